"""Where the clients' private rows are on a cluster: in the object stores of the nodes that computed them.

A row is written by the node that trained its client and read there again; it travels only to a node that needs it and
has it not, and to the run's own process when a checkpoint is written. Rows newer than the last checkpoint are on one
node only. If that is lost, the run goes back to the checkpoint and computes its rounds again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedspan.simulation.cluster.ray_connection import Bytes, the_ray
from fedspan.simulation.record import RowsLost

PACK_BYTES = 128 << 10
"""What rows are packed to at least: objects below 100 kB do not stay in Ray's store, but travel with the answer."""

BATCH_BYTES = 64 << 20
"""Rows that are fetched at a time for a checkpoint."""

FETCH_SECONDS = 300.0
"""For rows to come; a node that was killed is known to be gone after about fifteen."""


@dataclass(frozen=True, eq=False)
class RowPack:
    """The rows of a few clients, in one object of the cluster."""

    reference: Any
    bytes: int
    node: str
    copies: set[str] = field(default_factory=set)
    """Nodes that have fetched it."""


@dataclass(frozen=True)
class RowPlace:
    """One client's row in a pack."""

    pack: RowPack
    index: int


def packs(rows: int, width: int) -> list[slice]:
    """How the rows of a chunk are divided into packs; a rule on sizes alone."""
    step = max(1, -(-PACK_BYTES // max(1, width)))
    return [slice(start, min(rows, start + step)) for start in range(0, rows, step)]


class RemoteRows:
    """Places of the clients' rows; a client without one has its initial row, or one that the store at home has.

    Args:
        traffic: counts the bytes that go from machine to machine.
    """

    def __init__(self, traffic: Counter[str]) -> None:
        self.traffic = traffic
        self.clear()

    def clear(self) -> None:
        """Know of no rows."""
        self._held: dict[int, RowPlace] = {}
        self._new: set[int] = set()  # of those: with a row that the store at home has not
        self._staged: dict[int, RowPlace] = {}
        self._before: dict[int, tuple[RowPlace | None, bool]] = {}

    def place(self, client: int) -> RowPlace | None:
        """Where a client's row is."""
        return self._held.get(client)

    def send(self, ids: Sequence[int], block: Bytes, home: str) -> None:
        """Let the cluster have rows that the store at home has: they are put beside this process, once."""
        pack = RowPack(the_ray().put(block), block.nbytes, home, {home})
        self._held |= {i: RowPlace(pack, k) for k, i in enumerate(ids)}

    def stage(self, ids: Sequence[int], places: Sequence[RowPlace]) -> None:
        """Hold places of new rows without replacing those that clients have."""
        self._staged |= dict(zip(ids, places))

    def accept(self) -> None:
        """Let what was staged replace the rows that clients have."""
        for i, place in self._staged.items():
            self._before.setdefault(i, (self._held.get(i), i in self._new))
            self._held[i] = place
            self._new.add(i)
        self._staged = {}

    def undo(self) -> None:
        """Go back to the rows before `accept`, and forget what is staged."""
        for i, (place, new) in self._before.items():
            if place is None:
                del self._held[i]
            else:
                self._held[i] = place
            if not new:
                self._new.discard(i)
        self.settle()

    def settle(self) -> None:
        """Forget what is staged, and how it was before `accept`."""
        self._staged, self._before = {}, {}

    def row(self, client: int) -> Bytes | None:
        """The record of a client whose row is not at home; None if it is.

        Raises:
            RowsLost: if it is gone.
        """
        if client not in self._new:
            return None
        place = self._held[client]
        found: Bytes = _fetched([place.pack])[0][place.index]
        self.traffic["rows for the server"] += place.pack.bytes
        return found

    def coming_home(self) -> Iterator[tuple[list[int], Bytes]]:
        """Clients with rows that the store at home has not, and their records, some at a time.

        Raises:
            RowsLost: if some are gone.
        """
        of: dict[RowPack, list[int]] = {}
        for i in sorted(self._new):
            of.setdefault(self._held[i].pack, []).append(i)
        waiting: list[RowPack] = []
        for pack in [*of, None]:
            if pack is None or sum(p.bytes for p in waiting) + pack.bytes > BATCH_BYTES:
                for one, block in zip(waiting, _fetched(waiting)):
                    self.traffic["rows for checkpoints"] += one.bytes
                    yield of[one], block[np.array([self._held[i].index for i in of[one]])]
                waiting = []
            if pack is not None:
                waiting.append(pack)

    def at_home(self) -> None:
        """Note that the store at home has all rows."""
        self._new = set()
        self.settle()


def _fetched(wanted: Sequence[RowPack]) -> list[Bytes]:
    if not wanted:
        return []
    ray = the_ray()
    try:
        found: list[Bytes] = ray.get([p.reference for p in wanted], timeout=FETCH_SECONDS)
        return found
    except (ray.exceptions.ObjectLostError, ray.exceptions.GetTimeoutError):
        raise RowsLost("Cluster: private states of clients were on a node that is gone") from None
