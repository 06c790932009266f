"""FedARA: limiting cases and equations, in float64, to 1e-12.

* Nothing decomposed, lam = rho = 0: FedPer. All heads shared, lam = 0, the same ranks and decay: FedHM.
* Full rank, no local steps: the extractor comes back. One step of full-rank factors is not FedPer's, but
  W - lr (G V V' + U U' G) + lr^2 G V U' G.
* Anchors do not move; one example per class at its own anchor has no alignment loss and no gradient; the classifier has
  none in any case. lam_1 = 0, rising, lam from round 11 on.
* Bytes are linear in the rank; a client of weight 0 changes nothing; a rotation of the factors changes nothing.
* Classes that a client lacks, has once, or has alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from conftest import assert_close, assert_same, make_data, make_task, method_of
from conftest import finished as run
from fedspan import tree
from fedspan.data.federated import FederatedData
from fedspan.errors import ConfigError
from fedspan.learn.aggregate import weighted_mean
from fedspan.learn.batches import Batch, Batches
from fedspan.learn.optimizer import Optimizer
from fedspan.learn.sgd import gradient
from fedspan.learn.task import Task
from fedspan.linalg import lowrank
from fedspan.methods import FedAra, FedAraStar, FedHM, FedPer, make
from fedspan.methods.fedara.capacities import LEVELS
from fedspan.methods.fedara.objective import Alignment, Anchors, FactorDecay, anchors
from fedspan.models import build
from fedspan.tree import Params

STEPS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
# One mapping is enough: that both give the same is in the common table, for every method.
MAPPING = pytest.mark.parametrize("mapping", ["loop"])


def all_of(data: FederatedData, client: int) -> Batches:
    """A client's training examples as one batch."""
    rows = torch.from_numpy(data.train[client])[None]
    return Batches(data.x, data.y, rows, torch.tensor(0))


# ------------------------------------------------------------------------------------------------ limiting cases


@MAPPING
def test_without_decomposition_and_anchors_it_is_fedper(mapping: str) -> None:
    a = run(method_of(FedAra, lam=0.0, rho=0.0, **STEPS), "cnn", mapping=mapping)
    b = run(method_of(FedPer, **STEPS), "cnn", mapping=mapping)
    assert_close(a.record.server, b.record.server)
    assert_close([a.record.row(i) for i in range(7)][3], b.record.row(3))
    assert a.result.bytes["up"] == b.result.bytes["up"]  # type: ignore[attr-defined]
    far = run(method_of(FedAra, lam=1.0, warmup=1, **STEPS), "cnn", mapping=mapping)
    assert (
        float((far.record.server["theta"]["hidden.weight"] - a.record.server["theta"]["hidden.weight"]).norm()) > 1e-3
    )


def test_with_shared_heads_and_without_anchors_it_is_fedhm() -> None:
    same: dict[str, Any] = {"layers": "body", "private_head": False, "weighting": "uniform", "weight_decay": 0.05}
    a = run(method_of(FedAra, ratio=(1.0, 0.5), rank_rule="out_channels", lam=0.0, rho=0.05, **same, **STEPS), "cnn")
    b = run(method_of(FedHM, rho=(1.0, 2.0), **same, **STEPS), "cnn")
    assert_close(a.record.server, b.record.server)
    whole = method_of(
        FedAra, ratio=(1.0, 0.5), rank_rule="out_channels", lam=0.0, rho=0.025, rho_rule="whole", **same, **STEPS
    )
    assert_close(a.record.server, run(whole, "cnn").record.server)
    assert FactorDecay(rho_rule="whole", rho=0.1).strengths(Optimizer()) == (0.2, 0.0)


def test_a_decay_in_every_third_step_is_the_same_to_first_order() -> None:
    """One epoch of three steps; lr² and rho² apart."""
    data = make_data(clients=1, equal=True)
    gaps, moved = [], []
    for lr in (1e-2, 1e-3):
        weights = []
        for rho, every in ((0.5, 1), (0.5, 3), (0.0, 1)):
            method = method_of(FedAra, ratio=0.5, lam=0.0, rho=rho, decay_every=every, lr=lr)
            sim = run(method, data=data, rounds=1, epochs=1, batch_size=4, participation=1.0)
            weights.append(sim.record.server["W"]["2.weight"])
        gaps.append(float((weights[0] - weights[1]).norm()))
        moved.append(float((weights[0] - weights[2]).norm()))
    assert gaps[1] < 0.02 * gaps[0] and moved[1] > 0.05 * moved[0] and gaps[0] < 0.1 * moved[0]


