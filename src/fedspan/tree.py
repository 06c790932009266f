"""Trees: nested dicts of tensors, keyed by a paper's symbols. The only module that walks them.

A leaf is a tensor, or an `Outer` (a rank-one matrix kept as its two factors).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

Tree: TypeAlias = dict[str, Any]
"""A nested dict whose leaves are tensors (or `Outer`)."""

Inputs: TypeAlias = Any
"""What a model takes: a tensor, or a tree of tensors (a dict by argument, a tuple by place), one row per example."""

Params: TypeAlias = dict[str, Tensor]
"""A flat dict: parameter name to tensor, as `nn.Module.named_parameters` names them."""

EMPTY: Tree = {}


class Outer(NamedTuple):
    """The matrix a bᵀ, kept and sent as the two vectors a and b."""

    a: Tensor
    b: Tensor


def map(f: Callable[..., Any], *trees: Any) -> Any:
    """Apply `f` to the leaves of trees of one shape; tuples (`Outer`, a method's `Sent`) are mapped part by part."""
    first = trees[0]
    if isinstance(first, dict):
        return {k: map(f, *(t[k] for t in trees)) for k in first}
    if isinstance(first, tuple):
        parts = [map(f, *of) for of in zip(*trees)]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    return f(*trees)


def leaves(tree: Any) -> list[Tensor]:
    """All tensors of a tree, in order."""
    return [t for _, t in items(tree)]


def items(tree: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Pairs of path (`outer/inner`) and tensor; the factors of an `Outer` are `path/a` and `path/b`."""
    if isinstance(tree, tuple):
        tree = dict(zip(getattr(tree, "_fields", range(len(tree))), tree))
    if isinstance(tree, dict):
        for k, sub in tree.items():
            yield from items(sub, f"{prefix}/{k}" if prefix else str(k))
    else:
        yield prefix, tree


def flatten(tree: Tree) -> dict[str, Tensor]:
    """A flat dict path → tensor. Keys must not contain '/'. `Outer(a, b)` becomes `path//a`, `path//b`."""
    out: dict[str, Tensor] = {}

    def walk(sub: Any, path: str) -> None:
        if isinstance(sub, Outer):
            out[f"{path}//a"], out[f"{path}//b"] = sub.a, sub.b
        elif isinstance(sub, dict):
            for k, v in sub.items():
                if "/" in k:
                    raise ValueError(f"tree: keys must not contain '/'. Got {k!r}.")
                walk(v, f"{path}/{k}" if path else k)
        else:
            out[path] = sub

    walk(tree, "")
    return out


def unflatten(flat: dict[str, Tensor], empty: Iterable[str] = ()) -> Tree:
    """The inverse of `flatten`; paths in `empty` become empty sub-trees."""
    out: Tree = {}
    for path, tensor in flat.items():
        if path.endswith("//b"):
            continue
        value: Any = tensor
        if path.endswith("//a"):
            path = path[:-3]
            value = Outer(tensor, flat[f"{path}//b"])
        _insert(out, path, value)
    for path in empty:
        if path:
            _insert(out, path, {})
    return out


def _insert(out: Tree, path: str, value: Any) -> None:
    *parents, last = path.split("/")
    for p in parents:
        out = out.setdefault(p, {})
    out[last] = value


def empty_paths(tree: Any, prefix: str = "") -> list[str]:
    """Paths of the sub-trees without leaves; the whole tree's path is ''."""
    if not isinstance(tree, dict):
        return []
    if not tree:
        return [prefix]
    return [p for k, v in tree.items() for p in empty_paths(v, f"{prefix}/{k}" if prefix else k)]


def take(tree: Any, ids: Tensor | slice | int) -> Any:
    """Rows `ids` of every leaf of a stacked tree."""
    return map(lambda a: a[ids], tree)


def put(tree: Any, ids: Tensor, rows: Any) -> Any:
    """A copy of a stacked tree with rows `ids` replaced."""
    return map(lambda a, b: a.index_copy(0, ids, b.to(a.dtype)), tree, rows)


def stack(trees: Iterable[Any]) -> Any:
    """Put trees of one shape under a new leading axis."""
    return map(lambda *a: torch.stack(a), *trees)


def detach(tree: Any) -> Any:
    """The same values outside any graph."""
    return map(lambda a: a.detach(), tree)


def contiguous(tree: Any) -> Any:
    """The same values in the memory order in which they would be read from a file: products then round alike."""
    return map(lambda a: a.contiguous(), tree)


def aligned(tree: Any) -> Any:
    """The same values at addresses where products round alike, whether they were computed here or read from bytes."""
    return map(lambda a: a if a.data_ptr() % 64 == 0 else a.clone(), tree)


def zeros_like(tree: Any) -> Any:
    """A tree of zeros."""
    return map(torch.zeros_like, tree)


def add(x: Any, y: Any, scale: float | Tensor = 1.0) -> Any:
    """x + scale · y."""
    return map(lambda a, b: a + scale * b, x, y)


def sub(x: Any, y: Any) -> Any:
    """x − y."""
    return map(lambda a, b: a - b, x, y)


def where(condition: Tensor, x: Any, y: Any) -> Any:
    """Leaf-wise choice by one boolean."""
    return map(lambda a, b: torch.where(condition, a, b), x, y)


def ravel(params: Params) -> Tensor:
    """All entries as one vector, in order."""
    return torch.cat([a.reshape(-1) for a in params.values()])


def matrix(stacked: Params, rows: int) -> Tensor:
    """The entries of each row of a stacked tree as one row of a matrix, [rows, d]; d = 0 for an empty tree."""
    return torch.cat([a.reshape(rows, -1) for a in stacked.values()] or [torch.zeros(rows, 0)], 1)


def unravel(theta: Tensor, like: Params) -> Params:
    """The inverse of `ravel`, with names and shapes of `like`."""
    parts = torch.split(theta, [a.numel() for a in like.values()])
    return {k: p.reshape(a.shape) for (k, a), p in zip(like.items(), parts)}


def select(params: Params, names: Iterable[str]) -> Params:
    """The entries named, in the order of `params`."""
    wanted = set(names)
    return {k: v for k, v in params.items() if k in wanted}


def without(params: Params, names: Iterable[str]) -> Params:
    """All entries but those named."""
    unwanted = set(names)
    return {k: v for k, v in params.items() if k not in unwanted}


def merge(parts: Tree) -> Params:
    """One flat dict from several under their own names."""
    out: Params = {}
    for part in parts.values():
        out |= part
    return out


def nbytes(tree: Any) -> int:
    """Bytes of all tensors: what is returned is what is sent."""
    return sum(t.numel() * t.element_size() for t in leaves(tree))


def nonzero_share(tree: Any) -> float:
    """The share of entries that are not zero."""
    parts = leaves(tree)
    return sum(int(t.count_nonzero()) for t in parts) / sum(t.numel() for t in parts)


def dot(x: Any, y: Any) -> Tensor:
    """Sum of the products of all entries; can be differentiated and mapped."""
    parts = [(a * b).sum() for a, b in zip(leaves(x), leaves(y), strict=True)]
    return torch.stack(parts).sum() if parts else torch.zeros(())


def squared_norm(tree: Any) -> Tensor:
    """Sum of squares over all floating leaves (of the factors, for `Outer`)."""
    norms = [torch.linalg.vector_norm(t, dtype=torch.float64) for t in leaves(tree) if t.is_floating_point()]
    return torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64)


def all_finite(tree: Any) -> bool:
    """Whether no floating leaf holds NaN or infinity."""
    # A sum is finite only if every entry is; it may overflow where none is infinite, and then each is looked at.
    floats = [t for t in leaves(tree) if t.is_floating_point()]
    return all(bool(t.sum().isfinite()) or bool(t.isfinite().all()) for t in floats)


def digest(tree: Any) -> str:
    """SHA-256 over paths, types, shapes and bytes: equal for equal trees, whatever machine holds them."""
    return digest_of(sorted(items(tree)))


def digest_of(pairs: Iterable[tuple[str, Tensor]]) -> str:
    """The digest of a tree from its paths and tensors, in the order of the paths: they need not exist all at once."""
    h = hashlib.sha256()
    for path, t in pairs:
        t = t.detach().cpu().contiguous()
        h.update(f"{path}|{t.dtype}|{tuple(t.shape)}|".encode())
        h.update(t.reshape(-1).view(torch.uint8).numpy().data if t.numel() else b"")
    return h.hexdigest()
