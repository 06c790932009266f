"""The private state of the clients of one capacity group, in memory or on disk.

A client's state is one record: the bytes of its leaves one after the other, so all records of a group have one width.
Initial states can be computed again, so only records that were ever written are kept and saved; a checkpoint is a list
of segments (`treefile.Segment`), later ones winning.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedspan import tree
from fedspan.errors import CheckpointError, Divergence
from fedspan.storage.row_table import Empty, RowLayout, RowTable, uninitialised
from fedspan.storage.tree_file import BLOCK_BYTES, Block, Places, RawFile, Segment, read_at, segment_header
from fedspan.tree import Tree

# The two back ends. `at` are positions 0..n-1 in the group, not client ids.


class _Memory:
    """A table with a second slot for every client, so that what replaces rows can be written beside them."""

    NOWHERE = -1

    def __init__(self, n: int, layout: RowLayout) -> None:
        self.table = RowTable(layout, 2 * n)
        self.slot = np.full(n, self.NOWHERE, np.int64)
        self._free: list[int] = []
        self._end = 0  # slots from here on were never used

    def reserve(self, number: int) -> list[int]:
        """Slots that no row is in."""
        used = [self._free.pop() for _ in range(min(number, len(self._free)))]
        new = range(self._end, self._end + number - len(used))
        self._end = new.stop
        return used + list(new)

    @property
    def spare(self) -> int:
        """How many can be reserved."""
        return len(self._free) + self.table.slots - self._end

    def settle(self) -> None:
        """Let the slots be used again that no client's row is in."""
        self._free = np.setdiff1d(np.arange(self._end), self.slot)[::-1].tolist()

    def read(self, at: Places) -> Block:
        block, slots = np.empty((len(at), self.table.layout.width), np.uint8), self.slot[at]
        held = np.flatnonzero(slots >= 0)
        block[held] = self.table.rows[slots[held]]
        return block

    def write(self, at: Places, block: Block) -> None:
        new = at[self.slot[at] == self.NOWHERE]
        self.slot[new] = self.reserve(len(new))
        self.table.rows[self.slot[at]] = block

    def restore(self, segment: Segment, at: Places) -> None:
        for part, block in segment.blocks():
            self.write(at[part], block)

    def saved(self, segment: Segment, at: Places, base: bool) -> None:
        pass


class _Disk:
    """Saved rows stay in their segments; rows written since are in a scratch file that has no name.

    Both are read, never mapped: what the page cache holds is not this process's memory. The scratch file
    is emptied by every checkpoint, usually before the kernel has written any of it to the disk.
    """

    _NOWHERE, _SCRATCH = -2, -1

    def __init__(self, n: int, width: int, directory: Path | None) -> None:
        self._width = width
        self._segments: list[Segment] = []
        self._where = np.full(n, self._NOWHERE, np.int64)  # number of a segment, or one of the two above
        self._place = np.zeros(n, np.int64)
        self._used = 0  # slots of the scratch file
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
        # It lives as long as it is open: a killed process leaves nothing behind.
        made: Any = tempfile.TemporaryFile(buffering=0, suffix=".tmp", prefix="scratch-", dir=directory)  # noqa: SIM115
        self._file: RawFile = made
        weakref.finalize(self, made.close)

    def read(self, at: Places) -> Block:
        out = np.empty((len(at), self._width), np.uint8)
        where = self._where[at]
        for number in np.unique(where).tolist():
            to = np.flatnonzero(where == number)
            places = self._place[at[to]]
            if number >= 0:
                self._segments[number].read(places, out, to)
            elif number == self._SCRATCH:
                for place, k in zip(places.tolist(), to.tolist()):
                    read_at(self._file, out[k], place * self._width, "the scratch file")
        return out

    def write(self, at: Places, block: Block) -> None:
        new = at[self._where[at] != self._SCRATCH]
        places = dict(zip(new.tolist(), range(self._used, self._used + len(new))))
        for k, position in enumerate(at.tolist()):
            self._file.seek(places.get(position, int(self._place[position])) * self._width)
            done = 0
            while done < self._width:
                done += self._file.write(block[k, done:].data) or 0
        # Only now, so that a full disk leaves the old rows in place.
        self._where[new], self._place[new] = self._SCRATCH, np.arange(self._used, self._used + len(new))
        self._used += len(new)

    def restore(self, segment: Segment, at: Places) -> None:
        self._where[at], self._place[at] = len(self._segments), np.arange(len(at))
        self._segments.append(segment)

    def saved(self, segment: Segment, at: Places, base: bool) -> None:
        if base:
            self._segments.clear()
        self.restore(segment, at)
        self._file.truncate(0)
        self._used = 0


