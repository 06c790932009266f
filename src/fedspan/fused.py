"""A linear layer whose backward pass takes the SGD step inside the matrix product, so that no gradient is ever stored.

With small batches plain SGD is bound by memory traffic: writing a gradient and reading it again costs more than
computing it. Here W ← W − η gᵀx is one product that reads and writes W once. It is the same step up to rounding.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Step:
    """One SGD step in the making: where new parameters go."""

    def __init__(self, lr: float, fresh: bool) -> None:
        self.lr, self.fresh = lr, fresh  # fresh: the parameters are not ours to change, write new ones
        self.new: dict[str, Tensor] = {}


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: FusedLinear) -> Tensor:
        ctx.x, ctx.weight, ctx.bias, ctx.layer = x, weight, bias, layer
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,) = grads
        step: Step = ctx.layer.step
        before = g @ ctx.weight if ctx.needs_input_grad[0] else None  # with the weights of the forward pass
        g2, x2 = g.reshape(-1, g.shape[-1]), ctx.x.reshape(-1, ctx.x.shape[-1])
        for name, value in (("weight", ctx.weight), ("bias", ctx.bias)):
            if value is None or not value.requires_grad:
                continue
            held = value.detach()
            if name == "weight":
                out = torch.empty_like(held) if step.fresh else held
                torch.addmm(held, g2.T, x2, alpha=-step.lr, out=out)
            else:
                out = torch.sub(held, g2.sum(0), alpha=step.lr) if step.fresh else held.sub_(g2.sum(0), alpha=step.lr)
            step.new[f"{ctx.layer.path}{name}"] = out
        return before, None, None, None


class FusedLinear(nn.Linear):
    """`nn.Linear` that hands its step to the `Step` it was given."""

    path: str
    step: Step
    calls: int

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        result: Tensor = _Apply.apply(x, self.weight, self.bias, self)  # type: ignore[no-untyped-call]
        return result


def fuse(module: nn.Module) -> tuple[nn.Module, list[FusedLinear], list[str]]:
    """A copy of a module with fused linear layers, these layers, and the names of the parameters they step.

    Only plain `nn.Linear` layers whose weights are their own parameters, shared with no other layer, are replaced. Each
    must run once per forward pass and its parameters serve nothing else: the caller checks both on the first step.
    """
    module = copy.deepcopy(module)
    owners: dict[int, int] = {}
    for m in module.modules():
        for p in m.parameters(recurse=False):
            owners[id(p)] = owners.get(id(p), 0) + 1
    layers, names = [], []
    for name, m in list(module.named_modules()):
        own = {k for k, _ in m.named_parameters(recurse=False)}
        plain = type(m) is nn.Linear and own == ({"weight"} if m.bias is None else {"weight", "bias"})
        if not plain or m._forward_pre_hooks or any(owners[id(p)] > 1 for p in m.parameters()):
            continue
        m.__class__ = FusedLinear
        assert isinstance(m, FusedLinear)
        m.path = f"{name}." if name else ""
        layers.append(m)
        names += [f"{m.path}{k}" for k, p in m.named_parameters(recurse=False) if p.requires_grad]
    return module, layers, names
