"""Random changes of training inputs, drawn from (seed, round, client, step) alone.

They are the same mapped, in a loop, on any number of workers and on a node. Passes in the examples' own order,
validation and test parts see inputs as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any, TypeAlias

import torch
import torch.nn.functional as F
from annotated_types import Ge, Le
from torch import Tensor

from fedspan import tree
from fedspan.errors import ConfigError
from fedspan.randomness import fold, normal, uniform
from fedspan.tree import Inputs

OwnTransform: TypeAlias = Callable[[Any, Tensor], Any]
"""A function of one's own: (inputs of a batch, key) → inputs; `fedspan.uniform(key, shape)` draws."""


@dataclass(frozen=True, kw_only=True)
class Transforms:
    """What is done to training inputs, in this order; `[data.transforms]` in an experiment file."""

    crop: Annotated[int, Ge(0), Le(1024)] = 0
    """Pixels of zeros put around a picture, out of which its size is cut at a random place."""
    flip: Annotated[float, Ge(0), Le(1)] = 0.0
    """Probability that a picture is mirrored left to right."""
    erase: Annotated[float, Ge(0), Le(1)] = 0.0
    """Probability that a square of a quarter of a picture's area is set to 0."""
    noise: Annotated[float, Ge(0)] = 0.0
    """Deviation of normal noise that is added."""
    mask_tokens: Annotated[float, Ge(0), Le(1)] = 0.0
    """Probability that a token is replaced by `mask_token`."""
    mask_token: Annotated[int, Ge(0)] = 0
    """The token that stands for one that is hidden."""
    leaf: str = ""
    """Which of several inputs is changed, by its name or place; not needed where there is one."""
    own: tuple[str, ...] = ()
    """Functions `package.module:function` of (inputs, key), called last; their packages need `--allow-code`."""
    functions: tuple[OwnTransform, ...] = ()

    def __post_init__(self) -> None:
        for name in ("flip", "erase", "mask_tokens"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"Transforms: {name} must be a probability in [0, 1]. Got {getattr(self, name)!r}.")
        for name in ("crop", "noise"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"Transforms: {name} must be at least 0. Got {getattr(self, name)!r}.")

    def __bool__(self) -> bool:
        """Whether anything is done at all."""
        return bool(
            self.crop or self.flip or self.erase or self.noise or self.mask_tokens or self.own or self.functions
        )

    def identity(self) -> str:
        """What decides the numbers, in words."""
        values = {k: v for k, v in asdict(self).items() if k != "functions"}
        named = [f"{f.__module__}:{f.__qualname__}" for f in self.functions]
        return f"{values} {named}"

    def __call__(self, x: Inputs, key: Tensor) -> Inputs:
        """The inputs of a batch, changed."""
        if self._built_in:
            x = self._on_leaf(x, key)
        for k, function in enumerate(self.functions):
            x = self._checked(function, x, fold(key, 100 + k))
        return x

    @property
    def _built_in(self) -> bool:
        return bool(self.crop or self.flip or self.erase or self.noise or self.mask_tokens)

    def _on_leaf(self, x: Inputs, key: Tensor) -> Inputs:
        """The built-in changes, of the one input they are for."""
        if isinstance(x, Tensor):
            return self._changed(x, key)
        parts = x if isinstance(x, dict) else {str(k): v for k, v in enumerate(x)}
        if not isinstance(parts.get(self.leaf), Tensor):
            raise ConfigError(
                f"Transforms: of several inputs one must be named, {', '.join(parts)[:100]}. Got leaf {self.leaf!r}."
            )
        parts = {**parts, self.leaf: self._changed(parts[self.leaf], key)}
        return parts if isinstance(x, dict) else tuple(parts.values())

    def _changed(self, x: Tensor, key: Tensor) -> Tensor:
        if (self.crop or self.flip or self.erase) and x.ndim != 4:
            raise ConfigError(
                f"Transforms: crop, flip and erase are for pictures, [channels, height, width]. Got"
                f" {list(x.shape[1:])}."
            )
        if self.crop:
            x = random_crop(x, self.crop, fold(key, 1))
        if self.flip:
            x = random_flip(x, self.flip, fold(key, 2))
        if self.erase:
            x = random_erase(x, self.erase, fold(key, 3))
        if self.noise:
            if not x.is_floating_point():
                raise ConfigError(f"Transforms: noise is for inputs of real numbers. Got {x.dtype}; use mask_tokens.")
            x = x + self.noise * normal(fold(key, 4), x.shape, x.dtype)
        if self.mask_tokens:
            if x.is_floating_point():
                raise ConfigError(
                    f"Transforms: mask_tokens is for tokens, which are integers. Got {x.dtype}; use noise."
                )
            hidden = uniform(fold(key, 5), x.shape) < self.mask_tokens
            x = torch.where(hidden, torch.full_like(x, self.mask_token), x)
        return x

    def _checked(self, function: OwnTransform, x: Inputs, key: Tensor) -> Inputs:
        """What an own function gives, if it has the shapes and types of what it was given."""
        made = function(x, key)
        before = [(path, t.shape, t.dtype) for path, t in tree.items(x)]
        after = [(path, getattr(t, "shape", None), getattr(t, "dtype", None)) for path, t in tree.items(made)]
        if before != after:
            name = getattr(function, "__name__", type(function).__name__)
            raise ConfigError(
                f"Transforms: {name} must return inputs of the shapes and types it was given,"
                f" {[(list(s), str(d)) for _, s, d in before]}. Got"
                f" {[(list(s) if s is not None else None, str(d)) for _, s, d in after]}."
            )
        return made


def random_crop(x: Tensor, margin: int, key: Tensor) -> Tensor:
    """Pictures moved by up to `margin` pixels each way, with zeros behind. [B, C, H, W]"""
    b, c, h, w = x.shape
    move = (uniform(key, (b, 2)) * (2 * margin + 1)).long()  # 0..2·margin; uniform numbers are below 1
    padded = F.pad(x, (margin, margin, margin, margin))
    down = (move[:, 0, None] + torch.arange(h, device=x.device))[:, None, :, None].expand(b, c, h, w + 2 * margin)
    across = (move[:, 1, None] + torch.arange(w, device=x.device))[:, None, None, :].expand(b, c, h, w)
    return padded.gather(2, down).gather(3, across)


def random_flip(x: Tensor, probability: float, key: Tensor) -> Tensor:
    """Pictures mirrored left to right with a probability. [B, C, H, W]"""
    turned = uniform(key, (x.shape[0],)) < probability
    return torch.where(turned[:, None, None, None], x.flip(-1), x)


def random_erase(x: Tensor, probability: float, key: Tensor) -> Tensor:
    """Pictures of which a square of half their height and width is set to 0 with a probability. [B, C, H, W]"""
    b, _, h, w = x.shape
    tall, wide = max(1, h // 2), max(1, w // 2)
    drawn = uniform(key, (b, 3))
    top = (drawn[:, 1] * (h - tall + 1)).long()[:, None]
    left = (drawn[:, 2] * (w - wide + 1)).long()[:, None]
    rows, columns = torch.arange(h, device=x.device), torch.arange(w, device=x.device)
    inside = ((rows >= top) & (rows < top + tall))[:, :, None] & ((columns >= left) & (columns < left + wide))[:, None]
    gone = (drawn[:, 0] < probability)[:, None, None] & inside
    return torch.where(gone[:, None], torch.zeros_like(x), x)
