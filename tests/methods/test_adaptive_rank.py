"""FedARA's ranks that adapt: limiting cases, in float64.

* adapt_energy = 1, or no round in which ranks may change: FedARA bit for bit.
* Changes of rank one go down to the floor, and bytes, operations and time with them; flat ones stay at, or return to,
  what a client can afford. No client ever has more than that, whatever it sends.
* σ² of a change from its factors = those of the change itself; the decision = the formula on the change itself.
* Levels are the server's state: resumed, on two workers and on Flower they are the same.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from conftest import assert_close, assert_same, call, make_data, make_task, method_of
from conftest import finished as run
from fedspan import tree, wire
from fedspan.data.federated import FederatedData
from fedspan.errors import ConfigError, Refused
from fedspan.learn.task import Task
from fedspan.linalg import lowrank
from fedspan.method import Capacity, Method, Round, Visit
from fedspan.methods import FedAra, FedAraStar, make
from fedspan.simulation.devices import Devices, measure
from fedspan.simulation.onboarding import onboard
from fedspan.simulation.settings import Settings
from fedspan.simulation.simulator import Simulation
from fedspan.tree import Tree

LADDER: dict[str, Any] = {"ratio": (1.0, 0.4), "layers": ("0",), "adapt_ratios": (0.4, 0.2, 0.1), "lam": 0.0}
NARROW: dict[str, Any] = {"ratio": (1.0, 0.4), "layers": "body", "adapt_ratios": (0.4, 0.2), "lam": 1.0, "warmup": 1}


def wide() -> Task:
    """A layer of 20 × 20: ranks 20, 8, 4 and 2 at the ratios of LADDER."""
    torch.manual_seed(0)
    return Task(nn.Sequential(nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 3)), dtype=torch.float64)


def federation(same: bool, clients: int = 4) -> FederatedData:
    """Clients whose examples are all the same one, or all different."""
    g = torch.Generator().manual_seed(0)
    x = [torch.randn(1 if same else 16, 20, generator=g, dtype=torch.float64) for _ in range(clients)]
    labels = [torch.full((16,), i % 3) if same else torch.arange(16) % 3 for i in range(clients)]
    pairs = [(a.expand(16, 20).clone(), y) for a, y in zip(x, labels)]
    return FederatedData.from_arrays(pairs, seed=0, classes=3).to(torch.float64)


def begun(method: Method, data: FederatedData, rounds: int, **more: Any) -> Simulation:
    chosen = {"batch_size": 8, "epochs": 1, "workers": 1, "precision": "float64", "participation": 1.0}
    kept = {k: more.pop(k) for k in ("out", "devices") if k in more}
    return Simulation(method, wide(), data, rounds=rounds, seed=5, settings=Settings(**chosen | more), **kept)


def levels(sim: Simulation) -> list[int]:
    found: list[int] = sim.record.server["level"].tolist()
    return found


def sent(sim: Simulation, way: str = "up") -> list[int]:
    return [line["bytes"][way] for line in sim.record.lines]


# ------------------------------------------------------------------------------------------------ limiting cases


def test_without_a_round_to_adapt_in_it_is_fedara_bit_for_bit() -> None:
    fields = {k: v for k, v in NARROW.items() if k != "adapt_ratios"}
    plain = run(method_of(FedAra, **fields), "cnn")
    off = run(method_of(FedAra, adapt_energy=1.0, adapt_ratios=(0.1,), adapt_every=2, **fields), "cnn")
    assert off.record.digest() == plain.record.digest()
    assert off.result.bytes == plain.result.bytes  # type: ignore[attr-defined]
    still = run(method_of(FedAra, adapt_energy=0.5, adapt_every=100, **NARROW), "cnn")
    assert levels(still) == [0] * 7
    assert_same({k: v for k, v in still.record.server.items() if k != "level"}, plain.record.server)
    assert_same(*(tree.stack([sim.record.row(i) for i in range(7)]) for sim in (still, plain)))
    assert sum(sent(still)) == sum(sent(plain)) + 12  # one byte for each of three times four answers


def test_changes_of_rank_one_go_down_to_the_floor_and_bytes_with_them() -> None:
    """All examples of a client are one: a step of the first layer is δ xᵀ, of its factors twice that rank."""
    sim = begun(method_of(FedAra, adapt_energy=0.99, rho=0.0, **LADDER), federation(True), 5, evaluate_every=1)
    sim.run()
    assert levels(sim) == [3, 2, 3, 2]  # from dense and from 0.4, in steps of one
    seen = [line["monitor"] for line in sim.record.lines]
    assert [round(m["mean ratio"], 3) for m in seen] == [0.3, 0.15, 0.1, 0.1, 0.1]
    assert seen[0]["clients at 0.4"] == 0.5 and seen[0]["clients at 0.2"] == 0.5 and seen[-1]["clients at 0.1"] == 1.0
    rest = 8 * 4 * 20  # the bias of the first layer; the second is the private head
    factors = [8 * 40 * r for r in (8, 4, 2)]
    dense = 8 * 400
    down = [2 * dense + 2 * factors[0], 2 * factors[0] + 2 * factors[1], 2 * factors[1] + 2 * factors[2]]
    down += 2 * [4 * factors[2]]
    assert sent(sim, "down") == [rest + n for n in down]
    assert sent(sim) == [rest + n + 4 for n in down]
    task, weights = sim.personal(0)
    assert weights["0.U"].shape == (20, 2) and task is sim.engine.model(0.1)


def test_flat_changes_stay_at_and_return_to_what_a_client_can_afford() -> None:
    """Returning needs an ω that still has what all have left out: the mean of the models has not."""
    for aggregate in ("changes", "models"):
        method = method_of(FedAra, adapt_energy=0.9999, rho=0.0, aggregate=aggregate, **LADDER)
        stays = begun(method, federation(False), 3)
        stays.run()
        assert levels(stays) == [0] * 4 and len(set(sent(stays))) == 1
        back = begun(method, federation(False), 4)
        back.record.server["level"] = torch.tensor([3, 2, 3, 2])
        back.run()
        if aggregate == "changes":
            assert levels(back) == [0] * 4
            assert sent(back)[0] < sent(back)[1] < sent(back)[2] < sent(back)[3] == sent(stays)[0]
        else:
            assert levels(back) == [2, 1, 2, 1]


def test_a_client_that_does_not_move_or_answer_keeps_its_level() -> None:
    still = begun(method_of(FedAra, adapt_energy=0.5, lr=0.0, rho=0.0, **LADDER), federation(True), 2)
    still.run()
    assert levels(still) == [0] * 4
    few = begun(method_of(FedAra, adapt_energy=0.99, rho=0.0, **LADDER), federation(True), 1, participation=0.5)
    few.run()
    assert sorted(levels(few)) == [0, 0, 1, 1]
    seldom = begun(method_of(FedAra, adapt_energy=0.99, adapt_every=2, rho=0.0, **LADDER), federation(True), 5)
    seldom.run()
    assert levels(seldom) == [2, 2, 2, 2]


def test_no_client_leaves_its_levels_whatever_it_sends() -> None:
    method = method_of(FedAra, adapt_energy=0.9, **LADDER)
    assert method.levels(0) == [1.0, 0.4, 0.2, 0.1] and method.levels(1) == [0.4, 0.2, 0.1]
    level = torch.tensor([0, 0, 3, 2, 1])
    said = torch.tensor([127, -128, -1, -3, 1], dtype=torch.int8)
    n = torch.ones(5)
    round = Round(1, torch.arange(5), n, n, {}, {"step": said}, torch.tensor([]))
    assert method.ranks.moved(level, round).tolist() == [0, 1, 3, 2, 0]
    assert method_of(FedAraStar, adapt_energy=0.9, adapt_ratios=(0.25,)).levels(3) == [0.5, 0.25]
    several = method_of(FedAra, ratio=0.5, layer_sets=("a", "b"), adapt_energy=0.9, adapt_ratios=(0.7, 0.25))
    assert several.levels(1) == [(0.5, "b"), (0.25, "b")] and len(several.ranks.capacities) == 4


# ------------------------------------------------------------------------------------------------ the spectrum


@pytest.mark.parametrize("sizes", [((9,), (7,)), ((5, 3), (4, 3))], ids=["matrix", "kernel"])
def test_energies_of_a_change_come_from_its_factors(sizes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    g = torch.Generator().manual_seed(1)
    U, V, dU, dV = (torch.randn(*s, 3, generator=g, dtype=torch.float64) for s in sizes * 2)
    gap = lowrank.fold(U + 1e-3 * dU, V + 1e-3 * dV) - lowrank.fold(U, V)
    expected = torch.linalg.svdvals(lowrank.unfold(gap)).square()
    found = lowrank.changed_energies((U, V), (U + 1e-3 * dU, V + 1e-3 * dV))
    assert len(found) <= 6 and float(expected[6:].sum()) < 1e-24
    assert_close(found / expected[0], expected[: len(found)] / expected[0], 1e-11)
    stacked = [torch.stack([t, 2 * t]) for t in (U, V, U + dU, V + dV)]
    mapped = torch.func.vmap(lambda a, b, c, d: lowrank.changed_energies((a, b), (c, d)))(*stacked)
    alone = lowrank.changed_energies((U, V), (U + dU, V + dV))
    assert_close(mapped, torch.stack([alone, 16 * alone]), 1e-11)
    assert not lowrank.changed_energies((U, V), (U, V)).any()


def visit_at(capacity: Capacity, round: int = 1) -> Visit:
    one = torch.ones((), dtype=torch.float64)
    return Visit(torch.tensor(round), torch.tensor(0), one, 4, {}, capacity=capacity)


def test_a_step_is_decided_by_the_energy_of_all_layers_together() -> None:
    """Ranks 4 and 2 of 8 at ratios 0.5 and 0.25; the shares are computed here from the change itself."""
    g = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    down: Tree = {"U": {"a.U": draw(8, 4), "b.U": draw(12, 4)}, "V": {"a.V": draw(20, 4), "b.V": draw(8, 4)}}
    new: Tree = tree.map(lambda t: t + 0.1 * draw(*t.shape), down)
    energy = {}
    for k in "ab":
        W, old = (lowrank.fold(p["U"][f"{k}.U"], p["V"][f"{k}.V"]) for p in (new, down))
        energy[k] = torch.linalg.svdvals(W - old).square()
    total = float(sum(e.sum() for e in energy.values()))
    half, quarter = (float(sum(e[:r].sum() for e in energy.values())) / total for r in (4, 2))
    assert quarter < half < 1

    def step(energy: float, capacity: float = 0.5, round: int = 1, **more: Any) -> int:
        method = method_of(FedAra, ratio=(1.0, 0.5), adapt_ratios=(0.5, 0.25), adapt_energy=energy, **more)
        return int(method.ranks.step(down, new, visit_at(capacity, round)))

    assert step(quarter - 1e-9) == -1 and step(quarter + 1e-9) == 0
    assert step(half - 1e-9) == 0 and step(half + 1e-9) == 1
    assert step(0.01, round=1, adapt_every=2) == 0 and step(0.01, round=2, adapt_every=2) == -1
    # A dense change counts double, as two factors would need twice its rank.
    dense = {"W": {k + ".weight": lowrank.fold(down["U"][f"{k}.U"], down["V"][f"{k}.V"]) for k in "ab"}}
    trained = {"W": {k + ".weight": lowrank.fold(new["U"][f"{k}.U"], new["V"][f"{k}.V"]) for k in "ab"}}
    for energy_, expected in ((quarter - 1e-9, -1), (quarter + 1e-9, 0), (0.999, 0)):
        method = method_of(FedAra, ratio=1.0, adapt_ratios=(0.5,), adapt_energy=energy_)
        assert int(method.ranks.step(dense, trained, visit_at(1.0))) == expected


# ------------------------------------------------------------------------------------------------ runs


def test_levels_are_the_same_resumed_and_on_two_workers(tmp_path: Path) -> None:
    """Clients that can afford different ranks come to have one: their rows are in two stores."""
    method, data = method_of(FedAra, adapt_energy=0.9, momentum=0.5, **NARROW), make_data()

    def go(rounds: int, **more: Any) -> Simulation:
        chosen = {
            "batch_size": 8,
            "precision": "float64",
            "workers": 1,
            "participation": 0.8,
            "evaluate_every": 1,
        } | more
        out = chosen.pop("out", None)
        sim = Simulation(method, make_task(), data, rounds=rounds, seed=3, settings=Settings(**chosen), out=out)
        sim.run()
        return sim

    whole = go(5)
    moved = [line["monitor"]["mean ratio"] for line in whole.record.lines]
    assert len(set(moved)) > 2 and len({whole.record.capacity(i) for i in (0, 2, 4, 6)} & {0.4, 0.2}) > 0
    go(2, out=tmp_path / "run")
    again = go(5, out=tmp_path / "run")
    for other in (again, go(5, workers=2)):
        assert other.record.digest() == whole.record.digest()
        assert sent(other) == sent(whole) and other.record.lines[-1]["monitor"] == whole.record.lines[-1]["monitor"]


def test_rows_of_clients_in_several_stores_are_taken_and_put_by_id() -> None:
    record = run(method_of(FedAra, adapt_energy=0.9, **NARROW), rounds=1).record
    assert len(record.stores) == 2
    ids = [4, 1, 0, 3]
    rows = record.take(ids)
    assert_same(rows, tree.stack([record.row(i) for i in ids]))
    record.put(ids, tree.map(lambda t: t + 1, rows))
    assert_same(record.take(ids[::-1]), tree.take(tree.map(lambda t: t + 1, rows), torch.tensor([3, 2, 1, 0])))


def test_flower_is_the_simulator_while_ranks_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flower_grid import assert_same_run, deployed

    monkeypatch.setattr("fedspan.storage.tree_file.os.fsync", lambda _: None)
    method = method_of(FedAra, adapt_energy=0.9, momentum=0.5, **NARROW)
    server, grid = deployed(method, tmp_path, rounds=5, epochs=1)
    result = server.run()
    settings = Settings(evaluate_every=100, batch_size=8, precision="float64", workers=1, mapping="loop", epochs=1)
    sim = Simulation(method, make_task(), make_data(clients=3), rounds=5, seed=5, settings=settings)
    expected = sim.run()
    assert_same_run(sim, expected, server, grid, result)
    assert len(set(sent(sim))) > 2
    assert levels(sim) == server.record.server["level"].tolist() != [0, 0, 0]
    assert sent(sim) == [line["bytes"]["up"] for line in server.record.lines]
    with pytest.raises(Refused, match=r"its level must lie in 0\.\.1\. Got 2"):
        server.experiment.capacity(1, 2)


def test_a_node_predicts_and_exports_at_its_level(tmp_path: Path) -> None:
    from safetensors import safe_open

    from fedspan.deploy.node.service import Service

    node = tmp_path / "clinic"
    node.mkdir()
    x = np.random.default_rng(0).random((60, 1, 8, 8), np.float32)
    np.savez(tmp_path / "own.npz", x=x, y=(x[:, 0, 0, 0] > 0.5).astype(np.int64))
    (node / "node.json").write_text(json.dumps({"data": str(tmp_path / "own.npz")}))
    text = 'name = "t"\nrounds = 1\n[partition]\nclients = 2\n[model]\nkind = "mlp"\nhidden = [20, 16]\n'
    text += '[method]\nname = "fedara"\nratio = 0.5\nadapt_energy = 0.9\nadapt_ratios = [0.25]\n'
    service = Service(node)
    experiment = service.node(text).experiment
    method = experiment.method
    server = method.init_server(experiment.task, experiment.federation(2))
    down = method.download(server, torch.tensor([1]), experiment.capacity(1, 1), 1).shared
    asked = {"do": "evaluate", "round": 1, "client": 1, "clients": 2, "lineage": "ab12", "coded": {}, "told": 0}
    asked |= {"base": 0, "level": 1}
    assert service.handle(text, asked, wire.pack({"down": dict(down), "news": {}}))[0]["sums"]["n"] == 15
    assert "right of 60" in call("deploy", "predict", str(node), "--data", str(tmp_path / "own.npz")).stderr
    call("deploy", "export", str(node), str(tmp_path / "m.safetensors"))
    with safe_open(tmp_path / "m.safetensors", "pt") as f:
        weights = {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118
    assert set(weights) == set(experiment.task.init())
    ranks = [int(torch.linalg.matrix_rank(w)) for k, w in weights.items() if k in server["W"]]
    assert ranks == [max(1, round(0.25 * min(W.shape))) for W in server["W"].values()]


# ------------------------------------------------------------------------------------------------ around a run


def test_lower_ranks_cost_less_and_newcomers_start_at_the_first() -> None:
    method, data = method_of(FedAra, adapt_energy=0.99, rho=0.0, **LADDER), federation(True)
    settings = Settings(batch_size=8, epochs=1)
    costs = [measure(method, wide(), data, 0, settings, k) for k in range(4)]
    assert all(a.up > b.up for a, b in pairwise(costs)) and costs[1].flops > costs[2].flops > costs[3].flops
    sim = begun(method, data, 4, devices=Devices(gflops=(1.0,), mbps=(0.001,)))
    sim.run()
    seconds = [line["clock"]["seconds"] for line in sim.record.lines]
    assert seconds[0] > seconds[1] > seconds[2] > seconds[3]
    new = onboard(sim, data.x[:16], data.y[:16])
    assert sim.record.capacity(0) == 0.1 and new.weights["0.weight"].shape == (20, 20)


def test_clients_judged_after_local_training_have_their_level() -> None:
    sim = begun(method_of(FedAra, adapt_energy=0.99, rho=0.0, **LADDER), federation(True), 3, evaluate_after=True)
    result = sim.run()
    assert len(result.per_client["accuracy_after"]) == 4 and levels(sim) == [3, 2, 3, 2]


def test_bytes_say_that_ranks_may_come_down(tmp_path: Path) -> None:
    text = '[data]\nsource = "digits"\nlimit = 200\n[partition]\nkind = "iid"\nclients = 4\n[model]\nkind = "mlp"\n'
    (tmp_path / "e.toml").write_text(f'{text}[method]\nname = "fedara"\nratio = 0.5\nadapt_energy = 0.9\n')
    assert "Ranks adapt during training" in call("bytes", str(tmp_path / "e.toml")).stderr
    assert "Ranks adapt" not in call("bytes", str(tmp_path / "e.toml"), "method.adapt_energy=1.0").stderr


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"adapt_energy": 0.0}, "adapt_energy must be a number in (0, 1]. Got 0.0."),
        ({"adapt_energy": 1.5}, "adapt_energy must be a number in (0, 1]. Got 1.5."),
        ({"adapt_energy": float("nan")}, "adapt_energy must be a number in (0, 1]. Got nan."),
        ({"adapt_ratios": ()}, "adapt_ratios must be a list of "),
        ({"adapt_ratios": (0.5, 0.0)}, "in (0, 1]. Got "),
        (
            {"adapt_energy": 0.9, "ratio": (0.2, 0.1), "adapt_ratios": (0.2,)},
            "adapt_ratios must hold one below the largest ratio, 0.2, for ranks to adapt. Got (0.2,).",
        ),
        ({"adapt_every": 0}, "adapt_every must be an integer >= 1. Got 0."),
    ],
)
def test_bad_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as e:
        make("fedara", **fields)
    assert message in str(e.value) and "\n" not in str(e.value)


def test_a_level_that_cannot_be_trained_is_refused_before_the_first_round() -> None:
    method = method_of(FedAra, ratio=1.0, layers=("hidden",), adapt_energy=0.9, adapt_ratios=(0.95,))
    with pytest.raises(ConfigError, match=r"'hidden' smaller than dense, at most 0.86 of its full rank 6. Got rank 6"):
        run(method, "cnn", rounds=0)
