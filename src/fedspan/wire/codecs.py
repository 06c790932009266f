"""Codecs: how named parts of a payload are written in another form, and what that costs in bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedspan import tree
from fedspan.errors import ConfigError, Refused
from fedspan.tree import Tree


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
