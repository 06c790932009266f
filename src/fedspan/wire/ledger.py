"""A ledger of bytes: how many travelled which way, and under which name of the payload. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum


class Direction(StrEnum):
    """Which way, or what for, bytes travel."""

    UP = "up"
    """Uploads of training, as they are written."""
    DOWN = "down"
    """Downloads for training, as they are written."""
    ANNOUNCE = "announce"
    """News for all clients, sampled or not."""
    EVALUATE = "evaluate"
    """Downloads of the models that are evaluated."""
    META = "meta"
    """What goes with an upload: its weight."""
    WIRE = "wire"
    """Everything a deployment packed, both ways."""


class Ledger:
    """Bytes by direction and name.

    >>> ledger = Ledger()
    >>> ledger.add(Direction.UP, 40, "U")
    >>> ledger.add(Direction.UP, 2, "v")
    >>> ledger.total(Direction.UP), ledger.by_name(Direction.UP), ledger.total(Direction.DOWN)
    (42, {'U': 40, 'v': 2}, 0)
    """

    def __init__(self) -> None:
        self._entries: dict[Direction, dict[str, int]] = {}

    def add(self, direction: Direction, size: int, name: str = "") -> None:
        """Count bytes; what has no part of its own goes without a name."""
        names = self._entries.setdefault(direction, {})
        names[name] = names.get(name, 0) + size

    def add_names(self, direction: Direction, sizes: Mapping[str, int], times: int = 1) -> None:
        """Count bytes of several names, each `times` over."""
        for name, size in sizes.items():
            self.add(direction, size * times, name)

    def total(self, direction: Direction) -> int:
        """All bytes of one direction."""
        return sum(self._entries.get(direction, {}).values())

    def totals(self, directions: Iterable[Direction] = Direction) -> dict[str, int]:
        """The totals of these directions, as lines of metrics and results have them."""
        return {d.value: self.total(d) for d in directions}

    def by_name(self, direction: Direction) -> dict[str, int]:
        """Bytes of every name in one direction, sorted."""
        return dict(sorted(self._entries.get(direction, {}).items()))

    def merge(self, other: Ledger) -> None:
        """Add all of another ledger."""
        for direction, names in other._entries.items():
            self.add_names(direction, names)

    def to_json(self) -> dict[str, dict[str, int]]:
        """The entries as a checkpoint keeps them."""
        return {d.value: self.by_name(d) for d in Direction if d in self._entries}

    @classmethod
    def from_json(cls, entries: Mapping[str, Mapping[str, int]]) -> Ledger:
        """The inverse of `to_json`."""
        ledger = cls()
        for direction, names in entries.items():
            ledger.add_names(Direction(direction), names)
        return ledger

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and self.to_json() == other.to_json()

    def __repr__(self) -> str:
        return f"Ledger({self.to_json()})"
