"""Feature shifts: what a group of clients does to its examples, e.g. `rotate:90`, `noise:0.5`, `blur:1`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedspan.errors import ConfigError, DataError, nearest
from fedspan.randomness import generator


class Shift(NamedTuple):
    """One change of examples by its name and amount."""

    name: str
    amount: float = 0.0


class _Kind(NamedTuple):
    about: str
    low: float
    high: float
    pictures: bool


SHIFTS: dict[str, _Kind | None] = {
    "none": None,
    "rotate": _Kind("degrees, against the clock", -360, 360, True),
    "noise": _Kind("standard deviation of Gaussian noise, in units of the normalised features", 0, 100, False),
    "blur": _Kind("standard deviation of a Gaussian blur, in pixels", 0, 20, True),
    "contrast": _Kind("factor on the distance from the picture's mean", 0, 10, True),
    "permute": None,
}
"""What there is; those with a kind take an amount after a colon. `permute` gives a group its own order of features
(of pictures: of pixels)."""


def parse_shift(text: object) -> tuple[Shift, ...]:
    """Read one group's shift: names with amounts, joined by `+`, as in `rotate:90+noise:0.3`.

    Raises:
        ConfigError: naming what cannot be read.
    """
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"Partition: a shift must be a text such as rotate:90 or noise:0.3. Got {str(text)[:60]!r}.")
    found = []
    for part in text.split("+"):
        name, colon, amount = (s.strip() for s in part.partition(":"))
        if name not in SHIFTS:
            raise ConfigError(f"Partition: unknown shift '{name[:60]}'.{nearest(name[:60], SHIFTS)}")
        kind = SHIFTS[name]
        if kind is None:
            if colon:
                raise ConfigError(f"Partition: the shift '{name}' takes no amount. Got '{part[:60].strip()}'.")
            found += [Shift(name)] if name != "none" else []
            continue
        try:
            value = float(amount)
        except ValueError:
            value = math.nan
        if not kind.low <= value <= kind.high:
            raise ConfigError(
                f"Partition: the shift '{name}' needs an amount in {kind.low:g}..{kind.high:g} ({kind.about}), as in"
                f" {name}:{min(1, kind.high)}. Got '{part[:60].strip()}'."
            )
        found.append(Shift(name, value))
    return tuple(found)


def parse_shifts(value: object) -> list[str]:
    """The shifts of all groups: a list of texts, or one text with commas; checked, each in its plain form."""
    parts = [p.strip() for p in value.split(",")] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not parts:
        raise ConfigError(
            'Partition: shifts must be a list of texts, one for each group, e.g. ["none", "rotate:90", "noise:0.5"].'
            f" Got {str(value)[:60]!r}."
        )
    return ["+".join(_plain(s) for s in parse_shift(p)) or "none" for p in parts]


def _plain(shift: Shift) -> str:
    return shift.name if SHIFTS[shift.name] is None else f"{shift.name}:{shift.amount:g}"


def rotations(groups: int) -> list[str]:
    """A full turn divided by the groups; the first one sees examples as they are."""
    return ["none", *(f"rotate:{360 * g / groups:g}" for g in range(1, groups))]


def apply_shifts(x: Tensor, shifts: Sequence[Shift], seed: int, group: int) -> Tensor:
    """The examples [N, ...] as a group sees them, one change after another.

    Raises:
        DataError: for features that are no numbers, or a change of pictures where there are none.
    """
    if shifts and not x.is_floating_point():
        raise DataError(f"Partition: shifts need features that are real numbers. Got {x.dtype}; leave shifts out.")
    for k, shift in enumerate(shifts):
        kind = SHIFTS[shift.name]
        if kind is not None and kind.pictures and x.ndim != 4:
            raise DataError(
                f"Partition: the shift '{shift.name}' needs pictures (channels, height, width). Got examples of shape"
                f" {tuple(x.shape[1:])}; use noise or permute."
            )
        x = _apply(x, shift, ("partition", "shift", shift.name, group, k), seed)
    return x


def _apply(x: Tensor, shift: Shift, place: tuple[int | str, ...], seed: int) -> Tensor:
    if shift.name == "rotate":
        return _rotate(x, shift.amount)
    if shift.name == "blur":
        return _blur(x, shift.amount)
    if shift.name == "contrast":
        mean = x.mean((2, 3), keepdim=True)
        return mean + shift.amount * (x - mean)
    rng = generator(seed, *place)
    if shift.name == "noise":
        drawn = torch.from_numpy(rng.standard_normal(tuple(x.shape), "float32"))
        return x + shift.amount * drawn.to(x.dtype)
    # Of pictures the pixels are permuted, all channels alike; of vectors the features.
    flat = x.flatten(2) if x.ndim > 2 else x
    return flat[..., torch.from_numpy(rng.permutation(flat.shape[-1]))].reshape(x.shape)


def _rotate(x: Tensor, degrees: float) -> Tensor:
    """Turn pictures against the clock; quarter turns of squares are exact, what comes in at the rim repeats it."""
    quarters = degrees / 90
    if quarters.is_integer() and (x.shape[2] == x.shape[3] or quarters % 2 == 0):
        return torch.rot90(x, int(quarters), (2, 3)).contiguous()
    angle, ratio = math.radians(degrees), x.shape[2] / x.shape[3]
    cos, sin = math.cos(angle), math.sin(angle)
    turn = torch.tensor([[cos, -sin * ratio, 0.0], [sin / ratio, cos, 0.0]], dtype=x.dtype)
    grid = torch.nn.functional.affine_grid(turn.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return torch.nn.functional.grid_sample(x, grid, "bilinear", "border", align_corners=False)


def _blur(x: Tensor, sigma: float) -> Tensor:
    """Convolve pictures with a Gaussian, along both axes; the rim is repeated."""
    if sigma == 0:
        return x
    radius = math.ceil(3 * sigma)
    at = torch.arange(-radius, radius + 1, dtype=x.dtype)
    weights = torch.exp(-at.square() / (2 * sigma**2))
    weights = weights / weights.sum()
    n, c, h, w = x.shape
    flat = torch.nn.functional.pad(x.reshape(n * c, 1, h, w), (radius,) * 4, mode="replicate")
    flat = torch.nn.functional.conv2d(flat, weights.reshape(1, 1, -1, 1))
    return torch.nn.functional.conv2d(flat, weights.reshape(1, 1, 1, -1)).reshape(n, c, h, w)
