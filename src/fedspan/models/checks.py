"""Checks of a model's arguments, at the door: each raises one sentence that names the model."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import TypeGuard

from fedspan.errors import ConfigError


def _whole(value: object) -> TypeGuard[int]:
    # NumPy's integers count; bool is a subclass of int, and `width = true` is a slip, not a width of one.
    return isinstance(value, Integral) and not isinstance(value, bool)


def integer(who: str, name: str, value: object, low: int = 1, high: int | None = None) -> int:
    """Return `value` if it is an integer in [low, high], otherwise raise ConfigError."""
    if _whole(value) and value >= low and (high is None or value <= high):
        return int(value)
    allowed = f">= {low}" if high is None else f"from {low} to {high}"
    raise ConfigError(f"{who}: {name} must be an integer {allowed}. Got {value!r}.")


def integers(who: str, name: str, value: object) -> tuple[int, ...]:
    """Return `value` as a tuple if it is a list of integers >= 1 (it may be empty), otherwise raise ConfigError."""
    if isinstance(value, Sequence) and all(_whole(v) and v >= 1 for v in value):
        return tuple(int(v) for v in value)
    raise ConfigError(f"{who}: {name} must be a list of integers >= 1. Got {value!r}.")


def choice(who: str, name: str, value: object, allowed: Sequence[str]) -> str:
    """Return `value` if it is one of the allowed words, otherwise raise ConfigError."""
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{who}: {name} must be one of {', '.join(allowed)}. Got {value!r}.")
    return value


def flag(who: str, name: str, value: object) -> bool:
    """Return `value` if it is true or false, otherwise raise ConfigError."""
    if not isinstance(value, bool):
        raise ConfigError(f"{who}: {name} must be true or false. Got {value!r}.")
    return value


def image(who: str, shape: tuple[int, ...], smallest: int = 1, remedy: str = "") -> tuple[int, int, int]:
    """Return (channels, height, width), or raise ConfigError if the input is no image or is below `smallest` pixels."""
    if len(shape) != 3:
        raise ConfigError(
            f"{who}: inputs must be images (channels, height, width). Got shape {shape}; "
            "reshape the data, or use model 'mlp', which flattens any input."
        )
    channels, height, width = shape
    if width in (1, 3, 4) and channels > 4 and height > 4:
        raise ConfigError(
            f"{who}: inputs must be images (channels, height, width). Got shape {shape}, "
            f"which has its channels last; move them to the front: {(width, channels, height)}."
        )
    if min(height, width) < smallest:
        remedy = remedy or "use larger images, or model 'mlp'"
        raise ConfigError(f"{who}: images must be at least {smallest}x{smallest}. Got shape {shape}; {remedy}.")
    return channels, height, width
