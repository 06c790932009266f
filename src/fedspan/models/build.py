"""The models by name, and `build`, which makes one and tries it on an empty example before anybody trains it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedspan.errors import ConfigError, nearest
from fedspan.method.named_code import brief, installed, is_spec, load_installed, named_class, need_subclass
from fedspan.models import causal, checks, cnn, resnet, simple

GROUP = "fedspan.models"
"""The entry points by which an installed package brings models."""


@dataclass(frozen=True)
class Entry:
    """A model of the registry: how it is made, one line about it, its options with their defaults."""

    builder: Callable[..., nn.Module]
    about: str
    options: Mapping[str, Any]
    language: bool = False  # rows of tokens in, a row of logits per token out


def _entry(builder: Callable[..., nn.Module], about: str, language: bool = False, **fixed: Any) -> Entry:
    """An entry whose options are the builder's keyword-only parameters, except those the name already fixes."""
    parameters = inspect.signature(builder).parameters.values()
    options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in fixed}
    return Entry(functools.partial(builder, **fixed) if fixed else builder, about, options, language)


def _resnet8(input_shape: tuple[int, ...], classes: int, *, width: int = 16, norm: str = "group") -> nn.Module:
    return resnet.ResNet(input_shape, classes, blocks=(1, 1, 1), width=width, norm=norm)


MODELS: dict[str, Entry] = {
    "linear": _entry(simple.Linear, "one linear layer on the flattened input; with one output, linear regression"),
    "logistic": _entry(simple.Linear, "logistic regression: one linear layer on the flattened input"),
    "mlp": _entry(simple.MLP, "fully connected, ReLU; pFL-MF's 784-200-200-10 for MNIST"),
    "characters": _entry(simple.Characters, "the next character of a text: an embedding, two linear layers"),
    "cnn": _entry(cnn.CNN, "two 5x5 convolutions with pooling (and norm), two linear layers; the usual benchmark CNN"),
    "cnn3x3": _entry(cnn.CNN3x3, "pFL-MF's CIFAR model: two 3x3 convolutions without pooling, one linear layer"),
    "lenet5": _entry(cnn.LeNet5, "LeNet-5 with ReLU and max pooling; smaller images are padded to 32x32"),
    **{
        f"cnn{level}": _entry(
            cnn.CapacityCNN, f"FedARA's capacity level {level} of 5: {millions}M parameters on CIFAR-10", level=level
        )
        for level, millions in enumerate(("2.62", "1.82", "1.32", "1.06", "0.67"), start=1)
    },
    "resnet8": _entry(_resnet8, "narrow residual network, one basic block in each of three stages"),
    "resnet9": _entry(resnet.ResNet9, "Factorized-FL's residual network"),
    "resnet10": _entry(resnet.ResNet, "FedLoRU's residual network for Fashion-MNIST, 3x3 stem", blocks=(1,) * 4),
    "resnet18": _entry(resnet.ResNet, "FedLoRU's residual network for CIFAR, 3x3 stem", blocks=(2,) * 4),
    "causal-lm": _entry(
        causal.causal_lm, "causal language model: a folder, a name of the hub, or a small LLaMA on bytes", language=True
    ),
}


def is_language(kind: str) -> bool:
    """Whether a model of the registry works on rows of tokens."""
    return kind in MODELS and MODELS[kind].language


