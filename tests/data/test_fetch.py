"""`fedspan data get`: from a mirror or the hub, whole or not at all, to where runs look for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedspan.cli.app import app
from fedspan.data.sources.fetch import fetch
from fedspan.data.sources.load import load
from fedspan.errors import ConfigError, DataError


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    """Ten pictures in the place of MNIST."""
    folder = tmp_path / "mirror" / "mnist"
    folder.mkdir(parents=True)
    for part, n in (("train", 8), ("t10k", 2)):
        x, y = np.zeros((n, 28, 28), np.uint8), np.arange(n, dtype=np.uint8)
        for what, a in (("images-idx3", x), ("labels-idx1", y)):
            head = bytes((0, 0, 8, a.ndim)) + np.array(a.shape, ">u4").tobytes()
            (folder / f"{part}-{what}-ubyte").write_bytes(head + a.tobytes())
    return tmp_path / "mirror"


def test_a_mirror_is_copied_once(mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    monkeypatch.setenv("FEDSPAN_DATA", str(root))
    shown = CliRunner().invoke(app, ["data", "get", "mnist", "--mirror", str(mirror)])
    assert shown.exit_code == 0 and str(root / "mnist") in shown.output.replace("\n", "")
    assert len(load("mnist")) == 10
    assert fetch("mnist").origin == "an earlier time"
    assert not list(root.rglob("*.tmp"))


def test_what_is_lacking_is_said(mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDSPAN_DATA", raising=False)
    with pytest.raises(ConfigError, match=r"set \$FEDSPAN_DATA, or give --root DIR"):
        fetch("mnist", None, mirror)
    with pytest.raises(DataError, match="'cifar10' was not found in the mirror"):
        fetch("cifar10", tmp_path, mirror)
    with pytest.raises(ConfigError, match="Did you mean 'mnist'"):
        fetch("mnits", tmp_path, mirror)
    assert "nothing has to be put anywhere" in fetch("digits").origin
    assert CliRunner().invoke(app, ["data"]).exit_code == 0


def test_the_hub_is_asked_for_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="pip install 'fedspan[data]'")
    asked: list[Any] = []

    def load_dataset(*name: str) -> Any:
        asked.append(name)
        return {part: datasets.Dataset.from_dict({"label": [0, 1]}) for part in ("train", "test")}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    made = fetch("svhn", tmp_path)
    assert sorted(made.files) == ["test.parquet", "train.parquet"] and asked == [
        ("ufldl-stanford/svhn", "cropped_digits")
    ]

    def no_network(*_: str) -> Any:
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr(datasets, "load_dataset", no_network)
    with pytest.raises(
        DataError, match=r"Couldn't reach the hub. It needs a network; or give a folder .* --mirror DIR"
    ):
        fetch("mnist", tmp_path)
    assert not (tmp_path / "mnist").exists()
