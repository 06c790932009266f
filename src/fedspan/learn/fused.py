"""A linear layer whose backward pass takes the SGD step inside the matrix product, so that no gradient is ever stored.

With small batches plain SGD is bound by memory traffic: writing a gradient and reading it again costs more than
computing it. Here W ← W − η gᵀx is one product that reads and writes W once. It is the same step up to rounding.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from fedspan.learn.products import less_product, linear


class Step:
    """One SGD step in the making: the parameters it starts from, and where new ones go."""

    def __init__(self) -> None:
        self.params: dict[str, Tensor] = {}

    def begin(self, params: dict[str, Tensor], lr: float, fresh: bool) -> None:
        """Start a step; `fresh` means that `params` are not ours to change, so new tensors are written."""
        self.params, self.lr, self.fresh = params, lr, fresh
        self.new: dict[str, Tensor] = {}
        self.calls = 0


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: FusedLinear) -> Tensor:
        ctx.x, ctx.weight, ctx.bias, ctx.layer = x, weight, bias, layer
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,) = grads
        layer: FusedLinear = ctx.layer
        step = layer.step
        # With the weights of the forward pass, before they step.
        before = linear(g, ctx.weight.detach().mT, None) if ctx.needs_input_grad[0] else None
        g2, x2 = g.reshape(-1, g.shape[-1]), ctx.x.reshape(-1, ctx.x.shape[-1])
        held = ctx.weight.detach()
        out = torch.empty_like(held) if step.fresh else held
        step.new[layer.weight_name] = less_product(held, g2.T, x2, step.lr, out=out)
        if ctx.bias is not None:
            held = ctx.bias.detach()
            out = torch.empty_like(held) if step.fresh else held
            step.new[layer.bias_name] = torch.sub(held, g2.sum(0), alpha=step.lr, out=out)
        return before, None, None, None


class FusedLinear(nn.Linear):
    """`nn.Linear` that takes its parameters from a `Step` and hands the new ones back to it."""

    weight_name: str
    bias_name: str
    step: Step

    def forward(self, x: Tensor) -> Tensor:
        step = self.step
        step.calls += 1
        bias = None if self.bias is None else step.params[self.bias_name]
        result: Tensor = _Apply.apply(x, step.params[self.weight_name], bias, self)  # type: ignore[no-untyped-call]
        return result


def fuse(module: nn.Module) -> tuple[nn.Module, Step, list[str]]:
    """A copy of a module with fused linear layers, their common step, and the names of the parameters they step.

    Only plain `nn.Linear` layers whose weights are their own trainable parameters, shared with no other layer, are
    replaced. Each must run once per forward pass and its parameters serve nothing else: the caller checks both.
    """
    module = copy.deepcopy(module)
    owners: dict[int, int] = {}
    for m in module.modules():
        for p in m.parameters(recurse=False):
            owners[id(p)] = owners.get(id(p), 0) + 1
    step, names = Step(), []
    for name, m in list(module.named_modules()):
        own = {k for k, p in m.named_parameters(recurse=False) if p.requires_grad}
        plain = type(m) is nn.Linear and own == ({"weight"} if m.bias is None else {"weight", "bias"})
        if not plain or m._forward_pre_hooks or any(owners[id(p)] > 1 for p in m.parameters()):
            continue
        m.__class__ = FusedLinear
        assert isinstance(m, FusedLinear)
        path = f"{name}." if name else ""
        m.step, m.weight_name, m.bias_name = step, f"{path}weight", f"{path}bias"
        names += [f"{path}{k}" for k in own]
    return module, step, names
