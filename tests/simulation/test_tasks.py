"""Kinds of tasks: the same numbers mapped, in the loop, on two workers and on Flower's messages; bad labels refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flower_grid import assert_same_run, deployed_on, experiment_of
from torch import Tensor, nn

from conftest import assert_close
from fedspan.data.federated import FederatedData
from fedspan.errors import ConfigError, DataError
from fedspan.learn.task import Task
from fedspan.methods import make
from fedspan.simulation.protocols import EvaluationSettings
from fedspan.simulation.settings import Settings
from fedspan.simulation.simulator import Simulation, simulate

DOUBLE = torch.float64


class TokenTagger(nn.Module):
    """A row of three logits for each of four positions, as an output object."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(logits=self.head(self.body(x).tanh()))


def federation(kind: str, clients: int = 4) -> FederatedData:
    """Clients of 6 to 23 examples."""
    rng, pairs = np.random.default_rng(1), []
    a = rng.normal(size=(5, 3))
    for i in range(clients):
        n = 6 + 5 * i + i * i // 2
        x = rng.normal(size=(n, 4, 2) if kind == "tagging" else (n, 5))
        if kind == "multi-label":
            y: Any = (x @ a + rng.normal(size=(n, 3)) > 0).astype(np.int64)
        elif kind == "regression":
            y = x @ a + 0.1 * rng.normal(size=(n, 3))
        elif kind == "survival":
            y = np.stack([np.ceil(8 * rng.random(n) * np.exp(-0.3 * (x @ a[:, 0]))), rng.random(n) < 0.7], 1)
        elif kind == "tagging":
            y = (x[..., 0] > 0).astype(np.int64) + (x[..., 1] > 0)
            y[:, 3] = np.where(rng.random(n) < 0.5, -100, y[:, 3])
        else:
            y = (x @ a).argmax(1)
        pairs.append((torch.tensor(x), torch.tensor(y)))
    return FederatedData.from_arrays(pairs, seed=2).to(DOUBLE)


def contrast(output: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """A loss of a batch: outputs of one class near each other, of two classes apart."""
    w = mask.to(output.dtype)
    both = w[:, None] * w[None, :]
    far = (output[:, None] - output[None]).square().mean(2)
    same = (y[:, None] == y[None]).to(output.dtype)
    return (both * (same * far + (1 - same) * (1 - far).clamp_min(0))).sum() / both.sum().clamp_min(1)


def task_of(kind: str) -> Task:
    torch.manual_seed(0)
    if kind == "tagging":
        return Task(TokenTagger(), "tagging", dtype=DOUBLE)
    own: dict[str, Any] = {"loss": contrast, "loss_of": "batch"} if kind == "contrast" else {}
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1 if kind == "survival" else 3))
    return Task(net, "classification" if kind == "contrast" else kind, dtype=DOUBLE, **own)  # type: ignore[arg-type]


METRIC = {
    "multi-label": ("roc_auc", "f1_macro"),
    "regression": ("r2", "mae"),
    "survival": ("concordance",),
    "tagging": ("balanced_accuracy", "ece"),
    "contrast": ("f1_macro",),
}


def finished(kind: str, method: str = "fedper", evaluate: Any = None, **settings: Any) -> Simulation:
    chosen = {"batch_size": 8, "epochs": 2, "precision": "float64", "evaluate_every": 100, "workers": 1} | settings
    judged = EvaluationSettings(metrics=METRIC[kind]) if evaluate is None else evaluate
    fields: dict[str, Any] = {"fedper": {"private_head": False}, "pfl-mf": {"rank": 2}}.get(method, {})
    one = make(method, lr=0.05, **fields)
    data = federation(kind)
    sim = Simulation(one, task_of(kind), data, rounds=2, seed=5, settings=Settings(**chosen), evaluate=judged)
    sim.result = sim.run()  # type: ignore[attr-defined]
    return sim


