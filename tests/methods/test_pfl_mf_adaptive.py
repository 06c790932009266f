"""Adaptive pFL-MF: its limits, the fit of heads, the covariance from sums, the choice and when it is final."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from conftest import assert_close, assert_same, call, finished, make_data, make_task, method_of, plain_models
from fedspan import tree
from fedspan.data.federated import FederatedData
from fedspan.errors import ConfigError
from fedspan.learn.batches import draw
from fedspan.learn.task import Task
from fedspan.method import Federation, Sent
from fedspan.methods import make
from fedspan.methods.pfl_mf import PflMfAdaptive
from fedspan.methods.pfl_mf.head_prior import (
    HeadExamples,
    HeadShape,
    clear_directions,
    completed,
    covariance_step,
    eigenvalue_bound,
    first_directions,
    fit_heads,
    linear_head,
    loadings,
    losses_of,
)
from fedspan.methods.pfl_mf.shared_panel import sentence
from fedspan.randomness import key, normal
from fedspan.simulation.onboarding import onboard
from fedspan.simulation.simulator import Simulation

OFTEN: dict[str, Any] = {"rank": 3, "score_every": 1, "lr": 0.3}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return normal(key(seed, "test"), shape, torch.float64)


def regression(rows: int = 2) -> Task:
    return Task(
        nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, rows)), "regression", dtype=torch.float64, seed=1
    )


def numbers(clients: int = 5, rows: int = 2) -> FederatedData:
    rng = np.random.default_rng(0)
    pairs = [
        (torch.tensor(rng.normal(size=(n, 5))), torch.tensor(rng.normal(size=(n, rows)))) for n in range(9, 9 + clients)
    ]
    return FederatedData.from_arrays(pairs, seed=0)


# ------------------------------------------------------------------------------------------------ limits


@pytest.mark.parametrize("mapping", ["vmap", "loop", "folded"])
@pytest.mark.parametrize("clip", [0.1, 1.0])
def test_without_directions_and_residual_it_is_fedavg_with_clipping(mapping: str, clip: float) -> None:
    fields = {"lr": 0.5, "momentum": 0.5, "clip_norm": clip}
    a = finished(make("pfl-mf-adaptive", kappa=(0.0,), tau=(0.0,), **fields), mapping=mapping)
    b = finished(make("fedavg", **fields), mapping=mapping)
    assert_close(plain_models(a), plain_models(b))
    assert not tree.leaves(a.record.row(0)), "nothing to choose: nothing is kept"


def test_it_is_fedavg_with_batch_normalisation_too() -> None:
    fields = {"lr": 0.1, "clip_norm": 1.0}
    a = finished(make("pfl-mf-adaptive", kappa=(0.0,), tau=(0.0,), rank=2, **fields), "batchnorm")
    b = finished(make("fedavg", **fields), "batchnorm")
    assert_close(plain_models(a), plain_models(b))


@pytest.mark.parametrize("mapping", ["vmap", "loop"])
def test_both_wires_carry_the_same(mapping: str) -> None:
    a, b = (finished(make("pfl-mf-adaptive", **OFTEN, wire=wire), mapping=mapping) for wire in ("rank-one", "full"))
    assert_close(a.record.server, b.record.server)
    assert_close(plain_models(a), plain_models(b))
    up = [sim.result.bytes["up"] for sim in (a, b)]  # type: ignore[attr-defined]
    d, clients = 21, 4 * 3
    assert up[1] - up[0] == 8 * clients * d * (OFTEN["rank"] + 1)


def test_without_a_residual_models_lie_in_the_span_of_the_directions() -> None:
    sim = finished(make("pfl-mf-adaptive", **OFTEN, kappa=(1.0, 10.0), tau=(0.0,)), rounds=4)
    server = sim.record.server
    apart = torch.stack([tree.ravel({k: m[k] for k in ("4.weight", "4.bias")}) for m in plain_models(sim).values()])
    apart = apart - server["mu"]
    B = server["Q"][:, : OFTEN["rank"]]
    assert float(apart.norm()) > 0.01
    assert_close(apart, apart @ B @ B.T)
    assert torch.linalg.matrix_rank(apart, rtol=1e-9) <= OFTEN["rank"]


def test_the_covariance_of_all_heads_is_exact_up_to_rank_r() -> None:
    d, r, n = 14, 4, 30
    e, w = drawn(n, r) @ drawn(r, d, seed=1) + drawn(d, seed=2), drawn(n, seed=3).square()
    w = w / w.sum()
    m = w @ e
    exact = (e - m).T @ (w[:, None] * (e - m))
    Q = first_directions(d, r + 1, 7, torch.float64)
    new, s = covariance_step(Q, torch.zeros(r + 1).double(), m, e.T @ (w[:, None] * (e @ Q)), 0.8)
    assert_close(new @ torch.diag(s.square()) @ new.T, exact)
    assert_close(new.T @ new, torch.eye(r + 1).double())
    # A second step with the old covariance mixed in: where it is the same, nothing changes.
    again, t = covariance_step(new, s, m, e.T @ (w[:, None] * (e @ new)), 0.8)
    assert_close(again @ torch.diag(t.square()) @ again.T, exact)


def test_heads_that_are_all_alike_have_no_directions() -> None:
    Q = first_directions(8, 3, 0, torch.float64)
    m = drawn(8)
    new, s = covariance_step(Q, torch.zeros(3).double(), m, torch.outer(m, m @ Q), 0.8)
    assert not s.any()
    assert_same(new, Q)
    assert not loadings(new, s).any()


def test_directions_are_filled_up_by_others_that_are_orthogonal() -> None:
    Q = first_directions(9, 4, 1, torch.float64)
    for V in (Q[:, :2], Q[:, [3]], first_directions(9, 2, 5, torch.float64), Q[:, :1] + 1e-9 * drawn(9, 1)):
        V = torch.linalg.qr(V).Q
        full = completed(V, Q)
        assert_close(full.T @ full, torch.eye(4).double())
        assert_close(full[:, : V.shape[1]].abs(), V.abs())


# ------------------------------------------------------------------------------------------------ heads


def exact_head(
    part: HeadExamples, mu: Tensor, B: Tensor, u2: Tensor, kappa: float, tau: float, a: float = 1.0
) -> Tensor:
    """The minimiser for the squared error, mean over outputs, by the normal equations."""
    rows, columns = mu.shape
    A = torch.cat([kappa**0.5 * B.flatten(1), (tau / a * u2) ** 0.5 * torch.eye(rows * columns).double()])
    A = A.reshape(len(A), rows, columns)
    Z = torch.einsum("krc,nc->knr", A, part.h).flatten(1)
    gap = (part.y - part.h @ mu.T).flatten()
    scale = 2 * a / rows
    x = torch.linalg.solve(scale * Z @ Z.T + torch.eye(len(A)).double(), scale * Z @ gap)
    return mu + torch.einsum("k,krc->rc", x, A)


@pytest.fixture
def fitting() -> tuple[Task, HeadExamples, Tensor, Tensor, Tensor]:
    h = torch.cat([drawn(30, 4), torch.ones(30, 1).double()], 1)
    part = HeadExamples(h, drawn(30, 2, seed=1), torch.ones(30).double(), None)
    B = (
        torch.linalg.qr(drawn(10, 3, seed=2)).Q.T.reshape(3, 2, 5)
        * torch.tensor([2.0, 1.0, 0.5]).double()[:, None, None]
    )
    return regression(), part, drawn(2, 5, seed=3), B, part.inverse_scale


def test_heads_are_the_most_probable_ones(fitting: Any) -> None:
    task, part, mu, B, u2 = fitting
    pairs = [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (10.0, 0.1), (0.1, 10.0)]
    for a in (1.0, 0.3):
        found = fit_heads(task, part, mu, B, u2, pairs, 3000, a)
        for head, (kappa, tau) in zip(found, pairs):
            assert_close(head, exact_head(part, mu, B, u2, kappa, tau, a), 1e-10)
        assert_same(found[0], mu)


def test_a_wide_residual_is_a_free_fit_and_so_are_all_directions(fitting: Any) -> None:
    task, part, mu, B, u2 = fitting
    free = torch.linalg.lstsq(part.h, part.y).solution.T
    assert_close(fit_heads(task, part, mu, B, u2, [(0.0, 1e9)], 3000)[0], free, 1e-7)
    every = torch.eye(10).double().reshape(10, 2, 5)
    assert_close(fit_heads(task, part, mu, every, u2, [(1e9, 0.0)], 3000)[0], free, 1e-7)


@pytest.mark.parametrize(("kind", "rows"), [("classification", 3), ("multi-label", 3), ("regression", 2)])
def test_every_loss_with_a_bounded_curvature_is_minimised(kind: Any, rows: int) -> None:
    task = Task(nn.Linear(4, rows), kind, dtype=torch.float64)
    h = torch.cat([drawn(12, 4) * 3, torch.ones(12, 1).double()], 1)
    y = torch.arange(12) % rows if kind == "classification" else (drawn(12, rows, seed=4) > 0).double()
    part = HeadExamples(h, y, torch.ones(12).double(), None)
    B = torch.linalg.qr(drawn(rows * 5, 2, seed=2)).Q.T.reshape(2, rows, 5)
    mu, u2 = drawn(rows, 5, seed=3), part.inverse_scale
    theta = fit_heads(task, part, mu, B, u2, [(1.0, 10.0)], 2000)[0].requires_grad_()
    # At the minimum the loss's gradient is −P⁻¹(θ − μ), with the prior's covariance P = κBᵀB + τu²I.
    g = torch.autograd.grad(task.example_loss(h @ theta.T, y).sum(), theta)[0].flatten()
    P = B.flatten(1).T @ B.flatten(1) + 10 * u2 * torch.eye(rows * 5).double()
    assert_close((theta - mu).flatten().detach(), -P @ g, 1e-9)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 10**6), st.sampled_from([torch.float32, torch.float64]))
def test_the_largest_eigenvalue_is_never_taken_too_small(
    rows: int, columns: int, seed: int, dtype: torch.dtype
) -> None:
    h = normal(key(seed, "h"), (rows, columns), torch.float64) * normal(key(seed, "widths"), (columns,), torch.float64)
    largest = torch.linalg.svdvals(h)[0].square()
    bound = eigenvalue_bound(h.to(dtype)).double()
    rounding = 1e-5 if dtype == torch.float32 else 1e-12
    assert largest * (1 - rounding) <= bound <= largest * min(rows, columns) ** (1 / 32) * (1 + rounding)


def test_features_that_are_all_zero_give_a_bound() -> None:
    assert 0 <= float(eigenvalue_bound(torch.zeros(5, 3))) < 1e-6


def test_heads_of_squared_errors_are_fitted_where_eigenvalues_lie_close_together() -> None:
    """Power steps come near the largest of these only slowly, and a step that is too long ends in infinity."""
    d = 200
    task = Task(nn.Linear(d, 1, bias=False), "regression", dtype=torch.float64)
    h = torch.linalg.qr(drawn(300, d)).Q * torch.linspace(0.9, 1.0, d).double() * 30
    part = HeadExamples(h, drawn(300, 1, seed=4), torch.ones(300).double(), None)
    mu, no_directions = torch.zeros(1, d).double(), torch.zeros(0, 1, d).double()
    theta = fit_heads(task, part, mu, no_directions, torch.tensor(1.0).double(), [(0.0, 100.0)], 2000)[0]
    c = task.curvature_bound()
    assert c is not None
    exact = torch.linalg.solve(c * h.T @ h + torch.eye(d).double() / 100, c * h.T @ part.y)
    assert_close(theta.T, exact, 1e-9)


def test_an_empty_slot_counts_for_nothing(fitting: Any) -> None:
    task, part, mu, B, u2 = fitting
    keep = torch.arange(30) < 20
    masked = part._replace(w=keep.double(), mask=keep)
    short = HeadExamples(part.h[:20], part.y[:20], torch.ones(20).double(), None)
    a, b = (fit_heads(task, p, mu, B, u2, [(1.0, 1.0), (0.0, 10.0)], 60) for p in (masked, short))
    assert_close(a, b)
    assert_close(masked.inverse_scale, short.inverse_scale)


def test_loadings_leave_out_the_noise_floor_and_keep_the_sum_of_squares() -> None:
    Q, s = first_directions(8, 4, 0, torch.float64), torch.tensor([5.0, 3.0, 1.0, 1.0]).double()
    B, p = loadings(Q, s), torch.tensor([24.0, 8.0, 0.0]).double().sqrt()
    assert_close(B.square().sum(), p.square().sum())
    assert_close((B[0].norm() / B[1].norm()).square(), p[0] / p[1])
    assert not B[2].any()


def test_a_head_without_a_bias_lies_as_its_parameters_do() -> None:
    for bias in (True, False):
        shape = HeadShape(3, 4, bias)
        flat = drawn(2, shape.size)
        assert_same(shape.flat(shape.matrix(flat)), flat)
    task = Task(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3, bias=False)), dtype=torch.float64)
    assert linear_head("X", task) == HeadShape(3, 4, False)
    assert torch.isfinite(finished(make("pfl-mf-adaptive", **OFTEN), task=task).record.server["mu"]).all()


# ------------------------------------------------------------------------------------------------ the choice


def latest(sim: Simulation) -> Tensor:
    return torch.stack([sim.record.row(i)["losses"] for i in range(sim.data.clients)]).sum(0)


def test_the_server_has_the_sum_of_everybodys_latest_losses() -> None:
    sim = finished(make("pfl-mf-adaptive", **OFTEN), rounds=5)
    server = sim.record.server
    assert_close(torch.cat([server["S"], server["held"][None]]), latest(sim))
    assert float(server["held"]) == sum(max(1, round(0.12 * n)) for n in sim.data.sizes)


def test_scores_follow_their_rhythm_and_end_when_the_choice_is_final() -> None:
    fields = OFTEN | {"score_every": 2}
    runs = [finished(make("pfl-mf-adaptive", **fields, freeze=3), rounds=t).record for t in (1, 2, 3, 4)]
    S = [run.server["S"] for run in runs]
    assert not S[0].any() and S[1].any()
    assert_same(S[2], S[1])
    assert_same(S[3], S[1])
    assert [int(run.server["frozen"]) for run in runs] == [0, 0, 1, 1]


def test_a_choice_is_final_when_it_has_not_changed_for_a_while() -> None:
    one = finished(make("pfl-mf-adaptive", **OFTEN, settle=2, kappa=(0.0,), tau=(0.0, 100.0)), rounds=5)
    since = int(one.record.server["since"])
    assert since >= 1 and int(one.record.server["frozen"]) == int(5 - since >= 2)
    never = finished(make("pfl-mf-adaptive", **OFTEN, settle=50), rounds=5)
    assert not int(never.record.server["frozen"])


def test_what_was_held_out_is_trained_on_when_the_choice_is_final() -> None:
    """A client whose held-out examples are nonsense: until the choice is final its training does not see them."""
    data = make_data(equal=True)
    # No residual, whose scale is that of all examples, and no scores, which are there to see what is held out.
    method = make("pfl-mf-adaptive", rank=2, lr=0.3, freeze=2, score_every=100, kappa=(0.5, 1.0), tau=(0.0,))
    plan, place = method.plan(), {"seed": 5, "round": 1, "client": 0, "batch_size": 8, "epochs": 1}
    held = draw(data.train[0], data.validation[0], plan, **place)["held"]
    spoilt = replace(data, x=data.x.index_fill(0, torch.from_numpy(held[held >= 0]), 50.0))
    for rounds, seen in ((2, False), (3, True)):
        a, b = (finished(method, data=d, rounds=rounds, participation=1.0).record.server["phi"] for d in (data, spoilt))
        assert (tree.digest(a) != tree.digest(b)) == seen


def test_before_any_loss_the_prior_chooses_and_a_better_loss_wins() -> None:
    method, none = PflMfAdaptive(), torch.tensor(0.0)
    S = torch.zeros(len(method.pairs))
    assert method.pairs[method.choice({"S": S, "held": none, "outputs": none})] == (1.0, 1.0)
    k = method.pairs.index((0.0, 100.0))
    S[k] = -4 * float(method.penalties().max()) - 1
    assert method.choice({"S": S, "held": torch.tensor(9.0), "outputs": none}) == k
    assert float(method.penalties()[method.pairs.index((0.0, 0.0))]) == pytest.approx((2.5**2 + 1.5**2) / 2)


def test_the_body_is_trained_under_the_mean_head_where_fitted_ones_gain_little() -> None:
    method, none = make("pfl-mf-adaptive", gain=0.1), torch.tensor(0.0)
    assert isinstance(method, PflMfAdaptive)
    wide = (10.0, 1.0)
    for part, pair in ((0.95, (0.0, 0.0)), (0.85, wide)):
        S = torch.full((len(method.pairs),), 2000.0)
        S[method.pairs.index(wide)] *= part
        server = {"S": S, "held": torch.tensor(900.0), "outputs": none}
        assert method.pairs[method.choice(server)] == wide
        assert method.trained_pair(server) == pair
    first = {"S": torch.zeros(len(method.pairs)), "held": none, "outputs": none}
    assert method.trained_pair(first) == (1.0, 1.0), "before any loss the prior chooses"
    narrow = replace(method, kappa=(1.0,))
    assert narrow.trained_pair({**first, "S": torch.full((4,), 5.0)}) in narrow.pairs, "the mean head is not offered"


def test_the_unit_of_a_target_decides_neither_fit_nor_choice() -> None:
    """Heads of targets in a hundredth of the unit are a hundred times as large, and the same pair is chosen."""
    task, (h, rows) = regression(1), (drawn(40, 5), 1)
    y, B = h @ drawn(5, rows, seed=1) + drawn(40, rows, seed=2), drawn(2, rows, 5, seed=3)
    B = torch.linalg.qr(B.flatten(1).T).Q.T.reshape(2, rows, 5)
    method = PflMfAdaptive(rank=2)
    chosen, heads = [], []
    for unit in (1.0, 100.0):
        part = HeadExamples(h, unit * y, torch.ones(40).double(), None)
        first = {"S": torch.full((len(method.pairs),), 40.0 * unit**2).double(), "held": torch.tensor(40.0).double()}
        server = first | {"outputs": torch.tensor(float(rows)).double()}
        a = method.precision(server)
        assert_close(a, torch.tensor(0.5 / unit**2, dtype=torch.float64))
        mu, u2 = torch.zeros(rows, 5).double(), part.inverse_scale
        theta = fit_heads(task, part, mu, unit * B, u2, method.pairs, 300, a)
        heads.append(theta / unit)
        chosen.append(method.choice({**server, "S": losses_of(task, part, theta)}))
    assert_close(heads[0], heads[1], 1e-9)
    assert chosen[0] == chosen[1]


def test_classification_has_no_noise_to_be_measured() -> None:
    method = PflMfAdaptive(rank=2)
    server = method.init_server(make_task(), Federation(3, 0))
    assert float(method.precision({**server, "held": torch.tensor(7.0), "S": server["S"] + 5})) == 1.0
    squares = method.init_server(regression(), Federation(3, 0))
    assert float(squares["outputs"]) == 2 and float(method.precision(squares)) == 1.0, "nothing is known before a score"


def test_it_chooses_free_heads_where_names_differ_and_narrow_ones_where_they_do_not() -> None:
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(3, 5)) * 2

    def client(i: int, own: bool) -> tuple[Tensor, Tensor]:
        y = rng.integers(0, 3, 40)
        names = rng.permutation(3) if own else np.arange(3)
        return torch.tensor(centres[y] + rng.normal(size=(40, 5))), torch.tensor(names[y])

    def tau(own: bool) -> float:
        data = FederatedData.from_arrays([client(i, own) for i in range(8)], seed=0).to(torch.float64)
        sim = finished(make("pfl-mf-adaptive", rank=1, score_every=2), data=data, rounds=12, participation=1.0)
        return float(sim.engine.method.monitor(sim.record.server)["tau"])  # type: ignore[attr-defined]

    assert tau(True) > tau(False)


def test_clients_with_few_examples_hold_nothing_out() -> None:
    pairs = [(drawn(n, 5, seed=n), torch.arange(n) % 3) for n in (2, 3, 4, 9)]
    data = FederatedData.from_arrays(pairs, test=pairs, seed=0)
    for mapping in ("vmap", "loop"):
        sim = finished(make("pfl-mf-adaptive", **OFTEN), data=data, rounds=2, participation=1.0, mapping=mapping)
        assert [float(sim.record.row(i)["losses"][-1]) for i in range(4)] == [0.0, 0.0, 1.0, 1.0]


# ------------------------------------------------------------------------------------------------ use, words, refusals


def test_a_newcomer_needs_no_history() -> None:
    sim = finished(make("pfl-mf-adaptive", **OFTEN), rounds=3)
    rows, test = (torch.from_numpy(part[2]) for part in (sim.data.train, sim.data.test))
    new = onboard(sim, sim.data.x[rows], sim.data.y[rows], sim.data.x[test], sim.data.y[test])
    assert_close(new.weights, sim.personal(2)[1], 1e-9)
    assert new.v is not None and new.v.shape == (OFTEN["rank"] + 1,) and new.visits == 0


def test_after_training_the_clients_own_model_is_in_the_place_of_the_mean() -> None:
    task, method = make_task(), make("pfl-mf-adaptive", **OFTEN)
    down = method.init_server(task, Federation(3, 0))
    sent = Sent(torch.ones(()), {"phi": tree.map(torch.zeros_like, down["phi"]), "e": torch.ones_like(down["mu"])})
    after = method.trained(down, sent, None)
    assert_close(after["mu"], down["mu"] + 1)
    assert_same(after["phi"], sent.mean["phi"])
    assert_same(after["Q"], down["Q"])


def test_regression_runs_mapped_and_looped() -> None:
    a, b = (
        finished(make("pfl-mf-adaptive", **OFTEN), task=regression(), data=numbers(), rounds=2, mapping=mapping)
        for mapping in ("vmap", "loop")
    )
    assert a.record.server["S"].any()
    assert_close(a.record.server, b.record.server)


@pytest.mark.parametrize(
    ("s", "clear"),
    [
        ([2.5, 2.0, 2.0, 0.6, 0.5], 3),
        ([1.0, 0.9, 0.8, 0.7], 0),
        ([0.0, 0.0], 0),
        ([3.0, 1.0, 0.9], 1),
        ([1.0, 1.0, 0.0], 0),
    ],
)
def test_directions_that_stand_clear_are_counted(s: list[float], clear: int) -> None:
    assert clear_directions(torch.tensor(s)) == clear


def test_it_says_in_one_sentence_what_was_found() -> None:
    assert sentence(10, 1, 3, 10) == "Shared: a body, a mean head and 3 directions; personal residual: narrow."
    assert sentence(0, 0, 3, 10) == "Shared: a body and a mean head, no directions; personal residual: none."
    free = "Shared: a body, a mean head and up to 9 directions, of which none stands clear; personal residual: "
    assert sentence(1, 100, 0, 9) == free + "nearly free."


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"private_head": True}, "private_head must be false, as every head is fitted anew. Got true"),
        ({"server_optimizer": "adam"}, "server_optimizer must be 'none', as the server estimates the covariance"),
        ({"kappa": (1.0, 1.0)}, "kappa must not have a value twice. Got [1.0, 1.0]."),
        ({"tau": ()}, "tau must be a list of one or more"),
        ({"held_out": 1.0}, "held_out must be a finite number > 0 and < 1. Got 1.0."),
        ({"clip_norm": 0.0}, "clip_norm must be a finite number > 0. Got 0.0."),
    ],
)
def test_fields_that_cannot_be_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as e:
        method_of(PflMfAdaptive, **fields)
    assert message in str(e.value)


@pytest.mark.parametrize(
    ("task", "fields", "message"),
    [
        (lambda: make_task(), {"rank": 21}, "rank must be below 21, the number of the head's parameters. Got 21."),
        (lambda: Task(nn.Linear(3, 1), "survival"), {}, "Got task.kind 'survival'; use pfl-mf."),
        (lambda: Task(nn.Linear(3, 2), loss=lambda o, y: o[:, 0]), {}, "Got a loss of one's own; use pfl-mf."),
        (
            lambda: Task(nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 2), nn.Tanh())), head="1"),
            {},
            "the head must be one nn.Linear, all of it trained. Got a Sequential with 2 trained parameters",
        ),
    ],
)
def test_tasks_without_a_linear_head_and_a_bounded_loss_are_refused(task: Any, fields: Any, message: str) -> None:
    with pytest.raises(ConfigError) as e:
        method_of(PflMfAdaptive, **fields).init_server(task(), Federation(3, 0))
    assert message in str(e.value)


def test_a_run_says_what_is_shared_and_what_is_personal(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(EXPERIMENT, encoding="utf-8")
    call("run", str(tmp_path / "run.toml"), "--out", str(tmp_path / "run"), "-q")
    said = call("analyse", "panels", str(tmp_path / "run")).output
    assert "Shared: a body, a mean head and" in " ".join(said.split())
    found = json.loads(next(tmp_path.rglob("shared.json")).read_text(encoding="utf-8"))
    assert found["says"].endswith(".") and len(found["deviations"]) == 3 and found["pairs"][0] == [0.0, 0.0]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    told = lines[-1]["monitor"]
    assert {"kappa", "tau", "rank_found", "held_out_loss", "final"} <= told.keys()


EXPERIMENT = """
rounds = 3
[data]
source = "digits"
limit = 300
[partition]
kind = "permuted-groups"
clients = 6
groups = 2
[model]
hidden = [6]
[method]
name = "pfl-mf-adaptive"
rank = 2
score_every = 1
[train]
workers = 1
"""
