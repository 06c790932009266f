"""The byte ledger: totals are sums of names, merging adds, and a checkpoint gives the same ledger back."""

from __future__ import annotations

import copy
import json

import pytest

from fedspan.wire import Direction, Ledger


def some() -> Ledger:
    ledger = Ledger()
    ledger.add(Direction.UP, 5, "v")
    ledger.add_names(Direction.DOWN, {"U": 4, "v": 1}, times=3)
    ledger.add(Direction.META, 16)
    return ledger


def test_totals_are_sums_of_names_and_directions_do_not_mix() -> None:
    ledger = some()
    assert ledger.totals() == {"up": 5, "down": 15, "announce": 0, "evaluate": 0, "meta": 16, "wire": 0}
    assert ledger.totals((Direction.UP, Direction.META)) == {"up": 5, "meta": 16}
    assert ledger.by_name(Direction.DOWN) == {"U": 12, "v": 3} and ledger.by_name(Direction.WIRE) == {}


def test_merging_adds_and_leaves_the_other_alone() -> None:
    whole, part = some(), some()
    before = copy.deepcopy(part)
    whole.merge(part)
    assert part == before and whole.total(Direction.DOWN) == 30 and whole.by_name(Direction.UP) == {"v": 10}
    part.add(Direction.UP, 1, "v")
    assert whole.by_name(Direction.UP) == {"v": 10}


def test_a_checkpoint_gives_the_same_ledger_back() -> None:
    ledger = some()
    assert Ledger.from_json(json.loads(json.dumps(ledger.to_json()))) == ledger
    assert Ledger.from_json({}) == Ledger()
    with pytest.raises(ValueError, match="sideways"):
        Ledger.from_json({"sideways": {"U": 1}})
