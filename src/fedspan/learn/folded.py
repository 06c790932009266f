"""Clients folded into the batch axis: one pass through layers that hold a weight per client, by ordinary autograd.

A method's functions run under `vmap`, written for one client. Where they call the model, the wrappers of vmap are
taken off, the batches of all clients become one batch, and each layer multiplies a client's slice by that client's
weight; what comes out is wrapped again. Gradients come from one backward pass over the clients' losses, whose sum has
the gradient of each in its own slice. In that pass a linear layer can take the SGD step inside its matrix product,
W ← W − η gᵀx, so that no gradient is stored: only for a weight that the loss uses once, which is read off the graph of
every step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _functorch as functorch
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.autograd.graph import get_gradient_edge
from torch.func import functional_call, vmap

from fedspan.learn.layout import Layout
from fedspan.learn.losses import outputs_of
from fedspan.learn.precision import is_autocast

_FOLDING: ContextVar[bool] = ContextVar("folding", default=False)
_FIRST: ContextVar[int | None] = ContextVar("first", default=None)


@contextmanager
def folding() -> Iterator[None]:
    """Fold clients into the batch axis wherever a model is called inside this block's `vmap`."""
    token = _FOLDING.set(True)
    try:
        yield
    finally:
        _FOLDING.reset(token)


def is_folding() -> bool:
    """Whether the running code is mapped over clients to be folded, and inside no further transform."""
    return _FOLDING.get() and functorch.get_dynamic_layer_stack_depth() == 1


@contextmanager
def only_first(clients: int | None) -> Iterator[None]:
    """Compute models for the first so many clients alone: the others have no example left, and outputs of zero."""
    token = _FIRST.set(clients)
    try:
        yield
    finally:
        _FIRST.reset(token)


def clients_left(rows: Tensor) -> list[int]:
    """For each minibatch [C, K, B] of indices, wrapped, up to which client there is any example."""
    inner, batched = unwrapped(rows)
    if not batched:
        return [0] * rows.shape[0]
    live = (inner >= 0).any(2)
    order = torch.arange(1, len(live) + 1, device=live.device)
    result: list[int] = (live * order[:, None]).amax(0).tolist()
    return result


def unwrapped(t: Tensor) -> tuple[Tensor, bool]:
    """A tensor without vmap's wrapper, clients first, and whether it has a client axis at all."""
    inner, at = functorch._unwrap_batched(t, functorch.current_level())
    if at is None:
        return inner, False
    return (inner if at == 0 else inner.movedim(at, 0)), True


def wrapped(t: Tensor) -> Tensor:
    """A tensor whose first axis is the clients', as vmap hands it to a function of one client."""
    result: Tensor = functorch._add_batch_dim(t, 0, functorch.current_level())
    return result


# ---------------------------------------------------------------------------------------------------- layers


