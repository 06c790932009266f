"""Layers whose weight is composed of smaller tensors, and `convert`, which puts them in the place of plain ones.

A structured layer is a module like any other: `functional_call` and `vmap` go through it, `reset_parameters` draws it
anew, bias, stride, padding and groups are those of the layer it replaces. A new kind of structure is a subclass of
`Structured` that says how its weight is composed (and may override `forward` where that can be had for less).
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedspan.errors import ConfigError, nearest
from fedspan.task import Task
from fedspan.tree import Params

Plain: TypeAlias = nn.Linear | nn.Conv2d
"""What can be replaced."""

Layout: TypeAlias = Literal["space_by_channel", "official_view", "ik_by_ok", "out_by_rest"]
"""How a kernel [o, i, k, k] is read as a matrix; see `LAYOUTS`."""

Which: TypeAlias = Literal["all", "body"] | tuple[str, ...]
"""All layers, all but the head, or those whose names start with one of some prefixes."""

MuStart: TypeAlias = Literal["zeros", "xavier", "dense"]


# ------------------------------------------------------------------------------------------------ matrix views


class View(NamedTuple):
    """A kernel as a matrix: the shape of the matrix, and the way back."""

    dims: Callable[[int, int, int, int], tuple[int, int]]
    kernel: Callable[[Tensor, tuple[int, int, int, int]], Tensor]


def _space_by_channel(matrix: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    o, i, h, w = shape
    return matrix.reshape(h, w, i, o).permute(3, 2, 0, 1)


def _ik_by_ok(matrix: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    o, i, h, w = shape
    return matrix.reshape(i, w, o, h).permute(2, 0, 3, 1)


LAYOUTS: dict[str, View] = {
    # Rows are positions, columns pairs of channels: with rank one every filter is a multiple of one base filter.
    "space_by_channel": View(lambda o, i, h, w: (h * w, i * o), _space_by_channel),
    # The same matrix read row by row as [o, i, k, k], as the public code of Factorized-FL does: the axes are scrambled.
    "official_view": View(lambda o, i, h, w: (h * w, i * o), lambda m, shape: m.reshape(shape)),
    # The two ambiguous layouts of Factorized-FL's ablation, Figure 7(k).
    "ik_by_ok": View(lambda o, i, h, w: (i * w, o * h), _ik_by_ok),
    "out_by_rest": View(lambda o, i, h, w: (o, i * h * w), lambda m, shape: m.reshape(shape)),
}


# ------------------------------------------------------------------------------------------------ the layers


class Structured(nn.Module):
    """Base of all structured layers: everything of `like` but its weight, which a subclass composes."""

    def __init__(self, like: Plain) -> None:
        super().__init__()
        self.shape = tuple(like.weight.shape)
        self.convolution = isinstance(like, nn.Conv2d)
        if isinstance(like, nn.Conv2d):
            self.stride, self.padding = like.stride, like.padding
            self.dilation, self.groups = like.dilation, like.groups
            self.padding_mode, self.around = like.padding_mode, like._reversed_padding_repeated_twice
        bias: Tensor | None = like.bias
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)

    def compose(self) -> Tensor:
        """The weight, in the shape of the plain layer's."""
        raise TypeError(f"{type(self).__name__}: compose must be defined.")

    def forward(self, x: Tensor) -> Tensor:
        """What the plain layer would do with the composed weight."""
        weight = self.compose()
        if not self.convolution:
            return F.linear(x, weight, self.bias)
        padding = self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, self.around, mode=self.padding_mode), (0, 0)
        return F.conv2d(x, weight, self.bias, self.stride, padding, self.dilation, self.groups)

    def reset_parameters(self) -> None:
        """Draw the bias as plain layers do; subclasses draw the rest."""
        if self.bias is not None:
            bound = 1 / math.sqrt(max(1, math.prod(self.shape[1:])))
            nn.init.uniform_(self.bias, -bound, bound)

    def extra_repr(self) -> str:
        return f"weight {list(self.shape)}, " + ", ".join(f"{k} {list(p.shape)}" for k, p in self.named_parameters())


