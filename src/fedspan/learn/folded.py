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
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _functorch as functorch
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack as mapped_by_hand
from torch.autograd.graph import get_gradient_edge
from torch.func import functional_call, vmap

from fedspan.learn.losses import outputs_of
from fedspan.learn.products import subtract_product, times

_FOLDING: ContextVar[bool] = ContextVar("folding", default=False)

_CALL = 100_000
"""Multiplications that take as long as asking for one more product."""


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


def unwrapped(t: Tensor) -> tuple[Tensor, bool]:
    """A tensor without vmap's wrapper, clients first, and whether it has a client axis at all."""
    inner, at = functorch._unwrap_batched(t, functorch.current_level())
    if at is None:
        return inner, False
    return (inner if at == 0 else inner.movedim(at, 0)), True


def is_mapped(t: Any) -> bool:
    """Whether it is a tensor with a client axis."""
    return isinstance(t, Tensor) and unwrapped(t)[1]


def wrapped(t: Tensor) -> Tensor:
    """A tensor whose first axis is the clients', as vmap hands it to a function of one client."""
    result: Tensor = functorch._add_batch_dim(t, 0, functorch.current_level())
    return result


# ---------------------------------------------------------------------------------------------------- rows


class Segment(NamedTuple):
    """Clients next to one another that have equally many rows."""

    client: int
    clients: int
    row: int
    rows: int

    @property
    def whose(self) -> slice | int:
        """Their places among the clients."""
        return self.client if self.clients == 1 else slice(self.client, self.client + self.clients)

    def of(self, t: Tensor, per: int) -> Tensor:
        """Their part of a tensor with `per` entries for each row: [clients, rows, …]; for one client [rows, …]."""
        part = t[self.row * per : (self.row + self.clients * self.rows) * per]
        return part if self.clients == 1 else part.view(self.clients, self.rows * per, *t.shape[1:])


