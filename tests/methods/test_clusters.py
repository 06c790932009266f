"""IFCA, FedCollab and PriSM: limiting cases and equations, in float64, to 1e-12.

* IFCA: one cluster = FedAvg with uniform weights, by models or by gradients; begun at the models of the true groups it
  is the oracle; a model nobody chose stays; with shared bodies only heads differ.
* FedCollab: the bound is the paper's; samples that count for nothing leave all alone, distances of zero bring all
  together; two blocks are found; with one coalition it is FedAvg after the rounds that measure distances.
* PriSM: triples are drawn without replacement by the powers of their singular values; each becomes the mean over who
  had it; with all of them a round of one client is a step on U and V.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from conftest import assert_close, assert_same, finished, make_data, make_task, method_of
from fedspan import tree
from fedspan.errors import ConfigError
from fedspan.learn.task import Task
from fedspan.method import Federation, Round
from fedspan.methods import FedAvg, FedCollab, Ifca, Oracle, PriSM
from fedspan.tree import Tree

STEPS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


def same(a: Any, b: Any) -> None:
    for i in range(7):
        assert_close(a.personal(i)[1], b.personal(i)[1])


# ------------------------------------------------------------------------------------------------ IFCA


def test_ifca_with_one_cluster_is_fedavg_with_uniform_weights() -> None:
    same(finished(method_of(Ifca, clusters=1, **STEPS)), finished(method_of(FedAvg, weighting="uniform", **STEPS)))


def test_ifca_by_gradients_with_one_cluster_is_fedsgd() -> None:
    once = {"epochs": 1, "batch_size": "full"}
    a = finished(Ifca(clusters=1, averaging="gradient", lr=0.3), batch_size=8)
    same(a, finished(FedAvg(weighting="uniform", lr=0.3), **once))


def test_ifca_at_the_models_of_the_groups_is_the_oracle() -> None:
    good = finished(Oracle(lr=0.3), rounds=6, participation=1.0).record.server["theta"]
    begun = lambda base: type("Begun", (base,), {
        "init_server": lambda self, task, federation: base.init_server(self, task, federation) | {"theta": good}
    })  # fmt: skip
    a = finished(method_of(begun(Ifca), clusters=2, **STEPS), rounds=2)
    same(a, finished(method_of(begun(Oracle), weighting="uniform", **STEPS), rounds=2))
    assert tree.digest(a.record.server["theta"]) != tree.digest(good)


def test_ifca_leaves_a_model_that_nobody_chose() -> None:
    class Far(Ifca):
        def init_server(self, task: Task, federation: Federation) -> Tree:
            server = super().init_server(task, federation)
            theta = tree.map(lambda a: torch.stack([a[0], a[1], 100 * a[1] + 7]), server["theta"])
            return {**server, "theta": theta}

    start = Far(clusters=3).init_server(make_task(), Federation(7, 5))["theta"]
    found = finished(Far(clusters=3, lr=0.1), rounds=1, participation=1.0).record.server["theta"]
    for k in start:
        assert_same(found[k][2], start[k][2])
    moved = [bool((found["0.weight"][j] != start["0.weight"][j]).any()) for j in (0, 1)]
    assert any(moved)


def test_ifca_with_shared_bodies_has_clusters_of_heads_only() -> None:
    task = make_task()
    theta = finished(Ifca(clusters=3, clustered="head", lr=0.3), participation=1.0).record.server["theta"]
    for k in task.body:
        assert_same(theta[k][0], theta[k][2])
    assert not torch.equal(theta[task.head[0]][0], theta[task.head[0]][1])


# ------------------------------------------------------------------------------------------------ FedCollab


def test_fedcollab_bound_is_the_papers() -> None:
    rng = np.random.default_rng(0)
    d = rng.random((4, 4))
    d = np.triu(d, 1) + np.triu(d, 1).T
    n, coalition, C = np.array([20.0, 30, 15, 35]), np.array([0, 0, 1, 1]), 3.0
    m, beta = n.sum(), n / n.sum()
    total = 0.0
    for i in range(4):
        alpha = np.where(coalition == coalition[i], beta, 0)
        alpha = alpha / alpha.sum()
        total += C * np.sqrt((alpha**2 / beta).sum() / m) + (alpha * d[i]).sum()
    method = FedCollab(weight_of_samples=C)
    assert method.bound(torch.tensor(d), torch.tensor(n), torch.tensor(coalition)) == pytest.approx(
        total / 4, abs=1e-12
    )


def test_fedcollab_coalitions_follow_distances_and_quantities() -> None:
    n = torch.tensor([20.0, 30, 15, 35, 25, 0]).double()
    blocks = torch.tensor([0, 1, 0, 1, 0, 1])
    d = (blocks[:, None] != blocks).double() * 0.9
    found = FedCollab(weight_of_samples=1.0).coalitions(d, n)
    assert len(set(found[[0, 2, 4]].tolist())) == 1 and len(set(found[[1, 3]].tolist())) == 1
    assert found[0] != found[1] and found[5] not in found[:5]  # the last was never heard
    alone = FedCollab(weight_of_samples=0.0).coalitions(d + 0.01 - 0.01 * torch.eye(6).double(), n)
    assert len(set(alone.tolist())) == 6
    together = FedCollab(weight_of_samples=1.0).coalitions(0 * d, n)
    assert len(set(together[:5].tolist())) == 1


def test_fedcollab_with_one_coalition_is_fedavg_once_it_is_settled() -> None:
    class Late(FedAvg):
        def server_update(self, server: Tree, round: Round) -> Tree:
            return server if round.round <= 2 else super().server_update(server, round)

    method = method_of(
        FedCollab, distance_rounds=2, distance_hidden=3, weight_of_samples=1e6, private_head=False, **STEPS
    )
    sim = finished(method, rounds=4, participation=1.0)
    assert int(sim.record.server["coalition"].max()) == 0 and bool(sim.record.server["settled"])
    same(sim, finished(method_of(Late, **STEPS), rounds=4, participation=1.0))
    d = sim.record.server["d"]
    assert torch.equal(d, d.T) and float(d.min()) >= 0 and float(d.max()) <= 1 and not d.diagonal().any()


def test_fedcollab_trains_each_pair_by_averaging_the_two() -> None:
    method = FedCollab(distance_rounds=3, distance_hidden=3)
    one = finished(method, rounds=1, participation=1.0)
    x = one.record.server["D"]["x"]
    assert x.shape == (21, 5, 3)
    seen: list[Tree] = []

    class Sees(FedCollab):
        def server_update(self, server: Tree, round: Round) -> Tree:
            seen.append(round.each)
            return super().server_update(server, round)

    finished(Sees(distance_rounds=3, distance_hidden=3), rounds=1, participation=1.0)
    sent = seen[0]["D"]["x"]  # [client, other, ...]
    k = 0
    for i in range(7):
        for j in range(i + 1, 7):
            assert_close(x[k], (sent[i, j - 1] + sent[j, i]) / 2)
            k += 1


def test_fedcollab_refuses_crowds() -> None:
    with pytest.raises(ConfigError, match="at most 50 clients"):
        FedCollab().init_server(make_task(), Federation(51, 0))


# ------------------------------------------------------------------------------------------------ PriSM


def test_prism_draws_triples_by_powers_of_their_singular_values() -> None:
    task = PriSM().model(make_task(), None)
    for kappa in (0.0, 2.0):
        method = PriSM(keep=0.01, kappa=kappa, layers=("0",))
        server = method.init_server(method.model(make_task(), None), Federation(7, 5))
        sigma = next(iter(server["sigma"].values()))
        counts = torch.zeros(len(sigma))
        for t in range(600):
            (at,) = method.chosen(server, 3, None, t).values()
            assert len(at) == 1
            counts[at] += 1
        p = sigma**kappa / (sigma**kappa).sum()
        assert float((counts / 600 - p).abs().max()) < 0.08
    some = PriSM(keep=0.5).chosen(PriSM().init_server(task, Federation(7, 5)), 0, None, 1)
    assert all(len(set(a.tolist())) == len(a) for a in some.values())


def test_prism_with_all_triples_steps_on_both_factors() -> None:
    data, lr = make_data(clients=1), 0.2
    method = PriSM(keep=1.0, lr=lr)
    once = {"rounds": 1, "epochs": 1, "batch_size": "full", "participation": 1.0}
    sim = finished(method, data=data, **once)
    task = method.model(make_task(), None)
    server = method.init_server(task, Federation(1, 5))
    start = {**server["theta"], **server["U"], **server["V"]}
    rows = torch.from_numpy(data.train[0])

    def loss(p: Any, _: Any) -> Any:
        return torch.nn.functional.cross_entropy(task.predict(p, data.x[rows]), data.labels(0))

    g = torch.func.grad(lambda p: loss(p, None))(start)
    new = {k: p - lr * g[k] for k, p in start.items()}
    found = sim.record.server
    for k in ("0.", "2."):
        assert_close(found["U"][k + "U"] @ found["V"][k + "V"].T, new[k + "U"] @ new[k + "V"].T)
        assert_close(found["sigma"][k], torch.linalg.svdvals(new[k + "U"] @ new[k + "V"].T))
    assert_close(found["theta"], {k: new[k] for k in found["theta"]})


def test_prism_averages_a_triple_over_who_had_it() -> None:
    method = PriSM(keep=(0.4, 0.8), lr=0.1)
    task = method.model(make_task(), 0.4)
    server = method.init_server(task, Federation(2, 5))
    sent = []
    for i, c in ((0, 0.4), (1, 0.8)):
        down = method.download(server, torch.tensor([i]), c, 1)
        up = tree.map(lambda a, i=i: a if a.dtype == torch.int32 else a + i + 1, tree.take(down.own, 0))
        sent.append(method.lift({"theta": server["theta"], **up}, down.shared, c))
    mean = tree.map(lambda a, b: (a + b) / 2, *sent)
    empty = torch.zeros(0)
    after = method.server_update(server, Round(1, torch.tensor([0, 1]), empty, empty, mean, {}, empty))
    at = [method.chosen(server, i, c, 1) for i, c in ((0, 0.4), (1, 0.8))]
    for k in server["sigma"]:
        U, V = server["U"][k + "U"].clone(), server["V"][k + "V"].clone()
        for j in range(U.shape[1]):
            had = [i + 1.0 for i in (0, 1) if j in at[i][k].tolist()]
            if had:
                U[:, j] += sum(had) / len(had)
                V[:, j] += sum(had) / len(had)
        assert_close(after["U"][k + "U"] @ after["V"][k + "V"].T, U @ V.T)


@pytest.mark.parametrize(
    ("cls", "fields", "message"),
    [
        (PriSM, {"keep": 0.0}, "keep must be a number in (0, 1] or a list of "),
        (PriSM, {"keep": (0.5, 1.5)}, "in (0, 1]. Got "),
        (PriSM, {"kappa": -1.0}, "kappa must be a finite number >= 0"),
        (PriSM, {"server_optimizer": "adam"}, "server_optimizer must be 'none', as the triples are others"),
        (Ifca, {"clusters": 0}, "clusters must be an integer >= 1. Got 0"),
        (Ifca, {"averaging": "both"}, "averaging must be one of 'model', 'gradient'"),
        (FedCollab, {"distance_rounds": 1}, "distance_rounds must be an integer >= 2. Got 1"),
        (FedCollab, {"weight_of_samples": -1.0}, "weight_of_samples must be a finite number >= 0"),
    ],
)
def test_bad_fields_are_refused(cls: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as e:
        method_of(cls, **fields)
    assert message in str(e.value) and "\n" not in str(e.value)