class Factorized(Structured):
    """W = u v + μ: a matrix of rank γ and a correction that is meant to be sparse. Factorized-FL, eq. (2) and (3).

    u [rows, γ] and v [γ, columns] make a matrix that `layout` turns into the weight; μ has the shape of the weight,
    which is the paper's matrix up to that rearrangement. A linear layer is read as inputs × outputs.
    """

    def __init__(
        self,
        like: Plain,
        gamma: int = 1,
        layout: Layout = "space_by_channel",
        mu: bool = True,
        mu_start: MuStart = "zeros",
    ) -> None:
        super().__init__(like)
        self.view, self.mu_start = LAYOUTS[layout], mu_start
        rows, columns = matrix_dims(like, layout)
        rank = min(gamma, rows, columns)
        if rank < gamma:
            warnings.warn(
                f"Factorized: a matrix of {rows} x {columns} has at most rank {rank}; gamma = {gamma} is cut to that.",
                stacklevel=2,
            )
        self.u = nn.Parameter(like.weight.new_empty(rows, rank))
        self.v = nn.Parameter(like.weight.new_empty(rank, columns))
        self.mu = nn.Parameter(torch.empty_like(like.weight)) if mu else None
        self._draw(like.weight.detach())

    def product(self) -> Tensor:
        """The part of low rank, in the shape of the weight."""
        matrix = self.u @ self.v
        if not self.convolution:
            return matrix.T
        o, i, h, w = self.shape
        return self.view.kernel(matrix, (o, i, h, w))

    def compose(self) -> Tensor:
        return self.product() if self.mu is None else self.product() + self.mu

    def reset_parameters(self) -> None:
        super().reset_parameters()
        dense = self.u.new_empty(self.shape)
        nn.init.kaiming_uniform_(dense, a=math.sqrt(5))
        self._draw(dense)

    def _draw(self, dense: Tensor) -> None:
        nn.init.xavier_uniform_(self.u)
        nn.init.xavier_uniform_(self.v)
        if self.mu is None:
            return
        with torch.no_grad():
            if self.mu_start == "zeros" or (self.mu_start == "xavier" and self.convolution):
                self.mu.zero_()
            elif self.mu_start == "xavier":  # what the public code does, in dense layers only
                nn.init.xavier_uniform_(self.mu)
            else:
                self.mu.copy_(dense - self.product())  # starts as the plain network, exactly


class Hadamard(Structured):
    """W = W₁ ∘ W₂ with W_j = X_j Y_jᵀ of rank r, so that W can have rank r². FedPara, Proposition 1 and 3.

    For a convolution W_j[o, i] = Σ_xy T_j[x, y] X_j[o, x] Y_j[i, y], the tensor form. With `plus_one` the weight is
    W₁ ∘ (W₂ + 1), as pFedPara has it. `start` "kaiming": each factor is Gaussian with Kaiming's deviation for its own
    shape, as published; "matched": all factors get the deviation that gives W the variance of Kaiming's.
    """

    def __init__(
        self,
        like: Plain,
        rank: int,
        plus_one: bool = False,
        tanh: bool = False,
        start: Literal["kaiming", "matched"] = "kaiming",
    ) -> None:
        super().__init__(like)
        self.rank, self.plus_one, self.tanh, self.start = rank, plus_one, tanh, start
        o, i, *kernel = self.shape
        for j in (1, 2):
            if self.convolution:
                self.register_parameter(f"T{j}", nn.Parameter(like.weight.new_empty(rank, rank, *kernel)))
            self.register_parameter(f"X{j}", nn.Parameter(like.weight.new_empty(o, rank)))
            self.register_parameter(f"Y{j}", nn.Parameter(like.weight.new_empty(i, rank)))
        self._draw()

    def factor(self, j: int) -> Tensor:
        """W₁ or W₂."""
        X, Y = getattr(self, f"X{j}"), getattr(self, f"Y{j}")
        W: Tensor = torch.einsum("xyhw,ox,iy->oihw", getattr(self, f"T{j}"), X, Y) if self.convolution else X @ Y.T
        return W.tanh() if self.tanh else W

    def compose(self) -> Tensor:
        second = self.factor(2)
        return self.factor(1) * (second + 1 if self.plus_one else second)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self._draw()

    def _draw(self) -> None:
        r, wanted = self.rank, 2 / math.prod(self.shape[1:])
        # Var W = Var W₁ · Var W₂ (+ Var W₁ with the one): the variance each W_j must have.
        one = math.sqrt(wanted) if not self.plus_one else (math.sqrt(1 + 4 * wanted) - 1) / 2
        # Var W_j = r s⁴ for two factors, r² s⁶ for three, when all entries have variance s².
        matched = (one / r**2) ** (1 / 6) if self.convolution else (one / r) ** (1 / 4)
        for name, p in self.named_parameters(recurse=False):
            if name != "bias":
                fan = r * math.prod(p.shape[2:])
                nn.init.normal_(p, 0.0, matched if self.start == "matched" else math.sqrt(2 / fan))


