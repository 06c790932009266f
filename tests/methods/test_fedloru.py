"""FedLoRU and its kin: limiting cases in float64 to 1e-12, ranks, bytes, schedules.

* FedLoRU without accumulation = FedLoRA, and before the first accumulation.
* A = I frozen, r >= m, B from 0: FedLoRU with step lr = FedAvg with step lr * alpha^2, for every tau.
* One client = ReLoRA, by torch.optim.
* Right after an accumulation the function is what it was, unless both factors are kept ("momentum").
* rank(W_t - W_0) <= r * ceil(t / tau), with equality below the largest rank.
* With one frozen A the mean of the factors is the mean of the models; without, it is not.
* pFedLoRU without personal epochs = FedLoRU; without global epochs the shared state stays.
* mFedLoRU with inner identities frozen, inner alpha 1 and full rank = FedLoRU, also with momentum; so is opting out.
* pFedLoRA(2) with alpha = 0 = FedAvg; so is (1) without personal epochs.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from conftest import assert_close, assert_same, make_data, make_task, method_of
from conftest import finished as run
from conftest import plain_model as model
from conftest import plain_models as models
from fedspan import tree
from fedspan.errors import ConfigError
from fedspan.learn.task import Task
from fedspan.linalg import lowrank
from fedspan.method import Averaging, Federation
from fedspan.method.fields import keys_of, sentences, with_keys
from fedspan.methods import FedAvg, FedLoRA, FedLoRU, MFedLoRU, PFedLoRA, PFedLoRAJoint, PFedLoRU, make
from fedspan.simulation.simulator import Simulation
from fedspan.tree import Params

STEPS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
# One mapping is enough: that both give the same is in the common table, for every method.
MAPPING = pytest.mark.parametrize("mapping", ["loop"])
REINIT = pytest.mark.parametrize("reinit", ["random", "momentum_A"])


def unbiased() -> Task:
    torch.manual_seed(0)
    sizes = ((5, 7), (7, 6), (6, 3))
    a, b, c = (nn.Linear(i, o, bias=False) for i, o in sizes)
    return Task(nn.Sequential(a, nn.Tanh(), b, nn.Tanh(), c), dtype=torch.float64)


def moved(sim: Simulation) -> float:
    """How far the models went from the start."""
    start = sim.task.init()
    return float(tree.ravel(tree.sub(model(sim), tree.select(start, model(sim)))).norm())


def products(sim: Simulation) -> Params:
    """W − W⁰ of all clients, as matrices."""
    start = sim.task.init()
    return {k: (W - start[k]).flatten(1) for k, W in sim.record.common["W"].items()}


# ------------------------------------------------------------------------------------------------ FedLoRU


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_the_stable_rank_that_is_shown_is_that_of_the_products(rounds: int) -> None:
    sim = run(method_of(FedLoRU, rank=2, tau=2, **STEPS), task=unbiased(), rounds=rounds)
    server = sim.record.server
    pair = server["last"]["added"] if rounds == 2 else server  # in round 2 the factors went over to W and begin anew
    found = []
    for A, B in zip(pair["A"].values(), pair["B"].values()):
        s = torch.linalg.svdvals(A @ B)
        found.append(float((s / s[0]).square().sum()))
    seen = sim.method.monitor(server)["stable rank of the update"]
    assert seen == pytest.approx(sum(found) / len(found), rel=1e-12) and 1.0 < seen < 2.0
    assert sim.method.monitor(sim.method.init_server(sim.task, Federation(7, 0))) == {}  # the product is still zero


@MAPPING
def test_without_accumulation_it_is_fedlora(mapping: str) -> None:
    one = run(method_of(FedLoRA, rank=2, **STEPS), mapping=mapping)
    for tau in (None, 4):
        other = run(method_of(FedLoRU, rank=2, tau=tau, **STEPS), mapping=mapping)
        assert_close(models(one), models(other))
    assert moved(one) > 1e-3
    assert_close(one.record.common["W"], {k: one.task.init()[k] for k in one.record.common["W"]})


@pytest.mark.parametrize("tau", [1, 2, None])
@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_with_a_frozen_identity_it_is_fedavg(tau: int | None, alpha: float) -> None:
    fields: dict[str, Any] = {"start": "identity", "freeze_A": True, "reinit": "momentum_A", "layers": "all"}
    a = run(method_of(FedLoRU, rank=7, lr=0.2, alpha=alpha, tau=tau, **fields), task=unbiased(), rounds=4)
    b = run(FedAvg(lr=0.2 * alpha**2), task=unbiased(), rounds=4)
    assert_close(models(a), models(b))
    assert moved(a) > 1e-2


def test_with_a_frozen_identity_and_dense_biases_it_is_fedavg_with_momentum_too() -> None:
    fields: dict[str, Any] = {"start": "identity", "freeze_A": True, "alpha": 1.0, "tau": 2, "layers": "body"}
    assert_close(models(run(method_of(FedLoRU, rank=8, **fields, **STEPS))), models(run(method_of(FedAvg, **STEPS))))
    # α = a/r is the same as writing that number.
    scaled = run(method_of(FedLoRU, rank=8, **{**fields, "alpha": 8.0, "alpha_over_r": True}, **STEPS))
    assert_close(models(scaled), models(run(method_of(FedAvg, **STEPS))))


@pytest.mark.parametrize("reinit", ["random", "momentum_A", "momentum"])
def test_with_one_client_it_is_relora(reinit: Any) -> None:
    data, rounds, tau, alpha = make_data(clients=1), 4, 2, 0.7
    method = method_of(FedLoRU, rank=2, tau=tau, alpha=alpha, reinit=reinit, layers="all", lr=0.1, momentum=0.9)
    once: dict[str, Any] = {"epochs": 3, "batch_size": "full", "participation": 1.0}
    sim = run(method, rounds=rounds, data=data, task=unbiased(), **once)
    task = unbiased()
    rows = torch.from_numpy(data.train[0])
    start = method.model(task, None).init()
    W = [p.detach() for p in task.module.parameters()]
    A = [start[f"{i}.A"].clone().requires_grad_() for i in (0, 2, 4)]
    B = [start[f"{i}.B"].clone().requires_grad_() for i in (0, 2, 4)]
    for t in range(1, rounds + 1):
        optimiser = torch.optim.SGD([*A, *B], lr=0.1, momentum=0.9)  # anew in every round
        for _ in range(3):
            weights = dict(zip(("0.weight", "2.weight", "4.weight"), (w + alpha * a @ b for w, a, b in zip(W, A, B))))
            output = functional_call(task.module, weights, (data.x[rows],))
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(output, data.y[rows]).backward()
            optimiser.step()
        if t % tau == 0:
            W = [(w + alpha * a @ b).detach() for w, a, b in zip(W, A, B)]
            if reinit != "momentum":
                B = [torch.zeros_like(b).requires_grad_() for b in B]
            if reinit == "random":
                # What the server draws, once for all.
                drawn = run(method, rounds=t, data=data, task=unbiased(), **once).record.server["A"]
                assert not torch.equal(drawn["0.A"], A[0])
                A = [a.clone().requires_grad_() for a in drawn.values()]
    assert_close(sim.record.common["W"], dict(zip(("0.weight", "2.weight", "4.weight"), W)))
    last = (w + alpha * a @ b for w, a, b in zip(W, A, B))
    assert_close(model(sim), dict(zip(("0.weight", "2.weight", "4.weight"), last)))


@pytest.mark.parametrize("adapter", ["lora", "loha", "lokr"])
@REINIT
def test_accumulation_leaves_the_function_as_it_was(adapter: Any, reinit: Any) -> None:
    fields: dict[str, Any] = {"rank": 2, "adapter": adapter, "alpha": 0.8, **STEPS}
    before = run(method_of(FedLoRA, **fields), "cnn", rounds=2)
    after = run(method_of(FedLoRU, tau=2, reinit=reinit, **fields), "cnn", rounds=2)
    x = torch.randn(5, 1, 6, 6, dtype=torch.float64)
    outputs = [task.predict(weights, x) for task, weights in (before.personal(1), after.personal(1))]
    assert_close({"y": outputs[0]}, {"y": outputs[1]})
    zero = lowrank.FACTORS[adapter][-1]
    assert all(not p.count_nonzero() for p in after.record.server[zero].values())
    assert any(p.count_nonzero() for p in before.record.server[zero].values())
    for f in lowrank.FACTORS[adapter][:-1]:
        kept = [torch.equal(p, before.record.server[f][k]) for k, p in after.record.server[f].items()]
        assert kept == [reinit == "momentum_A"] * len(kept)


def test_keeping_both_factors_counts_their_product_twice() -> None:
    before = run(method_of(FedLoRA, rank=2, alpha=0.8, **STEPS), rounds=2)
    after = run(method_of(FedLoRU, rank=2, alpha=0.8, tau=2, reinit="momentum", **STEPS), rounds=2)
    start = before.task.init()
    for k in after.record.common["W"]:
        once, twice = model(before)[k] - start[k], model(after)[k] - start[k]
        assert float(once.norm()) > 1e-2
        assert_close({k: twice}, {k: 2 * once})


def test_each_accumulation_adds_r_to_the_rank() -> None:
    def ranks(sim: Simulation, change: Params) -> set[int]:
        return {int(torch.linalg.matrix_rank(d, rtol=1e-9)) for d in change.values()}

    method = method_of(FedLoRU, rank=1, tau=2, layers="body", **STEPS)
    sim = run(method, rounds=6)
    assert ranks(sim, products(sim)) == {3}
    sim = run(method, rounds=7)  # the pair that is not accumulated yet counts as well
    start = sim.task.init()
    assert ranks(sim, {k: model(sim)[k] - start[k] for k in sim.record.common["W"]}) == {4}
    kept = run(replace(method, reinit="momentum_A", freeze_A=True), rounds=6)
    assert ranks(kept, products(kept)) == {1}  # one A for ever spans one subspace
    drawn = run(replace(method, reinit="random", freeze_A=True), rounds=6)
    assert ranks(drawn, products(drawn)) == {3}


@pytest.mark.parametrize("frozen", [True, False])
def test_with_a_frozen_A_the_mean_of_factors_is_the_mean_of_models(frozen: bool) -> None:
    # After two rounds, so that B is not zero and A has moved where it may.
    method = FedLoRU(rank=2, tau=None, freeze_A=frozen, lr=0.3)
    sim = run(method, rounds=2, participation=1.0)
    engine, server, common = sim.engine, sim.record.server, sim.record.common
    ids = list(range(7))
    rows = {"h": {}}
    down = method.download(server, torch.tensor(ids), None, 3)
    sent = engine.update(None, 3, ids, rows, down.shared, {}, common).sent
    assert ("A" in sent.mean) == (not frozen)
    A = lambda i, k: common["A"][k] if frozen else sent.mean["A"][k][i]
    w = sent.weight / sent.weight.sum()
    mean = run(method, rounds=3, participation=1.0).record.server
    gap = 0.0
    for k, B in sent.mean["B"].items():
        a = k[:-1] + "A"
        models = sum(w[i] * A(i, a) @ B[i] for i in ids)
        factors = (common["A"][a] if frozen else mean["A"][a]) @ mean["B"][k]
        gap = max(gap, float((models - factors).abs().max()))
    assert gap < 1e-12 if frozen else gap > 1e-4


@MAPPING
def test_a_frozen_A_runs_alike_in_every_way_and_is_never_sent(mapping: str) -> None:
    method = method_of(FedLoRU, rank=2, tau=2, freeze_A=True, layers="large", private_head=True, momentum=0.5)
    a, b = (run(method, rounds=5, mapping=mapping, chunk=2, workers=w) for w in (1, 2))
    assert a.record.digest() == b.record.digest()
    assert_close(models(a), models(run(method, rounds=5, mapping="loop")))
    assert set(a.result.bytes["names"]["up"]) == {"theta", "B"}  # type: ignore[attr-defined]
    assert not torch.equal(a.record.common["A"]["0.A"], method.model(make_task(), None).init()["0.A"])


def test_all_clients_are_told_of_an_accumulation_and_the_bytes_are_counted() -> None:
    r, layers = 2, [(7, 5), (6, 7)]
    pair = 8 * sum(r * (m + n) for m, n in layers)
    rest = 8 * (7 + 6 + 3 + 18)
    sim = run(FedLoRU(rank=r, tau=2), rounds=5)
    told = [line["bytes"] for line in sim.record.lines]
    assert [line["announce"] for line in told] == [0, 7 * pair, 0, 7 * pair, 0]
    assert {line["up"] for line in told} == {line["down"] for line in told} == {4 * (pair + rest)}
    assert sim.result.bytes["announce"] == 14 * pair  # type: ignore[attr-defined]
    lora = run(FedLoRA(rank=r), rounds=5)
    assert lora.result.bytes["announce"] == 0  # type: ignore[attr-defined]


def test_a_round_nobody_answers_accumulates_nothing() -> None:
    sim = run(FedLoRU(rank=2, tau=1), rounds=2, drop_rate=1.0)
    assert sim.result.bytes["announce"] == 0  # type: ignore[attr-defined]
    assert_close(products(sim), tree.zeros_like(products(sim)), 0.0)


def test_running_statistics_are_averaged_and_the_model_is_whole() -> None:
    sim = run(method_of(FedLoRU, rank=2, tau=2, server_optimizer="adam", server_lr=0.05), "batchnorm", rounds=3)
    theta = sim.record.server["theta"]
    assert {k for k in theta if "running" in k} == {"norm.running_mean", "norm.running_var"}
    assert bool((theta["norm.running_var"] > 0).all()) and not torch.equal(
        theta["norm.running_mean"], sim.task.init()["norm.running_mean"]
    )
    task, weights = sim.personal(0)
    assert task.whole(weights) and not task.whole({"norm.weight": theta["norm.weight"]})
    x = torch.randn(3, 1, 6, 6, dtype=torch.float64)
    y = task.predict(weights, x)
    assert_close({"y": sim.result.personal_model(0)(x)}, {"y": y})  # type: ignore[attr-defined]
    assert_close({"y": sim.task.predict(model(sim), x)}, {"y": y})


# ------------------------------------------------------------------------------------------------ the server's step


@pytest.mark.parametrize("rule", ["adam", "adagrad"])
def test_the_servers_step_is_fedadam_or_fedadagrad(rule: Any) -> None:
    method = method_of(
        FedLoRU,
        rank=2,
        server_optimizer=rule,
        server_lr=0.05,
        server_momentum=0.8,
        server_beta2=0.7,
        server_epsilon=0.01,
    )
    one = run(with_keys(method, server_optimizer="none"), rounds=1)
    sim = run(method, rounds=1)
    start = run(method, rounds=0).record.server
    for f in ("theta", "A", "B"):
        for k, x in start[f].items():
            delta = one.record.server[f][k] - x
            m, s = 0.2 * delta, (0.3 if rule == "adam" else 1.0) * delta**2
            assert_close({k: sim.record.server[f][k]}, {k: x + 0.05 * m / (s.sqrt() + 0.01)})


def test_moments_of_factors_end_with_an_accumulation() -> None:
    sim = run(method_of(FedLoRU, rank=2, tau=2, server_optimizer="adam", server_lr=0.05), rounds=2)
    for moment in ("m", "s"):
        state = sim.record.server["optimizer"][moment]
        assert not any(p.count_nonzero() for f in "AB" for p in state[f].values())
        assert all(p.count_nonzero() for p in state["theta"].values())


def test_the_step_size_falls_along_a_cosine_and_starts_anew() -> None:
    method = method_of(FedLoRU, lr=0.3, lr_min=0.1, cycle=4)

    def rate(t: int) -> float:
        return method.schedule.rate(method.lr, t)

    expected = [0.1 + 0.1 * (1 + math.cos(math.pi * j / 4)) for j in range(4)]
    assert [rate(t) for t in range(1, 9)] == pytest.approx(expected * 2)
    one = run(FedLoRA(rank=2, lr=0.3), rounds=2)
    assert_close(models(one), models(run(method_of(FedLoRA, rank=2, lr=0.3, lr_min=0.1, cycle=1), rounds=2)))
    fallen = run(method_of(FedLoRA, rank=2, lr=0.3, lr_min=0.1, cycle=2), rounds=2)
    assert not torch.equal(model(one)["0.weight"], model(fallen)["0.weight"])


# ------------------------------------------------------------------------------------------------ pFedLoRU


@MAPPING
def test_pfedloru_without_personal_epochs_is_fedloru(mapping: str) -> None:
    fields: dict[str, Any] = {"rank": 2, "tau": 2, **STEPS}
    a = run(method_of(PFedLoRU, personal_epochs=0, global_epochs=2, private_head=False, **fields), mapping=mapping)
    start = a.engine.model(None).init()
    # The two draw A in another order, as one also draws L; from the same A they are the same.
    assert all(not p.count_nonzero() for k, p in a.record.row(0)["h"].items() if k.endswith("U"))
    begun = type("Begun", (FedLoRU,), {"init_server": lambda s, t, f: FedLoRU.init_server(s, t, f) | {"A": old}})
    old = {k: p for k, p in start.items() if k.endswith(".A")}
    b = run(method_of(begun, **fields), mapping=mapping)
    assert_close(a.record.server, b.record.server)
    assert_close(models(a), models(b))
    assert moved(a) > 1e-2


def test_pfedloru_without_global_epochs_shares_nothing_new() -> None:
    method = method_of(PFedLoRU, rank=2, tau=2, global_epochs=0, reinit="momentum", **STEPS)
    start, sim = run(method, rounds=0), run(method, rounds=3, participation=1.0)
    for f in ("theta", "A", "B"):
        assert_close(start.record.server[f], sim.record.server[f])
    assert_close(start.record.common["W"], sim.record.common["W"])
    a, b = model(sim, 0), model(sim, 1)
    assert all(float((a[k] - b[k]).abs().max()) > 1e-3 for k in sim.record.common["W"])


@pytest.mark.parametrize("head", [True, False])
def test_pfedlorus_phases_by_hand(head: bool) -> None:
    """L, U (and a private head) first, with A, B fixed; then A, B and the rest, with those fixed."""
    data = make_data(clients=1)
    method = PFedLoRU(
        rank=2, own_ranks=(1,), alpha=0.5, alpha_own=2.0, personal_epochs=2, global_epochs=3, private_head=head, lr=0.2
    )
    sim = run(method, rounds=1, data=data, batch_size="full", participation=1.0)
    task = method.model(make_task(), None)
    p = {k: t.requires_grad_() for k, t in task.init().items()}
    rows = torch.from_numpy(data.train[0])
    own = [k for k in p if k.endswith((".L", ".U")) or (head and k.startswith("4."))]
    for names, steps in ((own, 2), ([k for k in p if k not in own], 3)):
        for _ in range(steps):
            loss = torch.nn.functional.cross_entropy(functional_call(task.module, p, (data.x[rows],)), data.y[rows])
            grads = torch.autograd.grad(loss, [p[k] for k in names])
            for k, g in zip(names, grads):
                p[k] = (p[k] - 0.2 * g).detach().requires_grad_()
    weights = sim.personal(0)[1]
    assert_close({k: weights[k] for k in p}, tree.detach(p))
    layer = task.module.get_submodule("0")
    W = dict(task.module.named_parameters())["0.weight"]
    whole = W + 0.5 * p["0.A"] @ p["0.B"] + 2.0 * p["0.L"] @ p["0.U"]  # type: ignore[operator]
    assert_close({"w": model(sim)["0.weight"]}, {"w": whole.detach()})
    assert layer.beside == {"A": False, "L": False}  # type: ignore[comparison-overlap]


def test_named_layers_can_be_personal() -> None:
    method = PFedLoRU(rank=2, personal_layers=("norm", "head"), private_head=False)
    sim = run(method, "cnn", rounds=1)
    assert {k for k in sim.record.row(0)["h"] if not k.endswith((".L", ".U"))} == {
        "norm.weight",
        "norm.bias",
        "head.weight",
        "head.bias",
    }
    assert set(sim.record.server["theta"]) == {"conv.bias", "hidden.bias"}
    with pytest.raises(ConfigError, match=r"PFedLoRU: personal_layers must begin the name of a parameter. Got \['x'\]"):
        run(PFedLoRU(personal_layers=("x",)), rounds=0)


def test_own_ranks_differ_by_client_also_with_nested_factors() -> None:
    method = method_of(PFedLoRU, rank=4, own_ranks=(1, 3), ranks=(4, 2, 2), tau=2)
    assert [method.capacity_of(i) for i in range(7)] == [(4, 1), (2, 3), (2, 1), (4, 3), (2, 1), (2, 3), (4, 1)]
    sim = run(method, rounds=3, participation=1.0)
    shapes = [tuple(sim.record.row(i)["h"]["0.L"].shape) for i in range(7)]
    assert shapes == [(7, method.capacity_of(i)[1]) for i in range(7)]  # type: ignore[index]
    assert all(float(sim.record.row(i)["h"]["0.U"].abs().max()) > 1e-4 for i in range(7))
    assert PFedLoRU(own_ranks=(3, 3)).capacity_of(5) is None


# ------------------------------------------------------------------------------------------------ mFedLoRU


@MAPPING
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_mfedloru_with_inner_identities_is_fedloru(mapping: str, momentum: float) -> None:
    fields: dict[str, Any] = {"rank": 3, "tau": 2, "lr": 0.1, "momentum": momentum}
    inner = {"alpha_inner": 1.0, "inner_start": "identity", "inner_frozen": True, "opt_out": False}
    a = run(method_of(MFedLoRU, ranks=(3,), **inner, **fields), mapping=mapping)  # type: ignore[arg-type]
    b = run(method_of(FedLoRU, **fields), mapping=mapping)
    assert_close(models(a), models(b))
    assert_close(a.record.server, b.record.server)
    assert set(a.result.bytes["names"]["up"]) == {"theta", "A_d", "A_u", "B_d", "B_u"}  # type: ignore[attr-defined]
    out = run(method_of(MFedLoRU, ranks=(3,), **fields), mapping=mapping)
    assert_same(out.record.server, b.record.server)  # a client of rank r opts out
    assert moved(b) > 1e-2


def test_nested_factors_cost_what_the_paper_says() -> None:
    r, layers = 4, [(7, 5), (6, 7)]
    rest = 7 + 6 + 3 + 18
    sim = run(method_of(MFedLoRU, rank=r, ranks=(4, 2, 1)), rounds=1, participation=1.0)

    def up(k: int) -> int:
        return sum(r * (m + n) if k == r else k * (m + r) + k * (r + n) for m, n in layers)

    counts = {4: 3, 2: 2, 1: 2}
    bytes_ = sim.result.bytes  # type: ignore[attr-defined]
    assert bytes_["up"] == 8 * sum(n * (up(k) + rest) for k, n in counts.items())
    assert bytes_["down"] == 8 * 7 * (sum(r * (m + n) for m, n in layers) + rest)


@pytest.mark.parametrize(
    ("ranks", "counts"), [((128, 64, 32, 16), [5, 5, 5, 5]), ((64, 32, 16), [7, 7, 6])], ids=["setting-1", "setting-2"]
)
def test_clients_take_ranks_in_turn(ranks: Any, counts: list[int]) -> None:
    method = method_of(MFedLoRU, rank=128, ranks=ranks)
    got = [method.capacity_of(i) for i in range(20)]
    assert [got.count(r) for r in ranks] == counts


def test_the_server_averages_what_inner_factors_make() -> None:
    method = method_of(MFedLoRU, rank=3, ranks=(2, 1), alpha_inner=0.7, weighting="uniform", lr=0.3)
    # From the second round on, as B is zero before.
    sim = run(method, rounds=2, participation=1.0)
    server, common = sim.record.server, sim.record.common
    total: dict[str, Tensor] = {}
    for capacity in (2, 1):
        ids = [i for i in range(7) if method.capacity_of(i) == capacity]
        down = method.download(server, torch.tensor(ids), capacity, 3)
        sent = sim.engine.update(capacity, 3, ids, {"h": {}}, down.shared, {}, common).sent.mean
        for name in ("0.A", "2.A"):
            made = server["A"][name] + 0.7 * sent["A_d"][name] @ sent["A_u"][name]
            total[name] = total.get(name, 0.0) + made.sum(0)
            assert sent["A_d"][name].shape[1:] == (server["A"][name].shape[0], capacity)
            assert float(sent["A_d"][name].abs().max()) > 1e-6
    after = run(method, rounds=3, participation=1.0).record.server
    assert_close({k: after["A"][k] for k in total}, {k: t / 7 for k, t in total.items()})
    literal = with_keys(method, alpha_inner_by_rank=True)
    assert (method.nesting.alpha_of(2), literal.nesting.alpha_of(2)) == (0.7, 1.4)


# ------------------------------------------------------------------------------------------------ pFedLoRA


@MAPPING
def test_pfedlora_without_its_pair_is_fedavg(mapping: str) -> None:
    fedavg = models(run(method_of(FedAvg, **STEPS), mapping=mapping))
    assert_close(models(run(method_of(PFedLoRAJoint, alpha=0.0, private_head=False, **STEPS), mapping=mapping)), fedavg)
    phases = method_of(PFedLoRA, personal_epochs=0, global_epochs=2, private_head=False, **STEPS)
    assert_close(models(run(phases, mapping=mapping)), fedavg)
    own = models(run(method_of(PFedLoRA, **STEPS), mapping=mapping))
    assert float((own["0"]["0.weight"] - own["1"]["0.weight"]).abs().max()) > 1e-3


def test_pfedlora_sends_the_whole_model_and_keeps_the_pair() -> None:
    for method in (method_of(form, rank=1, private_head=False) for form in (PFedLoRA, PFedLoRAJoint)):
        sim = run(method, "cnn", rounds=1, participation=1.0)
        size = sum(p.numel() for p in sim.task.init().values())
        assert sim.result.bytes["up"] == sim.result.bytes["down"] == 7 * 8 * size  # type: ignore[attr-defined]
        assert set(sim.record.server["theta"]) == set(sim.task.init())
        assert set(sim.record.row(0)["h"]) == {"conv.L", "conv.U", "hidden.L", "hidden.U"}


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("fedloru", {"rank": 0}, "rank must be an integer >= 1. Got 0"),
        ("fedloru", {"tau": 0}, "tau must be an integer >= 1. Got 0"),
        ("fedloru", {"alpha": 0.0}, "alpha must be a finite number > 0"),
        ("fedloru", {"reinit": "zero"}, "reinit must be one of 'random', 'momentum', 'momentum_A'"),
        ("fedloru", {"adapter": "loha", "freeze_A": True}, "freeze_A goes with adapter 'lora' only. Got 'loha'"),
        ("fedloru", {"cycle": 5, "lr": 0.01, "lr_min": 0.1}, "lr_min must be at most lr = 0.01 with a cycle. Got 0.1"),
        ("fedloru", {"server_beta2": 1.0}, "server_beta2 must be a finite number >= 0 and < 1"),
        ("fedloru", {"layers": "some"}, "layers must be one of 'all', 'body', 'large'"),
        ("mfedloru", {"rank": 4, "ranks": (8,)}, "ranks must be integers in 1..4, the global rank. Got [8]"),
        ("mfedloru", {"adapter": "lokr"}, "ranks go with adapter 'lora' and freeze_A=false only"),
        ("pfedloru", {"own_ranks": ()}, "own_ranks must be a list of one or more integers >= 1. Got []"),
        ("pfedloru", {"own_ranks": (0,)}, "own_ranks must be a list of one or more integers >= 1. Got [0]"),
        ("mfedloru", {"ranks": (4, 0)}, "ranks must be a list of integers >= 1. Got [4, 0]"),
        ("pfedloru", {"rank": 4, "ranks": (8,)}, "ranks must be integers in 1..4, the global rank. Got [8]"),
        ("pfedlora1", {"personal_epochs": -1}, "personal_epochs must be an integer >= 0"),
        ("pfedlora2", {"rank": 0}, "rank must be an integer >= 1"),
    ],
)
def test_bad_fields_are_refused(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as e:
        make(name, **fields)
    assert message in str(e.value)


def test_no_layer_smaller_by_its_factors_is_refused() -> None:
    with pytest.raises(ConfigError, match="FedLoRU: layers must be 'body', 'all' or names where no layer becomes"):
        run(FedLoRU(rank=16, layers="large"), rounds=0)


@pytest.mark.parametrize("cls", [FedLoRU, FedLoRA, PFedLoRU, MFedLoRU])
def test_experiment_files_write_flat_keys_each_with_a_sentence(cls: type[FedLoRU]) -> None:
    keys = keys_of(cls)
    inner = {"ranks", "alpha_inner", "alpha_inner_by_rank", "inner_start", "inner_frozen", "opt_out"}
    own = {"own_ranks", "alpha_own", "personal_epochs", "global_epochs"}
    more = {PFedLoRU: inner | own, MFedLoRU: inner}.get(cls, set())
    assert keys.keys() - keys_of(Averaging).keys() == more | {
        *("rank", "alpha", "alpha_over_r", "tau", "reinit", "adapter", "start", "freeze_A", "layers"),
        *("personal_layers", "lr_min", "cycle"),
    }
    assert not [k for k, key in keys.items() if not key.sentence.endswith(".")]
    assert not [f.name for f in fields(cls) if not sentences(cls).get(f.name)]
    assert keys["ranks"].default == ((2, 4, 8, 16) if cls is MFedLoRU else ()) if more else "ranks" not in keys
