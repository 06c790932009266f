"""Pictures in the memory layout that convolutions compute in: channels last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch._C import _functorch as functorch

from fedspan.learn.precision import is_autocast
from fedspan.tree import Inputs

R = TypeVar("R")


class Layout:
    """How a model is given its inputs: pictures channels last where it convolves them in 32 or 16 bits.

    The values and their shape are the same, only their order in memory is another; layers after the first convolution
    go on in it, and weights are rearranged by the convolutions themselves. A rule on the model and its inputs alone,
    whatever the machine: rounding must not depend on where a run is computed. A model that relies on the usual order
    (`view` instead of `flatten`) is found out by its first pass, and keeps it. Mapped clients keep it too, as their
    convolutions are grouped, and so does group normalisation in bf16, which is slow with channels last.

    Attributes:
        tried: whether a pass has shown that the model takes what it is given.
    """

    def __init__(self, module: nn.Module) -> None:
        self.last = any(_convolves(m) for m in module.modules())
        self.tried = not self.last
        self.grouped = any(isinstance(m, nn.GroupNorm) for m in module.modules())

    def __call__(self, run: Callable[[Any], R], x: Inputs) -> R:
        """What `run` gives for inputs in the layout of the model."""
        if not self.last or not _are_pictures(x) or (self.grouped and is_autocast(x)):
            return run(x)
        try:
            found = run(channels_last(x))
        except RuntimeError:  # of which there are others: then it is raised again
            found = run(x)
            self.last = False
        self.tried = True
        return found


def _convolves(module: nn.Module) -> bool:
    """Whether a layer convolves pictures: itself, or in the place of one that does."""
    return isinstance(module, nn.Conv2d | nn.ConvTranspose2d) or getattr(module, "convolution", False) is True


def _are_pictures(x: Inputs) -> TypeGuard[Tensor]:
    whole = isinstance(x, Tensor) and x.ndim == 4 and x.dtype == torch.float32
    return whole and functorch.maybe_current_level() is None


def channels_last(x: Tensor) -> Tensor:
    """Pictures [B, C, H, W] with the channels of a pixel side by side in memory."""
    if x.shape[1] == 1:  # both layouts are one and the same then, but for the strides by which they are told apart
        return x.reshape(len(x), *x.shape[2:], 1).permute(0, 3, 1, 2)
    return x.contiguous(memory_format=torch.channels_last)
