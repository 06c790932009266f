"""What a payload is: its schema, its bytes by name, and how it is packed into bytes and unpacked."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fedspan import tree
from fedspan.errors import Refused
from fedspan.tree import Tree

Schema: TypeAlias = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Path of each tensor in a payload to its type and shape."""


def schema(payload: Tree, *, stacked: bool = False) -> Schema:
    """Names, types and shapes of a payload; with `stacked`, of one row of it."""
    return {p: (t.dtype, tuple(t.shape[1:] if stacked else t.shape)) for p, t in tree.flatten(payload).items()}


def count(payload: Tree, coded: Mapping[str, Any] | None = None) -> dict[str, int]:
    """Bytes per top-level name of a payload that travels as it is; `coded` overrides names with a codec."""
    return {k: int(coded[k]) if coded and k in coded else tree.nbytes(v) for k, v in payload.items()}


_EMPTY = "//empty"
TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {t: c for c, t in TYPES.items()}


def code_of(name: str, t: Tensor) -> str:
    """The code of a tensor's type.

    Raises:
        Refused: for a type that cannot travel.
    """
    if t.dtype not in _CODES:
        raise Refused(f"Wire: '{name}' has type {t.dtype}, which cannot travel; use float32 or int64.")
    return _CODES[t.dtype]


def pack(payload: Tree) -> bytes:
    """A tree as bytes in the layout of safetensors, empty sub-trees included.

    The widest types come first, so that every tensor starts at a multiple of its own width and can be read in place.
    """
    flat = {k: t.detach().cpu().contiguous() for k, t in tree.flatten(payload).items()}
    flat |= {path + _EMPTY: torch.empty(0, dtype=torch.uint8) for path in tree.empty_paths(payload)}
    header: dict[str, Any] = {}
    parts: list[Any] = []
    at = 0
    for name, t in sorted(flat.items(), key=lambda item: -item[1].element_size()):
        end = at + t.numel() * t.element_size()
        header[name] = {"dtype": code_of(name, t), "shape": list(t.shape), "data_offsets": [at, end]}
        if t.numel():
            parts.append(t.reshape(-1).view(torch.uint8).numpy().data)
        at = end
    text = json.dumps({k: header[k] for k in flat}).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def unpack(data: bytes | bytearray) -> Tree:
    """The inverse of `pack`; the tensors share the memory of `data` where that can be written to.

    Raises:
        Refused: for bytes that are not a packed tree.
    """
    try:
        size = int.from_bytes(data[:8], "little")
        if size > len(data) - 8:
            raise ValueError("header")
        header = json.loads(bytes(data[8 : 8 + size]))
        buffer = data if isinstance(data, bytearray) else bytearray(data)
        flat: dict[str, Tensor] = {}
        spans = sorted(tuple(entry["data_offsets"]) for entry in header.values())
        if [a for a, _ in spans] + [len(data) - 8 - size] != [0] + [b for _, b in spans]:
            raise ValueError("the tensors must fill the bytes without gap or overlap")
        for name, entry in header.items():
            dtype, shape = TYPES[entry["dtype"]], tuple(int(n) for n in entry["shape"])
            start, end = (int(n) for n in entry["data_offsets"])
            count = math.prod(shape)
            width = torch.empty(0, dtype=dtype).element_size()
            if min(shape, default=0) < 0 or start < 0 or end - start != count * width or 8 + size + end > len(data):
                raise ValueError(name)
            at = 8 + size + start
            flat[name] = (
                torch.frombuffer(buffer, dtype=dtype, count=count, offset=at) if count else torch.empty(0, dtype=dtype)
            ).reshape(shape)
        empty = [k.removesuffix(_EMPTY) for k in flat if k.endswith(_EMPTY)]
        return tree.unflatten({k: t for k, t in flat.items() if not k.endswith(_EMPTY)}, empty)
    except Exception as e:
        raise Refused(f"Wire: the bytes are not a packed tree ({type(e).__name__}).") from None
