"""FedProto and FedTGP: limiting cases and equations, in float64, to 1e-12.

* lam = 0: both are Local; the term is the mean squared distance to the class's prototype, only where there is one.
* Prototypes are class means after training; the server's are their means over those who have the class.
* FedTGP: the margin is the largest distance of a class to its nearest; the generator pulls its rows to the uploads and
  apart; rows of classes nobody sent are not used.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_limits import MAPPING, STEPS, run, same_models
from torch import Tensor, nn

from conftest import assert_close, make_data, make_task, method_of
from fedspan import tree
from fedspan.data.federated import FederatedData
from fedspan.errors import ConfigError
from fedspan.learn.task import Task
from fedspan.method import Federation, Round
from fedspan.methods import FedProto, FedTgp, Local
from fedspan.tree import Tree
from fedspan.wire import Direction

# Equations are checked one client after another; that mapped clients do the same is checked for every method.
LOOP = pytest.mark.parametrize("mapping", ["loop"])


def features(task: Task, theta: Tree, x: Tensor) -> Tensor:
    """The head's input, by the layers themselves."""
    return task.module_with(theta)[:-1](x).detach()  # type: ignore[index]


def examples(data: FederatedData, i: int) -> tuple[Tensor, Tensor]:
    return data.x[torch.from_numpy(data.train[i])], data.labels(i, "train")


def without_class(c: int) -> FederatedData:
    """Client 0 has no example of class c, client 1 has only that one."""
    data = make_data()
    train = list(data.train)
    train[0] = train[0][(data.labels(0, "train") != c).numpy()]
    train[1] = train[1][(data.labels(1, "train") == c).numpy()]
    return replace(data, train=train)


@MAPPING
@pytest.mark.parametrize("kind", [FedProto, FedTgp])
def test_without_their_term_they_are_local(mapping: str, kind: Any) -> None:
    extra = {"server_epochs": 1} if kind is FedTgp else {}
    same_models(method_of(kind, lam=0.0, **extra, **STEPS), method_of(Local, **STEPS), mapping=mapping)


