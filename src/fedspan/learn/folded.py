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
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _functorch as functorch
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.autograd.graph import get_gradient_edge
from torch.func import functional_call, vmap
from torch.nn.utils import stateless

from fedspan.learn.accelerator import HOST, to_device
from fedspan.learn.layout import Layout
from fedspan.learn.losses import outputs_of
from fedspan.learn.precision import is_autocast
from fedspan.learn.products import affine, linear, product, subtract_product, times

_FOLDING: ContextVar[bool] = ContextVar("folding", default=False)

_CALL = 400_000
"""Multiplications of a forward pass that take as long as asking for the products of one more layer."""

ROUND = 8
"""Rows of a client in a large model are filled up to a multiple of this."""

SMALL = 20_000
"""Up to so many parameters products have nothing to prepare, and rows are exactly the examples."""


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


def mapped_by_hand() -> AbstractContextManager[Any]:
    """Leave vmap for a block that computes for all clients itself, on tensors that are `unwrapped`."""
    block: AbstractContextManager[Any] = temporarily_pop_interpreter_stack()
    return block


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


def stacked(f: Callable[..., Tensor], *given: Tensor) -> Tensor:
    """`f` for one client, written for stacks of tensors [C, …]: where clients are mapped it runs once for all of them.

    A computation of many small steps then costs what its operations do, and not what vmap takes for each of them.
    """
    depth = functorch.get_dynamic_layer_stack_depth()
    by_hand = depth == 1 and functorch.peek_interpreter_stack().key() == functorch.TransformType.Vmap
    held = [unwrapped(t) for t in given] if by_hand else []
    sizes = [len(t) for t, own in held if own]
    if not sizes:
        return f(*(t[None] for t in given))[0]
    with mapped_by_hand():
        found = f(*(t if own else t.expand(sizes[0], *t.shape) for t, own in held))
    return wrapped(found)


# ---------------------------------------------------------------------------------------------------- rows


class ClientRun(NamedTuple):
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


class PackedClients:
    """How the examples of all clients lie in one batch: client after client, as many rows for each as `counts` says."""

    def __init__(
        self,
        counts: Sequence[int],
        width: int,
        packed: bool,
        device: torch.device = HOST,
        filled: Sequence[int] | None = None,
    ) -> None:
        self.counts, self.width, self.packed, self.device = counts, width, packed, device
        self.clients, self.rows = len(counts), sum(counts)
        self.filled = counts if filled is None else filled  # rows of each client that hold an example

    @cached_property
    def segments(self) -> list[ClientRun]:
        """Runs of clients with equally many rows, those without any left out."""
        found: list[ClientRun] = []
        row = 0
        for c, n in enumerate(self.counts):
            last = found[-1] if found else None
            if last is not None and last.rows == n and last.client + last.clients == c:
                found[-1] = last._replace(clients=last.clients + 1)
            elif n:
                found.append(ClientRun(c, 1, row, n))
            row += n
        return found

    @cached_property
    def client(self) -> Tensor:
        """The client of each row."""
        found: Tensor = to_device(torch.arange(self.clients).repeat_interleave(torch.tensor(self.counts)), self.device)
        return found

    @cached_property
    def _within(self) -> Tensor:
        """The place of each row among its client's."""
        first: Tensor = to_device(torch.tensor([0, *self.counts[:-1]]).cumsum(0), self.device)
        return torch.arange(self.rows, device=self.device) - first.index_select(0, self.client)

    @cached_property
    def _slots(self) -> Tensor:
        """For each row its slot among [clients × width]."""
        within = torch.arange(self.width).repeat(self.clients).view(self.clients, -1)
        filled = (within < torch.tensor(self.counts)[:, None]).view(-1).nonzero().view(-1)
        found: Tensor = to_device(filled, self.device)  # made on the host, which would wait for the device otherwise
        return found

    @cached_property
    def _row_of(self) -> Tensor:
        """For each slot its row; one without an example has the first, so that what is computed there is finite."""
        nowhere = torch.zeros(self.clients * self.width, dtype=torch.int64, device=self.device)
        return nowhere.index_copy(0, self._slots, torch.arange(self.rows, device=self.device))

    def shares(self, dtype: torch.dtype) -> Tensor:
        """[rows, 1], the share of each row in the mean over its client's examples; 0 for one that is empty."""
        if dtype not in self._shares:
            filled: Tensor = to_device(torch.tensor(self.filled), self.device)
            share = filled.clamp_min(1).to(torch.float64).reciprocal().index_select(0, self.client)
            if self.filled is not self.counts:
                share *= self._within < filled.index_select(0, self.client)
            self._shares[dtype] = share.to(dtype)[:, None]
        return self._shares[dtype]

    @cached_property
    def _shares(self) -> dict[torch.dtype, Tensor]:
        return {}

    def sums(self, t: Tensor, per: int) -> Tensor:
        """Sum over each client's part of a tensor that has `per` entries for each row, [clients, …]."""
        if len(self.segments) == 1 and all(self.counts):
            return t.view(self.clients, -1, *t.shape[1:]).sum(1)
        client = self.client if per == 1 else self.client.repeat_interleave(per)
        return t.new_zeros(self.clients, *t.shape[1:]).index_add_(0, client, t)

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


