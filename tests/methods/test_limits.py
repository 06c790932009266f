"""Limiting cases: what a method becomes at the edge of its parameters, in float64, to 1e-12.

* FedProx mu=0 = FedAvg; mu large holds theta at the solution of grad f + mu (theta - start) = 0.
* FedAvg with fine-tuning or a fitted head of no epochs = FedAvg, bit for bit; with the run's epochs = a model trained
  once more; a large l2 holds it at the model received; with a head that is all of the model both are one.
* FedPer without a private head = FedAvg; with all layers personal = Local; = FedAvg with private_head.
* LG-FedAvg shares exactly what FedPer keeps; told the same layers, the two are one method.
* FedRep without head epochs = FedBABU without fine-tuning; FedBABU's head never moves and then all share one model.
* Ditto lam=0: v = Local, step for step; theta = FedAvg whatever lam; lam large holds v near the model sent.
* FedAvg with one client = Local; E=1, full batch, full participation = gradient descent on the pooled loss.
* Oracle with one group = FedAvg; with every client its own group = Local.
* pFL-MF: the paper's form without options is Algorithm 1 bit for bit; r=1, v=1 frozen = FedSGD, uniform weights; r=n,
  V=I frozen = Local with step lr/|S|; U=I frozen = Local; (U, v) and (UQ, Q'v) give the same models; the models have
  rank <= r; rank-one wire = full wire; G and the v-step are the gradients of psi = (1/n) sum f_i(U v_i), 1/n included.
  Scaled server step, no ridge, v frozen: r=1, v=1 is FedAvg, one-hot v is FedAvg inside clusters, V=I is Local, any
  change of gauge changes nothing; with ridge and with v solved only the last.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from conftest import assert_close, assert_same, finished, make_data, make_task, method_of
from fedspan import tree
from fedspan.data.federated import FederatedData
from fedspan.errors import ConfigError
from fedspan.learn.task import Task
from fedspan.method import ClientInfo, Federation, Method
from fedspan.methods import (
    Ditto,
    FedAvg,
    FedAvgFineTuned,
    FedAvgHead,
    FedBabu,
    FedPer,
    FedProx,
    FedRep,
    LgFedAvg,
    Local,
    Oracle,
    PflMf,
    PflMfJoint,
    PflMfPaper,
)
from fedspan.methods.pfl_mf import ALGORITHM_1, PflMfAlgorithm1, algorithm_1
from fedspan.simulation.settings import Settings, sample
from fedspan.simulation.simulator import Simulation
from fedspan.tree import Tree

pytestmark = pytest.mark.slow  # seconds together: make test has them

STEPS = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
# One mapping is enough: that both give the same is in the common table, for every method.
MAPPING = pytest.mark.parametrize("mapping", ["loop"])


def run(method: Method, data: FederatedData | None = None, rounds: int = 3, **settings: Any) -> Simulation:
    """A finished run on seven ragged clients, four of them in each round."""
    chosen = {"participation": 0.6, "batch_size": 8, "epochs": 2, "workers": 1, "precision": "float64"} | settings
    sim = Simulation(
        method, make_task(), data or make_data(), rounds=rounds, seed=5, settings=Settings(evaluate_every=100, **chosen)
    )
    sim.run()
    return sim


def models(sim: Simulation) -> Tree:
    """What every client predicts with."""
    return {str(i): sim.personal(i)[1] for i in range(sim.data.clients)}


def same_models(a: Method, b: Method, data: FederatedData | None = None, **settings: Any) -> None:
    """Both methods give every client the same weights, and not those of the start."""
    x, y = models(run(a, data, **settings)), models(run(b, data, **settings))
    assert_close(x, y)
    start = make_task().init()
    assert any(float((tree.ravel(theta) - tree.ravel(start)).norm()) > 1e-3 for theta in x.values())


def pooled_loss(task: Task, theta: dict[str, Tensor], data: FederatedData, client: int) -> Tensor:
    """Mean cross-entropy of one client's training examples, by the module itself."""
    rows = torch.from_numpy(data.train[client])
    return torch.nn.functional.cross_entropy(functional_call(task.module, theta, (data.x[rows],)), data.labels(client))


# ------------------------------------------------------------------------------------------------ one shared model


@MAPPING
def test_fedprox_without_its_term_is_fedavg(mapping: str) -> None:
    same_models(method_of(FedProx, mu=0.0, **STEPS), method_of(FedAvg, **STEPS), mapping=mapping)


