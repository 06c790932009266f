"""FedHM, FedLMT, FedDLR: what truncation, averaging and decay do, in float64.

* FedHM at full rank without local steps returns W; truncation loses the tail of the spectrum (Eckart-Young).
* One SGD step from balanced factors: U'V'' = W_r - lr (G V V' + U U' G) + lr^2 G V U' G.
* Zero columns in U and V change no trajectory: SGD, momentum, decay, AdamW.
* The decay of the product has the gradients lambda U (V'V) and lambda V (U'U).
* rho = 1 for all = FedAvg with uniform weights; FedLMT = FedAvg of the factorised network; one round of one client is
  the same in FedHM and FedLMT; FedDLR that keeps all energy = FedAvg.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import assert_close, make_data, make_task, method_of
from conftest import finished as run
from conftest import plain_model as model
from conftest import plain_models as models
from fedspan import tree
from fedspan.errors import ConfigError
from fedspan.layers import Adapter, LowRank, candidates, convert
from fedspan.layers.decay import product_decay
from fedspan.learn.batches import Batch
from fedspan.learn.sgd import adamw, gradient, sgd
from fedspan.learn.task import Task
from fedspan.linalg import lowrank
from fedspan.method import Abilities, Converts, Round
from fedspan.method.factored import size_of_factors
from fedspan.methods import FedAvg, FedDLR, FedHM, FedLMT, make
from fedspan.methods.fedhm import matching_rho
from fedspan.models import build
from fedspan.tree import Tree

STEPS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
# One mapping is enough: that both give the same is in the common table, for every method.
MAPPING = pytest.mark.parametrize("mapping", ["loop"])


# ------------------------------------------------------------------------------------------------ truncation


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_without_local_steps_full_ranks_return_the_model_and_others_its_nearest(kind: str) -> None:
    start = make_task(kind).init()
    sim = run(FedHM(rho=1.0001, lr=0.0), kind, participation=1.0)  # outputs/rho is full rank here, but factored
    if kind == "mlp":  # a kernel of o·k × i·k can have a rank above o
        assert_close(model(sim), start, 1e-12)
    sim = run(FedHM(rho=3.0, lr=0.0), kind, rounds=1, participation=1.0)
    for k, W in sim.record.server["W"].items():
        r = round(len(W) / 3)
        s = torch.linalg.svdvals(lowrank.unfold(start[k]))
        lost = float((start[k] - W).square().sum())
        assert 1 <= r < len(s) and lost == pytest.approx(float(s[r:].square().sum()), rel=1e-9)  # Eckart–Young
    again = run(FedHM(rho=3.0, lr=0.0), kind, rounds=3, participation=1.0)
    assert_close(models(sim), models(again), 1e-12)  # a truncated model is not truncated further


def test_one_step_from_balanced_factors() -> None:
    task, lr = Task(nn.Linear(6, 5, bias=False), dtype=torch.float64), 0.3
    low = task.converted(lambda m: LowRank(m, 3))
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 6, generator=g, dtype=torch.float64), torch.randint(0, 5, (8,), generator=g)
    batch = Batch(x, y, None, torch.tensor(0), 0)
    start = low.init()
    U, V = start["U"], start["V"]
    new = sgd(low.loss, start, [batch], lr)
    G = gradient(task.loss, {"weight": U @ V.T}, batch)["weight"]
    expected = U @ V.T - lr * (G @ V @ V.T + U @ U.T @ G) + lr**2 * G @ V @ U.T @ G
    assert_close({"w": new["U"] @ new["V"].T}, {"w": expected})
    assert float(G.abs().max()) > 1e-2


@pytest.mark.parametrize(
    "train",
    [
        lambda loss, p, b: sgd(loss, p, b, 0.2),
        lambda loss, p, b: sgd(loss, p, b, 0.2, momentum=0.9, weight_decay=0.1),
        lambda loss, p, b: adamw(loss, p, b, 0.05, weight_decay=0.1),
    ],
    ids=["sgd", "momentum and decay", "adamw"],
)
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_zero_columns_change_no_trajectory(train: Any, kind: str) -> None:
    task, data = make_task(kind), make_data(kind)
    layer = "0" if kind == "mlp" else "conv"
    thin, wide = (task.converted(lambda m, r=r: convert(m, [layer], lambda p: LowRank(p, r))) for r in (2, 3))
    start, pad = thin.init(), {}
    for k, p in start.items():
        pad[k] = nn.functional.pad(p, (0, 1)) if k.endswith((".U", ".V")) else p
    rows = [torch.from_numpy(data.train[i]) for i in range(4)]
    batches = [Batch(data.x[r], data.y[r], None, torch.tensor(0), j) for j, r in enumerate(rows)]
    a, b = train(thin.loss, start, batches), train(wide.loss, pad, batches)
    for k, p in b.items():
        if k.endswith((".U", ".V")):
            assert not p[..., 2:].count_nonzero()
            p = p[..., :2]
        assert_close({k: p}, {k: a[k]})
        assert not torch.equal(a[k], start[k])


# ------------------------------------------------------------------------------------------------ decay


def test_decay_acts_on_the_product() -> None:
    method = method_of(FedHM, rho=3.0, weight_decay=0.2)
    task = method.model(make_task("cnn"), None)
    p = task.init()
    x, y = torch.zeros(1, 1, 6, 6, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    nothing = Batch(x, y, None, torch.tensor(0), 0)
    g = tree.sub(
        gradient(product_decay(task, task.loss, *method.factors.decays(method.optimizer)), p, nothing),
        gradient(task.loss, p, nothing),
    )
    for k in ("conv", "hidden"):
        U, V = (p[f"{k}.{f}"].flatten(0, -2) for f in "UV")
        gU, gV = (g[f"{k}.{f}"].flatten(0, -2) for f in "UV")
        assert_close({"u": gU, "v": gV}, {"u": 0.2 * U @ (V.T @ V), "v": 0.2 * V @ (U.T @ U)})
        norm = lowrank.squared_product(p[f"{k}.U"], p[f"{k}.V"])
        assert float(norm) == pytest.approx(float(lowrank.fold(p[f"{k}.U"], p[f"{k}.V"]).square().sum()))
    others = [k for k in g if not k.endswith((".U", ".V"))]
    assert_close({k: g[k] for k in others}, {k: 0.2 * p[k] for k in others})
    plain = run(method_of(FedLMT, rho=3.0, weight_decay=0.2, frobenius=False))
    assert (
        float((model(plain)["0.weight"] - model(run(method_of(FedLMT, rho=3.0, weight_decay=0.2)))["0.weight"]).norm())
        > 1e-4
    )


# ------------------------------------------------------------------------------------------------ FedHM


@MAPPING
def test_with_full_models_it_is_fedavg(mapping: str) -> None:
    a = run(method_of(FedHM, rho=1.0, **STEPS), mapping=mapping)
    assert_close(models(a), models(run(method_of(FedAvg, weighting="uniform", **STEPS), mapping=mapping)))
    decayed = run(method_of(FedHM, rho=1.0, weight_decay=0.05, **STEPS), mapping=mapping)
    assert_close(models(decayed), models(run(method_of(FedAvg, weighting="uniform", weight_decay=0.05, **STEPS))))


@MAPPING
def test_mixed_ranks_average_what_the_factors_make(mapping: str) -> None:
    method = FedHM(rho=(1.0, 2.0, 4.0), lr=0.3)
    assert [method.capacity_of(i) for i in range(4)] == [1.0, 2.0, 4.0, 1.0]
    sim = run(method, "cnn", rounds=1, participation=1.0, mapping=mapping)
    server = run(method, "cnn", rounds=0).record.server
    total: dict[str, Tensor] = {}
    for rho in (1.0, 2.0, 4.0):
        ids = [i for i in range(7) if method.capacity_of(i) == rho]
        down = method.download(server, torch.tensor(ids), rho, 1).shared
        sent = sim.engine.update(rho, 1, ids, {"h": {}}, down, {}, {}).sent.mean
        for k in ("conv", "hidden"):
            rows = range(len(ids))
            if rho == 1.0:
                made = sent["W"][f"{k}.weight"].sum(0)
            else:
                r = max(1, round(server["W"][f"{k}.weight"].shape[0] / rho))
                assert sent["U"][f"{k}.U"].shape[-1] == sent["V"][f"{k}.V"].shape[-1] == r
                made = sum(lowrank.fold(sent["U"][f"{k}.U"][j], sent["V"][f"{k}.V"][j]) for j in rows)
            total[f"{k}.weight"] = total.get(f"{k}.weight", 0.0) + made / 7
    assert_close(sim.record.server["W"], total)


def test_bytes_are_those_of_the_factors() -> None:
    # conv 4 x 1 x 3 x 3 and hidden 6 x 36; theta: biases 4 + 6, norm 8, head 21.
    sim = run(FedHM(rho=(1.0, 2.0)), "cnn", rounds=1, participation=1.0)
    small = 2 * 3 * (1 + 4) + 3 * (6 + 36)
    expected = 8 * (4 * (36 + 216 + 39) + 3 * (small + 39))
    assert sim.result.bytes["up"] == sim.result.bytes["down"] == expected  # type: ignore[attr-defined]


def test_the_last_model_is_one_more_member_where_no_full_one_answered() -> None:
    plain = FedHM(rho=(1.0, 2.0), weighting="samples")
    method = replace(plain, keep_full_rank_history=True)
    server = run(plain, rounds=0).record.server
    mean = {k: tree.map(lambda a: a + 1.0, server[k]) for k in ("theta", "W")}

    def after(method: FedHM, ids: list[int]) -> Tree:
        n = torch.tensor([10.0, 20.0], dtype=torch.float64)
        none = torch.tensor([], dtype=torch.int64)
        return method.server_update(server, Round(1, torch.tensor(ids), n, n, mean, {}, none))

    with_full, without = after(method, [1, 2]), after(method, [1, 3])
    for part in ("theta", "W"):
        assert_close(with_full[part], mean[part])
        assert_close(after(plain, [1, 3])[part], mean[part])
        # Weights 10 and 20, and 15 for the model before: two thirds of the way.
        assert_close(without[part], tree.map(lambda a: a + 2 / 3, server[part]))


def test_weights_by_temperature() -> None:
    method = FedHM(rho=(1.0, 2.0), temperature=0.5, lr=0.3)
    assert Abilities(method).weight == "own"
    sim = run(method, rounds=1, participation=1.0)
    uniform, server = FedHM(rho=(1.0, 2.0), lr=0.3), run(method, rounds=0).record.server
    total, weight = 0.0, 0.0
    for rho in (1.0, 2.0):
        ids = [i for i in range(7) if method.capacity_of(i) == rho]
        down = uniform.download(server, torch.tensor(ids), rho, 1).shared
        sent = sim.engine.update(rho, 1, ids, {"h": {}}, down, {}, {}).sent
        assert sent.weight.tolist() == pytest.approx([math.exp(-rho / 0.5)] * len(ids))
        total = total + math.exp(-rho / 0.5) * sent.mean["theta"]["4.bias"].sum(0)
        weight += math.exp(-rho / 0.5) * len(ids)
    assert_close({"b": sim.record.server["theta"]["4.bias"]}, {"b": total / weight})


def test_mixed_ranks_do_not_depend_on_workers() -> None:
    method = FedHM(rho=(1.0, 2.0, 4.0), keep_full_rank_history=True)
    one, two = (run(method, rounds=4, workers=w, chunk=1) for w in (1, 2))
    assert one.record.digest() == two.record.digest()
    assert one.record.server.keys() == {"theta", "W", "U", "V"}


def test_one_by_one_convolutions_stay_dense_unless_wanted() -> None:
    with torch.device("meta"):
        task = Task(build("resnet10", (3, 32, 32), 10))
        chosen = method_of(FedHM, layers=("layer",)).chosen(task)
        assert not any("shortcut" in k for k in chosen) and len(chosen) == 8
        assert len(method_of(FedHM, layers=("layer",), pointwise=True).chosen(task)) == 11
    only = Task(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(16, 2)))
    with pytest.raises(ConfigError, match="FedHM: layers must name a layer besides 1x1 convolutions"):
        FedHM().model(only, None)


@pytest.mark.parametrize(("rank", "percent"), [(128, 41.1), (64, 20.6)])
def test_rho_can_match_the_parameters_of_an_adapter(rank: int, percent: float) -> None:
    with torch.device("meta"):
        net = build("resnet18", (3, 32, 32), 10, norm="batch")
        task = Task(net)
        names = [k for k in candidates(net) if k.startswith("layer")]
        adapted = convert(build("resnet18", (3, 32, 32), 10, norm="batch"), names, lambda m: Adapter(m, rank))
        target = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
        method = method_of(FedHM, layers=("layer1.1", "layer2", "layer3", "layer4"))
        rho = matching_rho(task, target, method)
        layers = method.chosen(task).values()
        rest = sum(p.numel() for p in net.parameters()) - sum(m.weight.numel() for m in layers)
        found = rest + sum(size_of_factors(m, method.rank_of(m.weight.shape, rho)) for m in layers)
    assert rho > 1 and 0.99 * target < found <= target
    with pytest.raises(ConfigError, match=r"FedHM: the model must have at least .* parameters. Got 1"):
        matching_rho(task, 1, method)


# ------------------------------------------------------------------------------------------------ FedLMT, FedDLR


@MAPPING
def test_fedlmt_is_fedavg_of_the_factorised_network(mapping: str) -> None:
    method = method_of(FedLMT, rho=3.0, **STEPS)
    sim = run(method, mapping=mapping)

    class Converted(FedAvg, Converts):
        def model(self, task: Task, capacity: Any) -> Task:
            return method.model(task, capacity)

    assert_close(models(sim), models(run(method_of(Converted, **STEPS), mapping=mapping)))
    assert set(sim.record.server) == {"theta", "U", "V"}


def test_one_round_of_one_client_is_the_same_in_fedhm_and_fedlmt() -> None:
    data = make_data("cnn", clients=1)
    a, b = (run(m, "cnn", rounds=1, data=data, participation=1.0) for m in (FedHM(rho=3.0), FedLMT(rho=3.0)))
    assert_close(a.record.server["W"], {k: model(b)[k] for k in a.record.server["W"]})
    assert_close(a.record.server["theta"], b.record.server["theta"])


def test_feddlr_with_all_energy_is_fedavg_and_with_less_cuts_both_ways() -> None:
    whole = run(method_of(FedDLR, energy=1.0, **STEPS))
    assert_close(models(whole), models(run(method_of(FedAvg, **STEPS))))
    sim = run(FedDLR(energy=0.5, lr=0.0), rounds=1, participation=1.0)
    start = make_task().init()
    for k, W in sim.record.server["W"].items():
        s = torch.linalg.svdvals(start[k])
        r = int((s.square().cumsum(0) / s.square().sum() < 0.5).sum()) + 1
        assert int(torch.linalg.matrix_rank(W)) <= r < len(s)
    # What a client predicts with came over the wire, and was cut there once more.
    cut = run(FedDLR(energy=0.5), rounds=2)
    rows = torch.from_numpy(cut.data.test[0])
    output = cut.task.predict(cut.personal(0)[1], cut.data.x[rows])
    loss = nn.functional.cross_entropy(output, cut.data.labels(0, "test"))
    assert cut.result.per_client["loss"][0] == pytest.approx(float(loss), abs=1e-12)  # type: ignore[attr-defined]
    assert any(not torch.equal(cut.personal(0)[1][k], W) for k, W in cut.record.server["W"].items())
    up = sim.result.bytes["names"]["up"]  # type: ignore[attr-defined]
    assert up["W"] < 7 * 8 * (35 + 42) and up["theta"] == 7 * 8 * (7 + 6 + 3 + 18)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("fedhm", {"rho": 0.5}, "rho must be a finite number >= 1 or a list of "),
        ("fedhm", {"rho": ()}, "rho must be a number or a list of "),
        ("fedhm", {"temperature": 0.0}, "temperature must be a finite number > 0"),
        (
            "fedhm",
            {"optimizer": "adamw", "weight_decay": 0.1},
            "optimizer must be 'sgd' with weight_decay",
        ),
        ("fedlmt", {"rho": 0.0}, "rho must be a finite number >= 1"),
        ("feddlr", {"energy": 1.5}, "energy must be a number in (0, 1]. Got 1.5."),
        ("feddlr", {"energy": 0.0}, "energy must be a number in (0, 1]. Got 0.0."),
        ("feddlr", {"layers": "large"}, "layers must be one of 'all', 'body'"),
    ],
)
def test_bad_fields_are_refused(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as e:
        make(name, **fields)
    assert message in str(e.value)
