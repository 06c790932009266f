"""Matrix products of layers, by oneDNN where it is there and a product is large.

MKL, which does `torch.mm` on x86, has kernels of half the width for processors that are not Intel's; oneDNN asks the
processor what it can do. It takes longer to start, so small products stay where they are. The choice depends on shapes
and types alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _functorch as functorch

LARGE = 2_500_000
"""Multiplications from which on a product is worth oneDNN's start."""

DEEP = 48
"""Examples from which on a step by oneDNN, which cannot add to a weight in place, makes up for the extra pass."""


def _found() -> Callable[..., Tensor] | None:
    """x Wᵀ by oneDNN; None in builds of torch without it."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    found: Callable[..., Tensor] | None = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    return found


_LINEAR = _found()


def _operations(x: Sequence[int], weight: Sequence[int], *_: object, **__: object) -> int:
    """Operations of x Wᵀ, from the shapes."""
    return 2 * math.prod(x) * weight[0]


OPERATIONS: Mapping[Any, Callable[..., int]] = {} if _LINEAR is None else {_LINEAR: _operations}
"""What `FlopCounterMode` has to be told to count the products that are computed here; torch's own it knows."""


def _large(a: Tensor, columns: int) -> bool:
    """Whether the product of a matrix, or of each of a stack, with one of so many columns is worth oneDNN's start."""
    rows, inner = a.shape[-2:]
    worth = rows * inner * columns >= LARGE and min(inner, columns) >= 32
    return worth and _LINEAR is not None and a.dtype == torch.float32 and a.device.type == "cpu"


def times(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a b, of matrices or of stacks of them."""
    if a.ndim == 3:
        if _large(a, b.shape[2]):
            for parts in zip(a.unbind(0), b.unbind(0), out.unbind(0)):
                times(*parts)
        else:
            torch.bmm(a, b, out=out)
    elif _large(a, b.shape[1]):
        assert _LINEAR is not None
        out.copy_(_LINEAR(a, b.mT, None, "none", [], ""))
    else:
        torch.mm(a, b, out=out)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a b, of matrices or of stacks of them."""
    if functorch.maybe_current_level() is not None or not _large(a, b.shape[-1]):
        return a @ b
    out = a.new_empty(*a.shape[:-1], b.shape[-1])
    times(a, b, out)
    return out


def affine(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = x Wᵀ + b, of matrices or of stacks of them."""
    if _large(x, out.shape[-1]):
        assert _LINEAR is not None
        stack = x.ndim == 3
        for k in range(len(x) if stack else 1):
            at: Any = k if stack else ...
            out[at].copy_(_LINEAR(x[at], weight[at], None if bias is None else bias[at], "none", [], ""))
    elif x.ndim == 2:
        torch.mm(x, weight.mT, out=out) if bias is None else torch.addmm(bias, x, weight.mT, out=out)
    else:
        torch.bmm(x, weight.mT, out=out) if bias is None else torch.baddbmm(bias[:, None], x, weight.mT, out=out)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b, as `F.linear`."""
    rows = x.reshape(-1, x.shape[-1])
    if torch.is_autocast_enabled("cpu") or not _large(rows, len(weight)):
        return F.linear(x, weight, bias)
    assert _LINEAR is not None
    return _LINEAR(rows, weight, bias, "none", [], "").view(*x.shape[:-1], len(weight))


def less_product(c: Tensor, a: Tensor, b: Tensor, scale: float, out: Tensor) -> Tensor:
    """out = c − scale · a b, of matrices or of stacks of them."""
    if a.ndim == 3:
        if a.shape[2] < DEEP or not _large(a, b.shape[2]):
            return torch.baddbmm(c, a, b, alpha=-scale, out=out)
        for parts in zip(c.unbind(0), a.unbind(0), b.unbind(0), out.unbind(0)):
            less_product(*parts[:3], scale, out=parts[3])
        return out
    if a.shape[1] < DEEP or not _large(a, b.shape[1]):
        return torch.addmm(c, a, b, alpha=-scale, out=out)
    assert _LINEAR is not None
    return torch.sub(c, _LINEAR(a, b.mT, None, "none", [], ""), alpha=scale, out=out)


def subtract_product(c: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    """c −= scale · a b, of matrices or of stacks of them."""
    less_product(c, a, b, scale, out=c)
