"""Limiting cases of the personalised baselines, in float64, to 1e-12.

* CFL: eps_2 = inf = FedAvg with uniform weights; two groups with opposed labels are split into exactly those; clusters
  always partition the clients; single linkage minimises the largest similarity across; clients never heard find their
  group at their first update.
* Per-FedAvg: alpha = 0 = FedAvg with step beta, in every variant; Hessian-free = exact on quadratics for any delta, and
  tends to it as delta tends to 0; exact = derivative of f(w - alpha grad f(w)); adaptation = SGD steps.
* FedFOMO: M = 0 = Local on the data that are not held out; identical models change nothing; weights add up to 1 or 0;
  the server sends the models of largest affinity, never a client's own.
* APFL: alpha = 1 fixed: v = Local; alpha = 0 fixed: the personal model is FedAvg's and v never moves; the way of w does
  not depend on alpha; alpha takes the step of its derivative.
* FedSim with a plain server = FedPer; FedAlt = FedRep with the same epochs, = FedBABU without tuning where v takes no
  steps; server momentum and Adam are those of torch.optim; the l2 term is part of the loss; stateless = fitted at use.
* pFedSim: warm-up all the time = FedAvg (= FedPer with private heads); no similarity = Local after the warm-up; rows of
  the mixing matrix add up to 1; identical clients get equal weight.
* FedALA: A = 1 frozen = FedAvg; A = 0 frozen for all tensors = Local; A stays in [0, 1] and takes the step of its
  derivative; the first blend takes as many passes as it needs.
* pFedMe: one inner step of 1/lam from w = FedAvg with step eta; the inner steps end at grad f + lam (theta - w) = 0.
* L2GD: p = 0 = Local; p = 1 never trains; a pull to the mean itself with one local step in between = FedSGD; one step a
  round = the algorithm written out.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_limits import MAPPING, STEPS, models, run, same_models
from torch import Tensor, nn

from conftest import assert_close, assert_same, make_data, make_task, method_of
from fedspan import tree
from fedspan.data.federated import FederatedData
from fedspan.errors import ConfigError
from fedspan.learn.batches import Batch, Batches, Epochs, Portion, Validation, draw
from fedspan.learn.optimizer import Optimizer
from fedspan.learn.sgd import gradient, hessian_product
from fedspan.learn.task import Task
from fedspan.method import Round
from fedspan.methods import (
    Apfl,
    Cfl,
    FedAla,
    FedAlt,
    FedAvg,
    FedBabu,
    FedFomo,
    FedPer,
    FedRep,
    FedSim,
    L2gd,
    LgFedAvg,
    Local,
    PerFedAvg,
    PFedMe,
    PFedSim,
)
from fedspan.simulation.settings import Settings, sample
from fedspan.simulation.simulator import Simulation
from fedspan.tree import Tree
from fedspan.wire import Direction

# Equations are checked one client after another; that mapped clients do the same is checked for every method.
LOOP = pytest.mark.parametrize("mapping", ["loop"])


# ------------------------------------------------------------------------------------------------ CFL


@LOOP
@pytest.mark.parametrize("private_head", [False, True])
def test_cfl_that_never_splits_is_fedavg_with_uniform_weights(mapping: str, private_head: bool) -> None:
    common = {"private_head": private_head, **STEPS}
    never = method_of(Cfl, eps_1=float("inf"), eps_2=float("inf"), start_round=1, **common)
    same_models(never, method_of(FedAvg, weighting="uniform", **common), mapping=mapping)
    sim = run(method_of(Cfl, eps_2=float("inf"), weighting="samples", **common), mapping=mapping)
    assert_close(models(sim), models(run(method_of(FedAvg, **common), mapping=mapping)))


@pytest.mark.parametrize(("linkage", "participation"), [("complete", 0.5), ("single", 1.0)])
def test_cfl_splits_opposed_labels_into_the_true_groups(linkage: Any, participation: float) -> None:
    data = make_data(clients=12, equal=True)
    sim = run(Cfl(lr=0.1, start_round=8, linkage=linkage), data, rounds=14, participation=participation)
    cluster = sim.record.server["cluster"]
    assert sim.record.server["seen"].all()
    assert torch.equal(cluster == cluster[0], data.groups == data.groups[0])
    assert sim.method.monitor(sim.record.server)["clusters"] == 2
    alike = run(
        Cfl(lr=0.1, start_round=8, linkage=linkage), make_data(clients=12, equal=True, opposed=False), rounds=30
    )
    assert len(alike.record.server["a"]) == 1


def test_cfl_clusters_always_partition_the_clients() -> None:
    method = Cfl(eps_1=float("inf"), eps_2=0.0, min_size=1, start_round=1, lr=0.1)
    seen = set()
    for rounds in range(7):
        server = run(method, rounds=rounds, participation=0.45).record.server
        number = len(server["a"])
        assert server["cluster"].shape == (7,)
        assert set(server["cluster"].tolist()) == set(range(number))  # nobody is missing and no cluster is empty
        assert {len(t) for t in tree.leaves(server["theta"])} == {number}
        seen.add(number)
    assert max(seen) > 2


@pytest.mark.parametrize("seed", range(4))
def test_cfl_single_linkage_minimises_the_largest_similarity_across(seed: int) -> None:
    x = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    S = torch.nn.functional.normalize(x) @ torch.nn.functional.normalize(x).T

    def across(part: Tensor) -> float:
        return float(S[~part][:, part].max())

    every = [torch.tensor([False, *bits]) for bits in itertools.product([False, True], repeat=6) if any(bits)]
    found = Cfl(linkage="single")._bipartition(S)
    assert found is not None and across(found) == pytest.approx(min(map(across, every)), abs=1e-12)
    gamma = np.sqrt((1 - across(found)) / 2)
    assert Cfl(linkage="single", gamma_max=gamma + 1e-9)._bipartition(S) is None
    assert Cfl(linkage="single", gamma_max=gamma - 1e-9)._bipartition(S) is not None


def test_cfl_places_a_client_at_its_first_update_and_survives_updates_of_zero() -> None:
    method = Cfl(eps_1=float("inf"), eps_2=0.0, min_size=1, start_round=1)
    theta = {"w": torch.zeros(1, 2, dtype=torch.float64)}
    zeros = torch.zeros(1, dtype=torch.float64)
    server = {
        "theta": theta,
        "delta": {"w": torch.zeros(5, 2, dtype=torch.float64)},
        "cluster": torch.zeros(5, dtype=torch.int64),
        "seen": torch.zeros(5, dtype=torch.bool),
        "a": zeros,
        "m": zeros,
        "m_0": zeros[0],
    }

    def report(t: int, ids: list[int], rows: list[list[float]]) -> Round:
        w = torch.ones(len(ids), dtype=torch.float64)
        sent = {"delta": {"w": torch.tensor(rows, dtype=torch.float64)}}
        return Round(t, torch.tensor(ids), w, w, {}, sent, torch.tensor([], dtype=torch.int64))

    server = method.server_update(server, report(1, [0, 1, 2], [[1, 0], [0.9, 0.1], [-1, 0]]))
    c = server["cluster"].tolist()
    assert c[0] == c[1] == c[3] == c[4] != c[2]  # clients 3 and 4 were never heard: with the larger part
    assert server["theta"]["w"][c[0]].tolist() == pytest.approx([0.95, 0.05])
    assert server["theta"]["w"][c[2]].tolist() == [-1, 0]
    server = replace(method, eps_1=0.0).server_update(server, report(2, [3, 4], [[-2, 0.1], [0, 0]]))
    assert server["cluster"].tolist() == [c[0], c[0], c[2], c[2], 0]
    assert tree.all_finite(server)


# ------------------------------------------------------------------------------------------------ Per-FedAvg


@MAPPING
@pytest.mark.parametrize("variant", ["first-order", "hessian-free", "exact"])
def test_per_fedavg_without_inner_step_is_fedavg(mapping: str, variant: Any) -> None:
    for options in (STEPS, {"lr": 0.01, "optimizer": "adamw", "private_head": True}):
        same_models(
            method_of(PerFedAvg, lr_inner=0.0, variant=variant, **options),
            method_of(FedAvg, weighting="uniform", **options),
            mapping=mapping,
        )


def quadratic() -> tuple[Any, Tree, list[Batch]]:
    """A regression that is linear in its parameters, a point, and three batches."""
    rng = np.random.default_rng(0)
    x, y = torch.tensor(rng.normal(size=(12, 4))), torch.tensor(rng.normal(size=(12, 1)))
    torch.manual_seed(0)
    task = Task(nn.Linear(4, 1), "regression", dtype=torch.float64)
    batches = list(Batches(x, y, torch.arange(12).reshape(3, 4), torch.tensor(0)))
    return task.loss, task.init(), batches


@pytest.mark.parametrize("delta", [1e-3, 0.1, 10.0])
def test_per_fedavg_hessian_free_is_exact_on_quadratics(delta: float) -> None:
    f, w, D = quadratic()
    found = [PerFedAvg(lr=0.3, variant=v, delta=delta).meta_gradient(f, w, *D) for v in ("hessian-free", "exact")]
    assert_close(found[0], found[1])
    assert float((tree.ravel(found[0]) - tree.ravel(gradient(f, w, D[1]))).abs().max()) > 1e-2


def test_per_fedavg_exact_is_the_derivative_of_the_adapted_loss() -> None:
    task, stream = make_task(), whole_client(2)
    D, other, _ = (next(iter(stream.shifted(by))) for by in range(3))
    w = task.init()

    def F(w: Tree, batch: Batch) -> Tensor:
        g = torch.func.grad(lambda p: task.loss(p, D))(w)
        return task.loss(tree.add(w, g, -0.3), batch)

    at = tree.map(lambda a: a.clone().requires_grad_(), w)
    expected = dict(zip(at, torch.autograd.grad(F(at, other), list(at.values()))))
    assert_close(PerFedAvg(lr=0.3, variant="exact").meta_gradient(task.loss, w, D, other, D), expected)
    gaps = []
    for delta in (1e-1, 1e-2, 1e-3):
        method = PerFedAvg(lr=0.3, variant="hessian-free", delta=delta)
        gap = tree.sub(method.meta_gradient(task.loss, w, D, other, D), expected)
        gaps.append(float(tree.squared_norm(gap)) ** 0.5)
    assert gaps[2] < 1e-5 and gaps[2] <= gaps[0]


def whole_client(client: int, size: int = 4) -> Batches:
    data = make_data()
    rows = draw(data.train[client], data.validation[client], {"t": Epochs(1)}, seed=0, round=1, client=client,
                batch_size=size, epochs=1)["t"]  # fmt: skip
    return Batches(data.x, data.y, torch.from_numpy(rows), torch.tensor(0))


def test_hessian_products_agree_mapped_or_not_and_with_the_hessian() -> None:
    task, batch = make_task(), whole_client(0).whole()
    w = task.init()
    v = tree.map(lambda a: torch.linspace(-1, 1, a.numel(), dtype=a.dtype).reshape(a.shape), w)
    plain = hessian_product(task.loss, w, v, batch)
    mapped = hessian_product(task.loss, w, v, replace(batch, slots=torch.arange(len(batch.x))))
    assert_close(plain, mapped)
    H = torch.autograd.functional.hessian(lambda t: task.loss(tree.unravel(t, w), batch), tree.ravel(w))
    assert_close(tree.ravel(plain), H @ tree.ravel(v))


def test_shifted_batches_go_around_and_empty_ones_stay_at_the_end() -> None:
    rows = torch.tensor([[0, 1], [2, 3], [4, -1], [-1, -1]])
    stream = Batches(torch.arange(5.0), torch.arange(5), rows, torch.tensor(0), mapped=True)
    assert stream.shifted(1).rows.tolist() == [[2, 3], [4, -1], [0, 1], [-1, -1]]
    assert stream.shifted(3).rows.tolist() == rows.tolist()
    none = replace(stream, rows=rows[:0])
    assert len(none.shifted(1)) == 0


@LOOP
@pytest.mark.parametrize(("adapt", "unit"), [(0, "step"), (3, "step"), (2, "epoch")])
def test_per_fedavg_adapts_by_plain_steps_and_throws_them_away(mapping: str, adapt: int, unit: Any) -> None:
    sim = run(method_of(PerFedAvg, lr_inner=0.2, adapt=adapt, adapt_unit=unit, **STEPS), mapping=mapping)
    assert_same(
        sim.record.server, run(method_of(PerFedAvg, lr_inner=0.2, adapt=0, **STEPS), mapping=mapping).record.server
    )
    task = make_task()
    w = sim.record.server["theta"]
    steps = {"t": Epochs(adapt)}
    at = draw(sim.data.train[0], sim.data.validation[0], steps, seed=5, round=3, client=0, batch_size=8, epochs=2)["t"]
    for row in at[: adapt if unit == "step" else None]:
        row = row[row >= 0]
        p = tree.map(lambda a: a.clone().requires_grad_(), w)
        loss = nn.functional.cross_entropy(task.predict(p, sim.data.x[row]), sim.data.y[row])
        grads = torch.autograd.grad(loss, list(p.values()))
        w = {k: (a - 0.2 * g).detach() for (k, a), g in zip(p.items(), grads)}
    assert_close(sim.personal(0)[1], w)


# ------------------------------------------------------------------------------------------------ FedFOMO


def held_out(data: FederatedData, share: float, seed: int) -> list[dict[str, Any]]:
    """Training rows of each client as FedFOMO parts them."""
    plan = {"rest": Epochs(1), "held": Validation(share)}
    return [
        {k: np.sort(v[v >= 0]) for k, v in draw(rows, np.empty(0, np.int64), plan, seed=seed, round=1, client=i,
         batch_size=None, epochs=1).items()}
        for i, rows in enumerate(data.train)
    ]  # fmt: skip


@MAPPING
def test_fedfomo_without_models_is_local_on_what_is_not_held_out(mapping: str) -> None:
    data = make_data()
    parts = held_out(data, 0.2, 5)
    less = replace(data, train=[p["rest"] for p in parts])
    for rows, p in zip(data.train, parts):
        assert sorted([*p["rest"], *p["held"]]) == sorted(rows.tolist())
        assert len(p["held"]) == max(1, round(0.2 * len(rows)))
    # Batches are drawn by permuting the rows themselves, so the same rows in the same order give the same batches.
    a, b = (
        run(method_of(FedFomo, models=0, **STEPS), mapping=mapping),
        run(method_of(Local, **STEPS), less, mapping=mapping),
    )
    assert_close(models(a), models(b))
    assert a.record.progress.totals["down"] == 0


@pytest.mark.parametrize(("kind", "mapping", "workers"), [("mlp", "loop", 1), ("mlp", "vmap", 1), ("mlp", "folded", 1),
                         ("mlp", "auto", 2), ("batchnorm", "loop", 1)])  # fmt: skip
def test_fedfomo_never_trains_on_what_it_judges_models_by(kind: str, mapping: str, workers: int) -> None:
    """Other examples in the held-out part leave a client's own training as it was; in the other part they do not."""
    data, task = make_data(kind), make_task(kind)
    parts = held_out(data, 0.2, 5)

    def trained(part: str | None) -> list[Tree]:
        x = data.x.clone()
        if part is not None:
            x[np.concatenate([p[part] for p in parts])] += 1.0
        settings = Settings(batch_size=8, workers=workers, precision="float64", mapping=mapping)
        sim = Simulation(FedFomo(models=0, lr=0.1), task, replace(data, x=x), rounds=2, seed=5, settings=settings)
        sim.run()
        return [{k: sim.record.row(i)["theta"][k] for k in task.names} for i in range(data.clients)]

    plain, held, rest = (trained(part) for part in (None, "held", "rest"))
    assert all(torch.equal(tree.ravel(a), tree.ravel(b)) for a, b in zip(plain, held))
    assert not any(torch.equal(tree.ravel(a), tree.ravel(b)) for a, b in zip(plain, rest))