def packed_clients(
    counts: Sequence[int], width: int, parameters: int, layers: int, device: torch.device = HOST
) -> PackedClients:
    """How rows lie: with all empty slots, with few or with none, whatever costs a model of this size least.

    A client without an example has no row, so that nothing of it moves. Large models keep a number of rows that is a
    multiple of `ROUND`: products of every other shape would have to be prepared, which takes longer than some rows.
    """
    return _packed_clients(tuple(counts), width, parameters, layers, _CALL, device)


@lru_cache(maxsize=64)
def _packed_clients(
    counts: tuple[int, ...], width: int, parameters: int, layers: int, call: int, device: torch.device
) -> PackedClients:
    """`packed_clients`; steps of a visit mostly have equally many examples, and what is known of one is kept."""
    left = max((c + 1 for c, n in enumerate(counts) if n), default=1)
    full = PackedClients([width] * left + [0] * (len(counts) - left), width, False, device, counts)
    if min(counts[:left]) == width or not any(counts):
        return full
    ways = [full] if all(counts[:left]) else []
    ways.append(PackedClients([min(width, -(-n // ROUND) * ROUND) for n in counts], width, True, device, counts))
    if parameters <= SMALL:
        ways.append(PackedClients(counts, width, True, device))
    return min(ways, key=lambda way: way.rows * parameters + len(way.segments) * layers * call)


class FoldedRows:
    """One minibatch of all clients, `x` and `y` as a function of one client has them, and how full each client's is."""

    def __init__(self, x: Tensor, y: Tensor, counts: Sequence[int]) -> None:
        self.x, self.y, self.counts = x, y, counts
        self.width, self.device = x.shape[0], x.device

    @property
    def all_live(self) -> bool:
        """Whether every client has an example."""
        return min(self.counts) > 0

    def live(self, dtype: torch.dtype) -> Tensor:
        """1 for each client that has an example, 0 for others."""
        return self._numbers([float(n > 0) for n in self.counts], dtype)

    def layout(self, parameters: int, layers: int) -> PackedClients:
        """How its rows are given to a model of so many parameters in so many layers."""
        return packed_clients(self.counts, self.width, parameters, layers, self.device)

    def _numbers(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        """A number for each client, where the examples lie."""
        found: Tensor = to_device(torch.tensor(values, dtype=dtype), self.device)
        return found

    def means(self, values: Tensor, layout: PackedClients) -> Tensor:
        """Mean over each client's examples of values of the rows of a layout; 0 where there is none."""
        if min(self.counts) == self.width:
            return values.view(-1, self.width).mean(1)
        share = layout.shares(values.dtype)[:, 0]
        if layout.filled is not layout.counts:
            values = torch.where(share > 0, values, 0.0)
        return values.new_zeros(layout.clients).index_add(0, layout.client, values * share)


# ---------------------------------------------------------------------------------------------------- layers


class Pull(NamedTuple):
    """A term λ/2 ‖p − q‖² of the loss, kept apart as its gradient λ (p − q) needs no graph."""

    towards: Tensor
    """q, of all clients or with an axis for them."""
    strength: float
    batched: bool

    def of(self, whose: slice | int) -> Tensor:
        """q of some clients."""
        return self.towards[whose] if self.batched else self.towards

    def added(self, g: Tensor, p: Tensor, live: Tensor | None) -> Tensor:
        """A gradient with the term's."""
        more = self.strength * (p - self.towards)
        return g + (more if live is None else more * live.view(-1, *[1] * (p.ndim - 1)))


class _Step(NamedTuple):
    """An SGD step to be taken in a backward pass."""

    lr: float
    pull: Pull | None

    def towards(self, p: Tensor, whose: slice | int) -> Tensor:
        """Parameters of some clients, after the term's part of the step."""
        part = p[whose]
        return part if self.pull is None else part.lerp_(self.pull.of(whose), self.lr * self.pull.strength)


class _Product(torch.autograd.Function):
    """x Wᵀ + b, each row of x [rows, in] with the weight and bias of its client: W [C, out, in], b [C, out].

    `steps` are set before the backward pass: the steps of the weight (1) and the bias (2), where they are taken here.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layout: PackedClients) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.steps, ctx.layout, ctx.bf16, per = {}, layout, is_autocast(x), len(x) // layout.rows
        if ctx.bf16:
            x, weight, bias = x.bfloat16(), weight.bfloat16(), None if bias is None else bias.bfloat16()
        if layout.device.type != "cpu":
            _ = layout.client  # sent to the device before the backward pass asks for it
        out = x.new_empty(len(x), weight.shape[1])
        for s in layout.segments:
            affine(s.of(x, per), weight[s.whose], None if bias is None else bias[s.whose], s.of(out, per))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, bias = ctx.saved_tensors
        g, weight, per = grads[0].contiguous(), weight.detach(), len(x) // ctx.layout.rows
        x, read = x.to(g.dtype), weight.to(g.dtype)  # in bf16 products are, and weights are not
        before = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        by_weight = by_bias = None
        if 1 not in ctx.steps and ctx.needs_input_grad[1]:
            by_weight = _for_all(weight, ctx.layout)
        if bias is not None and (2 in ctx.steps or ctx.needs_input_grad[2]):
            by_bias = ctx.layout.sums(g.to(bias.dtype), per)
        for s in ctx.layout.segments:
            mine, given = s.of(g, per), s.of(x, per)
            if before is not None:  # with the weights of the forward pass
                times(mine, read[s.whose], s.of(before, per))
            if 1 in ctx.steps and ctx.bf16:  # a product in 16 bits cannot be added to 32 on the way
                ctx.steps[1].towards(weight, s.whose).sub_(mine.mT @ given, alpha=ctx.steps[1].lr)
            elif 1 in ctx.steps:
                subtract_product(ctx.steps[1].towards(weight, s.whose), mine.mT, given, ctx.steps[1].lr)
            elif by_weight is not None:
                if ctx.bf16:
                    by_weight[s.whose] = mine.mT @ given
                else:
                    times(mine.mT, given, by_weight[s.whose])
            if 2 in ctx.steps:
                ctx.steps[2].towards(bias.detach(), s.whose)
        if 2 in ctx.steps:
            bias.detach().sub_(by_bias, alpha=ctx.steps[2].lr)
            by_bias = None
        return before, by_weight, by_bias, None


def _for_all(like: Tensor, layout: PackedClients) -> Tensor:
    """Room for a gradient of every client; zeros where one of them has no row."""
    return torch.empty_like(like) if all(layout.counts) else torch.zeros_like(like)


class _Pass:
    """One forward pass in the making: how the rows lie, and the parameters by name."""

    layout: PackedClients
    params: dict[str, tuple[Tensor, bool]]


class _Common(torch.autograd.Function):
    """x Wᵀ + b with a weight and bias that all clients have in common, which are constants."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return product(grads[0], weight), None, None


class OwnParameters:
    """What a layer computes with where clients are folded: parameters by name, and products of rows with weights.

    A parameter has a client axis, [C, …], unless all clients have it in common.
    """

    def __init__(self, layer: nn.Module, given: Mapping[str, tuple[Tensor, bool]], layout: PackedClients) -> None:
        self._layer, self._given, self._layout = layer, given, layout

    def __getitem__(self, name: str) -> Tensor:
        value: Tensor = self._given[name][0] if name in self._given else getattr(self._layer, name).detach()
        return value

    @property
    def bias(self) -> Tensor | None:
        """The parameter `bias`, if the layer has one."""
        return None if self._layer.bias is None else self["bias"]

    def composed(self, compose: Callable[[], Tensor]) -> Tensor:
        """What a function of the layer that takes nothing but its parameters gives for each client."""
        dims = {k: 0 if own else None for k, (_, own) in self._given.items()}

        def one(params: dict[str, Tensor]) -> Tensor:
            with stateless._reparametrize_module(self._layer, params):
                return compose()

        found: Tensor = vmap(one, in_dims=(dims,))({k: v for k, (v, _) in self._given.items()})
        return found

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x Wᵀ + b, each row with the weight and bias of its client; those without a client axis are all clients'."""
        rows = x.reshape(-1, x.shape[-1])
        if weight.ndim == 2:
            if is_autocast(rows):
                out = F.linear(rows, weight)
            else:
                out = _Common.apply(rows, weight, None)  # type: ignore[no-untyped-call]
            if bias is not None:
                out = out + (bias if bias.ndim == 1 else self._of_rows(bias, len(rows)))
        else:
            if bias is not None and bias.ndim == 1:
                bias = bias.expand(self._layout.clients, -1)
            out = _Product.apply(rows, weight, bias, self._layout)  # type: ignore[no-untyped-call]
        return out.view(*x.shape[:-1], weight.shape[-2])

    def _of_rows(self, values: Tensor, rows: int) -> Tensor:
        """Values [C, …] of the client of each row."""
        return values.index_select(0, self._layout.client.repeat_interleave(rows // self._layout.rows))


class FoldableLayer(nn.Module):
    """Base of layers that say themselves how many clients are computed at once."""

    def folded(self, x: Tensor, own: OwnParameters) -> Tensor | None:
        """The layer with the parameters of each row's client; None: it is to be mapped like any other layer."""
        return None


class _Unit(nn.Module):
    """A layer with parameters of its own, run with those of each client."""

    def __init__(self, layer: nn.Module, prefix: str, now: _Pass, apart: bool) -> None:
        super().__init__()
        self.layer, self.prefix, self.now = layer, prefix, now
        self.apart = apart  # what it does to an example depends on the example's place in its client's batch

    def forward(self, x: Tensor) -> Tensor:
        given = {k[len(self.prefix) :]: v for k, v in self.now.params.items() if k.startswith(self.prefix)}
        if not self.apart and not any(batched for _, batched in given.values()):
            common = {k: v for k, (v, _) in given.items()}
            if type(self.layer) is nn.Linear and not torch.is_grad_enabled():
                return linear(x, common.get("weight", self.layer.weight), common.get("bias", self.layer.bias))
            out: Tensor = functional_call(self.layer, common, (x,))
            return out
        if isinstance(self.layer, FoldableLayer) and not self.apart:
            found = self.layer.folded(x, OwnParameters(self.layer, given, self.now.layout))
            if found is not None:
                return found
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
        if not torch.is_grad_enabled():
            weight = weight.contiguous()  # oneDNN takes a hundred times as long where clients lie side by side
        rows = x.reshape(-1, x.shape[-1])
        out: Tensor = _Product.apply(rows, weight, bias, self.now.layout)  # type: ignore[no-untyped-call]
        return out.view(*x.shape[:-1], weight.shape[1])

    def _convolution(self, x: Tensor, given: Mapping[str, tuple[Tensor, bool]]) -> Tensor:
        weight, bias = self._all(given, "weight"), self._all(given, "bias")
        assert weight is not None and isinstance(self.layer, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        counts = self.now.layout.counts
        biases: Sequence[Tensor | None] = [None] * len(counts) if bias is None else bias.unbind(0)
        parts = zip(torch.split(x, list(counts)), weight.unbind(0), biases)
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

    A layer of a known kind (linear, convolution, normalisation), and one that says itself how it is folded, is computed
    with a client axis; any other module that holds parameters itself is mapped by a `vmap` of its own; what holds none
    sees one larger batch.
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
        self, params: Mapping[str, Tensor], x: Tensor, layer: str | None, memory: Layout
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
            layout = PackedClients([inputs.shape[1]] * sizes[0], inputs.shape[1], False, inputs.device)
            out, seen = self._run(held, inputs.flatten(0, 1), layout, layer, memory)
            out, seen = layout.put(out), None if seen is None else layout.put(seen)
        return wrapped(out), None if seen is None else wrapped(seen)

    def of_rows(
        self, params: Mapping[str, Tensor], rows: FoldedRows, loss: Callable[[Tensor, Tensor], Tensor], memory: Layout
    ) -> Tensor:
        """Each client's mean of `loss(outputs, labels)`, one value per example, over its examples of a minibatch."""
        held, (x, _), (y, _) = {k: unwrapped(v) for k, v in params.items()}, unwrapped(rows.x), unwrapped(rows.y)
        with mapped_by_hand():
            layout = rows.layout(self.parameters, self.units)
            out, _ = self._run(held, layout.take(x), layout, None, memory)
            means = rows.means(loss(out, layout.take(y)), layout)
        return wrapped(means)

    def with_inputs(
        self, params: Mapping[str, Tensor], rows: FoldedRows, layer: str, memory: Layout
    ) -> tuple[Tensor, Tensor]:
        """What goes into a layer for the examples of a minibatch, and the outputs.

        A slot without an example holds some other one's.
        """
        held, (x, _) = {k: unwrapped(v) for k, v in params.items()}, unwrapped(rows.x)
        with mapped_by_hand():
            layout = rows.layout(self.parameters, self.units)
            out, seen = self._run(held, layout.take(x), layout, layer, memory)
            assert seen is not None
            slots = [layout.put(t) for t in (seen, out)]
        return wrapped(slots[0]), wrapped(slots[1])

    def _run(
        self, held: dict[str, tuple[Tensor, bool]], x: Tensor, layout: PackedClients, layer: str | None, memory: Layout
    ) -> tuple[Tensor, Tensor | None]:
        self.now.layout, self.now.params = layout, held
        try:
            return memory(lambda a: run_watched(self.module, layer, lambda: outputs_of(self.module(a))), x)
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
    """Parameters of all clients that a loss is differentiated by: given wrapped, as one client's function sees them.

    Steps change them in place, so that one set of leaves serves a whole fit.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        inner = [unwrapped(p) for p in params]
        assert all(batched for _, batched in inner)
        with mapped_by_hand():
            self.stacks = [t.detach() for t, _ in inner]
            self.leaves = [t.detach().requires_grad_() for t in self.stacks]
            self._ends = [get_gradient_edge(t).node for t in self.leaves]
        self.given = [wrapped(t) for t in self.leaves]

    def gradients(
        self, values: Tensor, lr: float | None = None, pulls: Sequence[Pull | None] = (), live: Tensor | None = None
    ) -> list[Tensor | None]:
        """∂/∂params of each client's value, wrapped; with `lr`, None for those that took their SGD step already.

        Args:
            pulls: for each of the parameters a term λ/2 ‖p − q‖² that is not among the values.
            live: [C], which clients have such terms; all if not given.
        """
        inner, _ = unwrapped(values)
        pulls = pulls or [None] * len(self.leaves)
        with mapped_by_hand(), torch.enable_grad():
            total = inner.sum()
            if not total.requires_grad:
                found: list[Tensor | None] = [None] * len(self.leaves)
                stepped: set[int] = set()
            else:
                stepped = set() if lr is None else _mark_steps(total, self.leaves, self._ends, lr, pulls)
                found = list(torch.autograd.grad(total, self.leaves, allow_unused=True))
            found = [
                torch.zeros_like(t) if g is None and i not in stepped else g
                for i, (g, t) in enumerate(zip(found, self.leaves))
            ]
        with mapped_by_hand(), torch.no_grad():
            found = [g if g is None or q is None else q.added(g, t, live) for g, q, t in zip(found, pulls, self.stacks)]
        return [None if g is None else wrapped(g) for g in found]


def _mark_steps(
    total: Tensor, leaves: Sequence[Tensor], ends: Sequence[Any], lr: float, pulls: Sequence[Pull | None]
) -> set[int]:
    """Let linear layers take the step of the weights that nothing else uses; returns which leaves those are.

    A weight qualifies if exactly one edge of the graph leads to it, from a linear layer, and no other layer computes
    with the same memory (a detached copy, whose backward pass would read it after the step).
    """
    at = {node: i for i, node in enumerate(ends)}
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
            node.steps[position] = _Step(lr, pulls[i])
            stepped.add(i)
    return stepped
