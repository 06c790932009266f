"""Tiny-ImageNet in its published layout, on a small made set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedspan.data import load
from fedspan.data.sources.catalog import KNOWN
from fedspan.errors import DataError

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("pyarrow")
IDS = ["n02", "n01", "n03"]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: Any) -> Path:
    """Three classes of four pictures each, one of them grey; three pictures for validation."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = tmp_path / "data" / "tiny-imagenet" / "tiny-imagenet-200"

    def picture(path: Path, value: int, grey: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        shape = (64, 64) if grey else (64, 64, 3)
        Image.fromarray(np.full(shape, value, np.uint8)).save(path, "JPEG")

    for c, name in enumerate(IDS):
        for k in range(4):
            picture(root / "train" / name / "images" / f"{name}_{k}.JPEG", 60 * c + 10 * k, grey=k == 3)
        picture(root / "val" / "images" / f"val_{c}.JPEG", 60 * c + 5)
    (root / "wnids.txt").write_text("\n".join(IDS) + "\n")
    lines = [f"val_{c}.JPEG\t{name}\t0\t0\t63\t63" for c, name in enumerate(IDS)]
    (root / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    return root


def test_folders_become_train_and_test_rows(made: Path) -> None:
    source = load("tiny-imagenet", made.parent.parent)
    assert source.x.shape == (15, 3, 64, 64) and source.class_names == IDS
    assert source.y.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [0, 1, 2]  # in the order of wnids.txt
    assert source.test_rows.tolist() == [12, 13, 14]
    mean, std = (np.array(v)[:, None, None] for v in (KNOWN["tiny-imagenet"].mean, KNOWN["tiny-imagenet"].std))
    level = (source.x.numpy() * std + mean) * 255
    assert level[:, 0].mean((1, 2)).round().tolist() == [60 * c + 10 * k for c in range(3) for k in range(4)] + [
        5,
        65,
        125,
    ]
    small = load("tiny-imagenet", made.parent.parent, size=16)
    assert small.x.shape == (15, 3, 16, 16)
    # From the cache, and without the folder of the archive in between.
    (made.parent.parent / "tiny-imagenet-200").symlink_to(made)
    assert np.array_equal(load("tiny-imagenet", made.parent.parent).x, source.x)
    assert np.array_equal(load("tiny-imagenet", made.parent).x, source.x)


def test_training_pictures_alone_are_enough(made: Path) -> None:
    (made / "val" / "val_annotations.txt").unlink()
    assert len(load("tiny-imagenet", made.parent.parent)) == 12


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("wnids.txt", "n01\nn01\n", "must list every class once"),
        ("wnids.txt", "n01\nn09\n", "every class must have a folder in train. Got none for n09"),
        ("wnids.txt", "../train/n01\n", "names must be plain file names. Got '../train/n01'"),
        ("val/val_annotations.txt", "val_0.JPEG\tn77\n", "line 1 must name a class of wnids.txt. Got 'n77'"),
        ("val/val_annotations.txt", "../../wnids.txt\tn01\n", "names must be plain file names"),
        ("val/val_annotations.txt", "val_9.JPEG\tn01\n", "picture val_9.JPEG must be there"),
        ("train/n01/images/n01_0.JPEG", "no picture", "must hold a PNG, WebP or JPEG picture"),
    ],
)
def test_damaged_folders_are_refused_in_one_sentence(made: Path, file: str, text: str, message: str) -> None:
    (made / file).write_text(text)
    with pytest.raises(DataError) as e:
        load("tiny-imagenet", made.parent.parent)
    assert message in str(e.value) and "\n" not in str(e.value)


def test_too_many_bytes_and_nothing_at_all(made: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must take at most"):
        load("tiny-imagenet", made.parent.parent, max_bytes=1000)
    with pytest.raises(DataError, match="the published archive's files"):
        load("tiny-imagenet", tmp_path / "cache")


@pytest.mark.parametrize("held", ["test", "validation", "valid"])
def test_parquet_files_may_call_the_held_out_part_as_the_hub_does(made: Path, held: str) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    root = made.parent.parent
    for split, labels in (("train", [0, 1, 2]), (held, [2, 1])):
        pictures = [(made / "train" / name / "images" / f"{name}_0.JPEG").read_bytes() for name in IDS]
        rows = [{"image": {"bytes": pictures[y], "path": None}, "label": y} for y in labels]
        pq.write_table(pa.Table.from_pylist(rows), root / "tiny-imagenet" / f"{split}-00000-of-00001-ab12.parquet")
    source = load("tiny-imagenet", root)
    assert source.y.tolist() == [0, 1, 2, 2, 1] and source.test_rows.tolist() == [3, 4]