def test_a_lone_example_is_trained_on_and_held_out() -> None:
    plan = {"t": Epochs(1), "v": Validation(0.2)}
    got = draw(np.array([4]), np.empty(0, np.int64), plan, seed=0, round=1, client=0, batch_size=8, epochs=1)
    assert got["t"].tolist() == got["v"].tolist() == [[4]]


@LOOP
def test_fedfomo_mixes_as_the_equations_say(mapping: str) -> None:
    method = FedFomo(models=2, lr=0.1, epsilon=0.0)
    before = run(method, rounds=2, mapping=mapping, participation=1.0)
    server, task, data = before.record.server, make_task(), before.data
    chosen = method.chosen(server, torch.arange(7), 3)
    frozen = replace(method, lr=0.0)
    sim = Simulation(frozen, make_task(), make_data(), rounds=1, seed=5,
                     settings=Settings(participation=1.0, workers=1, precision="float64", mapping=mapping))  # fmt: skip
    rows = tree.stack([before.record.row(i) for i in range(7)])
    down = frozen.download(server, torch.arange(7), None, 3)
    answer = sim.engine.update(None, 3, list(range(7)), rows, down.shared, down.own, {})
    some = 0
    for k, part in enumerate(held_out(data, 0.2, 5)):

        def loss(theta: Tree, at: Any = part["held"]) -> float:
            return float(nn.functional.cross_entropy(task.predict(theta, data.x[at]), data.y[at]))

        old = before.record.row(k)["theta"]
        others = [tree.take(server["theta"], int(j)) for j in chosen[k]]
        far = [float((tree.ravel(o) - tree.ravel(old)).norm()) for o in others]
        w = np.array([(loss(old) - loss(o)) / (d + 1e-5) for o, d in zip(others, far)])
        assert answer.sent.each["w"][k].tolist() == pytest.approx(w, abs=1e-10)
        share = np.clip(w, 0, None) / max(np.clip(w, 0, None).sum(), 1e-30)
        assert share.sum() == pytest.approx(1) or share.sum() == 0
        some += share.sum() > 0
        expected = old
        for s, o in zip(share, others):
            expected = tree.add(expected, tree.sub(o, old), s)
        assert_close(tree.take(answer.rows["theta"], k), expected, 1e-10)
    assert some