def test_full_rank_without_local_steps_returns_the_extractor() -> None:
    start = make_task("cnn").init()
    sim = run(method_of(FedAra, ratio=1.0, allow_larger=True, layers="body", lr=0.0), "cnn", participation=1.0)
    for k, W in sim.record.server["W"].items():
        assert_close({k: W}, {k: start[k]})
    assert sim.record.server.keys() == {"theta", "W", "U", "V"}
    half = run(FedAraStar(lr=0.0), "cnn", rounds=1, participation=1.0).record.server["W"]["hidden.weight"]
    s = torch.linalg.svdvals(start["hidden.weight"])
    assert float((half - start["hidden.weight"]).norm()) == pytest.approx(float(s[3:].norm()))  # Eckart–Young


@MAPPING
def test_changes_leave_alone_what_small_ranks_cannot_carry(mapping: str) -> None:
    fields: dict[str, Any] = {"ratio": (1.0, 0.5), "layers": "body", "aggregate": "changes"}
    start = run(method_of(FedAra, **fields), "cnn", rounds=0).record.server
    still = run(method_of(FedAra, lr=0.0, **fields), "cnn", mapping=mapping).record.server
    assert_close({k: still[k] for k in ("theta", "W")}, {k: start[k] for k in ("theta", "W")})
    cut = run(method_of(FedAra, lr=0.0, **fields | {"aggregate": "models"}), "cnn").record.server["W"]["hidden.weight"]
    assert float((cut - start["W"]["hidden.weight"]).norm()) > 0.1
    # Where nothing is cut the mean of the changes is the change of the mean.
    same = {"ratio": 1.0, "allow_larger": True, "layers": "body"}
    a, b = (
        run(method_of(FedAra, aggregate=how, **same), "cnn", mapping=mapping).record.server
        for how in ("models", "changes")
    )
    assert_close({k: a[k] for k in ("theta", "W")}, {k: b[k] for k in ("theta", "W")}, 1e-11)
    dense = [run(FedAra(aggregate=how), "cnn", mapping=mapping).record.server for how in ("models", "changes")]
    assert_close(*dense)


def test_one_step_of_full_rank_factors() -> None:
    torch.manual_seed(1)
    task = Task(nn.Sequential(nn.Linear(5, 4, bias=False), nn.Linear(4, 3)), dtype=torch.float64)
    data, lr = make_data(clients=1), 0.2
    once: dict[str, Any] = {"task": task, "data": data, "rounds": 1, "participation": 1.0, "epochs": 1}
    once |= {"batch_size": "full"}
    method = method_of(FedAra, ratio=1.0, allow_larger=True, layers=("0",), lam=0.0, rho=0.0, lr=lr)
    start = task.init()
    W = start["0.weight"]
    U, V = lowrank.leading(W, 4)
    G = gradient(task.loss, start, next(iter(all_of(data, 0))))["0.weight"]
    expected = W - lr * (G @ V @ V.T + U @ U.T @ G) + lr**2 * G @ V @ U.T @ G
    assert_close(run(method, **once).record.server["W"], {"0.weight": expected})
    dense = run(FedPer(lr=lr), **once).record.server["theta"]
    assert_close(dense, {"0.weight": W - lr * G})
    assert float((expected - dense["0.weight"]).norm()) > 1e-3


# ------------------------------------------------------------------------------------------------ anchors


def distance_gradient(method: FedAra, task: Task, params: Params, a: Anchors, batch: Batch) -> Params:
    near, plain = gradient(method.alignment.loss(task, a, 3.0), params, batch), gradient(task.loss, params, batch)
    return tree.sub(near, plain)  # type: ignore[no-any-return]


@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_anchors_are_frozen_and_pull_the_extractor_alone(ratio: float) -> None:
    method = method_of(FedAra, ratio=ratio, lr=0.1)
    task, data = method.model(make_task("cnn"), None), make_data("cnn")
    start, stream = task.init(), all_of(data, 2)
    batch = next(iter(stream))
    a = anchors(task, start, stream)
    assert all(torch.equal(x, y) for x, y in zip(a, anchors(task, start, stream)))
    features = task.features(start, batch.x)
    assert float(a.square) == pytest.approx(float(features.square().sum(1).mean()), rel=1e-12)
    for c in range(3):
        assert_close({"a": a.table[c]}, {"a": features[batch.y == c].mean(0)})
    g = distance_gradient(method, task, start, a, batch)
    assert all(not g[k].abs().max() > 1e-14 for k in task.head)
    assert max(float(g[k].abs().max()) for k in task.body) > 1e-3
    # The mean over D and over the examples of the squared distance, three times.
    value = method.alignment.loss(task, a, 3.0)(start, batch) - task.loss(start, batch)
    assert float(value) == pytest.approx(3 * float((features - a.table[batch.y]).square().mean()))
    summed = Alignment(fac_reduction="sum").loss(task, a, 3.0)(start, batch) - task.loss(start, batch)
    assert float(summed) == pytest.approx(float(value) * features.shape[1])


