"""Plain SGD of perceptrons written out for many clients: what autograd would compute, in some thirty calls a step.

Recording a graph, walking it and wrapping tensors for `vmap` takes longer than the products of a small minibatch. Of
linear layers with ReLU between them and a loss whose slope is known, every product of a step is known beforehand:
rows are selected from the pool without empty slots, and weights step inside their products. While clients hold one
common start, their first pass is one product for all of them, and their first step writes what it would have copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn

from fedspan.learn.folded import PackedClients, Pull, packed_clients
from fedspan.learn.products import affine, less_product, subtract_product, times

RELU = (torch.relu, F.relu)

BLOCK = 256
"""Rows in one product with a weight that all clients have in common: products of few shapes need no preparation."""


class LinearLayer(NamedTuple):
    """A linear layer by the names of its parameters."""

    weight: str
    bias: str | None
    relu: bool
    """Whether what it gives goes through a ReLU."""


class Perceptron(NamedTuple):
    """A model that is one linear layer after the other."""

    layers: tuple[LinearLayer, ...]
    flat: bool
    """Whether it flattens its inputs itself."""

    @property
    def names(self) -> list[str]:
        """Of all its parameters."""
        return [name for layer in self.layers for name in (layer.weight, layer.bias) if name is not None]


def perceptron_of(module: nn.Module) -> Perceptron | None:
    """A module as a perceptron; None if it is, or may be, anything else."""
    if type(module) is nn.Linear:
        return Perceptron((LinearLayer("weight", None if module.bias is None else "bias", False),), False)
    owners = [m for m in module.modules() if next(m.parameters(recurse=False), None) is not None]
    if not owners or any(type(m) is not nn.Linear for m in owners) or any(map(_watched, module.modules())):
        return None
    try:
        nodes = list(torch.fx.symbolic_trace(module).graph.nodes)
    except Exception:  # whatever a model of somebody's own does that cannot be traced
        return None
    return _read(module, nodes)


def _watched(module: nn.Module) -> bool:
    return bool(module._forward_pre_hooks or module._forward_hooks)


def _read(module: nn.Module, nodes: Sequence[torch.fx.Node]) -> Perceptron | None:
    """The layers in a graph, if each node takes what the one before gives and nothing else."""
    layers: list[LinearLayer] = []
    flat = False
    for before, node in pairwise(nodes):
        if node.all_input_nodes != [before] or node.args[0] is not before or len(before.users) != 1:
            return None
        kind = module.get_submodule(str(node.target)) if node.op == "call_module" else None
        if node.op == "output":
            break
        if type(kind) is nn.Linear:
            name = str(node.target)
            layers.append(LinearLayer(f"{name}.weight", None if kind.bias is None else f"{name}.bias", False))
        elif _is_relu(node, kind) and layers:
            layers[-1] = layers[-1]._replace(relu=True)
        elif _is_flatten(node, kind) and not layers:
            flat = True
        elif type(kind) is not nn.Identity:
            return None
    once = len({layer.weight for layer in layers}) == len(layers)
    if nodes[0].op != "placeholder" or not layers or not once or layers[-1].relu:
        return None
    return Perceptron(tuple(layers), flat)


def _is_relu(node: torch.fx.Node, kind: nn.Module | None) -> bool:
    named = node.op == "call_method" and node.target in ("relu", "relu_")
    return type(kind) is nn.ReLU or named or (node.op == "call_function" and node.target in RELU)


def _is_flatten(node: torch.fx.Node, kind: nn.Module | None) -> bool:
    if type(kind) is nn.Flatten:
        return (kind.start_dim, kind.end_dim) == (1, -1)
    called = (node.op == "call_method" and node.target == "flatten") or node.target is torch.flatten
    return called and node.args[1:] == (1,) and not node.kwargs


class StackedRows(NamedTuple):
    """The minibatches of all clients, without vmap's wrappers."""

    pool: Tensor
    """Inputs [examples, features]."""
    labels: Tensor
    at: Tensor
    """[K, C, B] places in the pool, those of empty slots among them."""
    counts: Sequence[tuple[int, ...]]
    """[K][C], how many slots of each are filled; the others come last."""
    relabel: Tensor | None
    """[C, classes], what clients call the labels."""

    def steps(self, parameters: int, layers: int) -> Iterator[tuple[PackedClients, Tensor, Tensor]]:
        """Of every minibatch with an example how its rows lie, inputs, and labels."""
        for k, counts in enumerate(self.counts):
            if any(counts):
                layout = packed_clients(counts, self.at.shape[2], parameters, layers, self.at.device)
                at = layout.take(self.at[k])
                y = self.labels.index_select(0, at)
                if self.relabel is not None:
                    y = self.relabel.view(-1).index_select(0, layout.client * self.relabel.shape[1] + y)
                yield layout, self.pool.index_select(0, at), y