def test_fedfomo_sends_the_most_alike_and_never_a_clients_own() -> None:
    server = {
        "P": torch.tensor([[1.0, 0.1, 0.9, 0.5], [0.3, 1.0, 0.2, 0.8], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]]),
        "seen": torch.tensor([True, True, True, False]),
        "key": torch.tensor(7),
    }
    method = FedFomo(models=2, epsilon=0.0)
    assert method.chosen(server, torch.tensor([0, 1]), 1).tolist() == [[2, 1], [0, 2]]  # 3 was never received
    server["seen"][3] = True
    assert method.chosen(server, torch.tensor([0, 1]), 1).tolist() == [[2, 3], [3, 0]]
    assert FedFomo(models=9, epsilon=0.0).chosen(server, torch.tensor([0]), 1).tolist() == [[2, 3, 1]]
    server["seen"][:] = torch.tensor([False, True, False, False])
    assert method.chosen(server, torch.tensor([0]), 1)[0, 0] == 1


def test_fedfomo_explores_as_often_as_it_says_and_stops() -> None:
    n, rounds = 30, 200
    P = torch.zeros(n, n) + torch.arange(n).flip(0)  # client 0 is liked best
    server = {"P": P, "seen": torch.ones(n, dtype=torch.bool), "key": torch.tensor(3)}
    method = FedFomo(models=3, epsilon=0.4, epsilon_decay=0.0)
    picks = torch.cat([method.chosen(server, torch.tensor([29]), t) for t in range(1, rounds + 1)])
    assert all(len(set(row)) == 3 and 29 not in row for row in picks.tolist())
    assert float((picks > 2).double().mean()) == pytest.approx(0.4, abs=0.08)
    assert len(picks[picks > 2].unique()) > 20
    fading = FedFomo(models=3, epsilon=0.4, epsilon_decay=0.1)
    assert fading.chosen(server, torch.tensor([29]), 5).tolist() == [[0, 1, 2]]
    assert any(fading.chosen(server, torch.tensor([i]), 1).max() > 3 for i in range(10, 30))