@MAPPING
def test_fedprox_with_a_large_mu_stays_where_its_term_balances_the_loss(mapping: str) -> None:
    data = make_data(clients=1)
    mu, lr = 99.0, 0.01  # lr * mu < 1
    sim = run(FedProx(mu=mu, lr=lr), data, rounds=1, epochs=30, batch_size="full", participation=1.0, mapping=mapping)
    task, start = make_task(), make_task().init()
    theta = sim.record.server["theta"]
    at = tree.map(lambda a: a.clone().requires_grad_(), theta)
    g = dict(zip(at, torch.autograd.grad(pooled_loss(task, at, sim.data, 0), list(at.values()))))
    assert_close(tree.add(tree.map(lambda a: mu * a, tree.sub(theta, start)), g), tree.zeros_like(theta), 1e-10)
    free = run(FedAvg(lr=lr), data, rounds=1, epochs=30, batch_size="full", participation=1.0)
    moved = tree.ravel(tree.sub(theta, start)).norm()
    assert 0 < moved < 0.1 * tree.ravel(tree.sub(free.record.server["theta"], start)).norm()


def test_the_first_proximal_step_is_fedavgs() -> None:
    once = {"epochs": 1, "batch_size": "full", "rounds": 1}
    same_models(FedProx(mu=5.0, lr=0.3), FedAvg(lr=0.3), **once)


@MAPPING
def test_fedavg_with_one_client_is_local(mapping: str) -> None:
    same_models(method_of(FedAvg, **STEPS), method_of(Local, **STEPS), make_data(clients=1), mapping=mapping)


@MAPPING
def test_fedavg_with_full_batches_is_gradient_descent_on_the_pooled_loss(mapping: str) -> None:
    lr, rounds = 0.3, 4
    sim = run(FedAvg(lr=lr), rounds=rounds, epochs=1, batch_size="full", participation=1.0, mapping=mapping)
    task, data = make_task(), sim.data
    theta = {k: p.requires_grad_() for k, p in task.init().items()}
    rows = torch.cat([torch.from_numpy(i) for i in data.train])
    for _ in range(rounds):
        loss = torch.nn.functional.cross_entropy(functional_call(task.module, theta, (data.x[rows],)), data.y[rows])
        grads = torch.autograd.grad(loss, list(theta.values()))
        theta = {k: (p - lr * g).detach().requires_grad_() for (k, p), g in zip(theta.items(), grads)}
    assert_close(sim.record.server["theta"], tree.detach(theta))


def test_uniform_weights_are_the_mean_over_clients_and_differ_from_samples() -> None:
    options = {"rounds": 1, "epochs": 1, "batch_size": "full", "participation": 1.0}
    sim = run(FedAvg(lr=0.3, weighting="uniform"), **options)
    alone = run(Local(lr=0.3), **options)
    assert_close(sim.record.server["theta"], tree.map(lambda *a: sum(a) / len(a), *models(alone).values()))
    other = run(FedAvg(lr=0.3), **options).record.server["theta"]
    assert float((tree.ravel(other) - tree.ravel(sim.record.server["theta"])).abs().max()) > 1e-4


@MAPPING
def test_oracle_with_one_group_is_fedavg(mapping: str) -> None:
    data = make_data()
    same_models(
        method_of(Oracle, **STEPS), method_of(FedAvg, **STEPS), replace(data, groups=torch.zeros(7)), mapping=mapping
    )


@MAPPING
def test_oracle_with_every_client_its_own_group_is_local(mapping: str) -> None:
    data = make_data()
    same_models(
        method_of(Oracle, **STEPS), method_of(Local, **STEPS), replace(data, groups=torch.arange(7)), mapping=mapping
    )


def test_oracle_is_fedavg_inside_each_group() -> None:
    data, options = make_data(), {"participation": 1.0}
    found = models(run(method_of(Oracle, **STEPS), data, **options))
    for g in (0, 1):
        mine = [i for i in range(7) if i % 2 == g]

        class Inside(FedAvg):
            """FedAvg that hears one group only: the others have weight (almost) nothing."""

            def server_update(self, server: Tree, round: Any) -> Tree:
                keep = torch.tensor([int(i) in mine for i in round.ids])  # noqa: B023
                w = round.n * keep
                return {"theta": tree.map(lambda a: torch.tensordot(w / w.sum(), a, 1), round.each["theta"])}

            def client_update(self, *args: Any) -> Any:
                client, sent = super().client_update(*args)
                return client, sent._replace(mean={}, each=sent.mean)

        theta = run(method_of(Inside, **STEPS), data, **options).record.server["theta"]
        for i in mine:
            assert_close(found[str(i)], theta)


