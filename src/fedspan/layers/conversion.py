"""Choosing layers of a model and putting structured ones in their place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias

from torch import nn

from fedspan.errors import ConfigError, nearest
from fedspan.layers.base import Structured
from fedspan.layers.views import Plain
from fedspan.learn.task import Task
from fedspan.tree import Params

Which: TypeAlias = Literal["all", "body"] | tuple[str, ...]
"""All layers, all but the head, or those whose names start with one of some prefixes."""

Chosen: TypeAlias = Literal["all", "body", "large", "main"] | tuple[str, ...]
"""As `Which`, or the large ones: those below the head that have fewer numbers once they are structured; or the main
ones: the fewest below the head that hold `MAIN` of its parameters, never the first convolution."""

MAIN = 0.8


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


def choose(task: Task, which: Chosen, who: str, size: Callable[[Plain], int] | None = None) -> dict[str, Plain]:
    """The layers that `which` means, by name. `size` tells the numbers of a layer once it is structured.

    Raises:
        ConfigError: if a prefix fits no layer, or there is no layer at all.
    """
    known = candidates(task.module)
    if which == "main":
        return _main(task, known, who)
    if which == "large":
        assert size is not None
        found = {k: m for k, m in known.items() if not in_head(task, k) and size(m) < m.weight.numel()}
        if not found:
            raise ConfigError(
                f"{who}: layers must be 'body', 'all' or names where no layer becomes smaller by its factors. Got"
                " 'large'; or use a smaller rank."
            )
        return found
    if isinstance(which, str):
        found = {k: m for k, m in known.items() if which == "all" or not in_head(task, k)}
        if not found:
            raise ConfigError(f"{who}: the model must have an nn.Linear or nn.Conv2d among '{which}'. It has none.")
        return found
    for prefix in which:
        if not any(k.startswith(prefix) for k in known):
            raise ConfigError(f"{who}: layers must begin the name of a layer. Got '{prefix}'.{nearest(prefix, known)}")
    return {k: m for k, m in known.items() if k.startswith(which)}


def _main(task: Task, known: dict[str, Plain], who: str) -> dict[str, Plain]:
    """The largest layers below the head, until they hold `MAIN` of its parameters; without the first convolution."""
    stem = next((k for k, m in known.items() if isinstance(m, nn.Conv2d)), None)
    order = [k for k in known if not in_head(task, k) and k != stem]
    order.sort(key=lambda k: -known[k].weight.numel())
    start, chosen, held = task.init(), set[str](), 0
    wanted = MAIN * sum(start[k].numel() for k in task.body)
    for k in order:
        if held < wanted:
            chosen.add(k)
            held += known[k].weight.numel()
    if not chosen:
        raise ConfigError(f"{who}: layers must be 'all' or names where there is no layer below the head. Got 'main'.")
    return {k: m for k, m in known.items() if k in chosen}


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


def parts(module: nn.Module, *names: str) -> list[str]:
    """The full names of these parameters in all structured layers of a module."""
    return [part(k, name) for k in structured(module) for name in names]


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