class ClientStore:
    """The private state of every client of one capacity group.

    Args:
        init: client id → its initial state; must give the same every time.
        clients: the ids of the group.
        budget_bytes: up to this size the rows are kept in memory, beyond it on disk.
        directory: where the scratch file of a store on disk goes; default: the system's temporary directory (which may
            itself be memory: give the run directory where there is one).
    """

    def __init__(
        self,
        init: Callable[[int], Tree],
        clients: Sequence[int],
        budget_bytes: int = 2 << 30,
        directory: Path | None = None,
    ) -> None:
        self.clients = [int(i) for i in clients]
        self._position = {i: k for k, i in enumerate(self.clients)}
        if len(self._position) != len(self.clients):
            raise ValueError("Client store: client ids must differ; some id occurs twice.")
        first: Tree = init(self.clients[0]) if self.clients else {}
        self._init = init
        self._layout = RowLayout(first)
        self.structure, self.row_bytes = self._layout.structure, self._layout.width
        self.on_disk = len(self.clients) * self.row_bytes > budget_bytes
        self._directory = directory
        self.restore([])

    def restore(self, segments: Sequence[Segment]) -> None:
        """Become what a checkpoint saved (`Loaded.rows[k]`); without segments, the initial state of every client."""
        n = len(self.clients)
        self._rows: _Memory | _Disk = (
            _Disk(n, self.row_bytes, self._directory) if self.on_disk else _Memory(n, self._layout)
        )
        self._touched, self._changed = np.zeros(n, bool), np.zeros(n, bool)
        self._held = np.zeros(n, bool)  # rows in `_rows`: the touched ones; in memory also initial ones asked for
        self.segments: list[Segment] = []
        for segment in segments:
            unknown = [i for i in segment.ids.tolist() if i not in self._position]
            if segment.structure != self.structure or unknown:
                what = f"client {unknown[0]} is not in this group" if unknown else "its rows have other names or shapes"
                raise CheckpointError(f"Client store: {segment.path.name} cannot be used: {what}. Use --fresh.")
            at = self._at(segment.ids.tolist())
            self._rows.restore(segment, at)
            self._touched[at] = self._held[at] = True
            self.segments.append(segment)

    def take(self, ids: Sequence[int] | Tensor, empty: Empty = uninitialised) -> Tree:
        """The states of `ids`, stacked in that order: a copy, on the CPU, in tensors that `empty` gives."""
        return self._unpack(self._read(self._at(ids)), empty)

    def row(self, i: int) -> Tree:
        """The state of one client."""
        one: Tree = tree.take(self.take([i]), 0)
        return one

    def put(self, ids: Sequence[int] | Tensor, rows: Tree) -> None:
        """Replace the states of `ids` (each once) by the rows of a stacked tree of the types and shapes `init` gave."""
        at = self._at(ids)
        if len(np.unique(at)) != len(at):
            raise ValueError("Client store: put needs every client once; some id occurs twice.")
        block = self._pack(rows, len(at))
        if not self.row_bytes:
            return
        try:
            self._rows.write(at, block)
        except OSError as e:
            raise CheckpointError(
                f"Client store: the rows of {len(at)} clients could not be written to disk: {e.strerror}. "
                "Free space, or raise the memory budget."
            ) from e
        self._touched[at] = self._changed[at] = self._held[at] = True

    # Rows in memory can also be read and written in place, by whoever has the table.

    @property
    def table(self) -> RowTable | None:
        """The rows of all clients, where worker processes can have them in place."""
        shared = isinstance(self._rows, _Memory) and self._rows.table.descriptor is not None
        return self._in_memory.table if shared else None

    def slots(self, ids: Sequence[int]) -> list[int]:
        """Where in the table the states of `ids` are; negative for initial ones that must be computed."""
        return self._in_memory.slot[self._at(ids)].tolist()

    def reserve(self, number: int) -> list[int]:
        """Slots of the table that no state is in, and nobody else is given before the next `settle`.

        After a `settle` there is one for every client; none are given where there are fewer than asked for.
        """
        return self._in_memory.reserve(number) if number <= self._in_memory.spare else []

    def settle(self) -> None:
        """Let go of slots that were reserved, or left by `replace`, and are not in use."""
        self._in_memory.settle()

    def replace(self, ids: Sequence[int], slots: Sequence[int]) -> list[int]:
        """Replace the states of `ids` by those in other slots, negative for initial ones; where they were before."""
        at, before, now = self._at(ids), self.slots(ids), np.array(slots, np.int64)
        self._in_memory.slot[at] = now
        self._touched[at] = self._changed[at] = self._held[at] = now >= 0
        return before

    def hold(self, ids: Sequence[int], slots: Sequence[int]) -> None:
        """Note where initial states are that somebody has computed."""
        at = self._at(ids)
        self._in_memory.slot[at], self._held[at] = slots, True

    @property
    def _in_memory(self) -> _Memory:
        assert isinstance(self._rows, _Memory)
        return self._rows

    def touched_ids(self) -> list[int]:
        """Clients whose state was ever replaced, in the order of `clients`."""
        return [self.clients[k] for k in np.flatnonzero(self._touched)]

    def changed_ids(self) -> list[int]:
        """Clients whose state was replaced since the last checkpoint, in the order of `clients`."""
        return [self.clients[k] for k in np.flatnonzero(self._changed)]

    def segment_chunks(self, ids: Sequence[int]) -> Iterator[bytes | memoryview]:
        """The bytes of a segment file with the rows of `ids`, a few MiB at a time.

        Raises:
            Divergence: at a row that holds NaN or infinity.
        """
        yield segment_header(len(ids), self.row_bytes, self.structure)
        yield np.asarray(ids, "<i8").tobytes()
        step = max(1, BLOCK_BYTES // max(1, self.row_bytes))
        for start in range(0, len(ids), step):
            part = ids[start : start + step]
            block = self._read(self._at(part))
            rows = self._unpack(block)
            if not tree.all_finite(rows):
                bad = next(i for k, i in enumerate(part) if not tree.all_finite(tree.take(rows, k)))
                raise Divergence(f"the private state of client {bad} holds NaN or infinity")
            yield block.data.cast("B")

    def saved(self, segment: Segment, base: bool) -> None:
        """Note that the rows of `segment` are on disk now; a base holds all touched rows, so it replaces the others."""
        at = self._at(segment.ids.tolist())
        self._rows.saved(segment, at, base)
        self.segments = [segment] if base else [*self.segments, segment]
        self._changed[at] = False

    def _at(self, ids: Sequence[int] | Tensor) -> Places:
        wanted: Sequence[int] = ids.tolist() if isinstance(ids, Tensor) else ids
        try:
            return np.array([self._position[int(i)] for i in wanted], np.int64)
        except KeyError as e:
            raise ValueError(f"Client store: client {e} is not one of the {len(self.clients)} of this group.") from None

    def _read(self, at: Places) -> Block:
        block = self._rows.read(at)
        fresh = np.flatnonzero(~self._held[at]) if self.row_bytes else np.empty(0, np.int64)
        for k in fresh.tolist():
            state = self._init(self.clients[int(at[k])])
            block[k] = self._pack(tree.map(lambda a: a[None], state), 1)[0]
        if len(fresh) and not self.on_disk:  # there is room for all: do not compute them again
            self._rows.write(at[fresh], block[fresh])
            self._held[at[fresh]] = True
        return block

    def _pack(self, rows: Tree, n: int) -> Block:
        block = np.empty((n, self.row_bytes), np.uint8)
        for part, (start, end) in zip(self._layout.parts(rows, n), self._layout.spans):
            block[:, start:end] = part
        return block

    def _unpack(self, block: Block, empty: Empty = uninitialised) -> Tree:
        out = self._layout.stack(len(block), empty)  # tensors of their own, aligned whatever comes before in a record
        for part, (start, end) in zip(self._layout.parts(out, len(block)), self._layout.spans):
            part[:] = block[:, start:end]
        return out
