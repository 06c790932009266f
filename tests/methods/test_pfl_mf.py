"""pFL-MF's forms against plain torch: what the public code does (one v for all, averaged), and both starts of v."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from conftest import assert_close, assert_same, finished, make_data, make_task
from fedspan import tree
from fedspan.learn.task import Task
from fedspan.method import Federation, Method
from fedspan.method.fields import keys_of
from fedspan.methods import FedAvg, PflMf, PflMfJoint, PflMfPaper
from fedspan.methods.pfl_mf import PflMfAlgorithm1, algorithm_1
from fedspan.simulation.settings import Settings, sample
from fedspan.tree import Tree

ROUNDS, RANK, LR = 3, 2, 0.05
OPTIONS: dict[str, Any] = {"rounds": ROUNDS, "batch_size": "full", "epochs": 2}


def mean(trained: list[tuple[int, Tree]]) -> Tree:
    """The mean of models, weighted by numbers of examples."""
    total = sum(n for n, _ in trained)
    sizes = [n for n, _ in trained]
    result: Tree = tree.map(lambda *a: sum(n * x.detach() for n, x in zip(sizes, a)) / total, *(p for _, p in trained))
    return result


@pytest.mark.parametrize("mapping", ["vmap", "loop"])
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_the_joint_form_is_fedper_on_u_and_v_as_the_public_code_runs_it(mapping: str, kind: str) -> None:
    """Every parameter is averaged, v included; a client has its own v from its first visit on, before that the mean."""
    method, task, data = PflMfJoint(rank=RANK, lr=LR, start="published"), make_task(kind), make_data(kind)
    sim = finished(method, kind, mapping=mapping, **OPTIONS)
    names = method.factorised(task)
    like = tree.select(task.init(), names)
    common = method.init_server(task, Federation(data.clients, 5))
    own: dict[int, Tensor] = {}

    def weights(U: Tensor, v: Tensor, theta: dict[str, Tensor]) -> dict[str, Tensor]:
        return theta | tree.unravel(U @ v, like)

    for t in range(1, ROUNDS + 1):
        ids = [int(i) for i in sample(7, Settings(participation=0.6), 5, t)]
        trained = []
        for i in ids:
            U, v = common["U"].clone().requires_grad_(), own.get(i, common["v"]).clone().requires_grad_()
            theta = {k: p.clone().requires_grad_() for k, p in common["theta"].items()}
            rows = torch.from_numpy(data.train[i])
            optimizer = torch.optim.SGD([U, v, *theta.values()], lr=LR)
            for _ in range(2):
                optimizer.zero_grad()
                output = functional_call(task.module, weights(U, v, theta), (data.x[rows],))
                torch.nn.functional.cross_entropy(output, data.labels(i)).backward()
                optimizer.step()
            own[i] = v.detach()
            trained.append((len(rows), {"U": U, "v": v, "theta": theta}))
        common = mean(trained)
    assert_close(sim.record.server, common)
    for i in range(7):
        v = own.get(i, common["v"])
        assert_close(sim.personal(i)[1], weights(common["U"], v, common["theta"]))


def test_a_client_that_was_never_sampled_has_the_mean_v() -> None:
    sim = finished(PflMfJoint(rank=RANK, lr=LR, start="published"), **{**OPTIONS, "rounds": 1})
    chosen = {int(i) for i in sample(7, Settings(participation=0.6), 5, 1)}
    server, like = sim.record.server, make_task().init()
    first = finished(PflMfJoint(rank=RANK, lr=LR, start="published"), rounds=0).record.server["v"]
    assert float((server["v"] - first).abs().max()) > 1e-3  # the mean has moved
    for i in range(7):
        row = sim.record.row(i)
        assert bool(row["trained"]) == (i in chosen)
        v = row["v"] if i in chosen else server["v"]
        assert_close(sim.personal(i)[1], tree.unravel(server["U"] @ v, like))


def test_all_clients_of_the_joint_form_start_from_one_v_and_u_within_its_bounds() -> None:
    sim = finished(PflMfJoint(rank=3, start="published"), rounds=0)
    server = sim.record.server
    for i in range(7):
        assert_same(sim.record.row(i)["v"], server["v"])
    assert float(server["U"].abs().max()) <= 3**-0.5 and float(server["U"].std()) == pytest.approx(1 / 3, rel=0.1)


@pytest.mark.parametrize("kind", ["cnn", "batchnorm"])
def test_biases_of_convolutional_networks_are_outside_u_v_and_start_from_zero(kind: str) -> None:
    method, task = PflMfJoint(rank=2), make_task(kind)
    assert method.factorised(task) == ["conv.weight", "hidden.weight", "head.weight"]
    theta = finished(method, kind, rounds=0, mapping="loop").record.server["theta"]
    assert set(theta) == {"conv.bias", "norm.weight", "norm.bias", "hidden.bias", "head.bias"}
    assert all(not p.any() for k, p in theta.items() if k.endswith("bias")) and bool((theta["norm.weight"] == 1).all())
    moved = finished(method, kind, rounds=1, mapping="loop").record.server["theta"]
    assert all(float((moved[k] - theta[k]).abs().max()) > 0 for k in theta)
    assert method.factorised(make_task()) == make_task().names  # of a perceptron all is U v


def test_the_joint_form_sends_u_v_and_what_is_outside() -> None:
    sim = finished(PflMfJoint(rank=2), "cnn", rounds=2)
    task = make_task("cnn")
    d = sum(task.init()[k].numel() for k in PflMfJoint(rank=2).factorised(task))
    rest = len(tree.ravel(task.init())) - d
    totals = sim.record.progress.totals
    assert totals["up"] == totals["down"] == 2 * 4 * 8 * ((d + 1) * 2 + rest)


@pytest.mark.parametrize("form", [PflMf, PflMfPaper, PflMfJoint, PflMfAlgorithm1])
def test_every_key_of_every_form_has_a_sentence(form: type[Method]) -> None:
    assert [name for name, found in keys_of(form).items() if not found.sentence.endswith(".")] == []


@pytest.mark.parametrize("form", [PflMf, PflMfPaper])
def test_v_starts_from_one_unit_vector_or_from_one_of_each_clients_own(form: type[PflMf] | type[PflMfPaper]) -> None:
    same, own = (finished(form(rank=3, start=s), rounds=0) for s in ("common", "random"))
    assert_same(same.record.server["U"], own.record.server["U"])
    v = torch.stack([same.record.row(i)["v"] for i in range(7)])
    assert_close(v, torch.full((7, 3), 3**-0.5, dtype=torch.float64))
    w = torch.stack([own.record.row(i)["v"] for i in range(7)])
    assert_close(w.norm(dim=1), torch.ones(7, dtype=torch.float64))
    assert float(torch.linalg.svdvals(w)[2]) > 0.1  # they point everywhere


def test_from_one_v_algorithm_1_is_one_model_for_all_until_a_v_has_moved() -> None:
    """With v frozen, one common v of length 1 makes a round FedSGD on θ = U v: only data can separate the clients."""
    common = finished(algorithm_1(rank=3, start="common", v_steps=0, lr=0.3), batch_size="full", epochs=1)
    all_models = [common.personal(i)[1] for i in range(7)]
    for model in all_models[1:]:
        assert_same(model, all_models[0])
    theta = finished(algorithm_1(rank=3, start="common"), rounds=0).personal(0)[1]

    class Begun(FedAvg):
        def init_server(self, task: Task, federation: Federation) -> Tree:
            return {"theta": theta}

    sgd = finished(Begun(lr=0.3, weighting="uniform"), batch_size="full", epochs=1)
    assert_close(all_models[0], sgd.record.server["theta"])
    assert float((tree.ravel(all_models[0]) - tree.ravel(theta)).abs().max()) > 1e-3
    moved = finished(algorithm_1(rank=3, start="common", v_steps=1, v_scale="1", lr=0.3))
    assert len({tree.digest(moved.personal(i)[1]) for i in range(7)}) > 1