@LOOP
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_global_prototypes_are_means_over_those_who_have_the_class(mapping: str, weighting: Any) -> None:
    data = without_class(2)
    sim = run(FedProto(lr=0.1, weighting=weighting), data, rounds=1, participation=1.0, mapping=mapping)
    task = make_task()
    total, weight = torch.zeros(3, 6, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for i in range(7):
        x, y = examples(data, i)
        f = features(task, sim.record.row(i)["theta"], x)
        for c in set(y.tolist()):
            n = float((y == c).sum()) if weighting == "samples" else 1.0
            total[c] += n * f[y == c].mean(0)
            weight[c] += n
    assert_close(sim.record.server["p"], total / weight[:, None])


@LOOP
def test_the_term_pulls_features_to_prototypes_that_exist(mapping: str) -> None:
    data = without_class(2)
    p = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    p[1] = 0  # nobody has reported class 1

    class Told(FedProto):
        def init_server(self, task: Task, federation: Federation) -> Tree:
            return {"p": p}

    options = {"rounds": 1, "participation": 1.0, "mapping": mapping, "batch_size": "full", "epochs": 1}
    sim = run(Told(lr=0.1, lam=2.0), data, **options)
    for i in (0, 1, 4):
        task, (x, y) = make_task(), examples(data, i)
        theta = tree.map(lambda a: a.requires_grad_(), task.init())
        f = torch.func.functional_call(task.module[:-1], tree.select(theta, task.body), (x,))  # type: ignore[index]
        loss = nn.functional.cross_entropy(f @ theta["4.weight"].T + theta["4.bias"], y)
        loss = loss + 2.0 * ((f - p[y]).square().mean(1) * (y != 1)).mean()
        grads = torch.autograd.grad(loss, list(theta.values()))
        assert_close(sim.record.row(i)["theta"], {k: (a - 0.1 * g).detach() for (k, a), g in zip(theta.items(), grads)})


def test_a_class_nobody_has_gets_no_prototype_and_one_not_reported_keeps_it() -> None:
    data = make_data()
    train = [rows[(data.labels(i, "train") != 2).numpy()] for i, rows in enumerate(data.train)]
    sim = run(FedProto(lr=0.1), replace(data, train=train))
    assert not sim.record.server["p"][2].any() and sim.record.server["p"][:2].any(1).all()
    kept = FedProto().server_update(
        {"p": torch.ones(2, 3)}, report(mean={"p": torch.zeros(2, 3)}, totals={"p": torch.zeros(2)})
    )
    assert torch.equal(kept["p"], torch.ones(2, 3))


def report(**parts: Tree) -> Round:
    ids = torch.arange(2)
    return Round(
        1, ids, torch.ones(2), torch.ones(2), parts.get("mean", {}), parts.get("each", {}), ids[:0],
        parts.get("totals", {}),
    )  # fmt: skip


@LOOP
def test_the_nearest_prototype_decides_where_asked_and_the_head_until_there_are_any(mapping: str) -> None:
    method = FedProto(lr=0.1, predict_by="prototype")
    start, sim = run(method, rounds=0, mapping=mapping), run(method, rounds=3, mapping=mapping)
    task = make_task()
    x = sim.data.x[:40]
    assert_close(method.predict(task, start.personal(2)[1], x), task.predict(task.init(), x))
    theta, p = sim.record.row(2)["theta"], sim.record.server["p"]
    nearest = torch.cdist(features(task, theta, x), p).argmin(1)
    assert torch.equal(method.predict(task, sim.personal(2)[1], x).argmax(1), nearest)
    p = p.clone()
    p[1] = 0
    out = method.predict(task, {"theta": theta, "p": p}, x)
    assert torch.isfinite(out).all() and 1 not in out.argmax(1)


def test_bytes_up_are_those_of_the_classes_a_client_has() -> None:
    data = without_class(2)
    sim = run(FedProto(lr=0.1), data, rounds=1, participation=1.0)
    held = sum(len(set(data.labels(i, "train").tolist())) for i in range(7))
    assert sim.record.progress.bytes.by_name(Direction.UP)["p"] == held * 6 * 8 + 7  # and one byte of flags each
    assert sim.record.progress.bytes.by_name(Direction.UP)["p weights"] == 7 * 3 * 8
    assert sim.record.progress.bytes.by_name(Direction.DOWN)["p"] == 7


def test_fedtgp_margin_is_the_largest_distance_to_the_nearest_class() -> None:
    P = torch.tensor([[0.0, 0.0], [2.0, 0.0], [1.0, 3.0], [10.0, 0.0]])
    y = torch.tensor([0, 0, 1, 2])
    assert FedTgp().margin(P, y) == pytest.approx(9.0)  # means (1, 0), (1, 3), (10, 0): nearest 3, 3, 9
    assert FedTgp(tau=4.0).margin(P, y) == 4.0
    assert FedTgp().margin(P[:2], y[:2]) == 0.0


def test_fedtgp_trains_its_generator_and_hides_what_was_never_trained() -> None:
    method, task = FedTgp(lr_server=0.05, server_epochs=200, tau=2.0), make_task()
    server = method.init_server(task, Federation(2, 0))
    rng = np.random.default_rng(0)
    p = torch.tensor(rng.normal(size=(2, 3, 6)))
    n = torch.tensor([[3.0, 1.0, 0.0], [2.0, 0.0, 0.0]], dtype=torch.float64)
    p = p * (n > 0)[:, :, None]
    new = method.server_update(server, report(each={"p": p, "n": n}))
    G = method.generate(new["g"])
    assert_close(new["p"][:2], G[:2])
    assert not new["p"][2].any() and G[2].any()

    def loss(g: Tree) -> float:
        G, total = method.generate(g), []
        for k, c in ((0, 0), (0, 1), (1, 0)):
            far = (p[k, c] - G).norm(dim=1)
            far[c] = far[c] + method.margin(torch.stack([p[0, 0], p[1, 0], p[0, 1]]), torch.tensor([0, 0, 1]))
            total.append(float(nn.functional.cross_entropy(-far[None], torch.tensor([c]))))
        return float(np.mean(total))

    assert loss(new["g"]) < 0.6 * loss(server["g"])
    again = method.server_update(server, report(each={"p": p, "n": n}))
    assert tree.digest(again) == tree.digest(new)


def test_fedtgp_generator_takes_the_gradient_step_of_its_loss() -> None:
    method, task = FedTgp(lr_server=0.1, server_epochs=1, server_batch=9, tau=0.5), make_task()
    server = method.init_server(task, Federation(2, 0))
    p = torch.tensor(np.random.default_rng(1).normal(size=(1, 3, 6)))
    new = method.server_update(server, report(each={"p": p, "n": torch.ones(1, 3, dtype=torch.float64)}))
    g = tree.map(lambda a: a.clone().requires_grad_(), server["g"])
    hidden = (g["e.weight"] @ g["1.weight"].T + g["1.bias"]).relu()
    far = torch.cdist(p[0], hidden @ g["2.weight"].T + g["2.bias"])
    loss = nn.functional.cross_entropy(-(far + 0.5 * torch.eye(3)), torch.arange(3))
    grads = torch.autograd.grad(loss, list(g.values()))
    assert_close(new["g"], {k: (a - 0.1 * d).detach() for (k, a), d in zip(g.items(), grads)})
    same = method.server_update(server, report(each={"p": server["p"][None] + 1, "n": torch.ones(1, 3)}))
    assert tree.all_finite(same)  # identical prototypes: distances of zero have no slope


def test_prototypes_need_classes() -> None:
    task = Task(nn.Linear(4, 1), "regression")
    with pytest.raises(ConfigError, match=r"FedProto: the model must be a classifier .* Got a regression task"):
        FedProto().init_server(task, Federation(2, 0))