# ------------------------------------------------------------------------------------------------ shared and private


@MAPPING
def test_fedper_without_a_head_is_fedavg(mapping: str) -> None:
    for weighting in ("samples", "uniform"):
        a, b = (
            method_of(FedPer, private_head=False, weighting=weighting, **STEPS),
            method_of(FedAvg, weighting=weighting, **STEPS),
        )
        same_models(a, b, mapping=mapping)


@MAPPING
def test_fedper_with_all_layers_personal_is_local(mapping: str) -> None:
    every = method_of(FedPer, personal_layers=("0", "2", "4"), **STEPS)
    assert every.private(make_task()) == make_task().names
    same_models(every, method_of(Local, **STEPS), mapping=mapping)


@MAPPING
def test_fedper_is_fedavg_with_a_private_head(mapping: str) -> None:
    same_models(method_of(FedPer, **STEPS), method_of(FedAvg, private_head=True, **STEPS), mapping=mapping)


def test_lg_fedavg_shares_what_fedper_keeps() -> None:
    task = make_task()
    kept, shared = set(FedPer().private(task)), set(LgFedAvg().private(task))
    assert kept | shared == set(task.names) and not kept & shared and kept and shared
    bytes_up = [run(m, rounds=1).record.progress.totals["up"] for m in (FedPer(), LgFedAvg(), FedAvg())]
    assert bytes_up[0] + bytes_up[1] == bytes_up[2] and bytes_up[0] != bytes_up[1]
    sim = run(LgFedAvg())
    assert sorted(sim.record.server["theta"]) == sorted(task.head)


@pytest.mark.parametrize("layers", [("0",), ("0", "2"), ("4.weight",)])
def test_lg_fedavg_and_fedper_with_the_same_layers_are_one_method(layers: tuple[str, ...]) -> None:
    same_models(
        method_of(LgFedAvg, personal_layers=layers, **STEPS), method_of(FedPer, personal_layers=layers, **STEPS)
    )


def test_lg_fedavg_and_fedper_meet_at_both_ends() -> None:
    same_models(method_of(LgFedAvg, personal_layers=("0", "2"), **STEPS), method_of(LgFedAvg, **STEPS))
    same_models(method_of(LgFedAvg, personal_layers=("0", "2", "4"), **STEPS), method_of(Local, **STEPS))


@MAPPING
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_fedrep_without_head_epochs_is_fedbabu_without_tuning(mapping: str, weighting: Any) -> None:
    same_models(
        method_of(FedRep, head_epochs=0, weighting=weighting, **STEPS),
        method_of(FedBabu, finetune_epochs=0, weighting=weighting, **STEPS),
        mapping=mapping,
    )


def test_fedrep_without_body_epochs_leaves_the_body_alone() -> None:
    sim = run(method_of(FedRep, head_epochs=2, body_epochs=0, **STEPS), participation=1.0)
    assert_close(sim.record.server["theta"], tree.select(make_task().init(), make_task().body), 1e-15)
    heads = [sim.record.row(i)["h"] for i in range(7)]
    assert len({tree.digest(h) for h in heads}) == 7


@MAPPING
def test_fedbabus_head_never_moves(mapping: str) -> None:
    task = make_task()
    head = tree.select(task.init(), task.head)
    for rounds in (1, 2, 3):
        sim = run(method_of(FedBabu, finetune_epochs=0, **STEPS), rounds=rounds, mapping=mapping)
        for i in range(7):
            assert_same(sim.record.row(i)["h"], head)
        whole = models(sim)
        for i in range(7):
            assert_same(whole[str(i)], whole["0"])
        assert_same(tree.select(whole["0"], task.head), head)
        assert tree.digest(tree.select(whole["0"], task.body)) != tree.digest(tree.select(task.init(), task.body))


@pytest.mark.parametrize("part", ["all", "head", "body"])
def test_fedbabu_tunes_only_what_it_says_and_throws_it_away(part: Any) -> None:
    task = make_task()
    sim = run(method_of(FedBabu, finetune=part, finetune_epochs=2, **STEPS))
    plain = run(method_of(FedBabu, finetune_epochs=0, **STEPS))
    assert sim.record.digest() == plain.record.digest()
    moved = {k for k in task.names if not torch.equal(models(sim)["0"][k], models(plain)["0"][k])}
    assert moved == set({"all": task.names, "head": task.head, "body": task.body}[part])