class _Product(torch.autograd.Function):
    """x Wᵀ + b for the first clients: x [c, B, in], W [C, out, in], b [C, out], c ≤ C.

    `steps` are set before the backward pass: learning rates of the weight (1) and the bias (2), where they step here.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.steps, ctx.bf16 = {}, is_autocast(x)
        across = weight[: len(x)].transpose(1, 2)
        return torch.bmm(x, across) if bias is None else torch.baddbmm(bias[: len(x), None], x, across)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with torch.autocast(grads[0].device.type, dtype=torch.bfloat16, enabled=ctx.bf16):
            return _Product._slopes(ctx, *grads)

    @staticmethod
    def _slopes(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        first = weight.detach()[: len(x)]
        before = torch.bmm(g, first) if ctx.needs_input_grad[0] else None  # with the weights of the forward pass
        by_weight = by_bias = None
        if 1 in ctx.steps and ctx.bf16:  # a product in 16 bits cannot be added to 32 on the way
            first.sub_(torch.bmm(g.transpose(1, 2), x), alpha=ctx.steps[1])
        elif 1 in ctx.steps:
            first.baddbmm_(g.transpose(1, 2), x, alpha=-ctx.steps[1])
        elif ctx.needs_input_grad[1]:
            by_weight = _filled(torch.bmm(g.transpose(1, 2), x), len(weight))
        if bias is not None and 2 in ctx.steps:
            bias.detach()[: len(x)].sub_(g.sum(1, dtype=bias.dtype), alpha=ctx.steps[2])
        elif bias is not None and ctx.needs_input_grad[2]:
            by_bias = _filled(g.sum(1, dtype=bias.dtype), len(bias))
        return before, by_weight, by_bias


def _filled(t: Tensor, clients: int) -> Tensor:
    """A tensor of the first clients with zeros for the others."""
    return t if len(t) == clients else torch.cat([t, t.new_zeros(clients - len(t), *t.shape[1:])])


class _Pass:
    """One forward pass in the making: how many clients there are, and the parameters by name."""

    clients: int
    params: dict[str, tuple[Tensor, bool]]


class _Unit(nn.Module):
    """A layer with parameters of its own, run with those of each client."""

    def __init__(self, layer: nn.Module, prefix: str, now: _Pass, apart: bool) -> None:
        super().__init__()
        self.layer, self.prefix, self.now = layer, prefix, now
        self.apart = apart  # what it does to an example depends on the example's place in its client's batch

    def forward(self, x: Tensor) -> Tensor:
        given = {k[len(self.prefix) :]: v for k, v in self.now.params.items() if k.startswith(self.prefix)}
        if not self.apart and not any(batched for _, batched in given.values()):
            out: Tensor = functional_call(self.layer, {k: v for k, (v, _) in given.items()}, (x,))
            return out
        return _RUN.get(type(self.layer), _Unit._mapped)(self, x, given)

    def _apart(self, x: Tensor) -> Tensor:
        return x.reshape(self.now.clients, -1, *x.shape[1:])

    def _all(self, given: Mapping[str, tuple[Tensor, bool]], name: str) -> Tensor | None:
        """A parameter of every client; what all have in common is repeated."""
        fixed: Tensor | None = getattr(self.layer, name)
        if fixed is None:
            return None
        value, batched = given.get(name, (fixed, False))
        return value[: self.now.clients] if batched else value.expand(self.now.clients, *value.shape)

    def _mapped(self, x: Tensor, given: Mapping[str, tuple[Tensor, bool]]) -> Tensor:
        values = {k: v[: self.now.clients] if batched else v for k, (v, batched) in given.items()}
        dims = {k: 0 if batched else None for k, (_, batched) in given.items()}
        one = vmap(lambda p, a: functional_call(self.layer, p, (a,)), in_dims=(dims, 0))
        out: Tensor = one(values, self._apart(x))
        return out.flatten(0, 1)

    def _linear(self, x: Tensor, given: Mapping[str, tuple[Tensor, bool]]) -> Tensor:
        if any(not batched for _, batched in given.values()) or len(given) < (1 if self.layer.bias is None else 2):
            return self._mapped(x, given)
        weight, bias = given["weight"][0], given["bias"][0] if "bias" in given else None
        rows = x.reshape(self.now.clients, -1, x.shape[-1])
        out: Tensor = _Product.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
        return out.reshape(*x.shape[:-1], weight.shape[1])

    def _convolution(self, x: Tensor, given: Mapping[str, tuple[Tensor, bool]]) -> Tensor:
        weight, bias = self._all(given, "weight"), self._all(given, "bias")
        assert weight is not None and isinstance(self.layer, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        biases: Sequence[Tensor | None] = [None] * self.now.clients if bias is None else bias.unbind(0)
        parts = zip(self._apart(x).unbind(0), weight.unbind(0), biases)
        return torch.cat([self.layer._conv_forward(a, w, b) for a, w, b in parts])

    def _normalised(self, x: Tensor, given: Mapping[str, tuple[Tensor, bool]]) -> Tensor:
        if isinstance(self.layer, nn.GroupNorm):
            y = F.group_norm(x, self.layer.num_groups, None, None, self.layer.eps)
            shape: tuple[int, ...] = (self.now.clients, 1, -1, *(1,) * (x.ndim - 2))
        else:
            assert isinstance(self.layer, nn.LayerNorm)
            y = F.layer_norm(x, self.layer.normalized_shape, None, None, self.layer.eps)
            inner = self.layer.normalized_shape
            shape = (self.now.clients, *(1,) * (x.ndim - len(inner)), *inner)
        weight, bias = self._all(given, "weight"), self._all(given, "bias")
        y = self._apart(y)
        if weight is not None:
            y = y * weight.reshape(shape)
        if bias is not None:
            y = y + bias.reshape(shape)
        return y.flatten(0, 1)


Run: TypeAlias = Callable[[_Unit, Tensor, Mapping[str, tuple[Tensor, bool]]], Tensor]
_RUN: dict[type[nn.Module], Run] = {
    nn.Linear: _Unit._linear,
    nn.Conv1d: _Unit._convolution,
    nn.Conv2d: _Unit._convolution,
    nn.Conv3d: _Unit._convolution,
    nn.GroupNorm: _Unit._normalised,
    nn.LayerNorm: _Unit._normalised,
}


class Folded:
    """A copy of a module whose layers take the parameters of many clients at once.

    A layer of a known kind (linear, convolution, normalisation) is computed with a client axis; any other module that
    holds parameters itself is mapped by a `vmap` of its own; what holds none sees one larger batch.
    """

    def __init__(self, module: nn.Module, keyed: type[nn.Module]) -> None:
        self.now = _Pass()
        self.module = self._replaced(copy.deepcopy(module), "", keyed)

    def _replaced(self, module: nn.Module, prefix: str, keyed: type[nn.Module]) -> nn.Module:
        if isinstance(module, keyed) or next(module.parameters(recurse=False), None) is not None:
            return _Unit(module, prefix, self.now, apart=isinstance(module, keyed))
        for name, child in list(module.named_children()):
            setattr(module, name, self._replaced(child, f"{prefix}{name}.", keyed))
        return module

    def __call__(
        self, params: Mapping[str, Tensor], x: Tensor, layer: str | None, layout: Layout
    ) -> tuple[Tensor, Tensor | None] | None:
        """Outputs for parameters and inputs as a function mapped by `vmap` holds them, and what goes into `layer`.

        None if nothing given has a client axis.
        """
        held = {k: unwrapped(v) for k, v in params.items()}
        inputs, batched = unwrapped(x)
        sizes = [v.shape[0] for v, own in [*held.values(), (inputs, batched)] if own]
        if not sizes:
            return None
        clients, first = sizes[0], _FIRST.get()
        with temporarily_pop_interpreter_stack():
            if not batched:
                inputs = inputs.expand(clients, *inputs.shape)
            now = clients if first is None else max(1, first)
            self.now.clients, self.now.params = now, held
            inputs = inputs[:now].flatten(0, 1)
            try:
                run = lambda a: run_watched(self.module, layer, lambda: outputs_of(self.module(a)))
                out, seen = layout(run, inputs)
            finally:
                self.now.params = {}
            out = _filled(out.reshape(now, -1, *out.shape[1:]), clients)
            seen = None if seen is None else _filled(seen.reshape(now, -1, *seen.shape[1:]), clients)
        return wrapped(out), None if seen is None else wrapped(seen)


def run_watched(module: nn.Module, layer: str | None, run: Callable[[], Tensor]) -> tuple[Tensor, Tensor | None]:
    """What a pass through a module gives, and what went into one of its layers."""
    if layer is None:
        return run(), None
    seen: list[Tensor] = []
    handle = module.get_submodule(layer).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    try:
        out = run()
    finally:
        handle.remove()
    return out, seen[-1]


def fold(module: nn.Module, keyed: type[nn.Module]) -> Folded | None:
    """The folded form of a module; None if some parameter is shared between layers, or a layer has hooks.

    Args:
        keyed: a kind of layer that is given a key per client instead of parameters.
    """
    seen: set[int] = set()
    for m in module.modules():
        if m._forward_pre_hooks or m._forward_hooks:
            return None
        for p in m.parameters(recurse=False):
            if id(p) in seen:
                return None
            seen.add(id(p))
    return Folded(module, keyed)


# ---------------------------------------------------------------------------------------------------- gradients


class Leaves:
    """Parameters of all clients that a loss is differentiated by: given wrapped, as one client's function sees them."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        inner = [unwrapped(p) for p in params]
        assert all(batched for _, batched in inner)
        with temporarily_pop_interpreter_stack():
            self.leaves = [t.detach().requires_grad_() for t, _ in inner]
        self.given = [wrapped(t) for t in self.leaves]

    def gradients(self, values: Tensor, lr: float | None = None) -> list[Tensor | None]:
        """∂/∂params of each client's value, wrapped; with `lr`, None for those that took their SGD step already."""
        inner, _ = unwrapped(values)
        with temporarily_pop_interpreter_stack(), torch.enable_grad():
            total = inner.sum()
            if not total.requires_grad:
                found: list[Tensor | None] = [None] * len(self.leaves)
                stepped: set[int] = set()
            else:
                stepped = set() if lr is None else _mark_steps(total, self.leaves, lr)
                found = list(torch.autograd.grad(total, self.leaves, allow_unused=True))
            found = [
                torch.zeros_like(t) if g is None and i not in stepped else g
                for i, (g, t) in enumerate(zip(found, self.leaves))
            ]
        return [None if g is None else wrapped(g) for g in found]


