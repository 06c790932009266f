"""Rows of client state in memory, one per slot, which worker processes read and write where they are.

On Linux the table is a memfd, so that forked and spawned workers map it: it has no name, and goes with the last process
that holds it. A worker copies the rows it needs out of their slots, and its results into slots that no row is in; so
nothing that a method does to what it is given reaches the table, and rows are replaced by naming other slots.
"""

from __future__ import annotations

import json
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fedspan import tree
from fedspan.storage.tree_file import Block, as_bytes, describe
from fedspan.tree import Tree

Empty: TypeAlias = Callable[[Tree], Tree]
"""Uninitialised tensors with the types and shapes of a tree of meta tensors."""


def uninitialised(like: Tree) -> Tree:
    """Tensors with these types and shapes, in memory of their own."""
    found: Tree = tree.map(lambda t: torch.empty(t.shape, dtype=t.dtype), like)
    return found


class RowLayout:
    """How one client's state is a record: the bytes of its leaves, one after another.

    Args:
        first: the state of any client.
    """

    def __init__(self, first: Tree) -> None:
        self.like: Tree = tree.map(lambda a: a.detach().to("meta"), first)
        self.described = describe(first)
        self.structure = json.dumps(self.described)
        ends = np.cumsum([0, *(a.nbytes for a in tree.leaves(self.like))]).tolist()
        self.spans: list[tuple[int, int]] = list(pairwise(ends))
        self.width: int = ends[-1]

    def stack(self, n: int, empty: Empty = uninitialised) -> Tree:
        """Uninitialised rows of n clients."""
        return empty(tree.map(lambda a: a.new_empty((n, *a.shape)), self.like))

    def row(self, record: Block) -> Tree:
        """The state that a record has."""
        found: Tree = tree.take(self.rows([record]), 0)
        return found

    def rows(self, records: Sequence[Block | None]) -> Tree:
        """The states that records have, stacked; where there is none, the row is left uninitialised."""
        rows = self.stack(len(records))
        for part, (start, end) in zip(self.parts(rows, len(records)), self.spans):
            for k, record in enumerate(records):
                if record is not None:
                    part[k] = record[start:end]
        return rows

    def block(self, rows: Tree, n: int) -> Block:
        """The records of stacked rows."""
        found = np.empty((n, self.width), np.uint8)
        for part, (start, end) in zip(self.parts(rows, n), self.spans):
            found[:, start:end] = part
        return found

    def parts(self, rows: Tree, n: int) -> list[Block]:
        """The bytes of stacked rows, leaf by leaf in the order of the record.

        Raises:
            ValueError: if they are not n rows of this layout.
        """
        given = describe(rows, 1)
        if given != self.described:
            raise ValueError(f"Client store: rows must be {self.described}, as init gave. Got {given}.")
        leaves: list[Tensor] = []
        tree.map(lambda _, a: leaves.append(a), self.like, rows)  # in the order of init, whatever the order of rows
        for leaf in leaves:
            if len(leaf) != n:
                raise ValueError(f"Client store: {n} ids need {n} rows. Got {len(leaf)}.")
        return [as_bytes(leaf).reshape(n, end - start) for leaf, (start, end) in zip(leaves, self.spans)]


class RowTable:
    """Records of one layout.

    Args:
        descriptor: of the file that holds the rows already, in a process that was handed it.

    Attributes:
        rows: the bytes, one record per slot.
        descriptor: None where memory cannot be shared.
    """

    def __init__(self, layout: RowLayout, slots: int, descriptor: int | None = None) -> None:
        self.layout, self.slots, self.descriptor = layout, slots, descriptor
        size = slots * layout.width
        if descriptor is None and (made := _memory_file(size)) is not None:
            self.descriptor = made
            weakref.finalize(self, os.close, made).atexit = False
        if self.descriptor is not None:
            self.rows: Block = np.frombuffer(mmap.mmap(self.descriptor, size), np.uint8).reshape(slots, layout.width)
        else:  # not NumPy's own, which asks for huge pages: rows that nobody writes must never be resident
            self.rows = torch.empty((slots, layout.width), dtype=torch.uint8).numpy()

    def __reduce__(self) -> Any:
        """For a process that is handed the descriptor under the same number."""
        return RowTable, (self.layout, self.slots, self.descriptor)

    def gather(self, slots: Sequence[int]) -> Tree:
        """A copy of the rows in these slots, stacked; where a slot is negative, the row is left uninitialised."""
        return self.layout.rows([self.rows[slot] if slot >= 0 else None for slot in slots])

    def scatter(self, slots: Sequence[int], rows: Tree) -> None:
        """Write stacked rows to these slots."""
        for part, (start, end) in zip(self.layout.parts(rows, len(slots)), self.layout.spans):
            for k, slot in enumerate(slots):
                self.rows[slot, start:end] = part[k]


def _memory_file(size: int) -> int | None:
    """The descriptor of memory that other processes can map; None where there is none to be had."""
    if not size or not hasattr(os, "memfd_create"):
        return None
    try:
        found = os.memfd_create("fedspan rows")
    except OSError:  # a kernel without it
        return None
    try:
        os.ftruncate(found, size)
    except OSError:
        os.close(found)
        return None
    return found