def test_one_example_per_class_lies_on_its_anchor() -> None:
    method, task, data = FedAra(), make_task("cnn"), make_data("cnn")
    rows = torch.tensor([[int((data.y == c).nonzero()[0]) for c in range(3)]])
    stream = Batches(data.x, data.y, rows, torch.tensor(0))
    batch = next(iter(stream))
    a = anchors(task, task.init(), stream)
    assert float(method.alignment.gap(task, task.init(), a, stream)) == 0.0
    assert all(float(g.abs().max()) <= 1e-15 for g in distance_gradient(method, task, task.init(), a, batch).values())


def scaled(task: Task, params: Params, layer: str, by: float) -> Params:
    """The same outputs from features that are so many times as large: a layer before a ReLU, and the head inversely."""
    new = {k: v * by if k.startswith(layer) else v for k, v in params.items()}
    head = next(k for k in task.head if params[k].ndim == 2)
    return new | {head: params[head] / by}


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
@pytest.mark.parametrize("by", [1e-3, 7.0])
def test_a_relative_distance_does_not_depend_on_the_scale_of_features(kind: str, by: float) -> None:
    task, data = make_task(kind), make_data(kind)
    start, stream = task.init(), all_of(data, 2)
    batch = next(iter(stream))
    layer = {"mlp": "2.", "cnn": "hidden."}[kind]
    now = {k: v + 0.05 if k in task.body else v for k, v in start.items()}  # trained a little, away from the anchors
    terms: dict[str, list[float]] = {}
    for how in ("relative", "mse"):
        near = method_of(FedAra, fac_reduction=how).alignment
        for p, q in ((start, now), (scaled(task, start, layer, by), scaled(task, now, layer, by))):
            a = anchors(task, p, stream)
            assert_close(task.predict(p, batch.x), task.predict(start, batch.x))
            value = near.loss(task, a, 3.0)(q, batch) - task.loss(q, batch)
            terms.setdefault(how, []).extend([float(value), float(near.gap(task, q, a, stream))])
    one, two = terms["relative"][:2], terms["relative"][2:]
    assert one == pytest.approx(two, rel=1e-12, abs=1e-12) and min(one) > 1e-3
    assert terms["mse"][2:] == pytest.approx([v * by**2 for v in terms["mse"][:2]], rel=1e-9, abs=1e-12)


def test_relative_is_the_mean_where_the_squared_norm_is_the_number_of_features() -> None:
    task, data = make_task("cnn"), make_data("cnn")
    stream = all_of(data, 2)
    batch = next(iter(stream))
    features = task.features(task.init(), batch.x)
    a = anchors(task, task.init(), stream)
    unit = (features.shape[1] / a.square) ** 0.5  # features of mean squared norm D
    near = Anchors(a.table * unit, a.square * unit**2)
    relative, mean = (Alignment(fac_reduction=r).distance(features * unit, near, batch.y) for r in ("relative", "mse"))
    assert_close(relative, mean)
    assert float(mean.max()) > 1e-3
    for how in ("mse", "sum", "relative"):  # the factor is what the distance is made with
        kind = Alignment(fac_reduction=how)  # type: ignore[arg-type]
        squared = (features - a.table[batch.y]).square().sum(1)
        assert_close(kind.distance(features, a, batch.y), squared * kind.factor(features.shape[1], a.square))


def test_features_that_are_all_zero_have_no_relative_distance() -> None:
    task, data = make_task("cnn"), make_data("cnn")
    dead = {k: 0 * v if k.startswith("hidden") else v for k, v in task.init().items()}
    a = anchors(task, dead, all_of(data, 2))
    assert float(a.square) == 0.0
    near, batch = Alignment(fac_reduction="relative"), next(iter(all_of(data, 2)))
    assert not near.distance(task.features(task.init(), batch.x), a, batch.y).any()
    assert tree.all_finite(gradient(near.loss(task, a, 3.0), task.init(), batch))
    tiny = Anchors(a.table.float(), torch.tensor(1e-42))
    assert bool(near.factor(6, tiny.square).isfinite())