def matrix_dims(layer: Plain, layout: Layout) -> tuple[int, int]:
    """Rows and columns of a layer's weight as a matrix; a linear layer is inputs × outputs in every layout."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    o, i, h, w = layer.weight.shape
    return LAYOUTS[layout].dims(o, i, h, w)


# ------------------------------------------------------------------------------------------------ conversion


def candidates(module: nn.Module) -> dict[str, Plain]:
    """The plain layers that can be replaced, in order; subclasses and frozen weights are left alone."""
    found: dict[str, Plain] = {}
    for name, m in module.named_modules():
        if isinstance(m, nn.Linear | nn.Conv2d) and type(m) in (nn.Linear, nn.Conv2d) and m.weight.requires_grad:
            found[name] = m
    return found


def in_head(task: Task, name: str) -> bool:
    """Whether a layer is the head or a part of it."""
    head = task.head_layer
    return head is not None and (not head or name == head or name.startswith(head + "."))


def choose(task: Task, which: Which, who: str) -> dict[str, Plain]:
    """The layers that `which` means, by name.

    Raises:
        ConfigError: if a prefix fits no layer, or there is no layer at all.
    """
    known = candidates(task.module)
    if isinstance(which, str):
        found = {k: m for k, m in known.items() if which == "all" or not in_head(task, k)}
        if not found:
            raise ConfigError(f"{who}: the model must have an nn.Linear or nn.Conv2d among '{which}'. It has none.")
        return found
    for prefix in which:
        if not any(k.startswith(prefix) for k in known):
            raise ConfigError(f"{who}: layers must begin the name of a layer. Got '{prefix}'.{nearest(prefix, known)}")
    return {k: m for k, m in known.items() if k.startswith(which)}


def convert(module: nn.Module, names: Iterable[str], make: Callable[[Plain], nn.Module]) -> nn.Module:
    """The module with the plain layers called `names` replaced by what `make` returns for them; changed in place.

    Raises:
        ConfigError: if a weight that would be replaced also serves another layer.
    """
    chosen = set(names)
    owners: dict[int, int] = {}
    for m in module.modules():
        for p in m.parameters(recurse=False):
            owners[id(p)] = owners.get(id(p), 0) + 1
    made: dict[int, nn.Module] = {}
    for name, m in list(module.named_modules(remove_duplicate=False)):
        if not isinstance(m, nn.Linear | nn.Conv2d) or (name not in chosen and id(m) not in made):
            continue
        if owners[id(m.weight)] > 1:
            raise ConfigError(
                f"Layers: the weight of '{name}' also serves another layer and cannot be replaced alone."
                " Choose other layers."
            )
        if id(m) not in made:
            made[id(m)] = make(m)
        if not name:
            return made[id(m)]
        parent, _, last = name.rpartition(".")
        setattr(module.get_submodule(parent), last, made[id(m)])
    return module


def structured(module: nn.Module) -> list[str]:
    """Names of the structured layers of a module, in order."""
    return [k for k, m in module.named_modules() if isinstance(m, Structured)]


def part(layer: str, name: str) -> str:
    """The full name of a layer's parameter; '' is the layer that is the whole model."""
    return f"{layer}.{name}" if layer else name


def plain_weights(module: nn.Module, params: Params) -> Params:
    """Parameters of a module with structured layers as those of the plain network it stands for."""
    module = copy.deepcopy(module)
    module.load_state_dict(params, strict=False)
    out = dict(params)
    for name in structured(module):
        layer = module.get_submodule(name)
        assert isinstance(layer, Structured)
        for k in dict(layer.named_parameters()):
            if k != "bias":
                out.pop(part(name, k), None)
        out[part(name, "weight")] = layer.compose().detach()
    return out
