"""MATLAB files of version 5 to 7.2, as far as arrays of numbers go; written out because files are untrusted.

A general reader that follows a damaged file's pointers can bring the whole process down. This one looks at nothing but
bounded slices: an element is a tag (type, length) and as many bytes, padded to eight; a matrix is an element of
elements (flags, dimensions, name, values); a compressed element is one inside zlib.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator

import numpy as np

from fedspan.data.formats.arrays import too_big
from fedspan.data.formats.part import Array

_HEADER = 128
_HEAD = 4096  # more than tags, dimensions and name of one array take
_MATRIX, _COMPRESSED = 14, 15
_STORED = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_CLASSES = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}


def read_matrices(raw: bytes, names: tuple[str, ...], limit: int, where: str) -> dict[str, Array]:
    """The named arrays of a file, in MATLAB's order of axes; others are skipped.

    Raises:
        ValueError: if the file is damaged, or a named array holds something else than real numbers.
        DataError: if it holds more than `limit` bytes; `where` names the file.
    """
    if len(raw) < _HEADER or raw[126:128] not in (b"IM", b"MI"):
        raise ValueError("it does not begin as such a file does")
    order = "<" if raw[126:128] == b"IM" else ">"
    if raw[124:126] != (b"\x00\x01" if order == "<" else b"\x01\x00"):
        raise ValueError("it is of another version")
    found: dict[str, Array] = {}
    for kind, body in _elements(memoryview(raw)[_HEADER:], order):
        if kind == _COMPRESSED:
            kind, body = next(_elements(_inflated(body, limit, where), order), (0, body))
        if kind != _MATRIX:
            raise ValueError(f"it holds an element of type {kind} where a matrix should be")
        parts = list(_elements(body, order))
        name = bytes(parts[2][1]).decode("latin-1") if len(parts) > 2 else ""
        if name in found:
            raise ValueError(f"it holds {name} twice")
        if name in names:
            found[name] = _matrix(parts, order, name, limit, where)
    return found


def _elements(data: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """Type and bytes of every element."""
    at, byteorder = 0, "little" if order == "<" else "big"
    while len(data) - at >= 8:
        word = int.from_bytes(data[at : at + 4], byteorder)  # type: ignore[arg-type]
        kind, size, start = word & 0xFFFF, word >> 16, at + 4
        if size:  # a small element keeps its length and up to four bytes in the tag itself
            end = at + 8
            if size > 4:
                raise ValueError("a small element is longer than four bytes")
        else:
            size, start = int.from_bytes(data[at + 4 : at + 8], byteorder), at + 8  # type: ignore[arg-type]
            end = start + size + (0 if kind == _COMPRESSED else -size % 8)
        if start + size > len(data):
            raise ValueError("an element is longer than the file")
        yield kind, data[start : start + size]
        at = end
    if any(data[at:]):
        raise ValueError("it ends within an element")


def _inflated(data: memoryview, limit: int, where: str) -> memoryview:
    """What zlib holds, if it is no more than `limit` bytes and a head."""
    stream = zlib.decompressobj()
    out = stream.decompress(data, limit + _HEAD)
    if not stream.eof and len(out) == limit + _HEAD:
        raise too_big(where, len(out), limit)
    if not stream.eof:
        raise ValueError("a compressed element ends early")
    return memoryview(out)


def _matrix(parts: list[tuple[int, memoryview]], order: str, name: str, limit: int, where: str) -> Array:
    if len(parts) != 4 or parts[0][0] != 6 or len(parts[0][1]) != 8 or parts[1][0] != 5 or len(parts[1][1]) % 4:
        raise ValueError(f"{name} is not an array of real numbers")
    flags = int(np.frombuffer(parts[0][1], f"{order}u4")[0])
    kind, stored = _CLASSES.get(flags & 0xFF), _STORED.get(parts[3][0])
    if kind is None or stored is None or flags & 0x0800:
        raise ValueError(f"{name} is not an array of real numbers")
    shape = [int(n) for n in np.frombuffer(parts[1][1], f"{order}i4")]
    if len(shape) < 2 or len(shape) > 8 or min(shape) < 0:
        raise ValueError(f"{name} has the dimensions {shape}")
    count, width = math.prod(shape), np.dtype(stored).itemsize
    if count * np.dtype(kind).itemsize > limit:
        raise too_big(where, count * np.dtype(kind).itemsize, limit)
    if count * width != len(parts[3][1]):
        raise ValueError(f"{name} has {len(parts[3][1])} bytes instead of {count * width}")
    values = np.frombuffer(parts[3][1], f"{order}{stored}")
    return values.astype(kind).reshape(shape, order="F")
