"""Rows in slots: copied out and in, replaced by naming other slots, the same for whoever maps them."""

from __future__ import annotations

import os

import pytest
import torch

from conftest import assert_same
from fedspan import tree
from fedspan.storage.client_store import ClientStore
from fedspan.storage.row_table import RowLayout, RowTable
from fedspan.tree import Outer, Tree

needs_memfd = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="tables are shared on Linux only")


def state(i: int) -> Tree:
    return {"w": torch.full((3, 2), float(i)), "n": torch.tensor(i), "o": Outer(torch.ones(1) * i, torch.zeros(2))}


def stacked(*ids: int) -> Tree:
    found: Tree = tree.stack([state(i) for i in ids])
    return found


def test_rows_come_out_of_their_slots_as_they_went_in() -> None:
    table = RowTable(RowLayout(state(0)), 6)
    table.scatter([4, 0, 5], stacked(1, 2, 3))
    assert_same(table.gather([5, 4]), stacked(3, 1))
    assert_same(tree.take(table.gather([-1, 0]), 1), state(2))
    with pytest.raises(ValueError, match="rows must be"):
        table.scatter([1], {"w": torch.zeros(1, 3, 2)})
    with pytest.raises(ValueError, match="2 ids need 2 rows"):
        table.scatter([1, 2], stacked(1))


@needs_memfd
def test_a_table_is_the_same_for_who_is_handed_its_descriptor() -> None:
    table = RowTable(RowLayout(state(0)), 4)
    make, handed_on = table.__reduce__()
    other = make(*handed_on)
    other.scatter([2], stacked(7))
    assert_same(table.gather([2]), stacked(7))
    rows = table.gather([2])
    rows["w"].zero_()  # a copy
    assert_same(other.gather([2]), stacked(7))


@needs_memfd
def test_rows_are_replaced_by_naming_slots_and_can_be_taken_back() -> None:
    store = ClientStore(state, range(10, 14))
    table = store.table
    assert table is not None and store.slots([10, 11, 12]) == [-1, -1, -1]
    store.put([11], stacked(5))
    new = store.reserve(2)
    table.scatter(new, stacked(100, 101))
    assert_same(store.take([10, 11]), tree.stack([state(10), state(5)]))  # nothing is replaced yet
    store.stage_slots([11, 12], new)
    assert_same(store.take([11, 12]), stacked(5, 12))
    store.accept()
    assert_same(store.take([11, 12]), stacked(100, 101))
    assert store.touched_ids() == store.changed_ids() == [11, 12]
    store.undo()
    assert_same(store.take([11, 12]), stacked(5, 12))
    assert store.touched_ids() == [11]
    store.settle()
    assert not set(store.reserve(4)) & {s for s in store.slots([10, 11, 12, 13]) if s >= 0}


@needs_memfd
def test_there_is_always_room_to_replace_every_row() -> None:
    store = ClientStore(state, range(3))
    assert store.table is not None
    for turn in range(5):
        store.settle()
        to = store.reserve(3)
        store.table.scatter(to, stacked(turn, turn + 1, turn + 2))
        store.stage_slots(range(3), to)
        store.accept()
        assert_same(store.take(range(3)), stacked(turn, turn + 1, turn + 2))
    assert store.reserve(1) == []  # what was replaced last can still be taken back


@needs_memfd
def test_initial_rows_that_were_computed_are_not_computed_again() -> None:
    asked: list[int] = []

    def init(i: int) -> Tree:
        asked.append(i)
        return state(i)

    store = ClientStore(init, range(4))
    assert store.table is not None
    slots = store.reserve(2)
    store.table.scatter(slots, stacked(1, 3))
    store.hold([1, 3], slots)
    asked.clear()
    assert_same(store.take([3, 1, 0]), stacked(3, 1, 0))
    assert asked == [0] and store.touched_ids() == []


def test_rows_on_disk_and_rows_of_no_bytes_have_no_table() -> None:
    assert ClientStore(state, range(4), 0).table is None
    assert ClientStore(lambda i: {}, range(4)).table is None
