"""`train.precision`: bf16 beside float32 for methods, mappings, workers and nodes; files and runs from before."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import make_data, make_model
from fedspan import simulate, tree
from fedspan.config import from_dict, to_toml
from fedspan.deploy.experiment import Experiment
from fedspan.errors import CheckpointError, ConfigError, Divergence
from fedspan.learn.task import Task
from fedspan.methods import FedAvg, make
from fedspan.simulation.settings import Settings, settings_from
from fedspan.simulation.simulator import Simulation

pytestmark = pytest.mark.slow  # seconds together: make test has them

BF16: dict[str, Any] = {"precision": "bf16", "batch_size": 8, "workers": 1, "evaluate_every": 100}


def run(method: Any, kind: str = "mlp", **settings: Any) -> Simulation:
    data = make_data(kind).to(torch.float32)
    chosen = Settings(**BF16 | settings)
    sim = Simulation(method, Task(make_model(kind)), data, rounds=2, seed=5, settings=chosen)
    sim.run()
    return sim


def numbers(sim: Simulation) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tree.leaves(sim.record.server) if t.is_floating_point()])


@pytest.mark.parametrize(
    ("name", "fields", "kind"),
    [
        ("fedavg", {}, "batchnorm"),
        ("fedpara", {"rank": 2}, "cnn"),  # layers whose weights are products themselves
        ("pfl-mf", {"rank": 3}, "mlp"),
        ("fedloru", {"rank": 2, "tau": 1}, "mlp"),
        ("fedara", {}, "mlp"),
    ],
)
def test_a_method_in_bf16_is_near_itself_in_float32_and_keeps_float32(name: str, fields: Any, kind: str) -> None:
    ways = ("loop",) if kind == "batchnorm" else ("loop", "vmap", "folded")
    whole = numbers(run(make(name, **fields), kind, precision="float32", mapping="loop"))
    for mapping in ways:
        sim = run(make(name, **fields), kind, mapping=mapping)
        states = [*tree.leaves(sim.record.server), *tree.leaves(sim.record.row(0))]
        assert not any(t.dtype == torch.bfloat16 for t in states)
        half = numbers(sim)
        assert 0 < float((half - whole).norm() / whole.norm()) < 0.05


def test_workers_and_a_node_compute_what_one_process_does() -> None:
    data = make_data().to(torch.float32)
    one, two = (numbers(run(FedAvg(), mapping="loop", chunk=2, workers=k)) for k in (1, 2))
    assert torch.equal(one, two)
    settings = Settings(**BF16)
    node = Experiment(FedAvg(), Task(make_model("mlp")), 5, settings, 2, "a", {}).engine(data)
    assert node.precision == "bf16"
    sim = Simulation(FedAvg(), node.task, data, rounds=1, seed=5, settings=replace(settings, mapping="loop"))
    start, row = {"theta": node.task.init()}, tree.stack([node.begin(None, 0)])
    there, here = (e.update(None, 1, [0], row, start, {}, {}).sent.mean for e in (node, sim.engine))
    assert torch.equal(*(torch.cat([t.reshape(-1) for t in tree.leaves(m)]) for m in (there, here)))


def test_a_model_that_overflows_in_bf16_diverges_in_one_sentence() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(5, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head((self.body(x) * 1e4).exp())

    with pytest.raises(Divergence, match=r"Use a smaller lr \(now 0.1\), or train.on_divergence='halve'\.$"):
        simulate(FedAvg(lr=0.1), Growing(), make_data().to(torch.float32), rounds=1, **BF16)


def test_a_model_that_bf16_cannot_compute_is_refused_in_one_sentence() -> None:
    class Strict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            held = torch.zeros(len(x), 3)
            return held.index_add(0, torch.arange(len(x)), self.head(x))  # of one type only

    data = make_data().to(torch.float32)
    with pytest.raises(ConfigError, match=r"cannot be trained in bf16 \(.*\); run with train.precision='float32'\.$"):
        simulate(FedAvg(), Strict(), data, rounds=1, **BF16)
    simulate(FedAvg(), Strict(), data, rounds=1, **BF16 | {"precision": "float32"})


# ------------------------------------------------------------------------------------------------ train.dtype


def test_files_with_dtype_still_load_and_are_written_with_precision() -> None:
    old, new = (from_dict({"train": {k: "float64"}}) for k in ("dtype", "precision"))
    assert old == new and old.identity() == new.identity()
    assert 'precision = "float64"' in to_toml(old) and "dtype" not in to_toml(old)
    assert from_dict({"train": {"dtype": "float32"}}) == from_dict({})
    assert settings_from({"dtype": "float64", "precision": "float64"}, "Train").precision == "float64"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dtype": "float64", "precision": "float32"}, r"say the same\. Got 'float64' and 'float32'; leave out dtype"),
        ({"dtype": "float32", "precision": "bf16"}, r"say the same\. Got 'float32' and 'bf16'; leave out dtype"),
        ({"dtype": "bf16"}, r"dtype must be one of 'float32', 'float64'\. Got 'bf16'; use precision instead\.$"),
        ({"dtype": ["float64"]}, r"dtype must be one of .* Got \['float64'\]"),
        ({"precision": "half"}, r"precision must be one of 'float32', 'bf16', 'float64'\. Got 'half'\.$"),
    ],
)
def test_dtype_and_precision_that_contradict_or_are_unknown_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^Train: .*{said}"):
        from_dict({"train": given})


def test_a_run_from_before_is_resumed_and_bf16_is_another_run(tmp_path: Path) -> None:
    def simulation(rounds: int, precision: Any) -> Simulation:
        settings = Settings(workers=1, checkpoint_seconds=0.0, precision=precision)
        task, data = Task(make_model("mlp")), make_data().to(torch.float32)
        return Simulation(FedAvg(), task, data, rounds=rounds, settings=settings, out=tmp_path)

    simulation(1, "float32").run()
    for path in (tmp_path / "checkpoints").glob("manifest-*.json"):
        held = json.loads(path.read_text())["identity"]
        assert held["train.dtype"] == "float32" and "train.precision" not in held  # the name before
    with pytest.raises(CheckpointError, match=r'train\.dtype is "float32" there and "bf16" here'):
        simulation(2, "bf16")
    assert simulation(2, "float32").record.resumed
