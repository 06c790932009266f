"""Models without convolutions: one linear layer, and the multilayer perceptron. Any input shape is flattened."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from fedspan.models import checks


class Linear(nn.Module):
    """One linear layer on the flattened input: logistic regression, or least squares with `classes=1`."""

    def __init__(self, input_shape: tuple[int, ...], classes: int, *, bias: bool = True) -> None:
        super().__init__()
        self.head = nn.Linear(math.prod(input_shape), classes, bias=checks.flag("linear", "bias", bias))

    def forward(self, x: Tensor) -> Tensor:
        """[B, *input_shape] -> [B, classes]."""
        y: Tensor = self.head(x.flatten(1))
        return y


class MLP(nn.Module):
    """Fully connected layers with ReLU; 784-200-200-10 is the MNIST model of the public pFL-MF code."""

    def __init__(self, input_shape: tuple[int, ...], classes: int, *, hidden: Sequence[int] = (200, 200)) -> None:
        super().__init__()
        sizes = (math.prod(input_shape), *checks.integers("mlp", "hidden", hidden))
        self.body = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.head = nn.Linear(sizes[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """[B, *input_shape] -> [B, classes]."""
        x = x.flatten(1)
        for layer in self.body:
            x = F.relu(layer(x))
        y: Tensor = self.head(x)
        return y


class Characters(nn.Module):
    """The next character from a window of them: an embedding of each, two fully connected layers."""

    def __init__(self, input_shape: tuple[int, ...], classes: int, *, width: int = 8, hidden: int = 64) -> None:
        super().__init__()
        width, hidden = checks.integer("characters", "width", width), checks.integer("characters", "hidden", hidden)
        self.embedding = nn.Embedding(classes, width)
        self.body = nn.Linear(math.prod(input_shape) * width, hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """[B, characters], their numbers, -> [B, classes]."""
        y: Tensor = self.head(F.relu(self.body(self.embedding(x.flatten(1).long()).flatten(1))))
        return y