def build(
    kind: str, input_shape: tuple[int, ...], classes: int, labelled_positions: tuple[int, ...] = (), **options: Any
) -> nn.Module:
    """Make a model and check that it turns one example (of a language model: every token) into `classes` numbers.

    Weights come from torch's global generator, so `torch.manual_seed` before the call decides them.

    Args:
        kind: a name in `MODELS` or of an installed package, or "package.module:Class" for your own subclass of
            `nn.Module` in a package that is allowed (`fedspan.allow_code`); it gets the options, and `input_shape` and
            `classes` if it has parameters of these names.
        input_shape: one example without the batch dimension; images as (channels, height, width).
        classes: number of outputs.
        labelled_positions: for models that label tokens or pixels, how many there are along each axis; they give
            `classes` numbers for each.

    Raises:
        ConfigError: unknown model or option, code that is not allowed, or the model does not fit the inputs.
    """
    who = f"model '{kind}'"
    input_shape = checks.integers(who, "input_shape", input_shape)
    if not input_shape:
        raise ConfigError(f"{who}: input_shape must not be empty. Got (); use data of shape [examples, 1].")
    classes = checks.integer(who, "classes", classes)
    if is_own(kind):
        model = _own(kind, input_shape, classes, options)
    else:
        if kind not in MODELS:
            raise ConfigError(
                f"model: kind must be a known model or your own as 'package.module:Class'. Got {kind!r}."
                + nearest(kind, MODELS)
            )
        _known_options(who, options, MODELS[kind].options)
        model = MODELS[kind].builder(input_shape, classes, **options)
    _try(kind, model, input_shape, classes, labelled_positions)
    return model


def _known_options(who: str, options: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    for name in options:
        if name not in known:
            raise ConfigError(f"{who}: unknown option '{name}'." + (nearest(name, known) or " It has no options."))


def is_own(kind: str) -> bool:
    """Whether a kind is somebody's own: code that is named, or what an installed package offers."""
    return is_spec(kind) or (kind not in MODELS and kind in installed(GROUP))


def _own(kind: str, input_shape: tuple[int, ...], classes: int, options: dict[str, Any]) -> nn.Module:
    """Build a model of somebody's own class."""
    who = f"model '{kind}'"
    if is_spec(kind):
        make = named_class(kind, nn.Module, "torch.nn.Module", who)
    else:
        make = need_subclass(load_installed(GROUP, kind, who), nn.Module, "torch.nn.Module", who)
    parameters = inspect.signature(make).parameters
    given = {"input_shape": input_shape, "classes": classes}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        _known_options(who, options, {p: None for p in parameters if p not in given})
    # A catch-all **kwargs does not count: it is often handed to a base class that knows neither name.
    arguments = {k: v for k, v in given.items() if k in parameters} | options
    try:
        return make(**arguments)
    except Exception as error:
        raise ConfigError(f"{who}: could not be built with {arguments} ({brief(error)}).") from error


def _try(
    kind: str, model: nn.Module, input_shape: tuple[int, ...], classes: int, positions: tuple[int, ...] = ()
) -> None:
    """Run the model on one example of zeros; it must give [1, classes]. Modes and statistics stay as they are."""
    own = is_own(kind)
    remedy = "change the class or the data so that they agree" if own else "use other options, or model 'mlp'"
    like = next(model.parameters(), torch.empty(0))
    # An embedding looks up whole numbers; every other layer computes with the type of its weights.
    tokens = any(isinstance(module, nn.Embedding) for module in model.modules())
    example = torch.zeros((1, *input_shape), dtype=torch.int64 if tokens else like.dtype, device=like.device)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            output = model(example)
            output = getattr(output, "logits", output)  # models of transformers return an object
    except Exception as error:
        raise ConfigError(
            f"model '{kind}': does not accept inputs of shape {input_shape} ({brief(error)}); {remedy}."
        ) from error
    finally:
        for module, training in modes:
            module.training = training
    wanted = (1, *(input_shape if is_language(kind) else ()), classes)
    if is_language(kind) and isinstance(output, Tensor):
        wanted = (*wanted[:-1], max(classes, output.shape[-1]))  # vocabularies are often rounded up
    if positions:
        wanted = (1, *positions, classes)
    if isinstance(output, Tensor) and positions and output.shape == (1, classes, *positions):
        return
    if not isinstance(output, Tensor) or output.shape != wanted:
        got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ConfigError(
            f"model '{kind}': must turn one input of shape {input_shape} into {wanted}. Got {got}; {remedy}."
        )