class _Stack:
    """A parameter of all clients, or one that they have in common until the first step."""

    def __init__(self, value: Tensor, batched: bool, clients: int, trained: bool, pull: Pull | None) -> None:
        self.value, self.batched, self.clients, self.trained, self.pull = value, batched, clients, trained, pull
        self.borrowed = True  # not ours to change

    def all(self) -> Tensor:
        """With a client axis, which may be one row seen many times."""
        return self.value if self.batched else self.value.expand(self.clients, *self.value.shape)

    def owned(self) -> Tensor:
        """A stack that may be changed."""
        if self.borrowed:
            self.value, self.batched, self.borrowed = self.all().clone(), True, False
        return self.value

    def subtract(self, g: Tensor, x: Tensor, lr: float, layout: PackedClients) -> None:
        """W ← W − η gᵀx, with the part of a pull before it."""
        old, new = self.all(), self.value
        if self.borrowed:
            new = torch.empty(old.shape, dtype=old.dtype, device=old.device)
            for c, n in enumerate(layout.counts):
                if not n:
                    new[c] = old[c]
        for s in layout.segments:
            mine, given = s.of(g, 1).mT, s.of(x, 1)
            if self.pull is not None:
                torch.lerp(old[s.whose], self.pull.of(s.whose), lr * self.pull.strength, out=new[s.whose])
                subtract_product(new[s.whose], mine, given, lr)
            elif self.borrowed:
                less_product(old[s.whose], mine, given, lr, out=new[s.whose])
            else:
                subtract_product(new[s.whose], mine, given, lr)
        self.value, self.batched, self.borrowed = new, True, False

    def subtract_sums(self, g: Tensor, lr: float, layout: PackedClients) -> None:
        """b ← b − η Σ g, with the part of a pull before it."""
        mine = self.owned()
        for s in layout.segments if self.pull is not None else ():
            mine[s.whose].lerp_(self.pull.of(s.whose), lr * self.pull.strength)  # type: ignore[union-attr]
        mine.sub_(layout.sums(g, 1), alpha=lr)


def descend(
    net: Perceptron,
    params: Mapping[str, tuple[Tensor, bool]],
    fixed: Mapping[str, tuple[Tensor, bool]],
    rows: StackedRows,
    lr: float,
    pulls: Mapping[str, Pull | None],
) -> dict[str, Tensor]:
    """Parameters of all clients after a step −η·gradient of the mean cross-entropy for each minibatch, stacked.

    Args:
        params: those that are trained, each with whether it has a client axis already.
        fixed: those of the other layers.
        pulls: terms λ/2 ‖p − q‖² of the loss, by parameter.
    """
    clients = rows.at.shape[1]
    held = {k: _Stack(v, own, clients, True, pulls.get(k)) for k, (v, own) in params.items()}
    held |= {k: _Stack(v, own, clients, False, None) for k, (v, own) in fixed.items()}
    size = sum(s.value.numel() // (clients if s.batched else 1) for s in held.values())
    layers = [(held[w], None if b is None else held[b], relu) for w, b, relu in net.layers]
    first = min(k for k, (w, b, _) in enumerate(layers) if w.trained or (b is not None and b.trained))
    for layout, x, y in rows.steps(size, len(layers)):
        _step(layers, first, layout, x, y, lr)
    return {k: held[k].owned() for k in params}


def _step(
    layers: Sequence[tuple[_Stack, _Stack | None, bool]],
    first: int,
    layout: PackedClients,
    x: Tensor,
    y: Tensor,
    lr: float,
) -> None:
    """One step of all clients; `first` is the lowest layer that is trained."""
    seen = [x]
    for weight, bias, relu in layers:
        x = _forward(x, weight, bias, layout)
        seen.append(x.relu_() if relu else x)
    g = x.softmax(1)
    g.scatter_add_(1, y[:, None], g.new_full((1, 1), -1.0).expand(len(y), 1))
    g.mul_(layout.shares(g.dtype))
    for k in reversed(range(first, len(layers))):
        weight, bias, _ = layers[k]
        before = _backward(g, weight, layout) if k > first else None  # with the weights of the forward pass
        if weight.trained:
            weight.subtract(g, seen[k], lr, layout)
        if bias is not None and bias.trained:
            bias.subtract_sums(g, lr, layout)
        if before is not None:
            g = before
            if layers[k - 1][2]:
                torch.ops.aten.threshold_backward.grad_input(g, seen[k], 0, grad_input=g)


def _forward(x: Tensor, weight: _Stack, bias: _Stack | None, layout: PackedClients) -> Tensor:
    out = x.new_empty(len(x), weight.value.shape[-2])
    if not weight.batched and (bias is None or not bias.batched):
        for given, to in zip(torch.split(x, BLOCK), torch.split(out, BLOCK)):
            affine(given, weight.value, None if bias is None else bias.value, to)
        return out
    w, b = weight.all(), None if bias is None else bias.all()
    for s in layout.segments:
        affine(s.of(x, 1), w[s.whose], None if b is None else b[s.whose], s.of(out, 1))
    return out


def _backward(g: Tensor, weight: _Stack, layout: PackedClients) -> Tensor:
    out = g.new_empty(len(g), weight.value.shape[-1])
    if not weight.batched:
        for given, to in zip(torch.split(g, BLOCK), torch.split(out, BLOCK)):
            times(given, weight.value, to)
        return out
    for s in layout.segments:
        times(s.of(g, 1), weight.value[s.whose], s.of(out, 1))
    return out