# ------------------------------------------------------------------------------------------------ APFL

MIX = pytest.mark.parametrize("mix", ["params", "logits"])


def fixed(alpha: float, mix: Any, **fields: Any) -> Apfl:
    return method_of(Apfl, alpha=alpha, adaptive=False, mix=mix, **fields)


@MAPPING
@MIX
def test_apfl_all_local_is_local(mapping: str, mix: Any) -> None:
    sim, local = run(fixed(1.0, mix, **STEPS), mapping=mapping), run(method_of(Local, **STEPS), mapping=mapping)
    for i in range(7):
        assert_close(sim.record.row(i)["v"], models(local)[str(i)])
    if mix == "params":
        assert_close(models(sim), models(local))


@MAPPING
@MIX
def test_apfl_all_global_is_fedavg_and_leaves_v_alone(mapping: str, mix: Any) -> None:
    steps = {"lr": 0.1, "momentum": 0.9}
    sim, fedavg = run(fixed(0.0, mix, **steps), mapping=mapping), run(method_of(FedAvg, **steps), mapping=mapping)
    for i in range(7):
        assert_same(sim.record.row(i)["v"], make_task().init())
        assert_close(sim.personal(i)[1] if mix == "params" else sim.personal(i)[1]["w"], models(fedavg)[str(i)])