def _mark_steps(total: Tensor, leaves: Sequence[Tensor], lr: float) -> set[int]:
    """Let linear layers take the step of the weights that nothing else uses; returns which leaves those are.

    A weight qualifies if exactly one edge of the graph leads to it, from a linear layer, and no other layer computes
    with the same memory (a detached copy, whose backward pass would read it after the step).
    """
    at = {get_gradient_edge(leaf).node: i for i, leaf in enumerate(leaves)}
    uses: dict[int, list[tuple[Any, int]]] = {}
    products: list[Any] = []
    seen, stack = set(), [total.grad_fn]
    while stack:
        node = stack.pop()
        if node in seen or node is None:
            continue
        seen.add(node)
        if isinstance(node, _Product._backward_cls):
            products.append(node)
        for position, (child, _) in enumerate(node.next_functions):
            if child in at:
                uses.setdefault(at[child], []).append((node, position))
            elif child is not None:
                stack.append(child)
    read: dict[int, int] = {}
    for node in products:
        for t in node.saved_tensors[1:]:
            if t is not None:
                read[t.data_ptr()] = read.get(t.data_ptr(), 0) + 1
    stepped = set()
    for i, edges in uses.items():
        (node, position), once = edges[0], len(edges) == 1
        if once and node in products and position in (1, 2) and read[leaves[i].data_ptr()] == 1:
            node.steps[position] = lr
            stepped.add(i)
    return stepped
