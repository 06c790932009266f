"""MATLAB files read as another library wrote them, and refused before they take memory."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest

from fedspan.data.formats.matlab5 import read_matrices
from fedspan.errors import DataError

KINDS = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "int64", "uint64", "float32", "float64"]


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_arrays_come_back_as_they_were_written(kind: str, compressed: bool, tmp_path: Path) -> None:
    io = pytest.importorskip("scipy.io")
    x = np.random.default_rng(0).integers(0, 100, (3, 2, 4)).astype(kind)
    io.savemat(tmp_path / "a.mat", {"X": x, "other": "text", "y": np.array([[1.0], [2.5]])}, do_compression=compressed)
    found = read_matrices((tmp_path / "a.mat").read_bytes(), ("X", "y"), 1 << 20, "a.mat")
    assert found.keys() == {"X", "y"} and found["X"].dtype == kind
    assert np.array_equal(found["X"], x) and found["y"].tolist() == [[1.0], [2.5]]


def test_what_is_not_numbers_is_refused(tmp_path: Path) -> None:
    io = pytest.importorskip("scipy.io")
    for value in ("text", {"a": 1}, np.array([1 + 2j]), np.array([[1, "a"]], object)):
        io.savemat(tmp_path / "a.mat", {"X": value})
        with pytest.raises(ValueError, match="X is not an array of real numbers"):
            read_matrices((tmp_path / "a.mat").read_bytes(), ("X",), 1 << 20, "a.mat")


def test_a_bomb_is_not_unpacked() -> None:
    body = zlib.compress(bytes(1 << 26))
    head = b"MATLAB 5.0".ljust(124) + b"\x00\x01IM"
    raw = head + (15).to_bytes(4, "little") + len(body).to_bytes(4, "little") + body
    with pytest.raises(DataError, match=r"a\.mat: the data must take at most"):
        read_matrices(raw, ("X",), 1 << 20, "a.mat")