@MIX
@pytest.mark.parametrize("every", ["round", "step"])
def test_apfl_global_model_does_not_depend_on_alpha(mix: Any, every: Any) -> None:
    method = method_of(Apfl, lr=0.1, weight_decay=0.01, alpha=0.7, mix=mix, alpha_every=every)
    sim = run(method)
    assert_close(sim.record.server, run(method_of(FedAvg, lr=0.1, weight_decay=0.01)).record.server)
    assert any(abs(float(sim.record.row(i)["alpha"]) - 0.7) > 1e-4 for i in range(7))


@LOOP
@pytest.mark.parametrize("every", ["round", "step"])
def test_apfl_alpha_takes_the_step_of_its_derivative(mapping: str, every: Any) -> None:
    method = Apfl(lr=0.2, lr_alpha=3.0, alpha=0.6, alpha_every=every, alpha_decay=0.02)
    after = run(method, rounds=2, participation=1.0, mapping=mapping, batch_size="full", epochs=1)
    first = run(method, rounds=1, participation=1.0, mapping=mapping, batch_size="full", epochs=1)
    task, w = make_task(), first.record.server["theta"]
    for i in range(7):
        row = first.record.row(i)
        v, alpha = row["v"], float(row["alpha"])
        bar = tree.map(lambda a, b, s=alpha: (s * a + (1 - s) * b).requires_grad_(), v, w)
        x, y = after.data.x[torch.from_numpy(after.data.train[i])], after.data.labels(i, "train")
        g = torch.autograd.grad(nn.functional.cross_entropy(task.predict(bar, x), y), list(bar.values()))
        slope = sum(float(((v[k] - w[k]) * a).sum()) for k, a in zip(bar, g))
        new = min(1.0, max(0.0, alpha - 3.0 * (slope + 0.02 * alpha)))
        assert float(after.record.row(i)["alpha"]) == pytest.approx(new, abs=1e-12)


def test_apfl_refuses_to_move_alpha_within_a_momentum() -> None:
    with pytest.raises(ConfigError, match="alpha_every must be 'round' with momentum"):
        method_of(Apfl, alpha_every="step", momentum=0.9)
    with pytest.raises(ConfigError, match=r"alpha must be a number in \[0, 1\]. Got 1.5"):
        Apfl(alpha=1.5)


# ------------------------------------------------------------------------------------------------ FedAlt and FedSim


@MAPPING
@pytest.mark.parametrize("layers", [(), ("0.",), ("2.", "4.bias")])
def test_fedsim_with_a_plain_server_is_fedper(mapping: str, layers: tuple[str, ...]) -> None:
    same_models(
        method_of(FedSim, personal_layers=layers, **STEPS),
        method_of(FedPer, personal_layers=layers, **STEPS),
        mapping=mapping,
    )


@MAPPING
@pytest.mark.parametrize(("v", "u"), [(2, 1), (1, 3), (0, 2)])
def test_fedalt_is_fedrep_with_the_same_epochs(mapping: str, v: int, u: int) -> None:
    rep = method_of(FedRep, head_epochs=v, body_epochs=u, weighting="samples", **STEPS)
    same_models(method_of(FedAlt, v_epochs=v, u_epochs=u, **STEPS), rep, mapping=mapping)
    if v == 0:
        same_models(
            method_of(FedAlt, v_epochs=0, **STEPS), method_of(FedBabu, finetune_epochs=0, **STEPS), mapping=mapping
        )