class Layout:
    """How the examples of all clients lie in one batch: client after client, as many rows for each as `counts` says."""

    def __init__(self, counts: Sequence[int], width: int, packed: bool) -> None:
        self.counts, self.width, self.packed = counts, width, packed
        self.clients, self.rows = len(counts), sum(counts)

    @cached_property
    def segments(self) -> list[Segment]:
        """Runs of clients with equally many rows, those without any left out."""
        found: list[Segment] = []
        row = 0
        for c, n in enumerate(self.counts):
            last = found[-1] if found else None
            if last is not None and last.rows == n and last.client + last.clients == c:
                found[-1] = last._replace(clients=last.clients + 1)
            elif n:
                found.append(Segment(c, 1, row, n))
            row += n
        return found

    @cached_property
    def client(self) -> Tensor:
        """The client of each row."""
        return torch.arange(self.clients).repeat_interleave(torch.tensor(self.counts))

    @cached_property
    def _slots(self) -> Tensor:
        """For each row its slot among [clients × width]."""
        within = torch.arange(self.width).repeat(self.clients).view(self.clients, -1)
        return (within < torch.tensor(self.counts)[:, None]).view(-1).nonzero().view(-1)

    @cached_property
    def _row_of(self) -> Tensor:
        """For each slot its row; one without an example has the first, so that what is computed there is finite."""
        return torch.zeros(self.clients * self.width, dtype=torch.int64).index_copy(
            0, self._slots, torch.arange(self.rows)
        )

    def take(self, slots: Tensor) -> Tensor:
        """Rows [rows, …] of what lies in slots [clients, width, …]."""
        if self.packed:
            return slots.flatten(0, 1).index_select(0, self._slots)
        return slots[: self.rows // self.width].flatten(0, 1)

    def put(self, rows: Tensor) -> Tensor:
        """Slots [clients, width, …] of rows; those without an example hold some other one's."""
        if self.packed:
            return rows.index_select(0, self._row_of).view(self.clients, self.width, *rows.shape[1:])
        found = rows.reshape(-1, self.width, *rows.shape[1:])
        missing = self.clients - len(found)
        return found if not missing else torch.cat([found, found[:1].detach().expand(missing, *found.shape[1:])])


class Rows:
    """One minibatch of all clients, `x` and `y` as a function of one client has them, and how full each client's is."""

    def __init__(self, x: Tensor, y: Tensor, counts: Sequence[int]) -> None:
        self.x, self.y, self.counts = x, y, counts
        self.width = x.shape[0]
        left = max((c + 1 for c, n in enumerate(counts) if n), default=1)
        self._full = Layout([self.width] * left + [0] * (len(counts) - left), self.width, packed=False)

    @property
    def all_live(self) -> bool:
        """Whether every client has an example."""
        return min(self.counts) > 0

    def layout(self, parameters: int, layers: int) -> Layout:
        """With empty slots, or without them where a model is so large that more products cost less than empty rows."""
        packed = self._packed
        more = (len(packed.segments) - 1) * layers
        return packed if (self._full.rows - packed.rows) * parameters > more * _CALL and packed.rows else self._full

    @cached_property
    def _packed(self) -> Layout:
        return Layout(self.counts, self.width, packed=True)

    @cached_property
    def _shares(self) -> Tensor:
        return torch.tensor([1.0 / max(1, n) for n in self.counts], dtype=torch.float64)

    def means(self, values: Tensor, layout: Layout) -> Tensor:
        """Mean over each client's examples of values of the rows of a layout; 0 where there is none."""
        client, share = layout.client, self._shares.to(values.dtype)
        if not layout.packed:
            at = torch.arange(layout.rows) % self.width
            values = torch.where(at < torch.tensor(self.counts).index_select(0, client), values, 0.0)
        return values.new_zeros(layout.clients).index_add(0, client, values) * share


# ---------------------------------------------------------------------------------------------------- layers


class _Product(torch.autograd.Function):
    """x Wᵀ + b, each row of x [rows, in] with the weight and bias of its client: W [C, out, in], b [C, out].

    `steps` are set before the backward pass: learning rates of the weight (1) and the bias (2), where they step here.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layout: Layout) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.steps, ctx.layout, per = {}, layout, len(x) // layout.rows
        out = x.new_empty(len(x), weight.shape[1])
        for s in layout.segments:
            y = s.of(out, per)
            times(s.of(x, per), weight[s.whose].mT, y)
            if bias is not None:
                y += bias[s.whose].unsqueeze(-2)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, bias = ctx.saved_tensors
        g, weight, per = grads[0].contiguous(), weight.detach(), len(x) // ctx.layout.rows
        before = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        by_weight = by_bias = None
        if 1 not in ctx.steps and ctx.needs_input_grad[1]:
            by_weight = _for_all(weight, ctx.layout)
        if bias is not None and 2 not in ctx.steps and ctx.needs_input_grad[2]:
            by_bias = _for_all(bias.detach(), ctx.layout)
        for s in ctx.layout.segments:
            mine, given, w = s.of(g, per), s.of(x, per), weight[s.whose]
            if before is not None:  # with the weights of the forward pass
                times(mine, w, s.of(before, per))
            if 1 in ctx.steps:
                subtract_product(w, mine.mT, given, ctx.steps[1])
            elif by_weight is not None:
                times(mine.mT, given, by_weight[s.whose])
            if bias is not None and 2 in ctx.steps:
                bias.detach()[s.whose].sub_(mine.sum(-2), alpha=ctx.steps[2])
            elif by_bias is not None:
                torch.sum(mine, -2, out=by_bias[s.whose])
        return before, by_weight, by_bias, None


def _for_all(like: Tensor, layout: Layout) -> Tensor:
    """Room for a gradient of every client; zeros where one of them has no row."""
    return torch.empty_like(like) if all(layout.counts) else torch.zeros_like(like)


class _Pass:
    """One forward pass in the making: how the rows lie, and the parameters by name."""

    layout: Layout
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

    def _all(self, given: Mapping[str, tuple[Tensor, bool]], name: str) -> Tensor | None:
        """A parameter of every client; what all have in common is repeated."""
        fixed: Tensor | None = getattr(self.layer, name)
        if fixed is None:
            return None
        value, batched = given.get(name, (fixed, False))
        return value if batched else value.expand(self.now.layout.clients, *value.shape)

    def _mapped(self, x: Tensor, given: Mapping[str, tuple[Tensor, bool]]) -> Tensor:
        dims = {k: 0 if batched else None for k, (_, batched) in given.items()}
        one = vmap(lambda p, a: functional_call(self.layer, p, (a,)), in_dims=(dims, 0))
        out: Tensor = one({k: v for k, (v, _) in given.items()}, self.now.layout.put(x))
        return self.now.layout.take(out)

    def _linear(self, x: Tensor, given: Mapping[str, tuple[Tensor, bool]]) -> Tensor:
        if any(not batched for _, batched in given.values()) or len(given) < (1 if self.layer.bias is None else 2):
            return self._mapped(x, given)
        weight, bias = given["weight"][0], given["bias"][0] if "bias" in given else None
        rows = x.reshape(-1, x.shape[-1])
        out: Tensor = _Product.apply(rows, weight, bias, self.now.layout)  # type: ignore[no-untyped-call]
        return out.view(*x.shape[:-1], weight.shape[1])

    def _convolution(self, x: Tensor, given: Mapping[str, tuple[Tensor, bool]]) -> Tensor:
        weight, bias = self._all(given, "weight"), self._all(given, "bias")
        assert weight is not None and isinstance(self.layer, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        counts = self.now.layout.counts
        biases: Sequence[Tensor | None] = [None] * len(counts) if bias is None else bias.unbind(0)
        parts = zip(x.split(list(counts)), weight.unbind(0), biases)
        return torch.cat([self.layer._conv_forward(a, w, b) for a, w, b in parts if len(a)])

    def _normalised(self, x: Tensor, given: Mapping[str, tuple[Tensor, bool]]) -> Tensor:
        if isinstance(self.layer, nn.GroupNorm):
            y = F.group_norm(x, self.layer.num_groups, None, None, self.layer.eps)
            shape: tuple[int, ...] = (len(x), -1, *(1,) * (x.ndim - 2))
        else:
            assert isinstance(self.layer, nn.LayerNorm)
            y = F.layer_norm(x, self.layer.normalized_shape, None, None, self.layer.eps)
            inner = self.layer.normalized_shape
            shape = (len(x), *(1,) * (x.ndim - 1 - len(inner)), *inner)
        client = self.now.layout.client
        weight, bias = self._all(given, "weight"), self._all(given, "bias")
        if weight is not None:
            y = y * weight.index_select(0, client).reshape(shape)
        if bias is not None:
            y = y + bias.index_select(0, client).reshape(shape)
        return y


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
        self.parameters = sum(p.numel() for p in module.parameters())
        self.units = sum(isinstance(m, _Unit) for m in self.module.modules())

    def _replaced(self, module: nn.Module, prefix: str, keyed: type[nn.Module]) -> nn.Module:
        if isinstance(module, keyed) or next(module.parameters(recurse=False), None) is not None:
            return _Unit(module, prefix, self.now, apart=isinstance(module, keyed))
        for name, child in list(module.named_children()):
            setattr(module, name, self._replaced(child, f"{prefix}{name}.", keyed))
        return module

    def __call__(
        self, params: Mapping[str, Tensor], x: Tensor, layer: str | None = None
    ) -> tuple[Tensor, Tensor | None] | None:
        """Outputs for parameters and inputs as a function mapped by `vmap` holds them, and what goes into `layer`.

        None if nothing given has a client axis.
        """
        held = {k: unwrapped(v) for k, v in params.items()}
        inputs, batched = unwrapped(x)
        sizes = [v.shape[0] for v, own in [*held.values(), (inputs, batched)] if own]
        if not sizes:
            return None
        with mapped_by_hand():
            if not batched:
                inputs = inputs.expand(sizes[0], *inputs.shape)
            layout = Layout([inputs.shape[1]] * sizes[0], inputs.shape[1], packed=False)
            out, seen = self._run(held, inputs.flatten(0, 1), layout, layer)
            out, seen = layout.put(out), None if seen is None else layout.put(seen)
        return wrapped(out), None if seen is None else wrapped(seen)

    def of_rows(self, params: Mapping[str, Tensor], rows: Rows, loss: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Each client's mean of `loss(outputs, labels)`, one value per example, over its examples of a minibatch."""
        held, (x, _), (y, _) = {k: unwrapped(v) for k, v in params.items()}, unwrapped(rows.x), unwrapped(rows.y)
        with mapped_by_hand():
            layout = rows.layout(self.parameters, self.units)
            out, _ = self._run(held, layout.take(x), layout, None)
            means = rows.means(loss(out, layout.take(y)), layout)
        return wrapped(means)

    def _run(
        self, held: dict[str, tuple[Tensor, bool]], x: Tensor, layout: Layout, layer: str | None
    ) -> tuple[Tensor, Tensor | None]:
        self.now.layout, self.now.params = layout, held
        try:
            return run_watched(self.module, layer, lambda: outputs_of(self.module(x)))
        finally:
            self.now.params = {}


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


def has_folded_form(module: nn.Module) -> bool:
    """Whether all that has parameters is a linear or normalising layer, for which folding wins."""
    with_parameters = [m for m in module.modules() if next(m.parameters(recurse=False), None) is not None]
    return all(type(m) in (nn.Linear, nn.LayerNorm, nn.GroupNorm) for m in with_parameters)


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
        with mapped_by_hand():
            self.leaves = [t.detach().requires_grad_() for t, _ in inner]
        self.given = [wrapped(t) for t in self.leaves]

    def gradients(self, values: Tensor, lr: float | None = None) -> list[Tensor | None]:
        """∂/∂params of each client's value, wrapped; with `lr`, None for those that took their SGD step already."""
        inner, _ = unwrapped(values)
        with mapped_by_hand(), torch.enable_grad():
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
