"""Trees in memory that other processes map: in place, private to who reads, free when nobody needs them."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import pytest
import torch

from conftest import assert_same
from fedspan.errors import Refused
from fedspan.tree import Outer, Tree, leaves
from fedspan.wire import shared_memory as module
from fedspan.wire.shared_memory import SharedMemory, Span, Visitor, shared_memory, tree_at

pytestmark = pytest.mark.skipif(os.name != "posix", reason="descriptors cannot be handed on")


def sample() -> Tree:
    return {
        "w": torch.arange(300.0, dtype=torch.float64).reshape(3, 100).T,
        "o": Outer(torch.ones(3), torch.zeros(0)),
        "flag": torch.tensor([True, False, True]),
        "half": {"b": torch.arange(5).to(torch.bfloat16), "n": torch.tensor(7)},
        "e": {"f": {}},
    }


def test_a_tree_is_read_where_it_was_written() -> None:
    memory = SharedMemory()
    told, held = memory.place(sample())
    back = Visitor(memory.descriptor).read(told)
    assert_same(back, sample())
    assert back["e"] == {"f": {}} and isinstance(back["o"], Outer)
    assert all(t.data_ptr() % 64 == 0 for t in leaves(back) if t.numel()) and held


def test_what_lies_in_a_block_is_not_written_again() -> None:
    memory = SharedMemory()
    rows = memory.empty({"a": torch.empty(2, 3, device="meta"), "none": torch.empty(0, device="meta")})
    rows["a"].copy_(torch.arange(6.0).reshape(2, 3))
    told, _ = memory.place({"rows": rows, "second": rows["a"][1], "elsewhere": torch.ones(2)})
    assert memory.span(rows["a"]) in told["spans"] and len(told["spans"]) == 2
    rows["a"].add_(1.0)  # seen by who reads, as it is the same memory
    back = Visitor(memory.descriptor).read(told)
    assert back["second"].tolist() == [4.0, 5.0, 6.0] and back["elsewhere"].tolist() == [1.0, 1.0]
    transposed, _ = memory.place({"t": rows["a"].T})
    assert_same(Visitor(memory.descriptor).read(transposed)["t"], rows["a"].T)


def test_what_a_reader_writes_reaches_nobody() -> None:
    memory = SharedMemory()
    told, _ = memory.place({"a": torch.zeros(4), "b": torch.zeros(4)})
    one, other = Visitor(memory.descriptor), Visitor(memory.descriptor)
    mine = one.read(told)
    mine["a"] += 1.0
    assert mine["a"]._version == 1 and mine["b"]._version == 0  # each counts for itself
    assert other.read(told)["a"].sum() == 0 and one.read(told)["a"].sum() == 0


def test_an_answer_is_written_to_the_block_it_was_given() -> None:
    memory = SharedMemory()
    room = memory.room(4096)
    span = memory.span(room)
    assert span is not None
    told = Visitor(memory.descriptor).write(span, sample())
    assert told is not None
    assert_same(tree_at(told, [room]), sample())
    assert Visitor(memory.descriptor).write(span, {"w": torch.zeros(span.size)}) is None  # four times too large
    with pytest.raises(Refused, match=r"'x' has type torch\.complex64, which cannot travel"):
        memory.place({"x": torch.zeros(2, dtype=torch.complex64)})


def test_a_block_is_used_again_when_the_last_tensor_in_it_is_gone_and_not_before() -> None:
    memory = SharedMemory()
    rows = memory.empty({"a": torch.empty(1000, device="meta"), "b": torch.empty(1000, device="meta")})
    span, last = memory.span(rows["a"]), rows["b"][5:6]
    del rows
    other = memory.room(8000)
    assert memory.span(other) != span
    last.fill_(3.0)
    del last
    assert memory.span(memory.room(7000)) == span


def test_free_memory_beyond_a_limit_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_FREE", 1 << 20)
    memory = SharedMemory()
    blocks = [memory.room(1 << 20).fill_(1) for _ in range(4)]
    spans = [memory.span(b) for b in blocks]
    assert all(a is not None and b is not None and a.offset + a.size <= b.offset for a, b in pairwise(spans))
    held = os.fstat(memory.descriptor).st_blocks
    del blocks
    assert held * 512 >= 4 << 20
    if hasattr(module.mmap, "MADV_REMOVE"):
        assert os.fstat(memory.descriptor).st_blocks * 512 <= 1 << 20
    assert memory.room(1 << 20).sum() in (0, 1 << 20)


def test_where_no_memory_can_be_shared_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> int:
        raise OSError("not here")

    monkeypatch.delattr(os, "memfd_create", raising=False)
    memory = shared_memory()  # an unlinked file
    assert memory is not None and os.fstat(memory.descriptor).st_nlink == 0
    told, _ = memory.place(sample())
    assert_same(Visitor(memory.descriptor).read(told), sample())
    monkeypatch.setattr(module.tempfile, "TemporaryFile", refuse)
    assert shared_memory() is None


def test_windows_to_write_through_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WINDOWS", 2)
    memory = SharedMemory()
    rooms = [memory.room(4096) for _ in range(4)]
    visitor = Visitor(memory.descriptor)
    for k, room in enumerate(rooms):
        told = visitor.write(Span(*(memory.span(room) or (0, 0))), {"k": torch.tensor(k)})
        assert told is not None and int(tree_at(told, [room])["k"]) == k
    assert len(visitor._windows) == 2