# ------------------------------------------------------------------------------------------------ FedAvg, fitted


CONTROLS = pytest.mark.parametrize("control", [FedAvgFineTuned, FedAvgHead])


@MAPPING
@CONTROLS
def test_fedavg_that_is_not_fitted_is_fedavg_bit_for_bit(control: type[Method], mapping: str) -> None:
    a = run(method_of(control, finetune_epochs=0, lr_finetune=5.0, l2=0.3, **STEPS), mapping=mapping)
    b = run(method_of(FedAvg, **STEPS), mapping=mapping)
    assert a.record.digest() == b.record.digest()
    assert_same(models(a), models(b))


@pytest.mark.parametrize("mapping", ["vmap", "loop"])
def test_fine_tuning_is_one_more_local_round(mapping: str) -> None:
    """The predictor is what FedAvg's client would send if it trained once more on the same minibatches."""
    sim = run(method_of(FedAvgFineTuned, finetune_epochs=None, **STEPS), mapping=mapping)
    plain = run(method_of(FedAvg, **STEPS), mapping="loop")
    assert_close(sim.record.server, plain.record.server)
    found = models(sim)
    for i in range(7):
        visit = plain.engine._visit(i, 3, plain.method.plan(), {})[0]
        _, sent = plain.method.client_update(make_task(), {"h": {}}, plain.record.server, visit)
        assert_close(found[str(i)], sent.mean["theta"])


def test_a_head_that_is_all_of_the_model_is_fine_tuning() -> None:
    """A linear model is nothing but its head."""
    linear = Task(nn.Linear(5, 3), dtype=torch.float64)
    sims = [finished(method_of(c, l2=0.1, **STEPS), task=linear) for c in (FedAvgHead, FedAvgFineTuned)]
    assert set(linear.head) == set(linear.names)
    assert_same(*(models(sim) for sim in sims))


@CONTROLS
def test_a_fit_moves_what_it_says_and_is_thrown_away(control: type[Method]) -> None:
    task = make_task()
    sim, plain = run(method_of(control, **STEPS)), run(method_of(FedAvg, **STEPS))
    assert sim.record.digest() == plain.record.digest()
    moved = {k for k in task.names if not torch.equal(models(sim)["0"][k], models(plain)["0"][k])}
    assert moved == set(task.names if control is FedAvgFineTuned else task.head)


@CONTROLS
def test_a_large_l2_holds_a_fit_at_the_model_received(control: type[Method]) -> None:
    def distance(l2: float) -> float:
        sim = run(method_of(control, lr=0.1, lr_finetune=0.5 / max(l2, 1), l2=l2, finetune_epochs=20))
        gaps = [tree.sub(m, sim.record.server["theta"]) for m in models(sim).values()]
        return max(float(tree.ravel(g).norm()) for g in gaps)

    assert distance(1e4) < 1e-3 < 0.05 < distance(0.0)


# ------------------------------------------------------------------------------------------------ Ditto


@MAPPING
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_ditto_without_its_term_is_local_at_every_round(mapping: str, rounds: int) -> None:
    same_models(
        method_of(Ditto, lam=0.0, personal_epochs=2, **STEPS), method_of(Local, **STEPS), mapping=mapping, rounds=rounds
    )


@pytest.mark.parametrize("lam", [0.0, 0.7, 5.0])
def test_dittos_global_model_is_fedavg_whatever_lambda(lam: float) -> None:
    a = run(method_of(Ditto, lam=lam, lr_personal=0.01, **STEPS)).record.server
    assert_close(a, run(method_of(FedAvg, **STEPS)).record.server)


def test_ditto_with_a_large_lambda_stays_near_the_model_it_was_sent() -> None:
    lam, lr = 99.0, 0.01
    sim = run(Ditto(lam=lam, lr=lr, personal_epochs=30), rounds=1, batch_size="full", participation=1.0)
    task, w = make_task(), make_task().init()
    for i in range(7):
        v = tree.map(lambda a: a.clone().requires_grad_(), sim.record.row(i)["v"])
        g = dict(zip(v, torch.autograd.grad(pooled_loss(task, v, sim.data, i), list(v.values()))))
        assert_close(tree.add(tree.map(lambda a: lam * a, tree.sub(tree.detach(v), w)), g), tree.zeros_like(w), 1e-10)


# ------------------------------------------------------------------------------------------------ pFL-MF


Start = Callable[[Task, int], Tensor]