def test_fedalt_stops_v_after_so_many_steps() -> None:
    a, b = (run(FedAlt(v_epochs=2, v_steps=k, lr=0.1), batch_size=4) for k in (1, 10_000))
    assert_close(models(b), models(run(FedAlt(v_epochs=2, lr=0.1), batch_size=4)))
    one = run(FedAlt(v_epochs=1, u_epochs=0, v_steps=1, lr=0.1), rounds=1, batch_size="full", participation=1.0)
    assert_close(models(one), models(run(FedAlt(v_epochs=1, u_epochs=0, lr=0.1), rounds=1, batch_size="full",
                                         participation=1.0)))  # fmt: skip
    assert tree.digest(models(a)) != tree.digest(models(b))


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_fedsim_server_steps_are_those_of_torch(kind: Any) -> None:
    options = {"lr": 0.1, "server_optimizer": kind, "server_lr": 0.07, "server_momentum": 0.9}
    sims = [run(method_of(FedSim, **options), rounds=r, participation=1.0) for r in range(4)]
    u = [tree.ravel(s.record.server["theta"]) for s in sims]
    p = u[0].clone().requires_grad_()
    made = torch.optim.SGD([p], 0.07, momentum=0.9) if kind == "sgd" else torch.optim.Adam([p], 0.07)
    for r in range(3):

        class Sees(FedSim):
            def server_update(self, server: Tree, round: Round, r: int = r) -> Tree:
                if round.round == r + 1:
                    p.grad = tree.ravel(tree.sub(server["theta"], round.mean["theta"]))
                return super().server_update(server, round)

        run(method_of(Sees, **options), rounds=r + 1, participation=1.0)
        made.step()
        assert_close(p.detach(), u[r + 1])


@pytest.mark.parametrize("towards", ["zero", "start"])
def test_fedsim_l2_term_is_part_of_the_loss(towards: Any) -> None:
    method = FedSim(lr=0.1, l2=0.7, l2_towards=towards)
    sim = run(method, rounds=1, participation=1.0, batch_size="full", epochs=1)
    plain = run(FedSim(lr=0.1), rounds=1, participation=1.0, batch_size="full", epochs=1)
    task = make_task()
    head = tree.select(task.init(), task.head)
    pull = tree.map(lambda a: a * 0 if towards == "start" else 0.1 * 0.7 * a, head)
    assert_close(sim.record.row(3)["h"], tree.sub(plain.record.row(3)["h"], pull))
    assert_close(sim.record.server["theta"], plain.record.server["theta"])


@LOOP
def test_stateless_fedalt_fits_v_when_it_is_used(mapping: str) -> None:
    sim = run(FedAlt(stateful=False, v_epochs=2, lr=0.1), mapping=mapping)
    assert all(not tree.leaves(sim.record.row(i)) for i in range(7))
    u = sim.record.server["theta"]
    task = make_task()
    rep = FedRep(head_epochs=2, body_epochs=0, lr=0.1)
    stream = sim.engine._visit(0, 3, {"head": Epochs(2), "body": Epochs(0)}, {})[0]
    head = rep.client_update(task, {"h": tree.select(task.init(), task.head)}, {"theta": u}, stream)[0]["h"]
    assert_close(models(sim)["0"], u | head)


@pytest.mark.parametrize("cls", [FedPer, LgFedAvg, FedSim, FedAlt])
def test_personal_layers_must_name_parameters(cls: Any) -> None:
    task = make_task()
    assert cls(personal_layers=("0", "2")).private(task) == [k for k in task.names if k[0] in "02"]
    assert cls(personal_layers=(), private_head=False).private(task) == (task.body if cls is LgFedAvg else [])
    with pytest.raises(ConfigError, match=rf"{cls.__name__}: personal_layers must begin the name .* Got \['x'\]"):
        cls(personal_layers=("x",)).private(task)


# ------------------------------------------------------------------------------------------------ pFedSim


@MAPPING
def test_pfedsim_in_its_warm_up_is_fedavg(mapping: str) -> None:
    same_models(method_of(PFedSim, warmup_rounds=9, **STEPS), method_of(FedAvg, **STEPS), mapping=mapping)
    same_models(
        method_of(PFedSim, warmup_rounds=9, private_head=True, **STEPS), method_of(FedPer, **STEPS), mapping=mapping
    )
    # After the last round of the warm-up everybody still has that one model, sampled or not.
    same_models(method_of(PFedSim, warmup_rounds=3, **STEPS), method_of(FedAvg, **STEPS), mapping=mapping)


@LOOP
def test_pfedsim_of_clients_that_are_not_alike_is_local_after_the_warm_up(mapping: str) -> None:
    class Alone(PFedSim):
        def server_update(self, server: Tree, round: Round) -> Tree:
            new = super().server_update(server, round)
            return {**new, "S": torch.eye(7, dtype=torch.float64)}

    sim = run(method_of(Alone, warmup_rounds=1, **STEPS), rounds=4, mapping=mapping)
    warm = run(method_of(FedAvg, **STEPS), rounds=1, mapping=mapping).record.server["theta"]

    class Later(Local):
        def client_update(self, task: Task, client: Tree, down: Tree, visit: Any) -> Any:
            if int(visit.round) == 1:
                return client, super().client_update(task, client, down, visit)[1]
            return super().client_update(task, client, down, visit)

        def init_client(self, task: Task, who: Any) -> Tree:
            return {"theta": warm}

    assert_close(models(sim), models(run(method_of(Later, **STEPS), rounds=4, mapping=mapping)))
    assert sim.record.progress.totals["announce"] == 7 * tree.nbytes(tree.select(warm, make_task().head))
    sent = sim.record.progress.bytes
    assert sent.by_name(Direction.DOWN)["h"] < sent.by_name(Direction.UP)["h"]


