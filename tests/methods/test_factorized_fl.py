"""Factorized-FL: its invariants and limiting cases.

alone (tau > 1) = local training of the factored model, bit for bit; eps = 0 and all matched = uniform mean =
Factorized-FedAvg with equal sizes; renaming classes changes heads only; lam -> infinity = no mu; mu = W - uv = the
dense network; identical clients agree; rows of omega add up to 1; gauge and sign; zero vectors; what is counted of mu
is what is not zero.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from conftest import assert_close, assert_same, make_data, make_task, method_of
from fedspan import tree, wire
from fedspan.data.federated import FederatedData
from fedspan.errors import ConfigError
from fedspan.layers import structured
from fedspan.learn.sgd import sgd
from fedspan.learn.task import Task
from fedspan.linalg.similarity import cosine, leading, neighbours, softmax_weights
from fedspan.method import Averaging, ClientInfo, Converts, Federation, Method, Round
from fedspan.method.fields import flat, keys_of, sentences
from fedspan.methods import FactorizedFedAvg, FactorizedFL, FactorizedFLBeta, FactorizedLocal, FedAvg, Local, make
from fedspan.methods.factorized_fl.factorization import tags
from fedspan.methods.factorized_fl.matching import SimilarityMatching
from fedspan.simulation.settings import Settings
from fedspan.simulation.simulator import Simulation
from fedspan.tree import Params, Tree

STEPS: dict[str, Any] = {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.01}
ALONE: dict[str, Any] = {"tau": 2.0, "m_min": 1}
ALL: dict[str, Any] = {"tau": -1.0, "epsilon": 0.0, "m_min": 1}
KINDS = pytest.mark.parametrize("kind", ["mlp", "cnn"])
# One mapping is enough: that both give the same is in the common table, for every method.
MAPPING = pytest.mark.parametrize("mapping", ["loop"])


def run(
    method: Method, kind: str = "mlp", data: FederatedData | None = None, rounds: int = 3, **settings: Any
) -> Simulation:
    chosen = {"participation": 1.0, "batch_size": 8, "epochs": 2, "workers": 1, "precision": "float64"} | settings
    data = data or make_data(kind)
    settled = Settings(**{"evaluate_every": 100, **chosen})
    sim = Simulation(method, make_task(kind), data, rounds=rounds, seed=5, settings=settled)
    sim.run()
    return sim


def models(sim: Simulation) -> Tree:
    return {str(i): sim.personal(i)[1] for i in range(sim.data.clients)}


def moved(sim: Simulation) -> bool:
    start = sim.engine.model(None).init()
    return all(float((tree.ravel(m) - tree.ravel(start)).norm()) > 1e-2 for m in models(sim).values())


# ------------------------------------------------------------------------------------------------ 1: alone


@MAPPING
@pytest.mark.parametrize(("cls", "kind"), [(FactorizedFL, "cnn"), (FactorizedFL, "mlp"), (FactorizedFLBeta, "mlp")])
def test_a_client_that_matches_nobody_is_alone_bit_for_bit(cls: Any, kind: str, mapping: str) -> None:
    a = run(method_of(cls, **ALONE, **STEPS), kind, mapping=mapping)
    b = run(method_of(FactorizedLocal, **STEPS), kind, mapping=mapping)
    x, y = models(a), models(b)
    for i in x:
        assert_same(x[i], {k: y[i][k] for k in x[i]})
    assert moved(b)
    together = models(run(method_of(cls, tau=-1.0, **STEPS), kind, mapping=mapping))
    assert any(not torch.equal(together["0"][k], x["0"][k]) for k in x["0"])


def test_alone_with_few_clients_a_round_if_newcomers_begin_at_the_start() -> None:
    few = {"participation": 0.4, "rounds": 4}
    x = models(run(method_of(FactorizedFL, **ALONE, newcomer="start", **STEPS), **few))
    y = models(run(method_of(FactorizedLocal, **STEPS), **few))
    for i in x:
        assert_same(x[i], {k: y[i][k] for k in x[i]})


def test_factorised_local_training_is_local_training_of_the_factored_module() -> None:
    sim = run(method_of(FactorizedLocal, lam=0.0, lr=0.2), rounds=2)
    task = FactorizedLocal().model(make_task(), None)

    class Converted(Local, Converts):
        def model(self, given: Task, capacity: Any) -> Task:
            return task

    assert_close(models(sim), models(run(Converted(lr=0.2), rounds=2)))


# ------------------------------------------------------------------------------------------------ 2: mean


@pytest.mark.parametrize(("kind", "shared"), [("cnn", "u"), ("mlp", "uv"), ("mlp", "um"), ("mlp", "uvm")])
def test_without_preferences_it_is_the_uniform_mean(kind: str, shared: Any) -> None:
    data = make_data(kind, equal=True)
    a = run(method_of(FactorizedFL, shared=shared, **ALL, **STEPS), kind, data)
    b = run(method_of(FactorizedFL, shared=shared, matching="none", **STEPS), kind, data)
    assert_close(models(a), models(b))
    assert moved(a)
    ragged = make_data(kind)
    uniform = method_of(FactorizedFL, shared=shared, matching="none", weighting="uniform", **STEPS)
    assert_close(
        models(run(method_of(FactorizedFL, shared=shared, **ALL, **STEPS), kind, ragged)),
        models(run(uniform, kind, ragged)),
    )


def test_beta_with_all_matched_is_factorized_fedavg() -> None:
    data = make_data(equal=True)
    assert_close(
        models(run(method_of(FactorizedFLBeta, **ALL, **STEPS), data=data)),
        models(run(method_of(FactorizedFedAvg, **STEPS), data=data)),
    )


def test_what_is_shared_by_each_variant() -> None:
    task = FactorizedFL().model(make_task("cnn"), None)
    expected = {"nothing": [], "u": ["u", "b"], "uv": ["u", "b", "v"], "um": ["u", "b", "mu"]}
    for shared, names in expected.items():
        parts, own = method_of(FactorizedFL, shared=shared).apart(task, task.init())
        assert sorted(parts) == sorted(names)
        assert {k for p in parts.values() for k in p} | set(own) == set(task.names)
        assert set(task.head) <= set(own)
    parts, own = method_of(FactorizedFLBeta, private_head=False).apart(task, task.init())
    assert not own and set(parts) == {"u", "b", "v", "mu"} and "norm.weight" in parts["b"]
    plain = method_of(FactorizedFL, min_u_dim=20)
    task = plain.model(make_task("cnn"), None)
    assert structured(task.module) == ["hidden"]  # 36 inputs; the kernel has 9 positions, the head 6 inputs
    assert tags(task)["conv.weight"] == "v" and tags(task)["conv.bias"] == "b"


# ------------------------------------------------------------------------------------------------ 3: permutation


@dataclass(frozen=True, kw_only=True)
class Renamed(FactorizedFL):
    """The head of client k starts with its classes renamed as its data are."""

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        return super().init_client(task, who) | {"h": renamed(task, super().init_client(task, who)["h"], PHI[who.id])}


PHI = torch.stack([torch.from_numpy(np.random.default_rng(k).permutation(3)) for k in range(7)])


def renamed(task: Task, params: Params, phi: Tensor) -> Params:
    """Output c becomes output φ(c)."""
    back, axis = phi.argsort(), {"v": 1, "mu": 0, "bias": 0}
    new = dict(params)
    for k in task.head:
        if (part := k.rpartition(".")[2]) in axis:
            new[k] = params[k].index_select(axis[part], back)
    return new


@pytest.mark.parametrize(("kind", "shared"), [("cnn", "u"), ("mlp", "u"), ("mlp", "uvm")])
def test_renaming_classes_changes_heads_only(kind: str, shared: Any) -> None:
    data = make_data(kind, opposed=False)
    fields: dict[str, Any] = {"shared": shared, "tau": 0.9, "epsilon": 5.0, **STEPS}
    for rounds in (1, 3):
        plain = run(method_of(FactorizedFL, **fields), kind, data, rounds)
        other = run(method_of(Renamed, **fields), kind, replace(data, relabel=PHI), rounds)
        assert_close(plain.record.server, other.record.server)
        task = plain.engine.model(None)
        for i in range(7):
            assert_close(renamed(task, plain.personal(i)[1], PHI[i]), other.personal(i)[1])
    assert len({tuple(p.tolist()) for p in PHI}) > 1 and moved(other)


@pytest.mark.parametrize("start", ["zeros", "xavier", "dense"])
def test_from_a_head_of_zeros_the_names_of_classes_make_no_difference_to_bodies(start: Any) -> None:
    data = make_data("mlp", opposed=False)
    task = Task(make_task("mlp").module, dtype=torch.float64, seed=5, zero_head=True)
    method = method_of(FactorizedFL, mu_start=start, tau=0.9, epsilon=5.0, likeness_of="change", **STEPS)
    settings = Settings(participation=1.0, batch_size=8, epochs=2, workers=1, precision="float64", evaluate_every=100)
    plain, other = (
        Simulation(method, task, d, rounds=3, seed=5, settings=settings) for d in (data, replace(data, relabel=PHI))
    )
    first = plain.engine.model(None).init()
    assert not any(first[k].any() for k in ("head.v", "head.mu", "head.bias") if k in first)
    for sim in (plain, other):
        sim.run()
    assert_close(plain.record.server, other.record.server)
    assert moved(other)


def test_similarity_of_the_change_leaves_the_common_start_out() -> None:
    sims = {of: run(method_of(FactorizedFL, likeness_of=of, **ALL, **STEPS), "mlp") for of in ("v", "change")}
    server, start = sims["change"].record.server, sims["change"].engine.model(None).init()
    z = start[sims["change"].method.z(sims["change"].engine.model(None))]
    assert_close({"s": server["seen"]["sigma"]}, {"s": cosine((server["z"] - z).flatten(1))})
    # All are averaged alike here, so the runs are the same but for what similarity says of them.
    assert_same(server["u"], sims["v"].record.server["u"])
    off = ~torch.eye(7, dtype=torch.bool)
    assert float(server["seen"]["sigma"][off].mean()) < float(sims["v"].record.server["seen"]["sigma"][off].mean())


# ------------------------------------------------------------------------------------------------ 4, 5, 6: mu


def test_with_mu_at_w_minus_uv_it_starts_as_the_dense_network_and_has_its_gradients() -> None:
    dense, task = make_task("cnn"), method_of(FactorizedFL, mu_start="dense").model(make_task("cnn"), None)
    x = torch.randn(5, 1, 6, 6, dtype=torch.float64)
    assert_close({"y": task.predict(task.init(), x)}, {"y": dense.predict(dense.init(), x)})
    only = method_of(FactorizedFedAvg, mu_start="dense", penalty="none", lr=0.1)
    sim = run(only, "cnn", rounds=1, epochs=1, batch_size="full")
    alone = run(Local(lr=0.1), "cnn", rounds=1, epochs=1, batch_size="full")
    mean = tree.map(
        lambda *a: sum(w * b for w, b in zip(sim.data.sizes / sim.data.sizes.sum(), a)), *models(alone).values()
    )
    # One step on mu is the dense network's step.
    for name in ("conv", "hidden"):
        step = sim.record.server["mu"][f"{name}.mu"] - task.init()[f"{name}.mu"]
        assert_close({"s": step}, {"s": mean[f"{name}.weight"] - dense.init()[f"{name}.weight"]})


@MAPPING
@pytest.mark.parametrize(("cls", "kind"), [(FactorizedFL, "cnn"), (FactorizedFLBeta, "mlp")])
def test_an_endless_penalty_takes_mu_out_of_the_model(cls: Any, kind: str, mapping: str) -> None:
    a = run(method_of(cls, lam=1e9, mu_start="zeros", safeguard=False, **STEPS), kind, mapping=mapping)
    x, y = models(a), models(run(method_of(cls, mu=False, safeguard=False, **STEPS), kind, mapping=mapping))
    for i in x:
        assert not any(p.count_nonzero() for k, p in x[i].items() if k.endswith(".mu"))
        assert_close({k: p for k, p in x[i].items() if not k.endswith(".mu")}, y[i])
    task = a.engine.model(None)
    for name in structured(task.module):
        layer = task.module_with(x["0"]).get_submodule(name)
        rows = layer.compose().detach()  # type: ignore[operator]
        matrix = rows.permute(2, 3, 1, 0).flatten(2).flatten(0, 1) if rows.ndim == 4 else rows
        assert int(torch.linalg.matrix_rank(matrix)) == 1


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_soft_thresholding_settles_where_the_penalised_loss_is_least(momentum: float) -> None:
    a = torch.tensor([1.0, -0.3, 0.05, -0.02], dtype=torch.float64)
    method = method_of(FactorizedFL, lr=0.02, lam=0.1, momentum=momentum)
    prox = method.penalty.prox(["w"], method.lr, momentum)
    batch = make_batches()
    found = sgd(lambda p, b: (p["w"] - a).square().sum() / 2, {"w": torch.zeros_like(a)}, [batch] * 2000,
                0.02, momentum=momentum, prox=prox)["w"]  # fmt: skip
    assert_close({"w": found}, {"w": torch.tensor([0.9, -0.2, 0.0, 0.0], dtype=torch.float64)}, 1e-9)
    assert int(found.count_nonzero()) == 2  # true zeros


def make_batches() -> Any:
    sim = Simulation(Local(), make_task(), make_data(), rounds=0, settings=Settings(precision="float64", workers=1))
    return next(iter(sim.engine._visit(0, 1, Local().plan(), {})[0]["train"]))


def test_a_larger_penalty_leaves_fewer_entries() -> None:
    def nonzero(**fields: Any) -> float:
        sim = run(method_of(FactorizedFLBeta, lr=0.1, **fields), "cnn", rounds=2)
        return sim.method.monitor(sim.record.server)["mu_nonzero"]

    free, some, many = nonzero(lam=0.0), nonzero(lam=0.02), nonzero(lam=0.2)
    assert free > 0.9 and free > some > many > 0
    assert nonzero(lam=0.02, penalty="subgradient") > some  # steps over zero, hardly ever on it


def test_pruning_at_use_leaves_out_what_is_below_lambda_and_changes_no_state() -> None:
    plain, cut = (
        run(method_of(FactorizedFLBeta, lam=0.02, penalty="none", eval_prune=p, lr=0.1)) for p in (False, True)
    )
    assert plain.record.digest() == cut.record.digest()
    x, y = models(plain), models(cut)
    for i, m in x.items():
        for k, p in m.items():
            expected = torch.where(p.abs() < 0.02, 0.0, p) if k.endswith(".mu") else p
            assert torch.equal(y[i][k], expected)
    assert any((p != 0).sum() > (y["0"][k] != 0).sum() for k, p in x["0"].items())


# ------------------------------------------------------------------------------------------------ 7, 8: matching


def test_identical_clients_agree() -> None:
    pair = (torch.randn(12, 5, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3)
    data = FederatedData.from_arrays([pair, pair], test=[pair, pair]).to(torch.float64)
    sim = run(method_of(FactorizedFL, lr=0.1, m_min=1), data=data, batch_size="full")
    seen = sim.record.server["seen"]
    assert_close({"s": seen["sigma"]}, {"s": torch.ones(2, 2, dtype=torch.float64)})
    assert_close({"o": sim.method.matching.omega(seen)}, {"o": torch.full((2, 2), 0.5, dtype=torch.float64)})  # type: ignore[attr-defined]
    down = sim.method.download(sim.record.server, torch.arange(2), None, 4).own
    assert_close(down["u"], sim.record.server["u"])
    assert seen["matched"].tolist() == [[3, 3], [3, 3]]


@pytest.mark.parametrize("matching", ["similarity", "random", "worst"])
@pytest.mark.parametrize("tau", [-1.0, 0.5, 2.0])
@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_rows_of_the_mixing_matrix_add_up_to_one(matching: Any, tau: float, rounds: int) -> None:
    method = method_of(FactorizedFL, matching=matching, tau=tau, m_min=2, lr=0.3)
    sim = run(method, rounds=rounds, participation=0.5)
    seen = sim.record.server["seen"]
    omega, known = method.matching.omega(seen), seen["n"] > 0
    assert_close({"o": omega.sum(1)}, {"o": torch.ones(7, dtype=torch.float64)})
    assert (omega >= 0).all() and not omega[:, ~known][known].any()
    others = (method.matching.members(seen) & ~torch.eye(7, dtype=torch.bool)).sum(1)[known]
    if matching != "similarity" and rounds:
        assert (others == min(3, int(known.sum()) - 1)).all()
    if tau == 2.0 and matching == "similarity" and rounds:
        assert (others == 1).all()  # m_min


def test_the_server_step_is_the_paper_by_hand() -> None:
    method = method_of(FactorizedFL, tau=0.2, epsilon=3.0, m_min=1)
    rng = np.random.default_rng(0)
    task = method.model(make_task(), None)
    server = method.init_server(task, Federation(5, 0))
    each = tree.map(
        lambda a: torch.from_numpy(rng.normal(size=(4, *a.shape[1:]))), {k: server[k] for k in ("u", "b", "z")}
    )
    ids, n = torch.tensor([0, 1, 3, 4]), torch.tensor([3.0, 5.0, 2.0, 4.0], dtype=torch.float64)
    new = method.server_update(server, Round(1, ids, n, n, {}, each, torch.tensor([2])))
    z = each["z"].numpy().reshape(4, -1)
    unit = z / np.linalg.norm(z, axis=1, keepdims=True)
    sigma = unit @ unit.T
    weights = np.where((sigma >= 0.2) | np.eye(4, dtype=bool), np.exp(3.0 * np.where(np.eye(4), 1.0, sigma)), 0.0)
    weights /= weights.sum(1, keepdims=True)
    assert (weights == 0).any() and ((weights > 0).sum(1) > 1).any()
    down = method.download(new, torch.arange(5), None, 2).own
    for k, u in each["u"].items():
        rows = u.numpy().reshape(4, -1)
        assert_close({"u": down["u"][k][ids].flatten(1)}, {"u": torch.from_numpy(weights @ rows)})
        mean = (n.numpy()[:, None] * rows).sum(0) / 14.0  # client 2 never sent
        assert_close({"u": down["u"][k][2].flatten()}, {"u": torch.from_numpy(mean)})
    assert new["seen"]["matched"].tolist()[2] == [0] * 5 and "z" not in down


def test_neighbours_and_weights() -> None:
    sigma = torch.tensor([[1.0, 0.9, 0.2, 0.5], [0.9, 1.0, 0.1, 0.0], [0.2, 0.1, 1.0, 0.3], [0.5, 0.0, 0.3, 1.0]])
    known = torch.tensor([True, True, True, False])
    found = neighbours(sigma, known, 0.8, 1)
    assert found.tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    found = neighbours(sigma, known, 0.95, 2)  # the client without an upload is never taken
    assert found.tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]
    assert neighbours(sigma, known, 0.95, 9).tolist() == [[1, 1, 1, 0]] * 3 + [[1, 1, 1, 1]]
    same = torch.ones(4, 4)
    assert neighbours(same, torch.ones(4, dtype=torch.bool), 2.0, 2)[3].tolist() == [1, 0, 0, 1]  # oneself first
    assert leading(torch.tensor([[1.0, 2.0, 2.0]]), 1).tolist() == [[0, 1, 0]]
    levels = torch.randint(0, 4, (50, 9), generator=torch.Generator().manual_seed(0)).double()
    levels[levels == 3] = -torch.inf
    for count in range(11):
        order = levels.argsort(dim=1, descending=True, stable=True)[:, :count]
        assert torch.equal(leading(levels, count), torch.zeros(50, 9, dtype=torch.bool).scatter(1, order, True))
    big = softmax_weights(1e6 * sigma, found, 20.0)
    assert torch.isfinite(big).all() and float(big[2, 1]) == 0.0


def test_zero_vectors_are_like_nobody() -> None:
    z = torch.tensor([[0.0, 0.0], [1.0, 0.0], [-3.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    assert cosine(z).tolist() == [[1, 0, 0, 0], [0, 1, -1, 0], [0, -1, 1, 0], [0, 0, 0, 1]]
    method = method_of(FactorizedFL, gauge=True, lr=0.1)
    task = method.model(make_task(), None)
    params = {k: torch.zeros_like(p) if k.endswith((".u", ".v")) else p for k, p in task.init().items()}
    assert_same(method.sharing.aligned(task, params), params)


@pytest.mark.parametrize("matching", ["random", "worst"])
def test_random_partners_change_and_the_worst_are_the_least_alike(matching: Any) -> None:
    method = method_of(FactorizedFL, matching=matching, partners=2, lr=0.3)
    a, b = run(method), run(method)
    assert a.record.digest() == b.record.digest()
    seen = a.record.server["seen"]
    members = method.matching.members(seen)
    assert members.diagonal().all() and (members.sum(1) == 3).all()
    if matching == "worst":
        for k in range(7):
            row = seen["sigma"][k]
            others = [i for i in range(7) if i != k]
            assert set(sorted(others, key=lambda i: float(row[i]))[:2]) == {i for i in others if members[k, i]}
    else:
        later = method.matching.members({**seen, "round": torch.tensor(9)})
        assert not torch.equal(members, later)


def test_the_layer_that_is_compared() -> None:
    task = FactorizedFL().model(make_task("cnn"), None)
    assert FactorizedFL().z(task) == "hidden.v"
    assert method_of(FactorizedFL, likeness_layer="conv").z(task) == "conv.v"
    with pytest.raises(
        ConfigError, match=r"likeness_layer must be a factorised layer. Got 'convv'. Did you mean 'conv'"
    ):
        method_of(FactorizedFL, likeness_layer="convv").z(task)
    single = Task(nn.Linear(5, 3), dtype=torch.float64)
    with pytest.raises(ConfigError, match="there must be a factorised layer below the head"):
        FactorizedFL().init_server(FactorizedFL().model(single, None), Federation(3, 0))
    only = method_of(FactorizedFedAvg, private_head=False)
    assert set(only.init_server(only.model(single, None), Federation(3, 0))) == {"u", "b", "v", "mu"}
    for private, layer in ((True, None), (False, None), (True, "0"), (True, "4")):
        sim = run(method_of(FactorizedFLBeta, likeness_layer=layer, private_head=private, lr=0.3), rounds=1)
        rows = {k: sim.record.server["v"].get(k, sim.record.server.get("z")) for k in (f"{layer or 2}.v",)}
        assert_same(sim.record.server["seen"]["sigma"], cosine(rows[f"{layer or 2}.v"].flatten(1)))


# ------------------------------------------------------------------------------------------------ gauge


@KINDS
def test_the_gauge_undoes_flips_and_scales_and_leaves_the_weights(kind: str) -> None:
    method = method_of(FactorizedFL, gamma=2, gauge=True)
    task = method.model(make_task(kind), None)
    params = task.fresh("x")
    c = torch.tensor([-3.0, 0.25], dtype=torch.float64)
    flipped = dict(params)
    for k in structured(task.module):
        flipped[f"{k}.u"], flipped[f"{k}.v"] = params[f"{k}.u"] * c, params[f"{k}.v"] / c[:, None]
    assert_close(method.sharing.aligned(task, params), method.sharing.aligned(task, flipped))
    name = method.z(task)
    z = torch.stack([params[name].flatten(), flipped[name].flatten()])
    assert float(cosine(z)[0, 1]) < 0.9
    new = method.sharing.aligned(task, flipped)
    x = torch.randn(4, *((5,) if kind == "mlp" else (1, 6, 6)), dtype=torch.float64)
    assert_close({"y": task.predict(new, x)}, {"y": task.predict(params, x)})
    for k in structured(task.module):
        u = new[f"{k}.u"]
        assert (u.sum(0) >= 0).all()
        assert_close({"n": u.square().sum(0)}, {"n": torch.full((2,), float(len(u)), dtype=torch.float64)})


def test_without_a_gauge_flipped_clients_cancel_and_with_it_they_do_not() -> None:
    for gauge in (False, True):
        method = method_of(FactorizedFL, gauge=gauge, **ALL)
        task = method.model(make_task(), None)
        start = task.init()
        flip = {k: -p if k.endswith((".u", ".v")) else p for k, p in start.items()}
        rows = [method.sharing.aligned(task, p) for p in (start, flip)]
        parts = [method.apart(task, p)[0] | {"z": p[method.z(task)]} for p in rows]
        two = torch.tensor([5.0, 5.0], dtype=torch.float64)
        server = method.server_update(
            method.init_server(task, Federation(2, 0)),
            Round(1, torch.arange(2), two, two, {}, tree.stack(parts), torch.tensor([])),
        )
        down = method.download(server, torch.arange(2), None, 2).own
        size = float(tree.squared_norm(down["u"]))
        sigma = float(server["seen"]["sigma"][0, 1])
        assert (size > 1 and sigma == pytest.approx(1)) if gauge else (size < 1e-20 and sigma == pytest.approx(-1))


def test_a_newcomer_starts_in_the_gauge_of_the_others() -> None:
    sim = run(method_of(FactorizedFL, gauge=True, lr=0.0), rounds=1, participation=0.4)
    task, start = sim.engine.model(None), sim.engine.model(None).init()
    assert not (sim.record.server["seen"]["n"] > 0).all()
    for m in models(sim).values():
        assert_close({"y": task.predict(m, sim.data.x)}, {"y": task.predict(start, sim.data.x)})


def test_all_clients_start_from_the_same_factors() -> None:
    sim = run(FactorizedFLBeta(), rounds=0)
    start = sim.engine.model(None).init()
    for m in models(sim).values():
        assert_same(m, {k: start[k] for k in m})


# ------------------------------------------------------------------------------------------------ bytes of mu


def test_averages_have_the_union_of_the_supports() -> None:
    sim = run(method_of(FactorizedFLBeta, lam=0.03, mu_start="zeros", lr=0.1, **ALL), "cnn", rounds=1)
    down = sim.method.download(sim.record.server, torch.arange(7), None, 2).own["mu"]
    for k, sent in sim.record.server["mu"].items():
        union = (sent != 0).any(0)
        assert int(union.sum()) > 0 and (sent != 0).double().mean() < union.double().mean()
        assert torch.equal(down[k] != 0, union.expand_as(down[k]))


def test_what_is_counted_of_mu_is_what_is_not_zero() -> None:
    method = method_of(FactorizedFLBeta, lam=0.3, mu_start="zeros", lr=0.1)
    one, two = run(method, "cnn", rounds=1), run(method, "cnn", rounds=2)
    sent = one.record.server["mu"]

    def wanted(rows: Params) -> int:
        total = 0
        for p in rows.values():
            for row in p:
                n = int(row.count_nonzero())
                total += 8 * n + min(4 * n, -(-row.numel() // 8))
        return total

    assert one._result().bytes["names"]["up"]["mu"] == wanted(sent)
    down = method.download(one.record.server, torch.arange(7), None, 2).own["mu"]
    assert two._result().bytes["names"]["down"]["mu"] == wanted(down)  # nothing of mu is sent at the start
    assert wanted(sent) < wanted(down) < 7 * 8 * sum(p[0].numel() for p in sent.values())
    codec = wire.Sparse()
    for p in sent.values():
        parts = codec.encode(p[0])
        assert len(parts["values"]) == int(p[0].count_nonzero())
        assert torch.equal(codec.decode(parts, p.dtype, tuple(p[0].shape)), p[0])


def test_a_thinned_download_is_sparse() -> None:
    plain = run(method_of(FactorizedFLBeta, lam=0.01, mu_start="zeros", lr=0.1, **ALL), "cnn", rounds=1)
    whole = plain.method.download(plain.record.server, torch.arange(7), None, 2).own
    for fields in ({"down_threshold": 0.01}, {"down_share": 0.25}):
        method = method_of(FactorizedFLBeta, lam=0.01, mu_start="zeros", lr=0.1, **ALL, **fields)  # type: ignore[arg-type]
        cut = method.download(plain.record.server, torch.arange(7), None, 2).own
        assert_same({k: cut[k] for k in ("u", "v", "b")}, {k: whole[k] for k in ("u", "v", "b")})
        for k, p in cut["mu"].items():
            kept = p != 0
            assert torch.equal(p[kept], whole["mu"][k][kept]) and 0 < kept.sum() < (whole["mu"][k] != 0).sum()
            if "down_share" in fields:
                assert (kept.flatten(1).sum(1) == -(-p[0].numel() // 4)).all()
                assert whole["mu"][k].abs()[~kept].max() <= p.abs()[kept].max()
            else:
                assert p[kept].abs().min() >= 0.01 and (whole["mu"][k][~kept].abs() < 0.01).all()
    shared = run(method_of(FactorizedFedAvg, lam=0.01, lr=0.1, down_share=0.5), "cnn", rounds=1)
    down = shared.method.download(shared.record.server, torch.arange(1), None, 2).shared["mu"]
    assert all(int(p.count_nonzero()) == -(-p.numel() // 2) for p in down.values())


# ------------------------------------------------------------------------------------------------ the rest


@MAPPING
@pytest.mark.parametrize(
    ("kind", "fields", "clients", "name"),
    [(FactorizedLocal, {"lam": 0.01}, 7, "0.u"), (Local, {}, 7, "0.weight"), (FedAvg, {}, 1, "0.weight")],
    ids=["factorized-local", "local", "fedavg of one client"],
)
def test_kept_momentum_is_one_long_training(
    kind: type[Any], fields: dict[str, Any], clients: int, name: str, mapping: str
) -> None:
    fields = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, **fields}
    data, how = make_data(clients=clients), {"batch_size": "full", "mapping": mapping}
    kept = run(method_of(kind, keep_momentum=True, **fields), data=data, rounds=3, **how)
    long = run(method_of(kind, **fields), data=data, rounds=1, epochs=6, **how)
    assert_close(models(kept), models(long))
    anew = models(run(method_of(kind, **fields), data=data, rounds=3, **how))
    assert float((anew["0"][name] - models(kept)["0"][name]).abs().max()) > 1e-4


def test_the_penalty_as_a_gradient_is_torchs() -> None:
    method = method_of(FactorizedLocal, penalty="subgradient", lam=0.05, lr=0.1, mu_start="dense")
    sim = run(method, rounds=1, epochs=2, batch_size="full")
    task = sim.engine.model(None)
    params = [p.requires_grad_() for p in task.init().values()]
    names = list(task.init())
    step = torch.optim.SGD(params, lr=0.1)
    rows = torch.from_numpy(sim.data.train[0])
    for _ in range(2):
        at = dict(zip(names, params))
        out = functional_call(task.module, at, (sim.data.x[rows],))
        loss = nn.functional.cross_entropy(out, sim.data.labels(0))
        loss = loss + 0.05 * sum(p.abs().sum() for k, p in at.items() if k.endswith(".mu"))
        step.zero_grad()
        loss.backward()
        step.step()
    assert_close(models(sim)["0"], {k: p.detach() for k, p in zip(names, params)})


@pytest.mark.parametrize("name", ["factorized-fl-alpha", "factorized-fl-beta", "factorized-fedavg", "factorized-local"])
def test_the_default_fits_the_training_data(name: str) -> None:
    def loss(rounds: int) -> float:
        sim = run(make(name), "cnn", rounds=rounds)
        total = 0.0
        for i, rows in enumerate(sim.data.train):
            task, params = sim.personal(i)
            out = task.predict(params, sim.data.x[torch.from_numpy(rows)])
            total += float(nn.functional.cross_entropy(out, sim.data.labels(i)).detach()) / 7
        return total

    assert loss(8) < 0.8 * loss(0)


def test_what_the_server_knows_can_be_shown() -> None:
    sim = run(method_of(FactorizedFLBeta, tau=-1.0, lr=0.1), rounds=2, participation=0.6)
    seen = sim.record.server["seen"]
    assert {"sigma", "matched", "n"} <= seen.keys()
    asked = seen["matched"].diagonal()  # how often a client was averaged at all
    assert int(asked.sum()) == 2 * 4 and (seen["matched"] <= asked[:, None]).all()
    found = sim.method.monitor(sim.record.server)
    assert set(found) == {
        *("similarity_v", "similarity_v_min", "similarity_u", "similarity_u_min"),
        *("neighbours", "mu_nonzero", "mu_nonzero_received"),
    }
    assert found["mu_nonzero_received"] >= found["mu_nonzero"]  # an average has the union of the supports
    known = int((seen["n"] > 0).sum())
    assert found["neighbours"] == known - 1 and found["similarity_v_min"] <= found["similarity_v"] <= 1
    assert FactorizedFL().monitor(run(FactorizedFL(), rounds=0).record.server) == {}


def test_similarity_of_v_and_u_is_kept_over_the_rounds() -> None:
    sim = run(method_of(FactorizedFL, lr=0.1), "cnn", rounds=2, participation=0.4, evaluate_every=1)
    server = sim.record.server
    known = server["seen"]["n"] > 0
    assert 2 <= int(known.sum()) < len(known)
    found = sim.method.matrices(server)
    pairs = known[:, None] & known[None, :]
    u = torch.cat([p.flatten(1) for p in server["u"].values()], 1)
    for name, rows in (("v", server["z"].flatten(1)), ("u", u)):
        assert torch.equal(torch.isfinite(found[name]), pairs)
        by_hand = nn.functional.cosine_similarity(rows[:, None], rows[None, :], dim=2)
        assert_close({name: found[name][pairs]}, {name: by_hand[pairs]})
    kept = [line["matrices"] for line in sim.record.lines]
    assert [set(k) for k in kept] == [{"v", "u"}] * 2
    assert kept[1]["u"][0][0] == (1.0 if known[0] else None)
    for method in (FactorizedFedAvg(), FactorizedLocal()):
        assert method.matrices(run(method, rounds=1).record.server) == {}
    assert FactorizedFL().matrices(run(FactorizedFL(), rounds=0).record.server) == {}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gamma": 0}, "gamma must be an integer >= 1. Got 0"),
        ({"tau": -1.5}, "tau must be a finite number >= -1. Got -1.5"),
        ({"epsilon": -1.0}, "epsilon must be a finite number >= 0"),
        ({"m_min": 0}, "m_min must be an integer >= 1"),
        ({"lam": float("inf")}, "lam must be a finite number"),
        ({"down_share": 0.0}, "down_share must be a number in (0, 1]. Got 0.0"),
        ({"down_share": 1.5}, "down_share must be a number in (0, 1]. Got 1.5"),
        ({"shared": "v"}, "shared must be one of"),
        ({"layout": "any"}, "layout must be one of"),
        ({"keep_momentum": True}, "keep_momentum needs momentum > 0"),
        ({"keep_momentum": True, "momentum": 0.9, "gauge": True}, "gauge must be false with keep_momentum"),
    ],
)
def test_bad_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as e:
        make("factorized-fl-alpha", **fields)
    assert message in str(e.value)


def test_a_key_in_the_place_of_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"FactorizedFL: matching must be a SimilarityMatching, .* Got 'random'"):
        FactorizedFL(matching="random")  # type: ignore[arg-type]
    assert FactorizedFL(matching=SimilarityMatching(rule="random")) == make("factorized-fl-alpha", matching="random")


def test_a_bound_that_leaves_no_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match="min_u_dim leaves no layer to factorise"):
        method_of(FactorizedFL, min_u_dim=1000).model(make_task(), None)


@pytest.mark.parametrize("cls", [FactorizedFL, FactorizedFLBeta, FactorizedFedAvg, FactorizedLocal])
def test_experiment_files_write_flat_keys_each_with_a_sentence(cls: type[Method]) -> None:
    keys = keys_of(cls)
    assert keys.keys() - keys_of(Averaging).keys() == {
        *("shared", "gauge", "down_threshold", "down_share"),
        *("matching", "tau", "epsilon", "m_min", "partners", "newcomer", "likeness_of", "likeness_layer"),
        *("gamma", "mu", "mu_start", "layers", "layout", "min_u_dim"),
        *("lam", "penalty", "eval_prune", "keep_momentum"),
    }
    assert not [k for k, key in keys.items() if not key.sentence.endswith(".")]
    own = [f.name for f in dataclasses.fields(cls)]
    assert not [k for k in own if not sentences(cls).get(k)]
    changed = {"shared": "uv", "matching": "worst", "lam": 0.25, "likeness_of": "change", "gamma": 2, "down_share": 0.5}
    assert changed.items() <= flat(method_of(cls, **changed)).items()