def starting(base: type[Method], U: Callable[[Task], Tensor], v: Start, **fields: Any) -> Method:
    """pFL-MF with a start of our own; Algorithm 1 with the v-step of its text, not scaled by 1/n, and K = 5."""

    class Started(base):  # type: ignore[misc, valid-type]
        def init_server(self, task: Task, federation: Federation) -> Tree:
            start = super().init_server(task, federation)
            return {**start, "U": U(task), "C": torch.eye(U(task).shape[1], dtype=torch.float64)}

        def init_client(self, task: Task, who: ClientInfo) -> Tree:
            return {"v": v(task, who.id), "stats": {}}

    usual = ALGORITHM_1 | {"v_scale": "1", "v_steps": 5} if base is PflMfPaper else {}
    method: Method = method_of(Started, **(usual | fields))
    return method


def scaled(U: Callable[[Task], Tensor], V: Tensor, **fields: Any) -> Method:
    """The scaled server step without its ridge, all parameters factorised and v frozen, unless told otherwise."""
    frozen = {"factorise": "all", "v_steps": 0, "v_prior": 0.0, "ridge": 0.0, "max_step": None, "rank": V.shape[1]}
    return starting(PflMf, U, lambda _, i: V[i], **(frozen | fields))


def columns(task: Task, count: int, names: list[str] | None = None) -> Tensor:
    """Independent initialisations, one per column."""
    fresh = [task.fresh("U", j) for j in range(count)]
    return torch.stack([tree.ravel(tree.select(c, names) if names else c) for c in fresh], 1)


@pytest.mark.parametrize("mapping", ["vmap", "loop"])
@pytest.mark.parametrize("fields", [{"lr": 0.1}, {"rank": 3, "v_steps": 4, "lr": 0.3, "weighting": "samples"}])
def test_pfl_mf_paper_as_printed_is_algorithm_1_bit_for_bit(mapping: str, fields: dict[str, Any]) -> None:
    """The file to be read beside the paper, and what `pfl-mf-paper` runs, are one method."""
    a, b = (run(method, mapping=mapping) for method in (PflMfAlgorithm1(**fields), algorithm_1(**fields)))
    assert_same(a.record.server["U"], b.record.server["U"])
    assert_same(models(a), models(b))
    assert a.record.progress.totals["up"] == b.record.progress.totals["up"]
    start = run(method_of(PflMfAlgorithm1, **fields), rounds=0)
    assert float((a.record.server["U"] - start.record.server["U"]).abs().max()) > 1e-4
    moved = [float((a.record.row(i)["v"] - start.record.row(i)["v"]).norm()) for i in range(7)]
    assert max(moved) > 1e-5


FOREIGN = [
    (PflMf, {"u_update": "joint"}),
    (PflMf, {"g_at": "old"}),
    (PflMf, {"v_scale": "1/n"}),
    (PflMf, {"p": 0.1}),
    (PflMfPaper, {"refresh": True}),
    (PflMfPaper, {"ridge": 0.1}),
    (PflMfPaper, {"rank_start": 20}),
    (PflMfJoint, {"v_steps": 5}),
    (PflMfJoint, {"wire": "full"}),
    (PflMfJoint, {"max_shared_step": 0.1}),
]