def test_without_lambda_the_reduction_decides_nothing() -> None:
    kept = [
        run(method_of(FedAra, lam=0.0, fac_reduction=r, ratio=0.5), rounds=2).record.server for r in ("mse", "relative")
    ]
    assert_same(*kept)


def test_the_alignment_is_warmed_up() -> None:
    strengths = [Alignment(lam=4.0).strength(t) for t in range(1, 14)]
    assert strengths[0] == 0.0 and strengths[5] == 2.0 and strengths[10:] == [4.0] * 3
    assert strengths == sorted(strengths)
    assert Alignment(lam=4.0, warmup=1).strength(2) == 4.0


@MAPPING
def test_absent_classes_single_examples_and_a_client_with_one_class(mapping: str) -> None:
    g = torch.Generator().manual_seed(0)
    labels = [[0] * 7 + [1], [2] * 6, [0, 1, 2, 0, 1, 2, 0, 1]]
    pairs = [(torch.randn(len(y), 5, generator=g, dtype=torch.float64), torch.tensor(y)) for y in labels]
    data = FederatedData.from_arrays(pairs, seed=0, test_fraction=0.25, classes=3).to(torch.float64)
    method = method_of(FedAra, ratio=(1.0, 0.5, 0.5), lam=2.0, warmup=1, watch=True)
    sim = run(method, data=data, participation=1.0, rounds=4, mapping=mapping, batch_size=3)
    assert tree.all_finite(sim.record.server) and all(tree.all_finite(sim.record.row(i)) for i in range(3))
    task = sim.engine.model(method.capacity_of(1))
    a = anchors(task, task.init(), all_of(data, 1)).table
    assert not a[:2].any() and a[2].any()  # a class it lacks has no anchor, and no example that would need one
    assert sim.result.measures["alignment"]["mean"] > 0  # type: ignore[attr-defined]


def test_alignment_falls_as_lambda_grows() -> None:
    gaps = []
    for lam in (0.0, 1.0, 10.0):
        sim = run(method_of(FedAra, lam=lam, warmup=1, watch=True, lr=0.05), participation=1.0, rounds=4, epochs=3)
        gaps.append(sim.result.measures["alignment"]["mean"])  # type: ignore[attr-defined]
        assert sim.result.per_client["alignment"][2] == pytest.approx(float(sim.record.row(2)["gap"]))  # type: ignore[attr-defined]
    assert gaps[0] > gaps[1] > gaps[2] > 0


# ------------------------------------------------------------------------------------------------ the wire, the server


def test_bytes_are_linear_in_the_rank() -> None:
    torch.manual_seed(0)
    task = Task(nn.Sequential(nn.Linear(5, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 3)))
    task = Task(task.module, dtype=torch.float64)
    sent = {}
    for r in (0.1, 0.2, 0.4):
        sim = run(method_of(FedAra, ratio=r, layers=("2",)), task=task, rounds=1, participation=1.0)
        sent[r] = sim.result.bytes["names"]["up"]  # type: ignore[attr-defined]
        assert sent[r]["U"] == sent[r]["V"] == 7 * 8 * 20 * round(20 * r)
        assert sim.result.bytes["up"] == sim.result.bytes["down"]  # type: ignore[attr-defined]
    assert sent[0.1]["theta"] == sent[0.4]["theta"] == 7 * 8 * (5 * 20 + 20 + 20)


def test_a_client_without_weight_and_a_rotation_change_nothing() -> None:
    method = method_of(FedAra, ratio=(1.0, 0.5))
    sim = run(method, "cnn", rounds=0)
    dense = method.download(sim.record.server, torch.tensor([0]), 1.0, 1).shared
    small = method.download(sim.record.server, torch.tensor([1]), 0.5, 1).shared
    assert dense.keys() == {"theta", "W"} and small.keys() == {"theta", "U", "V"}
    moved = tree.map(lambda t: t + 0.3, small)
    lifted = [method.lift(up, up, None) for up in (dense, moved)]
    stacked = tree.stack([{k: up[k] for k in ("theta", "W")} for up in lifted])
    assert_close(weighted_mean(stacked, torch.tensor([5.0, 0.0], dtype=torch.float64)), dense)
    Q = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).Q
    turned = {**moved, **{f: {k: t @ Q for k, t in moved[f].items()} for f in "UV"}}
    assert_close(method.lift(turned, turned, None), lifted[1])
    assert float((turned["U"]["hidden.U"] - moved["U"]["hidden.U"]).norm()) > 0.1