def test_pfedsim_mixing_rows_add_up_and_treat_equals_equally() -> None:
    sim = run(PFedSim(warmup_rounds=1, lr=0.1), rounds=4, participation=1.0)
    S = sim.record.server["S"]
    heads = sim.record.server["h"]["4.weight"]
    for i, j in ((0, 1), (2, 5)):
        cosines = [float(nn.functional.cosine_similarity(heads[i, c], heads[j, c], dim=0)) for c in range(3)]
        assert float(S[i, j]) == pytest.approx(max(0.0, np.mean(cosines)), abs=1e-12)
    a = sim.method.mixing(S)
    assert_close(a.sum(1), torch.ones(7, dtype=torch.float64))
    assert float(a.min()) >= 0 and float(a[0, 2]) > float(a[0, 1])  # 0 and 2 name the classes alike
    twins = torch.tensor([[1.0, 1.0, 0.2], [1.0, 1.0, 0.2], [0.2, 0.2, 1.0]])
    b = sim.method.mixing(twins)
    assert b[0, 0] == b[0, 1] and torch.isfinite(b).all()
    assert float(b[2, 0] / b[2, 2]) == pytest.approx(np.log(0.8) / np.log(1 - 0.9999), rel=1e-3)
    assert_close(sim.personal(3)[1]["0.bias"], a[3] @ sim.record.server["theta"]["0.bias"])


# ------------------------------------------------------------------------------------------------ FedALA


@MAPPING
def test_fedala_with_frozen_weights_is_fedavg_or_local(mapping: str) -> None:
    for top in (0, 2, 99):
        same_models(
            method_of(FedAla, lr_a=0.0, top=top, start_passes=1, **STEPS), method_of(FedAvg, **STEPS), mapping=mapping
        )

    class Stubborn(FedAla):
        def init_client(self, task: Task, who: Any) -> Tree:
            start = super().init_client(task, who)
            return {**start, "A": tree.zeros_like(start["A"])}

    same_models(
        method_of(Stubborn, lr_a=0.0, top=99, start_passes=1, **STEPS), method_of(Local, **STEPS), mapping=mapping
    )


@LOOP
def test_fedala_weights_take_the_step_of_their_derivative_and_stay_in_bounds(mapping: str) -> None:
    method = FedAla(lr=0.2, lr_a=50.0, top=3, share=1.0, start_passes=1)
    options = {"participation": 1.0, "mapping": mapping, "batch_size": "full", "epochs": 1}
    one, two = run(method, rounds=1, **options), run(method, rounds=2, **options)
    task, new = make_task(), one.record.server["theta"]
    names = ["2.bias", "4.weight", "4.bias"]
    assert list(one.record.row(0)["A"]) == names
    between = 0
    for i in range(7):
        own, A = one.record.row(i)["theta"], {k: torch.ones_like(new[k]).requires_grad_() for k in names}
        assert_close(one.record.row(i)["A"], tree.detach(A))  # the models of the first round are the same
        blend = {k: own[k] + (new[k] - own[k]) * A[k] for k in names}
        x, y = two.data.x[torch.from_numpy(two.data.train[i])], two.data.labels(i, "train")
        loss = nn.functional.cross_entropy(task.predict(new | blend, x), y)
        for (k, a), g in zip(A.items(), torch.autograd.grad(loss, list(A.values()))):
            found = two.record.row(i)["A"][k]
            assert_close(found, (a - 50.0 * g).clamp(0, 1).detach())
            between += int(((found > 0) & (found < 1)).sum())
    assert between > 20


def test_fedala_settles_its_first_blend_and_then_takes_one_pass() -> None:
    def weights(passes: int, threshold: float, rounds: int) -> Tree:
        method = FedAla(lr=0.2, lr_a=5.0, top=2, share=1.0, start_passes=passes, threshold=threshold)
        sim = run(method, rounds=rounds, participation=1.0, batch_size="full", epochs=1)
        return {str(i): sim.record.row(i)["A"] for i in range(7)}

    # Any eleven losses agree within a wide threshold; none do within 0, so that the cap decides.
    assert_close(weights(20, 99.0, 2), weights(11, 0.0, 2))
    assert tree.digest(weights(14, 0.0, 2)) != tree.digest(weights(11, 0.0, 2))
    sim = run(FedAla(lr=0.2, start_passes=12), rounds=2, participation=0.6)
    fresh = {i for i in range(7) if bool(sim.record.row(i)["fresh"])}
    assert fresh == set(range(7)) - set(sample(7, sim.settings, 5, 2))  # in round 1 nothing could differ yet


