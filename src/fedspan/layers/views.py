"""How a kernel [o, i, k, k] is read as a matrix, and the way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

from torch import Tensor, nn

Plain: TypeAlias = nn.Linear | nn.Conv2d
"""What can be replaced."""

Layout: TypeAlias = Literal["space_by_channel", "official_view", "ik_by_ok", "out_by_rest"]
"""How a kernel [o, i, k, k] is read as a matrix; see `LAYOUTS`."""


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


def matrix_dims(layer: Plain, layout: Layout) -> tuple[int, int]:
    """Rows and columns of a layer's weight as a matrix; a linear layer is inputs × outputs in every layout."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    o, i, h, w = layer.weight.shape
    return LAYOUTS[layout].dims(o, i, h, w)
