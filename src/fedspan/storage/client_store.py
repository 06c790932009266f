"""The private state of the clients of one capacity group, in memory or on disk.

A client's state is one record: the bytes of its leaves one after the other, so all records of a group have one width.
Initial states can be computed again, so only records that were ever written are kept and saved; a checkpoint is a list
of segments (`treefile.Segment`), later ones winning.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedspan import tree
from fedspan.errors import CheckpointError, Divergence
from fedspan.storage.row_table import Empty, RowLayout, RowTable, uninitialised
from fedspan.storage.tree_file import BLOCK_BYTES, Block, Places, RawFile, Segment, read_at, segment_header
from fedspan.tree import Tree

PIECE_BYTES = 1 << 20
"""Records that are copied at a time when rows are taken: what the cache holds, and no second copy of all of them."""

# The two back ends. `at` are positions 0..n-1 in the group, not client ids. Both can hold rows that are not in force
# yet (`stage`), let them replace those that are (`accept`), and go back once (`undo`).


class _Memory:
    """A table with a second slot for every client, so that what replaces rows can be written beside them."""

    NOWHERE = -1

    def __init__(self, n: int, layout: RowLayout) -> None:
        self.table = RowTable(layout, 2 * n)
        self.slot = np.full(n, self.NOWHERE, np.int64)
        self._free: list[int] = []
        self._end = 0  # slots from here on were never used
        self._staged: list[tuple[Places, Places]] = []  # positions, and slots
        self._before: list[tuple[Places, Places]] = []

    @property
    def spare(self) -> int:
        """How many slots can be reserved."""
        return len(self._free) + self.table.slots - self._end

    def reserve(self, number: int) -> list[int]:
        """Slots that no row is in."""
        used = [self._free.pop() for _ in range(min(number, len(self._free)))]
        new = range(self._end, self._end + number - len(used))
        self._end = new.stop
        return used + list(new)

    def read(self, at: Places) -> Block:
        block, slots = np.empty((len(at), self.table.layout.width), np.uint8), self.slot[at]
        held = np.flatnonzero(slots >= 0)
        block[held] = self.table.rows[slots[held]]
        return block

    def write(self, at: Places, block: Block) -> None:
        new = at[self.slot[at] == self.NOWHERE]
        self.slot[new] = self.reserve(len(new))
        self.table.rows[self.slot[at]] = block

    def stage(self, at: Places, block: Block) -> None:
        slots = np.array(self.reserve(len(at)), np.int64)
        self.table.rows[slots] = block
        self.stage_slots(at, slots)

    def stage_slots(self, at: Places, slots: Places) -> None:
        self._staged.append((at, slots))

    def accept(self) -> None:
        for at, slots in self._staged:
            self._before.append((at, self.slot[at]))
            self.slot[at] = slots
        self._staged = []

    def undo(self) -> None:
        for at, slots in self._before:
            self.slot[at] = slots
        self.settle()

    def settle(self) -> None:
        self._staged, self._before = [], []
        self._free = np.setdiff1d(np.arange(self._end), self.slot)[::-1].tolist()

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
        self._free: list[int] = []  # of those, the ones that hold nothing
        self._staged: list[tuple[Places, Places]] = []  # positions, and slots of the scratch file
        self._before: list[tuple[Places, Places, Places]] = []  # positions, and where their rows were
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
        slots = self._place[at]
        new = self._where[at] != self._SCRATCH
        slots[new] = self._slots(int(new.sum()))
        self._fill(slots, block)
        # Only now, so that a full disk leaves the old rows in place.
        self._where[at], self._place[at] = self._SCRATCH, slots

    def stage(self, at: Places, block: Block) -> None:
        slots = self._slots(len(at))
        self._staged.append((at, slots))
        self._fill(slots, block)

    def accept(self) -> None:
        for at, slots in self._staged:
            self._before.append((at, self._where[at], self._place[at]))
            self._where[at], self._place[at] = self._SCRATCH, slots
        self._staged = []

    def undo(self) -> None:
        for at, where, place in self._before:
            self._free += self._place[at].tolist()
            self._where[at], self._place[at] = where, place
        self._before = []
        self.settle()

    def settle(self) -> None:
        for _, slots in self._staged:
            self._free += slots.tolist()
        for _, where, place in self._before:
            self._free += place[where == self._SCRATCH].tolist()
        self._staged, self._before = [], []

    def _slots(self, number: int) -> Places:
        """Slots of the scratch file that hold nothing."""
        again, self._free = self._free[:number], self._free[number:]
        more = range(self._used, self._used + number - len(again))
        self._used += len(more)
        return np.array([*again, *more], np.int64)

    def _fill(self, slots: Places, block: Block) -> None:
        for k, slot in enumerate(slots.tolist()):
            self._file.seek(slot * self._width)
            done = 0
            while done < self._width:
                done += self._file.write(block[k, done:].data) or 0

    def restore(self, segment: Segment, at: Places) -> None:
        self._where[at], self._place[at] = len(self._segments), np.arange(len(at))
        self._segments.append(segment)

    def saved(self, segment: Segment, at: Places, base: bool) -> None:
        if base:
            self._segments.clear()
        self.restore(segment, at)
        self._file.truncate(0)
        self._used, self._free, self._staged, self._before = 0, [], [], []


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
        self._staged: list[Places] = []
        self._before: list[tuple[Places, list[NDArray[np.bool_]]]] = []
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
        at, step = self._at(ids), max(1, PIECE_BYTES // max(1, self.row_bytes))
        return self._unpack(len(at), (self._read(at[k : k + step]) for k in range(0, len(at), step)), empty)

    def row(self, i: int) -> Tree:
        """The state of one client."""
        one: Tree = tree.take(self.take([i]), 0)
        return one

    def put(self, ids: Sequence[int] | Tensor, rows: Tree) -> None:
        """Replace the states of `ids` (each once) by the rows of a stacked tree of the types and shapes `init` gave."""
        at = self._write(ids, rows, self._rows.write)
        for flags in self._flags:
            flags[at] = True

    def stage(self, ids: Sequence[int] | Tensor, rows: Tree) -> None:
        """Hold new states of `ids`, where the store holds its rows, without replacing those they have."""
        self._staged.append(self._write(ids, rows, self._rows.stage))

    # Records are the bytes of rows as the store holds them, for whoever keeps rows elsewhere.

    @property
    def layout(self) -> RowLayout:
        """How a state is a record."""
        return self._layout

    def records(self, ids: Sequence[int]) -> Block:
        """The records of `ids`."""
        return self._read(self._at(ids))

    def stage_records(self, ids: Sequence[int], block: Block) -> None:
        """Stage new states of `ids` that are records already."""
        self._staged.append(self._write_records(self._at(ids), block, self._rows.stage))

    def replaced(self, ids: Sequence[int]) -> list[bool]:
        """Of each client whether its state was ever replaced."""
        found: list[bool] = self._touched[self._at(ids)].tolist()
        return found

    def accept(self) -> None:
        """Let what was staged replace the states that clients have."""
        self._rows.accept()
        for at in self._staged:
            self._before.append((at, [flags[at] for flags in self._flags]))
            for flags in self._flags:
                flags[at] = True
        self._staged = []

    def undo(self) -> None:
        """Go back to the states before `accept`, and forget what is staged."""
        self._rows.undo()
        for at, before in self._before:
            for flags, was in zip(self._flags, before):
                flags[at] = was
        self._staged, self._before = [], []

    def settle(self) -> None:
        """Forget what is staged, and how it was before `accept`."""
        self._rows.settle()
        self._staged, self._before = [], []

    # Rows in memory can also be read and written in place, by whoever has the table.

    @property
    def table(self) -> RowTable | None:
        """The rows of all clients, where worker processes can have them in place."""
        shared = isinstance(self._rows, _Memory) and self._rows.table.descriptor is not None
        return self._in_memory.table if shared else None

    def slots(self, ids: Sequence[int]) -> list[int]:
        """Where in the table the states of `ids` are; negative for initial ones that must be computed."""
        found: list[int] = self._in_memory.slot[self._at(ids)].tolist()
        return found

    def reserve(self, number: int) -> list[int]:
        """Slots of the table that no state is in, and nobody else is given before the next `settle`.

        After a `settle` there is one for every client; none are given where there are fewer than asked for.
        """
        return self._in_memory.reserve(number) if number <= self._in_memory.spare else []

    def stage_slots(self, ids: Sequence[int], slots: Sequence[int]) -> None:
        """Stage new states of `ids` that somebody has written to slots of the table."""
        at = self._at(ids)
        self._in_memory.stage_slots(at, np.array(slots, np.int64))
        self._staged.append(at)

    def hold(self, ids: Sequence[int], slots: Sequence[int]) -> None:
        """Note where initial states are that somebody has computed."""
        at = self._at(ids)
        self._in_memory.slot[at], self._held[at] = slots, True

    @property
    def _in_memory(self) -> _Memory:
        assert isinstance(self._rows, _Memory)
        return self._rows

    @property
    def _flags(self) -> tuple[NDArray[np.bool_], ...]:
        return self._touched, self._changed, self._held

    def _write(self, ids: Sequence[int] | Tensor, rows: Tree, write: Callable[[Places, Block], None]) -> Places:
        """Give packed rows to the back end; the places of `ids`, none of them where a row has no bytes."""
        at = self._at(ids)
        if len(np.unique(at)) != len(at):
            raise ValueError("Client store: put needs every client once; some id occurs twice.")
        return self._write_records(at, self._pack(rows, len(at)), write)

    def _write_records(self, at: Places, block: Block, write: Callable[[Places, Block], None]) -> Places:
        if not self.row_bytes:
            return at[:0]
        try:
            write(at, block)
        except OSError as e:
            raise CheckpointError(
                f"Client store: the rows of {len(at)} clients could not be written to disk: {e.strerror}. "
                "Free space, or raise the memory budget."
            ) from e
        return at

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
            rows = self._unpack(len(block), [block])
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
        self._staged, self._before = [], []

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
        return self._layout.block(rows, n)

    def _unpack(self, n: int, blocks: Iterable[Block], empty: Empty = uninitialised) -> Tree:
        """Records as a tree; every leaf has memory of its own, so that it is aligned whatever came before it."""
        out = self._layout.stack(n, empty)
        parts, start = self._layout.parts(out, n), 0
        for block in blocks:
            for part, (a, b) in zip(parts, self._layout.spans):
                part[start : start + len(block)] = block[:, a:b]
            start += len(block)
        return out