@pytest.mark.parametrize(("form", "key"), FOREIGN, ids=[f"{f.__name__}-{next(iter(k))}" for f, k in FOREIGN])
def test_a_form_of_pfl_mf_refuses_keys_of_another_by_name(form: type[Method], key: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^{form.__name__}: unknown key '{next(iter(key))}'"):
        method_of(form, **key)


@pytest.mark.parametrize(
    ("form", "keys", "says"),
    [
        (PflMf, {"server_step": "literal"}, "server_step must be one of 'scaled', 'plain'. Got 'literal'"),
        (PflMf, {"rank_gap": 1.0}, "rank_gap must be a finite number > 1. Got 1.0"),
        (PflMf, {"v_steps": -1}, "v_steps must be an integer >= 0. Got -1"),
        (PflMf, {"private_head": True}, "private_head and adamw do not go with a shared subspace"),
        (PflMfPaper, {"rank": "auto"}, "rank must be an integer"),
        (
            PflMfPaper,
            ALGORITHM_1 | {"server_step": "literal"},
            "u_update must be 'train' with u_steps or server_step='literal'",
        ),
        (PflMfPaper, ALGORITHM_1 | {"momentum": 0.9}, "momentum and weight_decay must be 0, as G_i is a gradient. Got"),
        (PflMfPaper, ALGORITHM_1 | {"u_steps": 2}, "u_update must be 'train' with u_steps or server_step='literal'"),
        (PflMfPaper, {"server_optimizer": "adam"}, "server_optimizer must be 'none', as the server takes gradient"),
        (PflMfJoint, {"optimizer": "adamw"}, "private_head and adamw do not go with a shared subspace"),
    ],
)
def test_what_a_form_of_pfl_mf_does_not_allow_is_one_sentence(
    form: type[Method], keys: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{form.__name__}: {re.escape(says)}"):
        method_of(form, **keys)


def test_algorithm_1_has_no_place_for_running_statistics_and_says_which_form_has() -> None:
    with pytest.raises(ConfigError, match="no running statistics, as they are not U v; use pfl-mf-paper"):
        PflMfAlgorithm1(rank=2).init_server(make_task("batchnorm"), Federation(7, 0))


@MAPPING
@pytest.mark.parametrize("participation", [0.6, 1.0])
def test_pfl_mf_of_rank_one_with_frozen_v_is_fedsgd(mapping: str, participation: float) -> None:
    one = starting(
        PflMfPaper,
        lambda task: tree.ravel(task.init())[:, None],
        lambda *_: torch.ones(1, dtype=torch.float64),
        rank=1,
        v_steps=0,
        lr=0.3,
    )
    sgd = run(
        FedAvg(lr=0.3, weighting="uniform"), mapping=mapping, epochs=1, batch_size="full", participation=participation
    )
    for size in ("full", 4):  # G is the gradient on all examples, however they are cut into batches
        found = run(one, mapping=mapping, batch_size=size, participation=participation)
        assert_close(models(found), models(sgd))


@MAPPING
@pytest.mark.parametrize("participation", [0.6, 1.0])
def test_pfl_mf_with_one_column_per_client_is_local(mapping: str, participation: float) -> None:
    own = starting(
        PflMfPaper,
        lambda task: torch.stack([tree.ravel(task.fresh("own", i)) for i in range(7)], 1),
        lambda _, i: torch.eye(7, dtype=torch.float64)[i],
        rank=7,
        v_steps=0,
        lr=0.8,
    )

    class Own(Local):
        def init_client(self, task: Task, who: ClientInfo) -> Tree:
            return {"theta": task.fresh("own", who.id)}

    chosen = len(sample(7, Settings(participation=participation), 5, 1))
    options = {"mapping": mapping, "epochs": 1, "batch_size": "full", "participation": participation}
    assert_close(models(run(own, **options)), models(run(Own(lr=0.8 / chosen), **options)))


@MAPPING
@pytest.mark.parametrize(("unit", "size"), [("step", "full"), ("epoch", 8)])
def test_pfl_mf_with_the_identity_as_dictionary_is_local(mapping: str, unit: Any, size: Any) -> None:
    d = len(tree.ravel(make_task().init()))
    identity = starting(
        PflMfPaper,
        lambda _: torch.eye(d, dtype=torch.float64),
        lambda task, _: tree.ravel(task.init()),
        rank=d,
        lr=0.0,
        lr_v=0.2,
        v_steps=2,
        v_unit=unit,
    )
    same_models(identity, Local(lr=0.2), mapping=mapping, batch_size=size)


@pytest.mark.parametrize("g_at", ["old", "new"])
@pytest.mark.parametrize("wire", ["rank-one", "full"])
def test_pfl_mf_does_not_see_an_orthogonal_change_of_gauge(g_at: Any, wire: Any) -> None:
    g = torch.Generator().manual_seed(1)
    Q = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64, generator=g))[0]
    V = torch.randn(7, 3, dtype=torch.float64, generator=g)
    V = V / V.norm(dim=1, keepdim=True)

    def dictionary(task: Task) -> Tensor:
        return torch.stack([tree.ravel(task.fresh("U", j)) for j in range(3)], 1)

    fields = {"rank": 3, "lr": 0.1, "v_steps": 3, "g_at": g_at, "wire": wire}
    a = run(starting(PflMfPaper, dictionary, lambda _, i: V[i], **fields))
    b = run(starting(PflMfPaper, lambda task: dictionary(task) @ Q, lambda _, i: Q.T @ V[i], **fields))
    assert_close(models(a), models(b))
    assert float((a.record.server["U"] - b.record.server["U"]).abs().max()) > 0.1
    assert float((a.record.row(0)["v"] - V[0]).abs().max()) > 1e-3


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_pfl_mf_models_have_at_most_rank_r(rank: int) -> None:
    for rounds in (0, 1, 3):
        theta = torch.stack([tree.ravel(m) for m in models(run(algorithm_1(rank=rank), rounds=rounds)).values()], 1)
        s = torch.linalg.svdvals(theta)
        assert float(s[rank]) <= 1e-12 * float(s[0])
        assert float(s[rank - 1]) > 1e-3 * float(s[0])


