"""What a round costs a client, which rank its device can afford, and how long rounds take on a simulated clock."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from conftest import call, make_data, method_of
from fedspan.config import assemble, from_dict
from fedspan.data.federated import FederatedData
from fedspan.errors import ConfigError
from fedspan.learn.precision import Precision
from fedspan.learn.task import Task
from fedspan.methods import FedAra, FedAvg, FedHM, FedKd
from fedspan.report import write_page
from fedspan.report.figures import curves_figure
from fedspan.report.measures import measure_of, points
from fedspan.report.runs import load_run
from fedspan.simulation import evaluation
from fedspan.simulation.devices import Devices, assign, measure
from fedspan.simulation.settings import Settings
from fedspan.simulation.simulator import Simulation
from fedspan.studies import targets

TRAIN = Settings(batch_size=4, epochs=2, workers=1, precision="float64", evaluate_every=1)
LAYERS = ((5, 40), (40, 40), (40, 3))


def wide() -> Task:
    """5 - 40 - 40 - 3."""
    torch.manual_seed(0)
    a, b, c = (nn.Linear(*size) for size in LAYERS)
    return Task(nn.Sequential(a, nn.ReLU(), b, nn.ReLU(), c), dtype=torch.float64)


def test_operations_are_those_of_the_products() -> None:
    """Forward, and backward for weights and for inputs, which the first layer does not need; times the epochs."""
    cost = measure(FedAvg(), wide(), make_data(), 3, TRAIN)
    products = sum(i * o for i, o in LAYERS)
    trained = 2 * 2 * (3 * products - 5 * 40)
    assert cost.flops == trained + 2 * products  # the safeguard looks at the loss of the four examples once more
    assert measure(method_of(FedAvg, safeguard=False), wide(), make_data(), 3, TRAIN).flops == trained
    weights = 8 * sum(i * o + o for i, o in LAYERS)
    assert cost.up == cost.down == weights
    assert 2 * weights < cost.memory < 6 * weights  # a copy to train, gradients, activations of four examples


@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_large_products_are_counted_whoever_computes_them(precision: Precision) -> None:
    n, sizes = 64, ((32, 1300), (1300, 32))
    settings = replace(TRAIN, batch_size=n, precision=precision)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(*sizes[0]), nn.ReLU(), nn.Linear(*sizes[1]))
    task = Task(net, dtype=settings.torch_dtype)
    x = torch.randn(n, 32, dtype=settings.torch_dtype)
    data = FederatedData(x, torch.arange(n) % 32, [np.arange(n)], [np.arange(n)])
    cost = measure(method_of(FedAvg, safeguard=False), task, data, 0, settings)
    assert cost.flops == 2 * 2 * (3 * 2 * 32 * 1300 - 32 * 1300)


def test_a_smaller_rank_costs_less() -> None:
    found = [
        measure(method_of(FedAra, ratio=r, layers=("2",), rho=0.0), wide(), make_data(), 3, TRAIN)
        for r in (1.0, 0.3, 0.1)
    ]
    for a, b in pairwise(found):
        assert a.flops > b.flops and a.memory > b.memory and a.up > b.up
    assert found[0].up - found[1].up == 8 * (40 * 40 - 12 * 80)
    # The decay of the product takes 2 r² (m + n) products in a step, and half of that in every other one; and once
    # more in the loss that the safeguard looks at.
    decayed = [
        measure(method_of(FedAra, ratio=0.3, layers=("2",), decay_every=k), wide(), make_data(), 3, TRAIN)
        for k in (1, 2)
    ]
    once = 2 * 2 * 12**2 * 80
    assert [round(4 * (c.flops - found[1].flops)) for c in decayed] == [3 * once, 2 * once]
    # Coded parts are counted as they travel.
    assert (
        measure(FedKd(energy_start=0.3), wide(), make_data(), 3, TRAIN).up
        < measure(FedAvg(), wide(), make_data(), 3, TRAIN).up
    )


def test_every_client_gets_the_largest_rank_it_can_afford() -> None:
    data, task, method = make_data(equal=True), wide(), method_of(FedAra, layers=("2",), rho=0.0)
    costs = {r: measure(method.with_ratios((r,)), task, data, 0, TRAIN) for r in (1.0, 0.3, 0.1)}
    n = len(data.train[0])
    # Device k needs a second for ratio k, and has no time to send.
    gflops = tuple(c.flops * n / 1e9 for c in costs.values())
    devices = Devices(gflops=(*gflops, gflops[2] / 2), mbps=(1e9,), round_seconds=1.001, ratios=(0.1, 1.0, 0.3))
    chosen, choices = assign(method, task, data, devices, TRAIN)
    assert isinstance(chosen, FedAra) and chosen.ranks.ratio == (1.0, 0.3, 0.1, 0.1, 1.0, 0.3, 0.1)
    assert [c.fits for c in choices] == [True, True, True, False, True, True, True]
    assert [round(c.seconds or 0.0, 2) for c in choices[:4]] == [1.0, 1.0, 1.0, 2.0]
    # Memory alone; and what is sent takes time.
    tight = Devices(memory_mb=(costs[1.0].memory / 1e6, costs[0.3].memory / 1e6), ratios=(1.0, 0.3, 0.1))
    assert assign(method, task, data, tight, TRAIN)[0].ranks.ratios[:2] == (1.0, 0.3)  # type: ignore[attr-defined]
    up = costs[0.3].up + costs[0.3].down
    slow = Devices(gflops=(1e6,), mbps=(8 * up / 1e6,), round_seconds=1.001, ratios=(1.0, 0.3, 0.1))
    assert set(assign(method, task, data, slow, TRAIN)[0].ranks.ratios) == {0.3}  # type: ignore[attr-defined]
    # FedHM has its own name for a ratio; FedAvg has none.
    hm = assign(method_of(FedHM, layers=("2",)), task, data, slow, TRAIN)[0]
    assert isinstance(hm, FedHM) and all(rho > 1 for rho in hm.rhos)
    plain, unfit = assign(FedAvg(), task, data, slow, TRAIN)
    assert plain == FedAvg() and unfit[0].ratio is None and not unfit[0].fits


def test_a_round_lasts_as_long_as_its_slowest_participant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, task, method = make_data(), wide(), method_of(FedAra, ratio=(1.0, 0.3), layers=("2",))
    devices = Devices(gflops=(0.01, 0.001), mbps=(1.0, 0.1, 1.0))

    def run(rounds: int) -> Simulation:
        sim = Simulation(method, task, data, rounds=rounds, settings=TRAIN, out=tmp_path / "run", devices=devices)
        sim.run()
        return sim

    run(1)
    lines = run(2).record.lines  # resumed
    cost = {c: measure(method, task, data, i, TRAIN) for c, i in ((1.0, 6), (0.3, 1))}  # who has most
    times = []
    for i in range(7):
        c = cost[(1.0, 0.3)[i % 2]]
        speed, rate = (0.01e9, 0.001e9)[i % 2], (1e6, 0.1e6, 1e6)[i % 3]
        times.append(c.flops * len(data.train[i]) / speed + 8 * (c.up + c.down) / rate)
    slowest = max(times)
    assert lines[0]["clock"]["seconds"] == pytest.approx(slowest, rel=0.05)
    assert lines[0]["clock"]["slowest"] == times.index(slowest)
    assert lines[1]["clock"]["total"] == pytest.approx(lines[0]["clock"]["seconds"] + lines[1]["clock"]["seconds"])
    done = load_run(tmp_path / "run")
    assert [x for _, x, _ in points(done, measure_of([done]), "clock")] == pytest.approx(
        [line["clock"]["total"] for line in lines]
    )
    assert "seconds on the clients' devices" in curves_figure([done], "clock").axes[0].get_xlabel()
    monkeypatch.setattr("fedspan.report.page.inline_svg", lambda draw, label, name: "")  # drawing takes its time
    assert "over time on devices" in write_page([done], tmp_path / "report.html").read_text()
    found = evaluation.to_target(lines, 0.0)
    assert found is not None and found["clock"] == lines[0]["clock"]["total"]
    operations = sum(cost[(1.0, 0.3)[i % 2]].flops * len(data.train[i]) for i in range(7))
    assert found["flops"] == lines[0]["clock"]["flops"] == pytest.approx(operations)
    _, (row,) = targets.reached([done], [0.01])
    assert (row.round, row.clock, row.flops) == (1, found["clock"], found["flops"])
    told = call("targets", str(tmp_path / "run"), "--accuracy", "0.01").stdout
    assert "on devices" in told and "TFLOP" in told


EXPERIMENT = {
    "rounds": 1,
    "data": {"source": "digits", "limit": 200},
    "partition": {"kind": "iid", "clients": 4},
    "model": {"kind": "mlp", "hidden": [60, 60]},
    "method": {"name": "fedara", "layers": ["body.1"], "rho": 0.0},
    "devices": {"gflops": [1.0, 0.0018], "mbps": [100.0], "round_seconds": 1.0, "ratios": [1.0, 0.1]},
}


def test_an_experiment_says_what_devices_there_are(tmp_path: Path) -> None:
    config = from_dict(EXPERIMENT)
    assert from_dict(config.to_dict()) == config and "devices" not in from_dict({}).to_dict()
    method, _, _ = assemble(config)
    assert isinstance(method, FedAra) and method.ranks.ratio == (1.0, 0.1, 1.0, 0.1)
    file = tmp_path / "e.toml"
    file.write_text(
        'rounds = 1\n[data]\nsource = "digits"\nlimit = 200\n[partition]\nkind = "iid"\nclients = 4\n[model]\n'
        'kind = "mlp"\nhidden = [60, 60]\n[method]\nname = "fedara"\n[methods.fedara]\nlayers = ["body.1"]\n[devices]\n'
        "gflops = [1.0, 0.0001]\nmbps = [100.0]\nround_seconds = 0.5\nratios = [1.0, 0.1]\n"
    )
    shown = call("capacity", str(file))
    assert "0.0001" in shown.stdout and "A round with all clients takes" in shown.stdout
    assert "2 client(s) cannot afford a round" in shown.stderr
    assert "have no ranks to choose" in call("capacity", str(file), "method.name=fedavg").stderr


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gflops": (1.0,)}, "gflops and mbps must be given together"),
        ({"gflops": (0.0,), "mbps": (1.0,)}, "gflops must be a list of finite numbers > 0. Got [0.0]"),
        ({"round_seconds": 1.0}, "round_seconds must be a number > 0, with gflops and mbps. Got 1.0"),
        ({"ratios": (2.0,)}, "ratios must be a list of one or more numbers in (0, 1]. Got [2.0]"),
    ],
)
def test_devices_that_cannot_be(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as e:
        Devices(**fields)  # type: ignore[arg-type]
    assert message in str(e.value)