def test_clients_may_decompose_different_layers() -> None:
    method = method_of(FedAra, ratio=(0.5, 0.5, 0.25), layer_sets=("hidden", "conv+hidden", ""), lam=1.0, warmup=1)
    assert len(method.ranks.capacities) == 3 and method.capacity_of(2) == (0.25, "")
    a = run(method, "cnn", participation=1.0, mapping="loop")
    assert_close(a.record.server, run(method, "cnn", participation=1.0, mapping="vmap").record.server)
    down = [method.download(a.record.server, torch.tensor([i]), method.capacity_of(i), 1).shared for i in range(3)]
    assert [{k: list(v) for k, v in d.items() if k != "theta"} for d in down] == [
        {"W": ["conv.weight"], "U": ["hidden.U"], "V": ["hidden.V"]},
        {"U": ["conv.U", "hidden.U"], "V": ["conv.V", "hidden.V"]},
        {"W": ["conv.weight", "hidden.weight"]},
    ]


def test_the_server_says_what_truncation_loses_and_which_rank_it_has() -> None:
    method = method_of(FedAra, ratio=(1.0, 0.5), lam=0.0)
    sim = run(method, "cnn", rounds=1, participation=1.0)
    seen, server = method.monitor(sim.record.server), sim.record.server
    W = server["W"]["hidden.weight"]
    s = torch.linalg.svdvals(W)
    size = float(tree.squared_norm({k: server[k] for k in ("theta", "W")})) ** 0.5
    assert seen["truncation at 0.5"] == pytest.approx(float(s[3:].norm()) / size)
    assert seen["truncation at 1.0"] == 0.0 and seen["rank hidden"] == 1.0
    alike = FedAraStar(lr=0.0)
    small = alike.monitor(run(alike, "cnn", rounds=1, participation=1.0).record.server)
    assert small["rank hidden"] == 0.5 and small["truncation at 0.5"] < 1e-7  # all have the same three directions
    assert FedAra().monitor(run(FedAra(), "cnn", rounds=1).record.server) == {}


# ------------------------------------------------------------------------------------------------ capacities


def test_the_main_layers_and_five_levels_of_cnn1() -> None:
    with torch.device("meta"):
        task = Task(build("cnn1", (3, 32, 32), 10))
        method = method_of(FedAra, ratio="fedara_cnn1")
        assert list(method.ranks.chosen(method, task)) == ["fc1", "fc2"]
        star = FedAraStar()
        assert list(star.ranks.chosen(star, Task(build("cnn", (3, 32, 32), 10)))) == ["fc1"]
        assert [method.capacity_of(i) for i in range(6)] == [1.0, 0.5, 0.375, 0.3, 0.2, 1.0]
        assert LEVELS["fedara_cnn1"] == method.ranks.ratios
        sizes = []
        for c in method.ranks.ratios:
            ranks = method.ranks.ranks(method, task, c)
            dense = {k: m.weight.numel() for k, m in method.ranks.chosen(method, task).items()}
            smaller = sum(
                dense[k] - r * sum(method.ranks.chosen(method, task)[k].weight.shape) for k, r in ranks.items()
            )
            sizes.append(sum(p.numel() for p in task.module.parameters()) - smaller)
    # CNN1 to CNN5 have 2.62, 1.82, 1.32, 1.06 and 0.67 million.
    assert [round(n / 1e6, 2) for n in sizes] == [2.62, 1.77, 1.33, 1.07, 0.72]


def test_factors_larger_than_the_layer_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'hidden' smaller than dense, at most 0.86 of its full rank 6. Got rank 6"):
        method_of(FedAra, ratio=0.95).model(make_task("cnn"), None)
    larger = method_of(FedAra, ratio=0.95, allow_larger=True)
    assert larger.ranks.ranks(larger, make_task("cnn"), None) == {"hidden": 6}
    dense = method_of(FedAra, ratio=1.0).model(make_task("cnn"), None)
    assert dense.module.get_submodule("hidden").__class__ is nn.Linear


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ratio": 0.0}, "ratio must be a number in (0, 1] or a list of "),
        ({"ratio": ()}, "ratio must be a number or a list of "),
        ({"ratio": "fedara_cnn"}, "ratio must be numbers or a list of levels. Did you mean 'fedara_cnn1'?"),
        ({"lam": -1.0}, "lam must be a finite number >= 0"),
        ({"warmup": 0}, "warmup must be an integer >= 1"),
        ({"rho": float("nan")}, "rho must be a finite number >= 0"),
        ({"layers": "some"}, "layers must be one of 'all', 'body', 'large', 'main' or a list of strings"),
    ],
)
def test_bad_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as e:
        make("fedara", **fields)
    assert message in str(e.value)