@MAPPING
@pytest.mark.parametrize("g_at", ["old", "new"])
def test_pfl_mf_rank_one_wire_is_the_full_wire(mapping: str, g_at: Any) -> None:
    a, b = (run(algorithm_1(rank=3, wire=w, g_at=g_at), mapping=mapping) for w in ("rank-one", "full"))
    assert_close(models(a), models(b))
    d = len(tree.ravel(make_task().init()))
    assert a.record.progress.totals["up"] == 3 * 4 * 8 * (d + 3)
    assert b.record.progress.totals["up"] == 3 * 4 * 8 * (d * 3 + 6)


@MAPPING
@pytest.mark.parametrize("g_at", ["old", "new"])
@pytest.mark.parametrize("scale", ["1", "1/n"])
def test_pfl_mf_steps_are_the_gradients_of_psi(mapping: str, g_at: Any, scale: Any) -> None:
    method = algorithm_1(rank=3, lr=0.5, lr_v=0.7, v_steps=1, g_at=g_at, v_scale=scale)
    start = run(method, rounds=0)
    sim = run(method, rounds=1, participation=1.0, batch_size="full", mapping=mapping)
    task, n = make_task(), 7

    def psi(U: Tensor, V: Tensor) -> Tensor:
        losses = [pooled_loss(task, tree.unravel(U @ V[i], task.init()), sim.data, i) for i in range(n)]
        return torch.stack(losses).mean()

    U = start.record.server["U"].requires_grad_()
    V = torch.stack([start.record.row(i)["v"] for i in range(n)]).requires_grad_()
    old_U, old_V = torch.autograd.grad(psi(U, V), (U, V))
    new = (V - 0.7 * (old_V if scale == "1/n" else n * old_V)).detach()  # eq. (8)
    assert_close(torch.stack([sim.record.row(i)["v"] for i in range(n)]), new)
    step = old_U if g_at == "old" else torch.autograd.grad(psi(U, new), U)[0]
    assert_close(sim.record.server["U"], (U - 0.5 * step).detach())  # eq. (9)


def test_pfl_mf_v_scale_divides_the_step_by_all_clients_not_by_those_sampled() -> None:
    a = run(algorithm_1(rank=2, lr=0.0, lr_v=0.3, v_scale="1"))
    b = run(algorithm_1(rank=2, lr=0.0, lr_v=0.3 * 7, v_scale="1/n"))
    assert_close(models(a), models(b))


@pytest.mark.parametrize("form", [PflMf, PflMfPaper, PflMfJoint])
def test_pfl_mf_on_a_cosine_starts_at_lr_and_then_takes_smaller_steps(form: type[Method]) -> None:
    plain = run(method_of(form, rank=2, lr=0.02), rounds=2)
    for fields in ({"cycle": 1}, {"cycle": 2, "lr_min": 0.02}):  # both stay at lr
        assert_same(models(plain), models(run(method_of(form, rank=2, lr=0.02, **fields), rounds=2)))
    fallen = run(method_of(form, rank=2, lr=0.02, cycle=2, lr_min=0.0), rounds=2)
    assert not torch.equal(plain.record.server["U"], fallen.record.server["U"])


@MAPPING
@pytest.mark.parametrize("wire", ["rank-one", "full"])
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_the_scaled_step_of_rank_one_is_fedavg(mapping: str, wire: Any, weighting: Any) -> None:
    one = torch.ones(7, 1, dtype=torch.float64)
    steps = {"lr": 0.1, "momentum": 0.9, "weighting": weighting}
    method = scaled(lambda task: tree.ravel(task.init())[:, None], one, wire=wire, **steps)
    same_models(method, method_of(FedAvg, **steps), mapping=mapping)


