"""What crosses the wire: schemas, byte counts, codecs, and the gate in front of every upload."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from fedspan import tree
from fedspan.errors import ConfigError, Refused
from fedspan.tree import Tree

Schema: TypeAlias = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Path of each tensor in a payload to its type and shape."""


def schema(payload: Tree, *, stacked: bool = False) -> Schema:
    """Names, types and shapes of a payload; with `stacked`, of one row of it."""
    return {p: (t.dtype, tuple(t.shape[1:] if stacked else t.shape)) for p, t in tree.flatten(payload).items()}


# -------------------------------------------------------------------------------------------------- codecs


class Codec(Protocol):
    """How a tensor is written. `roundtrip` is what the simulator does: decoded value and bytes, without the writing."""

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """The tensors that travel."""
        ...

    def decode(self, parts: dict[str, Tensor], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """The tensor on the other side."""
        ...

    def fits(self, parts: dict[str, Tensor], dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
        """Whether these could be parts of a tensor of that type and shape; `decode` is only called if so."""
        ...

    def roundtrip(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`decode(encode(x))` and the bytes of `encode(x)`, as pure tensor operations that can be mapped."""
        ...


@dataclass(frozen=True)
class Half:
    """Floats as 16-bit floats."""

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """The tensors that travel."""
        return {"half": x.to(torch.float16)}

    def fits(self, parts: dict[str, Tensor], dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
        """Whether these could be parts of such a tensor."""
        return _are(parts, half=(torch.float16, shape))

    def decode(self, parts: dict[str, Tensor], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """The tensor on the other side."""
        return parts["half"].to(dtype).reshape(shape)

    def roundtrip(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Value after rounding to 16 bits, and its bytes."""
        return x.to(torch.float16).to(x.dtype), torch.tensor(2 * x.numel(), dtype=torch.int64, device=x.device)


@dataclass(frozen=True)
class Sparse:
    """Non-zero values with their int32 positions, or with a bitmap where that is shorter."""

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """The tensors that travel."""
        flat = x.reshape(-1)
        at = flat.nonzero().reshape(-1)
        if 4 * len(at) <= -(-flat.numel() // 8):
            return {"values": flat[at], "positions": at.to(torch.int32)}
        return {"values": flat[at], "bitmap": _bits(flat != 0)}

    def fits(self, parts: dict[str, Tensor], dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
        """Whether these could be parts of such a tensor."""
        size = math.prod(shape)
        n = parts["values"].numel() if "values" in parts else -1
        if not 0 <= n <= size:
            return False
        if _are(parts, values=(dtype, (n,)), positions=(torch.int32, (n,))):
            at = parts["positions"].long()
            return bool((at >= 0).all() and (at < size).all() and (at[1:] > at[:-1]).all())
        fit = _are(parts, values=(dtype, (n,)), bitmap=(torch.uint8, (-(-size // 8),)))
        return fit and len(_positions(parts["bitmap"], size)) == n

    def decode(self, parts: dict[str, Tensor], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """The tensor on the other side."""
        size = math.prod(shape)
        if "positions" in parts:
            at = parts["positions"].long()
        else:
            at = _positions(parts["bitmap"], size)
        out = torch.zeros(size, dtype=dtype, device=parts["values"].device)
        return out.index_copy(0, at, parts["values"].to(dtype)).reshape(shape)

    def roundtrip(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The same value, and the bytes of its non-zeros."""
        live = (x != 0).sum()
        return x, live * x.element_size() + torch.minimum(4 * live, torch.full_like(live, -(-x.numel() // 8)))


@dataclass(frozen=True)
class Rows:
    """The rows of a matrix that hold anything, with one bit for each row; more axes count as columns."""

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """The tensors that travel."""
        flat = x.reshape(*x.shape[:1], -1) if x.ndim else x.reshape(1, 1)
        live = (flat != 0).any(1)
        return {"rows": flat[live], "bitmap": _bits(live)}

    def fits(self, parts: dict[str, Tensor], dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
        """Whether these could be parts of such a tensor."""
        rows = shape[0] if shape else 1
        n = len(parts["rows"]) if "rows" in parts and parts["rows"].ndim == 2 else -1
        wide = math.prod(shape[1:])
        fit = 0 <= n <= rows and _are(parts, rows=(dtype, (n, wide)), bitmap=(torch.uint8, (-(-rows // 8),)))
        return fit and len(_positions(parts["bitmap"], rows)) == n

    def decode(self, parts: dict[str, Tensor], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """The tensor on the other side."""
        rows = parts["rows"].to(dtype)
        at = _positions(parts["bitmap"], shape[0] if shape else 1)
        out = torch.zeros(shape[0] if shape else 1, rows.shape[1], dtype=dtype, device=rows.device)
        return out.index_copy(0, at, rows).reshape(shape)

    def roundtrip(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The same value, and the bytes of its rows."""
        flat = x.reshape(*x.shape[:1], -1) if x.ndim else x.reshape(1, 1)
        live = (flat != 0).any(1).sum()
        return x, live * flat.shape[1] * x.element_size() + -(-len(flat) // 8)


def _are(parts: dict[str, Tensor], **expected: tuple[torch.dtype, tuple[int, ...]]) -> bool:
    """Whether parts have these names, types and shapes, and no others."""
    return {k: (t.dtype, tuple(t.shape)) for k, t in parts.items()} == expected


def _bits(live: Tensor) -> Tensor:
    """A list of yes and no, eight to a byte."""
    bits = torch.nn.functional.pad(live.to(torch.uint8), (0, -len(live) % 8)).reshape(-1, 8)
    return (bits * 2 ** torch.arange(8, dtype=torch.uint8, device=live.device)).sum(1).to(torch.uint8)


def _positions(bitmap: Tensor, size: int) -> Tensor:
    """Where such a list says yes."""
    powers = 2 ** torch.arange(8, dtype=torch.uint8, device=bitmap.device)
    return ((bitmap[:, None] & powers) != 0).reshape(-1)[:size].nonzero().reshape(-1)


@dataclass(frozen=True)
class Energy:
    """A matrix by the leading singular triples that hold a share of its energy; as it is where that is shorter.

    Tensors of more than two axes are written as out × rest. At least one triple is kept, so that a flat spectrum never
    zeroes a layer.
    """

    share: float

    def __post_init__(self) -> None:
        if not 0.0 < self.share <= 1.0:
            raise ConfigError(f"Energy: share must lie in (0, 1]. Got {self.share!r}.")

    def _cut(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # What is not finite has no singular values; it passes as it is, for the simulator to find.
        finite = torch.where(torch.isfinite(x).all(), x, torch.zeros_like(x))
        u, s, v = torch.linalg.svd(finite.reshape(x.shape[0], -1), full_matrices=False)
        held = s.square().cumsum(0) / s.square().sum().clamp_min(torch.finfo(s.dtype).tiny)
        # The smallest rank whose energy reaches the share; one more than the number of prefixes that do not.
        rank = ((held < self.share - 1e-12).sum() + 1).clamp_max(len(s))
        rank = torch.where(s[0] > 0, rank, torch.ones_like(rank))
        return u, s, v, rank

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """The tensors that travel."""
        if x.ndim < 2 or not bool(torch.isfinite(x).all()):
            return {"dense": x}
        u, s, v, rank = self._cut(x)
        k = int(rank)
        if k * (u.shape[0] + v.shape[1] + 1) >= x.numel():
            return {"dense": x}
        return {"u": u[:, :k], "s": s[:k], "v": v[:k]}

    def fits(self, parts: dict[str, Tensor], dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
        """Whether these could be parts of such a tensor."""
        if "dense" in parts or len(shape) < 2:
            return _are(parts, dense=(dtype, shape))
        high, wide = shape[0], math.prod(shape[1:])
        k = parts["s"].numel() if "s" in parts else -1
        return 1 <= k <= min(high, wide) and _are(parts, u=(dtype, (high, k)), s=(dtype, (k,)), v=(dtype, (k, wide)))

    def decode(self, parts: dict[str, Tensor], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """The tensor on the other side."""
        if "dense" in parts:
            return parts["dense"]
        return ((parts["u"] * parts["s"]) @ parts["v"]).to(dtype).reshape(shape)

    def roundtrip(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The truncated value at full shape, and the bytes of what is kept."""
        dense = torch.tensor(x.numel() * x.element_size(), dtype=torch.int64, device=x.device)
        if x.ndim < 2:
            return x, dense
        u, s, v, rank = self._cut(x)
        kept = torch.where(torch.arange(len(s), device=x.device) < rank, s, torch.zeros_like(s))
        short = rank * (u.shape[0] + v.shape[1] + 1) * x.element_size()
        small = (short < dense) & torch.isfinite(x).all()
        return torch.where(small, ((u * kept) @ v).reshape(x.shape), x), torch.where(small, short, dense)


def roundtrip(payload: Tree, codecs: Mapping[str, Codec]) -> tuple[Tree, dict[str, Tensor]]:
    """Pass the named top-level parts of a payload through their codecs: what arrives, and bytes per name."""
    out: Tree = {}
    sizes: dict[str, Tensor] = {}
    for name, part in payload.items():
        if name in codecs:
            total: list[Tensor] = []

            def through(x: Tensor, codec: Codec = codecs[name], total: list[Tensor] = total) -> Tensor:
                value, size = codec.roundtrip(x)
                total.append(size)
                return value

            out[name] = tree.map(through, part)
            sizes[name] = torch.stack(total).sum() if total else torch.zeros((), dtype=torch.int64)
        else:
            out[name] = part
    return out, sizes


def encode(payload: Tree, codecs: Mapping[str, Codec]) -> Tree:
    """A payload as it is written: the leaves of coded parts, in the order of their paths, become codecs' tensors."""
    out: Tree = {}
    for name, part in payload.items():
        if name in codecs:
            flat = tree.flatten({name: part})
            out[name] = {str(k): codecs[name].encode(flat[path]) for k, path in enumerate(sorted(flat))}
        else:
            out[name] = part
    return out


def decode(coded: Tree, codecs: Mapping[str, Codec], like: Tree) -> Tree:
    """The inverse of `encode`; `like` has the structure, types and shapes of the payload (its coded parts suffice).

    Raises:
        Refused: if a coded part cannot be one of those types and shapes; nothing larger than declared is made.
    """
    out: Tree = {}
    for name, part in coded.items():
        if name not in codecs or name not in like:
            out[name] = part
            continue
        paths = tree.flatten({name: like[name]})
        if not isinstance(part, dict) or part.keys() != {str(k) for k in range(len(paths))}:
            raise Refused(f"Wire: '{name[:80]}' must be written as {len(paths)} coded tensors.")
        flat: dict[str, Tensor] = {}
        for k, path in enumerate(sorted(paths)):
            parts, dtype, shape = part[str(k)], paths[path].dtype, tuple(paths[path].shape)
            plain = isinstance(parts, dict) and all(isinstance(t, Tensor) for t in parts.values())
            if not plain or not codecs[name].fits(parts, dtype, shape):
                raise Refused(f"Wire: '{path}' is not written as {type(codecs[name]).__name__} writes {list(shape)}.")
            flat[path] = codecs[name].decode(parts, dtype, shape)
        out |= tree.unflatten(flat, tree.empty_paths({name: like[name]}))
    return out


def count(payload: Tree, coded: Mapping[str, Any] | None = None) -> dict[str, int]:
    """Bytes per top-level name of a payload that travels as it is; `coded` overrides names with a codec."""
    return {k: int(coded[k]) if coded and k in coded else tree.nbytes(v) for k, v in payload.items()}


# -------------------------------------------------------------------------------------------------- the gate


def gate(
    payload: Tree,
    weight: float,
    *,
    who: str,
    declared: Schema,
    kind: str,
    examples: int,
    bound: float = 1e12,
    max_norm: float = math.inf,
) -> None:
    """Refuse an upload that is not what its method declares.

    Args:
        kind: `samples` (an integer in 1..examples), `one` (exactly 1) or `own` (finite, 0..bound).
        max_norm: largest Euclidean norm of the whole payload.

    Raises:
        Refused: in one sentence that names the client and the fault.
    """
    got = schema(payload)
    for path in declared.keys() - got.keys():
        raise Refused(f"{who}: '{path}' is missing from the upload.")
    for path in got.keys() - declared.keys():
        raise Refused(f"{who}: '{path[:80]}' is not part of this method's upload.")
    for path, expected in declared.items():
        if got[path] != expected:
            raise Refused(f"{who}: '{path}' must be {_say(expected)}. Got {_say(got[path])}.")
    if not math.isfinite(weight):
        raise Refused(f"{who}: the weight must be a finite number. Got {weight}.")
    if kind == "samples" and not (weight == int(weight) and 1 <= weight <= examples):
        raise Refused(f"{who}: the weight must be an integer in 1..{examples}, its number of examples. Got {weight:g}.")
    if kind == "one" and weight != 1:
        raise Refused(f"{who}: the weight must be 1. Got {weight:g}.")
    if kind == "own" and not 0 <= weight <= bound:
        raise Refused(f"{who}: the weight must lie in 0..{bound:g}. Got {weight:g}.")
    for path, t in tree.flatten(payload).items():
        if t.is_floating_point() and not bool(torch.isfinite(t).all()):
            raise Refused(f"{who}: '{path}' holds NaN or infinity.")
    norm = math.sqrt(float(tree.squared_norm(payload)))
    if norm > max_norm:
        raise Refused(f"{who}: the upload's norm must be at most {max_norm:g}. Got {norm:g}.")


def _say(entry: tuple[torch.dtype, tuple[int, ...]]) -> str:
    return f"{str(entry[0]).removeprefix('torch.')} of shape {list(entry[1])}"


# -------------------------------------------------------------------------------------------------- bytes of a tree

_EMPTY = "//empty"
_TYPES = {
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
_CODES = {t: c for c, t in _TYPES.items()}


def pack(payload: Tree) -> bytes:
    """A tree as bytes in the layout of safetensors, empty sub-trees included.

    The widest types come first, so that every tensor starts at a multiple of its own width and can be read in place.
    """
    flat = {k: t.detach().contiguous() for k, t in tree.flatten(payload).items()}
    flat |= {path + _EMPTY: torch.empty(0, dtype=torch.uint8) for path in tree.empty_paths(payload)}
    header: dict[str, Any] = {}
    parts: list[Any] = []
    at = 0
    for name, t in sorted(flat.items(), key=lambda item: -item[1].element_size()):
        if t.dtype not in _CODES:
            raise Refused(f"Wire: '{name}' has type {t.dtype}, which cannot travel; use float32 or int64.")
        end = at + t.numel() * t.element_size()
        header[name] = {"dtype": _CODES[t.dtype], "shape": list(t.shape), "data_offsets": [at, end]}
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
            dtype, shape = _TYPES[entry["dtype"]], tuple(int(n) for n in entry["shape"])
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
