"""Minibatch streams: what is drawn, and what a client sees of it."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import vmap

from fedspan.errors import ConfigError
from fedspan.learn.batches import All, Batches, Epochs, Index, Steps, Validation, draw, pad, rows_of
from fedspan.randomness import fold, key

SIZES = st.integers(1, 23)
WIDTHS = st.one_of(st.none(), st.integers(1, 30))


def streams(n: int, plan: dict[str, Any], width: int | None, valid: int = 0, **more: Any) -> dict[str, Index]:
    rows = np.arange(100, 100 + n, dtype=np.int64)[::-1].copy()
    options = {"seed": 1, "round": 2, "client": 3, "epochs": 2} | more
    return draw(rows, np.arange(900, 900 + valid, dtype=np.int64), plan, batch_size=width, **options)


def live(rows: Index) -> list[int]:
    return rows[rows >= 0].tolist()


@settings(deadline=None, max_examples=80, database=None)
@given(SIZES, WIDTHS, st.integers(0, 4), st.booleans())
def test_each_epoch_is_every_example_once(n: int, width: int | None, epochs: int, drop_last: bool) -> None:
    rows = streams(n, {"s": Epochs(epochs)}, width, drop_last=drop_last)["s"]
    b = n if width is None else min(width, n)
    per_pass = (n // b if b > 1 else 0) if drop_last else -(-n // b)  # batch normalisation: never one example alone
    assert rows.shape == (epochs * per_pass, b) and rows.dtype == np.int64
    for e in range(epochs):
        seen = live(rows[e * per_pass : (e + 1) * per_pass])
        assert len(set(seen)) == len(seen) == (per_pass * b if drop_last else n)
        assert set(seen) <= set(range(100, 100 + n))
    if drop_last:
        assert (rows >= 0).all()


@settings(deadline=None, max_examples=80, database=None)
@given(SIZES, WIDTHS, st.integers(0, 12), st.integers(0, 4), st.integers(0, 4), st.booleans())
def test_all_streams_are_prefixes_of_one_sequence(
    n: int, width: int | None, k: int, e: int, default: int, drop_last: bool
) -> None:
    plan = {"k": Steps(k), "e": Epochs(e), "d": Epochs(), "long": Epochs(20)}
    got = streams(n, plan, width, epochs=default, drop_last=drop_last)
    again = streams(n, dict(reversed(plan.items())), width, epochs=default, drop_last=drop_last)
    for name, rows in got.items():
        assert np.array_equal(rows, again[name])  # the order of the streams does not matter
        if len(rows) <= len(got["long"]):
            assert np.array_equal(rows, got["long"][: len(rows)])
    assert len(got["k"]) == (0 if drop_last and min(width or n, n) == 1 else k)
    assert np.array_equal(got["d"], streams(n, {"d": Epochs(default)}, width, drop_last=drop_last)["d"])


@settings(deadline=None, max_examples=60, database=None)
@given(SIZES, WIDTHS, st.booleans())
def test_empty_slots_are_only_at_the_end_of_rows(n: int, width: int | None, drop_last: bool) -> None:
    plan = {"e": Epochs(3), "s": Steps(7), "all": All(), "valid": Validation()}
    for rows in streams(n, plan, width, valid=n, drop_last=drop_last).values():
        for row in rows:
            alive = row >= 0
            assert alive[0] and not (alive[1:] & ~alive[:-1]).any()
            assert (row[~alive] == -1).all()


@settings(deadline=None, max_examples=60, database=None)
@given(SIZES, WIDTHS, SIZES)
def test_all_and_validation_keep_their_own_order_and_drop_nothing(n: int, width: int | None, valid: int) -> None:
    got = streams(n, {"all": All(), "valid": Validation()}, width, valid=valid)
    assert live(got["all"]) == list(range(100 + n - 1, 99, -1))
    assert live(got["valid"]) == list(range(900, 900 + valid))
    assert got["all"].shape[1] == min(width or n, n) and got["valid"].shape[1] == min(width or valid, valid)


@settings(deadline=None, max_examples=60, database=None)
@given(SIZES, WIDTHS, st.floats(0.05, 0.95), st.integers(1, 6))
def test_what_is_held_out_is_left_out_unless_a_stream_is_over_the_whole(
    n: int, width: int | None, share: float, least: int
) -> None:
    plan = {"held": Validation(share, least), "train": Epochs(1), "all": All()}
    plan |= {"train whole": Epochs(1, whole=True), "all whole": All(whole=True)}
    got = {name: live(rows) for name, rows in streams(n, plan, width).items()}
    everything = set(range(100, 100 + n))
    assert sorted(got["train whole"]) == sorted(got["all whole"]) == sorted(everything)
    assert sorted(got["train"]) == sorted(got["all"])
    if n < least:
        assert got["held"] == [] and set(got["all"]) == everything
    elif n == 1:  # it serves as both
        assert got["held"] == got["all"] == [100]
    else:
        assert len(got["held"]) == min(max(1, round(n * share)), n - 1)
        assert not {*got["held"]} & {*got["all"]} and {*got["held"], *got["all"]} == everything
    later = {name: live(rows) for name, rows in streams(n, plan, width, round=9).items()}
    assert later["held"] == got["held"] and later["all"] == got["all"]


@settings(deadline=None, max_examples=60, database=None)
@given(SIZES, WIDTHS, st.floats(0.05, 0.95))
def test_a_share_of_all_is_drawn_anew_and_keeps_the_order(n: int, width: int | None, share: float) -> None:
    got = live(streams(n, {"half": All(share)}, width)["half"])
    assert got == sorted(got, reverse=True) and len(set(got)) == len(got) == max(1, math.ceil(share * n - 1e-9))
    if n > 4 and 0.3 < share < 0.7:
        others = [live(streams(n, {"half": All(share)}, width, round=t)["half"]) for t in range(3, 12)]
        assert any(other != got for other in others)


@settings(deadline=None, max_examples=60, database=None)
@given(SIZES, st.integers(2, 9))
def test_with_batch_normalisation_no_batch_holds_one_example_alone(n: int, width: int) -> None:
    got = streams(n, {"all": All(), "e": Epochs(2)}, width, drop_last=True)
    assert live(got["all"]) == ([] if n == 1 else list(range(100 + n - 1, 99, -1)))
    for rows in got.values():
        assert all((row >= 0).sum() > 1 for row in rows)


def test_steps_start_a_new_pass_when_the_data_run_out() -> None:
    rows = streams(5, {"s": Steps(5)}, 2)["s"]
    assert [len(live(r)) for r in rows] == [2, 2, 1, 2, 2]
    assert sorted(live(rows[:3])) == list(range(100, 105))
    assert len(set(live(rows[3:]))) == 4
    assert live(streams(50, {"s": Epochs(1)}, None)["s"]) != live(streams(50, {"s": Epochs(2)}, None)["s"][1:])


def test_a_full_batch_is_one_row_and_shuffled() -> None:
    rows = streams(20, {"s": Epochs(2)}, None)["s"]
    assert rows.shape == (2, 20) and live(rows[0]) != live(rows[1])
    assert streams(20, {"s": Epochs(1)}, 64)["s"].shape == (1, 20)


def test_rows_depend_on_seed_round_and_client_alone() -> None:
    first = streams(20, {"s": Epochs(2)}, 8)["s"]
    assert np.array_equal(first, streams(20, {"s": Epochs(2)}, 8)["s"])
    state = np.random.get_state()[1].copy()  # type: ignore[index, union-attr]
    for other in ({"seed": 9}, {"round": 9}, {"client": 9}):
        assert not np.array_equal(first, streams(20, {"s": Epochs(2)}, 8, **other)["s"])
    swapped = streams(20, {"s": Epochs(2)}, 8, round=3, client=2)["s"]
    assert not np.array_equal(first, swapped)
    assert np.array_equal(state, np.random.get_state()[1])  # type: ignore[index]


def test_a_missing_validation_part_is_named() -> None:
    with pytest.raises(ConfigError, match="client 3 has no validation examples, which stream 'v' needs"):
        streams(4, {"v": Validation()}, 2)


@settings(deadline=None, max_examples=60, database=None)
@given(st.lists(st.integers(0, 40), max_size=40), st.integers(0, 9))
def test_rows_of_cuts_and_pads(index: list[int], width: int) -> None:
    rows = rows_of(np.array(index, np.int64), width)
    assert live(rows) == index and rows.shape[1] == max(1, width)
    assert len(rows) == -(-len(index) // max(1, width))


@settings(deadline=None, max_examples=40, database=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), min_size=1, max_size=5))
def test_pad_holds_every_stream_in_its_corner(shapes: list[tuple[int, int]]) -> None:
    parts = [np.arange(k * b, dtype=np.int64).reshape(k, b) for k, b in shapes]
    out = pad(parts)
    assert out.shape == (len(parts), max(k for k, _ in shapes), max(b for _, b in shapes))
    for t, p in zip(out.numpy(), parts):
        assert np.array_equal(t[: p.shape[0], : p.shape[1]], p)
        assert (t >= 0).sum() == p.size and (t[t < 0] == -1).all()


# ------------------------------------------------------------------------------------------------ what a client sees

X = torch.arange(20.0).reshape(10, 2)
Y = torch.arange(10) % 3
ROWS = torch.tensor([[4, 7, 2], [-1, -1, -1], [9, -1, -1]])
RELABEL = torch.tensor([2, 0, 1])


@pytest.mark.parametrize("relabel", [None, RELABEL])
def test_unmapped_batches_have_no_empty_slots(relabel: torch.Tensor | None) -> None:
    batches = Batches(X, Y, ROWS, key(5), relabel)
    seen = list(batches)
    assert len(batches) == 3 and [len(b.x) for b in seen] == [3, 1]
    for b, row, step in zip(seen, ([4, 7, 2], [9]), (0, 2)):
        assert torch.equal(b.x, X[row]) and torch.equal(b.w, torch.ones(len(row))) and bool(b.live)
        assert torch.equal(b.y, Y[row] if relabel is None else relabel[Y[row]])
        assert torch.equal(b.key, fold(key(5), step)) and not b.mapped  # the key counts steps, not live ones
    assert [len(b.x) for b in batches.first(1)] == [3]
    assert torch.equal(batches.whole().x, X[[4, 7, 2, 9]])


@pytest.mark.parametrize("relabel", [None, RELABEL])
def test_mapped_batches_mask_what_unmapped_ones_leave_out(relabel: torch.Tensor | None) -> None:
    batches = Batches(X, Y, ROWS, key(5), relabel, mapped=True)
    seen = list(batches)
    assert [b.w.tolist() for b in seen] == [[1, 1, 1], [0, 0, 0], [1, 0, 0]]
    assert [bool(b.live) for b in seen] == [True, False, True]
    plain = {0: 0, 2: 1}
    for step, k in plain.items():
        other = list(Batches(X, Y, ROWS, key(5), relabel))[k]
        on = seen[step].w.bool()
        assert torch.equal(seen[step].x[on], other.x) and torch.equal(seen[step].y[on], other.y)
        assert torch.equal(seen[step].key, other.key)
    whole = batches.whole()
    assert whole.w.tolist() == [1, 1, 1, 0, 0, 0, 1, 0, 0] and whole.x.shape == (9, 2)


def test_iteration_under_vmap_gives_each_client_its_own_rows_and_names() -> None:
    rows = torch.stack([ROWS, ROWS.flip(0)])
    names = torch.stack([RELABEL, torch.arange(3)])

    def sums(r: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return torch.stack([(b.y * b.w).sum() + (b.x[:, 0] * b.w).sum() for b in Batches(X, Y, r, key(1), n, True)])

    got = vmap(sums)(rows, names)
    for c in range(2):
        assert torch.equal(got[c], sums(rows[c], names[c]))
    assert not torch.equal(got[0], got[1].flip(0))


def test_the_mean_of_a_batch_is_over_its_examples() -> None:
    values = torch.tensor([1.0, 2.0, 30.0])
    means = [float(b.mean(values)) for b in Batches(X, Y, ROWS, key(5), mapped=True)]
    assert means == [11.0, 0.0, 1.0]
    assert [float(b.mean(values[: len(b.x)])) for b in Batches(X, Y, ROWS, key(5))] == [11.0, 1.0]


def test_integer_inputs_get_weights_in_the_default_type() -> None:
    tokens = torch.arange(20).reshape(10, 2)
    for mapped in (False, True):
        assert next(iter(Batches(tokens, Y, ROWS, key(1), None, mapped))).w.dtype == torch.get_default_dtype()
        assert next(iter(Batches(X.double(), Y, ROWS, key(1), None, mapped))).w.dtype == torch.float64


def test_every_example_is_drawn_equally_often_at_every_place() -> None:
    first = Counter(live(streams(4, {"s": Steps(1)}, 1, round=t)["s"])[0] for t in range(400))
    assert set(first) == {100, 101, 102, 103} and all(60 < c < 140 for c in first.values())
