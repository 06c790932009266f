"""Linear algebra of a shared subspace: coordinates, the server's step, the rank."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from conftest import assert_close
from fedspan.linalg import subspace


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(st.integers(0, 1000), st.integers(1, 6))
def test_coordinates_give_the_models_back(seed: int, r: int) -> None:
    U, v = drawn(9, r, seed=seed), drawn(r, seed=seed + 1)
    Q, L, back = subspace.gauge(U)
    assert_close(Q.T @ Q, torch.eye(r, dtype=torch.float64), 1e-10)
    assert_close(Q @ (v @ L), U @ v, 1e-9)
    assert_close(U @ (back @ (v @ L)), U @ v, 1e-9)


def test_a_direction_that_is_lost_does_not_spoil_the_others() -> None:
    U = drawn(9, 3)
    U[:, 2] = U[:, 1]
    _, L, back = subspace.gauge(U)
    assert bool(torch.isfinite(back).all())
    assert_close(U @ (back @ (drawn(3, seed=1) @ L)), U @ drawn(3, seed=1), 1e-9)


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e4])
def test_the_scaled_step_in_single_precision_survives_a_bad_gauge(scale: float) -> None:
    """Columns of very different length are only another gauge of the same models."""
    U, V, D = drawn(40, 4), drawn(20, 4, seed=1), drawn(20, 40, seed=2)
    R = torch.diag(torch.tensor([1.0, scale, 1.0, 1.0], dtype=torch.float64))
    W = V @ torch.linalg.inv(R)
    good = subspace.scaled_step(U, D.T @ V / 20, V.T @ V / 20, 0.01) @ V.T
    single = subspace.scaled_step((U @ R).float(), (D.T @ W / 20).float(), (W.T @ W / 20).float(), 0.01)
    bad = single.double() @ W.T
    assert float((bad - good).abs().max()) < 2e-4 * float(good.abs().max())


@pytest.mark.parametrize("most", [0.01, 0.1])
def test_the_step_is_shortened_to_a_part_of_the_models_and_keeps_its_direction(most: float) -> None:
    U, V, D = drawn(40, 4), drawn(20, 4, seed=1), 10 * drawn(20, 40, seed=2)
    M, C = D.T @ V / 20, V.T @ V / 20
    free, held = (subspace.scaled_step(U, M, C, 0.01, m) - U for m in (None, most))
    assert_close(held / held.norm(), free / free.norm())
    moved, own = (float((X @ V.T).norm()) for X in (held, U))
    assert moved == pytest.approx(most * own, rel=1e-9)
    small = subspace.scaled_step(U, 1e-6 * M, C, 0.01, most)  # a step below the limit is left alone
    assert_close(small, subspace.scaled_step(U, 1e-6 * M, C, 0.01))


def test_a_clear_gap_is_found_and_an_unclear_one_is_not() -> None:
    falling = lambda *ratios: torch.tensor(ratios, dtype=torch.float64).log()
    assert subspace.clear_gap(falling(1.1, 1.1, 1.6, 1.1, 1.1, 1.1, 1.1, 1.1), 1.25) == 3
    assert subspace.clear_gap(falling(1.1, 1.1, 1.2, 1.1, 1.1, 1.1, 1.1, 1.1), 1.25) is None  # too small
    assert subspace.clear_gap(falling(1.1, 1.55, 1.6, 1.1, 1.1, 1.1, 1.1, 1.1), 1.25) is None  # not alone
    assert subspace.clear_gap(falling(1.1, 1.1, 1.6, 1.1, 1.1, 1.1, 9.0, 9.0), 1.25) == 3  # the tail does not count
    assert subspace.clear_gap(falling(9.0, 1.1, 1.6, 1.1, 1.1, 1.1, 1.1, 1.1), 1.25) == 3  # nor does the first
    assert subspace.clear_gap(falling(1.1, 1.5), 1.25) == 2
    assert subspace.clear_gap(falling(1.5), 1.25) is None


def test_gaps_of_a_spectrum_stop_at_the_noise_of_the_arithmetic() -> None:
    gaps = subspace.gaps(torch.tensor([4.0, 2.0, 1e-30, 0.0]))
    assert float(gaps[0]) == pytest.approx(0.6931, abs=1e-4)
    assert float(gaps[1]) < 20 and float(gaps[2]) == 0.0


def test_a_cut_keeps_models_of_that_rank() -> None:
    U, V = drawn(30, 6), drawn(50, 2, seed=1) @ drawn(2, 6, seed=2)  # six columns, models of rank two
    small, P = subspace.cut(U, V.T @ V / 50, 2)
    assert small.shape == (30, 2) and P.shape == (2, 6)
    assert_close(small @ P @ V.T, U @ V.T, 1e-8)