@MAPPING
def test_the_scaled_step_with_one_hot_v_is_fedavg_inside_clusters(mapping: str) -> None:
    chosen = sample(7, Settings(participation=0.6), 5, 1)
    absent = next(i for i in range(7) if i not in chosen)  # this cluster has nobody in the first round
    groups = [2 if i == absent else i % 2 for i in range(7)]
    data = replace(make_data(), groups=torch.tensor(groups))
    V = torch.eye(3, dtype=torch.float64)[groups]
    method = scaled(lambda task: tree.ravel(task.init())[:, None].expand(-1, 3).clone(), V, lr=0.1)
    for rounds in (1, 3):
        same_models(method, Oracle(lr=0.1), data, mapping=mapping, rounds=rounds)
    once = run(method, data, rounds=1, mapping=mapping)
    assert_same(once.record.server["U"][:, 2], tree.ravel(make_task().init()))


@MAPPING
@pytest.mark.parametrize("participation", [0.6, 1.0])
def test_the_scaled_step_with_one_column_per_client_is_local(mapping: str, participation: float) -> None:
    eye = torch.eye(7, dtype=torch.float64)
    method = scaled(lambda task: tree.ravel(task.init())[:, None].expand(-1, 7).clone(), eye, lr=0.1)
    same_models(method, Local(lr=0.1), mapping=mapping, participation=participation)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"ridge": 0.01},
        {"ridge": 0.01, "rank": 6},  # more columns than participants
        {"ridge": 0.01, "max_step": 0.001},
        {"ridge": 0.01, "factorise": "head", "v_steps": 5, "v_method": "solve", "v_prior": 0.1, "v_ridge": 0.0},
        {"ridge": 0.01, "v_steps": 5, "v_method": "precondition", "lr_v": 0.3, "v_prior": 0.1},
    ],
)
def test_the_scaled_step_does_not_see_any_change_of_gauge(fields: dict[str, Any]) -> None:
    g = torch.Generator().manual_seed(1)
    r = fields.get("rank", 3)
    R = torch.randn(r, r, dtype=torch.float64, generator=g) + 2 * torch.eye(r, dtype=torch.float64)
    V = torch.randn(7, r, dtype=torch.float64, generator=g)
    names = make_task().head if fields.get("factorise") == "head" else None
    a = run(scaled(lambda task: columns(task, r, names), V, lr=0.1, **fields))
    b = run(scaled(lambda task: columns(task, r, names) @ R, V @ torch.linalg.inv(R).T, lr=0.1, **fields))
    assert_close(models(a), models(b))
    assert float((a.record.server["U"] - b.record.server["U"]).abs().max()) > 0.1
    assert float((a.record.server["U"] - columns(make_task(), r, names)).abs().max()) > 1e-4
    if fields.get("v_steps"):
        assert float((a.record.row(0)["v"] - V[0]).abs().max()) > 1e-3


@pytest.mark.parametrize("server_step", ["scaled", "plain"])
def test_a_bounded_server_step_moves_the_shared_part_by_that_share_of_its_norm(server_step: Any) -> None:
    task = make_task()
    fields: dict[str, Any] = {"rank": 3, "lr": 0.5, "server_step": server_step}
    start = tree.without(task.init(), task.head)
    free, bound = (
        run(method_of(PflMf, max_shared_step=m, **fields), rounds=1).record.server["theta"] for m in (None, 0.01)
    )
    far, near = (tree.add(t, start, -1.0) for t in (free, bound))
    size = tree.squared_norm(start).sqrt()
    assert tree.squared_norm(far).sqrt() > 0.01 * size  # otherwise nothing was bounded
    assert float(tree.squared_norm(near).sqrt() / size) == pytest.approx(0.01, rel=1e-12)
    part = 0.01 * size / tree.squared_norm(far).sqrt()
    assert_close(near, {k: part * v for k, v in far.items()})
    wide = run(method_of(PflMf, max_shared_step=1e3, **fields), rounds=1).record.server["theta"]
    assert all(torch.equal(wide[k], free[k]) for k in free)


@pytest.mark.parametrize("factorise", ["head", "all"])
@pytest.mark.parametrize("wire", ["rank-one", "full"])
def test_pfl_mf_bytes_are_those_of_the_formula(factorise: Any, wire: Any) -> None:
    r, clients, rounds = 3, 4, 2
    sim = run(PflMf(rank=r, factorise=factorise, wire=wire), rounds=rounds)
    task = make_task()
    total = len(tree.ravel(task.init()))
    d = len(tree.ravel(tree.select(task.init(), task.head))) if factorise == "head" else total
    up = d + r if wire == "rank-one" else d * r + r * (r + 1) // 2
    assert sim.record.progress.totals["up"] == rounds * clients * 8 * (total - d + up)
    assert sim.record.progress.totals["down"] == rounds * clients * 8 * (total - d + d * r)
