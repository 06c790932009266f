"""Memory that one process writes trees to and others read in place: blocks of a file that has no name.

The file is a memfd on Linux, and an unlinked temporary file on other systems that can hand on descriptors. Either way
its memory goes with the last descriptor and mapping: nothing is left behind, however a process ends. One process owns
it and alone gives out blocks: to itself for what others read, and to others for what they answer. A block is free again
when the last tensor in it is gone. It is kept for a next tree of its size, as new pages cost several times what a copy
does.

Nothing is packed. A tree is written leaf by leaf to where it is read, and told by types, shapes and places.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fedspan import tree
from fedspan.tree import Tree
from fedspan.wire.payload import TYPES, code_of

Told: TypeAlias = dict[str, Any]
"""Where a tree lies, as JSON can carry it: spans, leaves by path (type, shape, which span, start), empty sub-trees."""

LINE = 64
"""Leaves start at multiples of this many bytes: products then round as they do in memory that torch has allocated."""

KEPT_FREE = 128 << 20
"""Bytes of free blocks that are kept for what comes next; what is beyond them goes back to the system."""

MOST_WINDOWS = 256
"""Blocks that a process which does not own them keeps mapped to write to."""


class Span(NamedTuple):
    """A piece of the file."""

    offset: int
    size: int


class Block(NamedTuple):
    """A span of the file, mapped by its owner."""

    span: Span
    mapping: mmap.mmap


def shared_memory() -> SharedMemory | None:
    """Memory to share with other processes; None where descriptors cannot be handed on to them, or none can be had."""
    try:
        return SharedMemory() if os.name == "posix" else None
    except OSError:
        return None


class SharedMemory:
    """A file that others map, and its blocks; belongs to the process that made it."""

    def __init__(self) -> None:
        self.descriptor = _unnamed_file()
        weakref.finalize(self, os.close, self.descriptor).atexit = False
        self._used: dict[int, Block] = {}  # by the address of its memory
        self._free: list[Block] = []  # the one that was freed last comes last
        self._end = 0

    def room(self, size: int) -> Tensor:
        """At least so many bytes, which are nobody else's until the last tensor in them is gone."""
        page = mmap.ALLOCATIONGRANULARITY
        block = self._found(max(1, -(-size // page)) * page)
        array = np.frombuffer(block.mapping, np.uint8)
        memory = torch.from_numpy(array)  # it, and every view of it, holds the array
        self._used[memory.data_ptr()] = block
        weakref.finalize(array, self._release, memory.data_ptr()).atexit = False
        return memory

    def span(self, t: Tensor) -> Span | None:
        """The block that a tensor lies in; None for one that lies elsewhere."""
        block = self._used.get(t.untyped_storage().data_ptr())
        return None if block is None else block.span

    def empty(self, like: Tree) -> Tree:
        """Uninitialised tensors in one block, with the types and shapes of a tree (of meta tensors, say)."""
        starts, size = _starts(tree.leaves(like))
        memory, at = self.room(size) if size else torch.empty(0, dtype=torch.uint8), iter(starts)
        found: Tree = tree.map(lambda t: _view(memory, next(at), t.dtype, t.shape), like)
        return found

    def place(self, data: Tree) -> tuple[Told, list[Tensor]]:
        """Say where a tree lies, and give what must be held as long as others read it.

        Leaves that lie in blocks stay where they are; all others are written to one new block.
        """
        flat = tree.flatten(data)
        here = {k: t for k, t in flat.items() if t.numel() and t.is_contiguous() and self.span(t) is not None}
        told, new = _written({k: t for k, t in flat.items() if k not in here}, self.room)
        held, spans = [new, *here.values()], [self._used[new.data_ptr()].span] if new.numel() else []
        for path, t in here.items():
            span = self.span(t)
            assert span is not None
            if span not in spans:
                spans.append(span)
            start = t.storage_offset() * t.element_size()
            told[path] = [code_of(path, t), list(t.shape), spans.index(span), start]
        return {"spans": spans, "leaves": {k: told[k] for k in flat}, "empty": tree.empty_paths(data)}, held

    def _found(self, size: int) -> Block:
        """A free block that is not much larger, or a new one."""
        fitting = [b for b in self._free if size <= b.span.size <= 2 * size]
        if fitting:
            block = min(reversed(fitting), key=lambda b: b.span.size)  # of those alike the one freed last
            self._free.remove(block)
            return block
        span = Span(self._end, size)
        self._end += size
        os.ftruncate(self.descriptor, self._end)
        return Block(span, mmap.mmap(self.descriptor, size, offset=span.offset))

    def _release(self, address: int) -> None:
        """Have a block back; of those that are free beyond `KEPT_FREE` the oldest give their pages back."""
        self._free.append(self._used.pop(address))
        while hasattr(mmap, "MADV_REMOVE") and sum(b.span.size for b in self._free) > KEPT_FREE:
            self._free.pop(0).mapping.madvise(mmap.MADV_REMOVE)  # its place in the file stays a hole


class Visitor:
    """The blocks of another process's shared memory, as one that has its descriptor sees them."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._windows: OrderedDict[Span, Tensor] = OrderedDict()

    def read(self, told: Told) -> Tree:
        """The tree that lies there, in place; what is written to it is seen by nobody else and changes nothing there.

        A new mapping every time: a page that was written to would not show what comes to stand there later.
        """
        return tree_at(told, [self._map(Span(*span), mmap.ACCESS_COPY) for span in told["spans"]])

    def write(self, span: Span, data: Tree) -> Told | None:
        """Write a tree to a block that its owner has left to this process; None if there is not enough room."""
        if span not in self._windows:
            self._windows[span] = self._map(span, mmap.ACCESS_WRITE)
            if len(self._windows) > MOST_WINDOWS:
                self._windows.popitem(last=False)
        self._windows.move_to_end(span)
        return write(self._windows[span], data)

    def _map(self, span: Span, access: int) -> Tensor:
        mapping = mmap.mmap(self.descriptor, span.size, access=access, offset=span.offset)
        return torch.from_numpy(np.frombuffer(mapping, np.uint8))


def write(memory: Tensor, data: Tree) -> Told | None:
    """Write a tree to the beginning of some memory and say where its leaves lie; None if there is not enough room."""
    flat = tree.flatten(data)
    if _starts(flat.values())[1] > memory.numel():
        return None
    told, _ = _written(flat, lambda size: memory)
    return {"leaves": told, "empty": tree.empty_paths(data)}


def tree_at(told: Told, memories: Sequence[Tensor]) -> Tree:
    """The tree that lies there, its tensors views of the memory of each span."""
    flat: dict[str, Tensor] = {}
    nothing = torch.empty(0, dtype=torch.uint8)
    for path, (code, shape, number, start) in told["leaves"].items():
        flat[path] = _view(memories[number] if number is not None else nothing, start, TYPES[code], shape)
    return tree.unflatten(flat, told["empty"])


def _written(flat: dict[str, Tensor], room: Any) -> tuple[dict[str, Any], Tensor]:
    """Write leaves to one piece of memory; each with its type, shape, span 0 and start, and the memory."""
    starts, size = _starts(flat.values())
    memory = room(size) if size else torch.empty(0, dtype=torch.uint8)
    told: dict[str, Any] = {}
    for (path, t), start in zip(flat.items(), starts):
        told[path] = [code_of(path, t), list(t.shape), 0 if t.numel() else None, start]
        if t.numel():
            _view(memory, start, t.dtype, t.shape).copy_(t.detach())
    return told, memory


def _starts(leaves: Iterable[Tensor]) -> tuple[list[int], int]:
    """Where leaves begin that lie one after another, and how many bytes that takes."""
    starts, at = [], 0
    for t in leaves:
        starts.append(at)
        at += -(-t.nbytes // LINE) * LINE
    return starts, at


def _view(memory: Tensor, start: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """A tensor that lies in memory; it counts for itself how often it was written to."""
    size = torch.Size(shape)
    if not size.numel():
        return torch.empty(size, dtype=dtype)
    return memory[start : start + size.numel() * dtype.itemsize].view(dtype).view(size).data


def _unnamed_file() -> int:
    """The descriptor of a file that ends with its last user."""
    if hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):  # a kernel without it
            return os.memfd_create("fedspan")
    with tempfile.TemporaryFile(prefix="fedspan-") as file:
        return os.dup(file.fileno())