def test_a_part_of_the_data_is_another_one_in_every_round() -> None:
    rows = np.arange(10, 30)
    some = [
        draw(rows, rows[:0], {"p": Portion(0.3)}, seed=0, round=t, client=1, batch_size=4, epochs=1)["p"]
        for t in (1, 2)
    ]
    for s in some:
        assert s.shape == (2, 4) and len(set(s[s >= 0])) == 6 and set(s[s >= 0]) <= set(rows)
    assert set(some[0].ravel()) != set(some[1].ravel())
    none = draw(rows[:1], rows[:0], {"p": Portion(0.0)}, seed=0, round=1, client=1, batch_size=4, epochs=1)["p"]
    assert none.tolist() == [[10]]


# ------------------------------------------------------------------------------------------------ pFedMe and L2GD


@MAPPING
@pytest.mark.parametrize("lam", [2.0, 50.0])
def test_pfedme_with_one_inner_step_is_fedavg(mapping: str, lam: float) -> None:
    plain = Optimizer(safeguard=False)  # which would hold lr·lam = 5 to 1
    one = PFedMe(lr=0.1, lam=lam, lr_inner=1 / lam, inner_steps=1, optimizer=plain)
    options = {"mapping": mapping, "batch_size": "full", "epochs": 1}
    assert_close(run(one, **options).record.server, run(FedAvg(lr=0.1), **options).record.server)
    half = run(replace(one, beta=0.5), rounds=1, **options).record.server["theta"]
    whole = run(one, rounds=1, **options).record.server["theta"]
    assert_close(half, tree.map(lambda a, b: (a + b) / 2, whole, make_task().init()))


@LOOP
def test_pfedme_solves_its_inner_problem_and_moves_w_towards_it(mapping: str) -> None:
    method = PFedMe(lr=0.02, lam=20.0, lr_inner=0.04, inner_steps=60)
    sim = run(method, rounds=1, participation=1.0, batch_size="full", epochs=1, mapping=mapping)
    task, w = make_task(), make_task().init()
    for i in range(7):
        v = tree.map(lambda a: a.clone().requires_grad_(), sim.record.row(i)["v"])
        x, y = sim.data.x[torch.from_numpy(sim.data.train[i])], sim.data.labels(i, "train")
        g = torch.autograd.grad(nn.functional.cross_entropy(task.predict(v, x), y), list(v.values()))
        assert_close({k: d + 20.0 * (v[k].detach() - w[k]) for k, d in zip(v, g)}, tree.zeros_like(w), 1e-9)
        assert_close(models(sim)[str(i)], tree.detach(v))
    moved = [tree.map(lambda a, b: a - 0.4 * (a - b), w, sim.record.row(i)["v"]) for i in range(7)]
    n = torch.tensor([len(r) for r in sim.data.train], dtype=torch.float64)
    assert_close(sim.record.server["theta"], tree.map(lambda a: torch.tensordot(n / n.sum(), a, 1), tree.stack(moved)))


@MAPPING
def test_l2gd_without_mean_steps_is_local_and_without_local_steps_never_trains(mapping: str) -> None:
    same_models(
        method_of(L2gd, p=0.0, lr=0.1, weight_decay=0.01), method_of(Local, lr=0.1, weight_decay=0.01), mapping=mapping
    )
    still = run(L2gd(p=1.0, lr=0.1), mapping=mapping)
    for theta in models(still).values():
        assert_close(theta, make_task().init(), 1e-15)


@LOOP
def test_l2gd_with_one_step_a_round_is_the_algorithm_written_out(mapping: str) -> None:
    method = L2gd(lr=0.2, lam=0.7, p=0.4, weighting="uniform")
    sim = run(method, rounds=12, participation=1.0, batch_size="full", epochs=1, mapping=mapping)
    task = make_task()
    theta = [task.init() for _ in range(7)]
    heads = 0
    for t in range(1, 13):
        mean = tree.map(lambda *a: torch.stack(a).mean(0), *theta)
        if bool(method.coins(sim.record.common["key"], torch.tensor(t), 1)):
            heads += 1
            theta = [tree.map(lambda a, m: a - 0.2 * 0.7 / 0.4 * (a - m), p, mean) for p in theta]
            continue
        for i in range(7):
            p = tree.map(lambda a: a.clone().requires_grad_(), theta[i])
            x, y = sim.data.x[torch.from_numpy(sim.data.train[i])], sim.data.labels(i, "train")
            g = torch.autograd.grad(nn.functional.cross_entropy(task.predict(p, x), y), list(p.values()))
            theta[i] = {k: (a - 0.2 / 0.6 * d).detach() for (k, a), d in zip(p.items(), g)}
    assert 0 < heads < 12
    assert_close(models(sim), {str(i): p for i, p in enumerate(theta)})


def test_l2gd_coins_fall_as_often_as_p_says_and_never_pull_beyond_the_mean() -> None:
    method = L2gd(p=0.3)
    coins = torch.stack([method.coins(torch.tensor(5), torch.tensor(t), 10) for t in range(300)])
    assert float(coins.double().mean()) == pytest.approx(0.3, abs=0.03)
    assert L2gd(lam=1e9).pull == 1.0 and L2gd(lam=0.0).pull == 0.0
    with pytest.raises(ConfigError, match="L2gd: steps must be plain SGD"):
        method_of(L2gd, momentum=0.5)
