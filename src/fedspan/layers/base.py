"""The base of all structured layers."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedspan.layers.views import Plain
from fedspan.learn.folded import FoldableLayer, OwnParameters


def kernel(weight: Tensor) -> Tensor:
    """A kernel laid out row by row: axes of length one can make it look like channels last, which vmap refuses."""
    return weight.clone(memory_format=torch.contiguous_format)


class Structured(FoldableLayer):
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
        return self.apply_weight(x, self.compose())

    def folded(self, x: Tensor, own: OwnParameters) -> Tensor | None:
        """The layer with each client's composed weight."""
        return None if self.convolution else own.linear(x, own.composed(self.compose), own.bias)

    def apply_weight(self, x: Tensor, weight: Tensor) -> Tensor:
        """What the plain layer would do with this weight."""
        if not self.convolution:
            return F.linear(x, weight, self.bias)
        x, padding = self.padded(x)
        return F.conv2d(x, weight, self.bias, self.stride, padding, self.dilation, self.groups)

    def padded(self, x: Tensor) -> tuple[Tensor, tuple[int, ...] | str]:
        """The image and the padding a convolution still has to do; what is not zeros is put around it here."""
        if self.padding_mode == "zeros":
            return x, self.padding
        return F.pad(x, self.around, mode=self.padding_mode), (0, 0)

    def reset_parameters(self) -> None:
        """Draw the bias as plain layers do; subclasses draw the rest."""
        if self.bias is not None:
            bound = 1 / math.sqrt(max(1, math.prod(self.shape[1:])))
            nn.init.uniform_(self.bias, -bound, bound)

    def extra_repr(self) -> str:
        return f"weight {list(self.shape)}, " + ", ".join(f"{k} {list(p.shape)}" for k, p in self.named_parameters())
