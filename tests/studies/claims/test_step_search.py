"""Step sizes: equal trials for all, values on both sides of the winner, an end that is not left is marked."""

from __future__ import annotations

import math

import pytest

from fedspan.studies.claims.step_search import choose_step, confirm_step

GRID = (0.03, 0.1, 0.3, 1.0)


@pytest.mark.parametrize("peak", [0.001, 0.01, 0.05, 0.2, 0.9, 5.0, 40.0])
def test_every_search_spends_its_trials_and_no_more(peak: float) -> None:
    asked: list[float] = []

    def attempt(lr: float) -> float:
        asked.append(lr)
        return -abs(math.log(lr / peak))

    found = choose_step(GRID, 7, attempt)
    assert len(asked) == len(set(asked)) == len(found.tried) == 7
    assert found.lr == min(asked, key=lambda lr: abs(math.log(lr / peak)))


def test_the_grid_goes_beyond_its_end_until_the_winner_is_bracketed() -> None:
    found = choose_step(GRID, 7, lambda lr: -abs(math.log(lr / 5.0)))
    assert found.edge is None and max(found.tried) > 5
    assert choose_step(GRID, 6, lambda lr: lr).edge == "largest"
    assert choose_step(GRID, 6, lambda lr: -lr).edge == "smallest"


def test_divergence_brackets_from_above() -> None:
    found = choose_step(GRID, 6, lambda lr: None if lr > 0.5 else lr)
    assert found.lr is not None and 0.3 <= found.lr <= 0.5 and found.edge is None and found.diverged > 0


def test_where_all_diverge_smaller_steps_are_tried() -> None:
    found = choose_step(GRID, 6, lambda lr: None if lr > 0.005 else 1.0)
    assert found.lr == pytest.approx(0.0027) and found.edge == "smallest"
    assert choose_step(GRID, 6, lambda lr: None).lr is None


def test_of_equals_the_smallest_step_is_taken() -> None:
    assert choose_step(GRID, 4, lambda lr: 1.0).lr == 0.03


def test_a_step_that_diverges_elsewhere_gives_way_to_the_next_best() -> None:
    found = choose_step(GRID, 4, lambda lr: lr)
    asked: list[float] = []

    def holds(lr: float) -> bool:
        asked.append(lr)
        return lr < 0.5

    kept = confirm_step(found, holds)
    assert asked == [1.0, 0.3] and kept.lr == 0.3
    assert kept.tried[1.0] is None and kept.diverged == 1
    assert confirm_step(found, lambda lr: False).lr is None