@pytest.mark.parametrize("kind", list(METRIC))
def test_the_same_mapped_in_the_loop_and_on_workers(kind: str) -> None:
    loop = finished(kind, mapping="loop")
    a = loop.result  # type: ignore[attr-defined]
    for more in ({"mapping": "vmap"}, {"mapping": "vmap", "chunk": 1, "workers": 2}, {"mapping": "loop", "workers": 2}):
        sim = finished(kind, **more)
        b = sim.result  # type: ignore[attr-defined]
        assert_close(loop.record.server, sim.record.server)
        assert a.per_client.keys() == b.per_client.keys() and METRIC[kind][0] in a.measures
        for name, values in a.per_client.items():
            assert values == pytest.approx(b.per_client[name], abs=1e-10), name
        for name in METRIC[kind]:
            assert a.measures[name]["pooled"] == pytest.approx(b.measures[name]["pooled"], abs=1e-10)


@pytest.mark.parametrize("kind", list(METRIC))
def test_the_same_on_flower(kind: str, tmp_path: Path) -> None:
    method, judged = make("fedavg", lr=0.05), EvaluationSettings(metrics=METRIC[kind])
    sim = finished(kind, "fedavg", mapping="loop")
    experiment = replace(experiment_of(method, task_of(kind), 2), evaluate=judged)
    server, grid = deployed_on(experiment, sim.data, tmp_path)
    result = server.run()
    assert_same_run(sim, sim.result, server, grid, result)  # type: ignore[attr-defined]
    assert "pooled" not in result.measures[METRIC[kind][0]]  # predictions stay on the nodes


@pytest.mark.parametrize("kind", list(METRIC))
def test_every_kind_is_learnt(kind: str) -> None:
    plan: dict[str, Any] = {"batch_size": "full", "epochs": 30, "participation": 1.0, "mapping": "vmap"}
    start, end = (finished(kind, "fedavg", **plan | {"epochs": e}).result for e in (0, 30))  # type: ignore[attr-defined]
    assert end.measures["loss"]["mean"] < start.measures["loss"]["mean"]


PAIRS = [(kind, name) for kind in ("survival", "multi-label") for name in ("ditto", "apfl", "pfl-mf", "fedrep")]


@pytest.mark.parametrize(("kind", "name"), [*PAIRS, ("multi-label", "amht-lrs")])
def test_methods_train_them_too(kind: str, name: str) -> None:
    runs = [finished(kind, name, mapping=m).result for m in ("vmap", "loop")]  # type: ignore[attr-defined]
    for column, values in runs[0].per_client.items():
        assert values == pytest.approx(runs[1].per_client[column], abs=1e-8), column


def test_what_the_data_say_decides_the_kind() -> None:
    net = nn.Linear(5, 3)
    for kind in ("multi-label", "regression", "classification"):
        result = simulate(make("fedavg"), net, federation(kind), rounds=1, workers=1)
        assert result.simulation is not None and result.simulation.task.kind == kind


def test_labels_that_do_not_fit_are_refused() -> None:
    def run(task: Task, data: FederatedData) -> None:
        precision = "float64" if task.dtype else "float32"
        simulate(make("fedavg"), task, data.to(task.dtype or torch.float32), rounds=1, workers=1, dtype=precision)

    data = federation("survival")
    bad = data.y.clone()
    bad[int(data.test[2][0]), 1] = 3.0
    said = r"survival task must be a time of at least 0 and an event of 0 or 1. Got .*3.0.* of client 2"
    with pytest.raises(DataError, match=said):
        run(task_of("survival"), replace(data, y=bad))
    with pytest.raises(DataError, match=r"a time and an event.*Got torch.float64 of shape \(\d+, 3\)"):
        run(task_of("survival"), federation("regression"))
    with pytest.raises(ConfigError, match=r"a survival model must have 1 output, the risk. Got 3"):
        run(Task(nn.Linear(5, 3), "survival"), data)
    many = federation("multi-label")
    bad = many.y.clone()
    bad[int(many.train[1][0]), 0] = 2
    with pytest.raises(DataError, match=r"multi-label task must be 0 or 1 for every label. Got \[2.* of client 1"):
        run(task_of("multi-label"), replace(many, y=bad, classes=3))
    with pytest.raises(ConfigError, match=r"the model must have 3 output\(s\). Got 2"):
        run(Task(nn.Linear(5, 2), "multi-label"), many)
    tags = federation("tagging")
    bad = tags.y.clone()
    bad[int(tags.train[0][0]), 0] = 7
    with pytest.raises(DataError, match=r"tagging task must be classes 0..2, or -100 .*Got \[7.* of client 0"):
        run(task_of("tagging"), replace(tags, y=bad))
