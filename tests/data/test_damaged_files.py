"""Damaged files of every format that fedspan reads: one sentence of ours, never another library's error."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedspan.config import load_config
from fedspan.data.formats import arrays, leaf, matlab, parquet
from fedspan.data.tables.table_federation import table_data
from fedspan.data.tables.table_layout import TableLayout
from fedspan.errors import FedspanError
from fedspan.storage.checkpoint import RunDirectory
from fedspan.storage.client_store import ClientStore
from fedspan.storage.tree_file import load_tree, save_tree

LIMIT = 1 << 24
Format = tuple[Path, Callable[[Path], Any]]
"""A file that is whole, and how it is read."""

rng = np.random.default_rng(0)


def _npz(folder: Path) -> Format:
    np.savez_compressed(folder / "a.npz", x=rng.normal(size=(20, 3)), y=np.arange(20) % 3)
    return folder / "a.npz", lambda p: arrays.npz_parts(p, LIMIT)


def _npz_plain(folder: Path) -> Format:
    np.savez(folder / "b.npz", x=rng.normal(size=(20, 3)), y=np.arange(20) % 3, client=np.array(["a", "b"] * 10))
    return folder / "b.npz", lambda p: arrays.npz_parts(p, LIMIT)


def _table(folder: Path, name: str, columns: dict[str, Any], **options: Any) -> Format:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table(columns), folder / name, **options)
    return folder / name, lambda p: parquet.table_part(parquet.parquet(p, LIMIT), LIMIT)


def _numbers() -> dict[str, Any]:
    return {"a": rng.normal(size=50), "b": rng.integers(0, 9, 50), "label": np.arange(50) % 3, "user": ["u", "v"] * 25}


def _parquet(folder: Path) -> Format:
    return _table(folder, "numbers.parquet", _numbers())


def _parquet_plain(folder: Path) -> Format:
    return _table(folder, "plain.parquet", _numbers(), compression="none", use_dictionary=False, row_group_size=20)


def _parquet_pictures(folder: Path) -> Format:
    import io

    image = pytest.importorskip("PIL.Image")
    blobs = []
    for _ in range(8):
        out = io.BytesIO()
        image.fromarray(rng.integers(0, 255, (6, 6), dtype=np.uint8)).save(out, "PNG")
        blobs.append(out.getvalue())
    return _table(folder, "pictures.parquet", {"image": blobs, "label": np.arange(8) % 2}, compression="none")


_LAYOUT = TableLayout(client="user", target="label", missing="mean", unseen="zero")


def _named(folder: Path, name: str) -> Format:
    """The same numbers as a table with named columns."""
    pa, csv = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.csv")
    csv.write_csv(pa.table({**_numbers(), "kind": ["x", "y"] * 25}), folder / "named.csv")
    if name.endswith(".gz"):
        (folder / name).write_bytes(gzip.compress((folder / "named.csv").read_bytes(), mtime=0))
    return folder / name, lambda p: table_data(str(p), _LAYOUT)


def _csv(folder: Path) -> Format:
    return _named(folder, "named.csv")


def _csv_gz(folder: Path) -> Format:
    return _named(folder, "named.csv.gz")


def _parquet_named(folder: Path) -> Format:
    path, _ = _table(folder, "named.parquet", {**_numbers(), "kind": ["x", "y"] * 25}, compression="none")
    return path, lambda p: table_data(str(p), _LAYOUT)


def _leaf(folder: Path) -> Format:
    data = {u: {"x": rng.random((4, 3)).round(2).tolist(), "y": [0, 1, 2, 0]} for u in ("ann", "bob")}
    (folder / "leaf.json").write_text(json.dumps({"users": [*data], "num_samples": [4, 4], "user_data": data}))
    return folder / "leaf.json", lambda p: leaf.read(p, LIMIT)


def _idx_bytes() -> bytes:
    return bytes((0, 0, 8, 3)) + np.array([5, 4, 4], ">u4").tobytes() + rng.integers(0, 255, 80, np.uint8).tobytes()


def _idx(folder: Path) -> Format:
    (folder / "images-idx3-ubyte").write_bytes(_idx_bytes())
    return folder / "images-idx3-ubyte", lambda p: arrays.read_idx(p, 3, LIMIT)


def _idx_gz(folder: Path) -> Format:
    (folder / "images-idx3-ubyte.gz").write_bytes(gzip.compress(_idx_bytes(), mtime=0))
    return folder / "images-idx3-ubyte.gz", lambda p: arrays.read_idx(p, 3, LIMIT)


def _mat(folder: Path) -> Format:
    io = pytest.importorskip("scipy.io")
    held = {"X": rng.integers(0, 255, (32, 32, 3, 2), np.uint8), "y": np.array([[10], [3]])}
    io.savemat(folder / "train.mat", held, do_compression=True)
    return folder / "train.mat", lambda p: matlab.read_mat(p, LIMIT)


def _mat_plain(folder: Path) -> Format:
    io = pytest.importorskip("scipy.io")
    io.savemat(folder / "plain.mat", {"X": np.zeros((2, 2, 3, 2), np.uint8), "y": np.array([[10], [3]])})
    return folder / "plain.mat", lambda p: matlab.read_mat(p, LIMIT)


def _toml(folder: Path) -> Format:
    (folder / "exp.toml").write_text(
        'name = "kept"\nrounds = 4\n[data]\nsource = "digits"\n[partition]\nkind = "iid"\nclients = 6\n[model]\n'
        'kind = "mlp"\nhidden = [16]\n[method]\nname = "fedavg"\nlr = 0.2\n[train]\nbatch_size = 16\n'
    )
    return folder / "exp.toml", load_config


def _tree(folder: Path) -> Format:
    save_tree(folder / "tree.safetensors", {"a": torch.randn(3, 2), "b": {"c": torch.arange(4)}})
    return folder / "tree.safetensors", load_tree


def _checkpoint(folder: Path, name: str) -> Format:
    store = ClientStore(lambda i: {"v": torch.full((3,), float(i))}, range(4))
    with RunDirectory(folder / "run", {"seed": 0}) as run:
        store.put([0, 1], {"v": torch.ones(2, 3)})
        run.save(1, {"w": torch.ones(4)}, [store], {"notes": []}, 10)
    return folder / "run" / name, lambda p: RunDirectory(p.parent, {"seed": 0}, read_only=True).load()


def _manifest(folder: Path) -> Format:
    return _checkpoint(folder, "manifest-1.json")


def _server(folder: Path) -> Format:
    return _checkpoint(folder, "server-1.safetensors")


def _rows(folder: Path) -> Format:
    return _checkpoint(folder, "rows-1-0.safetensors")


FORMATS = [
    _npz, _npz_plain, _parquet, _parquet_plain, _parquet_pictures, _leaf, _idx, _idx_gz, _mat, _mat_plain, _toml, _tree,
    _manifest, _server, _rows, _csv, _csv_gz, _parquet_named,
]  # fmt: skip


def damaged(whole: bytes, chance: random.Random) -> bytes:
    """One of the ways in which files go wrong."""
    data, n = bytearray(whole), len(whole)
    at = chance.randrange(n)
    kind = chance.choice(["bit", "byte", "bytes", "cut", "insert", "delete", "zeros", "swap", "double", "number"])
    length = 1 + chance.randrange(min(64, n))
    if kind == "bit":
        data[at] ^= 1 << chance.randrange(8)
    elif kind == "byte":
        data[at] = chance.randrange(256)
    elif kind == "bytes":
        for _ in range(length):
            data[chance.randrange(n)] = chance.randrange(256)
    elif kind == "cut":
        del data[at:]
    elif kind == "insert":
        data[at:at] = chance.randbytes(length)
    elif kind == "delete":
        del data[at : at + length]
    elif kind == "zeros":
        data[at : at + length] = bytes(len(data[at : at + length]))
    elif kind == "swap":
        other = chance.randrange(n)
        data[at : at + length], data[other : other + length] = data[other : other + length], data[at : at + length]
    elif kind == "double":
        data[at:at] = data[at : at + length]
    else:
        data[at : at + 4] = chance.choice([b"\xff" * 4, b"\xff\xff\xff\x7f", b"\x00\x00\x00\x80", b"9999", b"-1e9"])
    return bytes(data)


def untyped(make: Callable[[Path], Format], folder: Path, trials: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was raised that is not ours, over so many damaged files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    path, read = make(folder)
    whole, chance = path.read_bytes(), random.Random(1)
    read(path)
    found: list[str] = []
    refused = 0
    for trial in range(trials):
        path.write_bytes(damaged(whole, chance))
        try:
            read(path)  # damage to a value that may be anything is no error
        except FedspanError as e:
            refused += 1
            if "\n" in str(e) or not str(e).endswith((".", "?")) or len(str(e)) > 1000:
                found.append(f"{trial}: not a sentence: {e}")
        except Exception as e:
            found.append(f"{trial}: {type(e).__name__}: {e}"[:300])
    assert refused > trials // 10, "hardly any file was refused: they were hardly damaged"
    return found


@pytest.mark.parametrize("make", FORMATS)
def test_fifty_damaged_files(make: Callable[[Path], Format], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert untyped(make, tmp_path, 50, monkeypatch) == []


@pytest.mark.parametrize("make", FORMATS)
@pytest.mark.long
def test_a_thousand_damaged_files(
    make: Callable[[Path], Format], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert untyped(make, tmp_path, 1000, monkeypatch) == []
