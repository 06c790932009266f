"""FedARA's steps: the measured curvature is a lower bound, and the warning fires where the anchors break training.

* The quotient never exceeds the largest eigenvalue of the Jacobian written out, dense and as factors.
* On a linear extractor gradient steps on the term alone grow beyond 2, and shrink below.
* A run that the anchors break says so once, and keeps it when it is resumed; a calm one says nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import jacrev

from conftest import make_data, make_task, method_of
from fedspan import simulate, tree
from fedspan.learn.batches import Batches
from fedspan.learn.sgd import gradient
from fedspan.learn.task import Task
from fedspan.methods import FedAra, FedAvg
from fedspan.methods.fedara.objective import Alignment, anchors
from fedspan.methods.fedara.stability import alignment_step, movement
from fedspan.tree import Params


def eigenvalue(task: Task, params: Params, x: torch.Tensor) -> float:
    """λ_max(1/n Σ J'J) from the whole Jacobian."""
    body = tree.select(params, task.body)
    J = jacrev(lambda b: task.features(params | b, x))(body)
    rows = torch.cat([j.reshape(len(x) * task.features(params, x).shape[1], -1) for j in J.values()], 1)
    return float(torch.linalg.svdvals(rows)[0] ** 2 / len(x))


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_the_curvature_is_found_from_below(kind: str, ratio: float) -> None:
    task = method_of(FedAra, ratio=ratio, layers="body").model(make_task(kind), None)
    x = make_data(kind).x[:20]
    found, exact = movement(task, task.init(), x), eigenvalue(task, task.init(), x)
    assert 0.9 * exact < found.curvature <= exact * (1 + 1e-9)
    features = task.features(task.init(), x)
    assert float(found.square) == pytest.approx(float(features.square().sum(1).mean()), rel=1e-12)
    assert found.features == features.shape[1]


def test_features_that_do_not_move_have_no_curvature() -> None:
    task = make_task("cnn")
    dead = {k: torch.full_like(v, -1.0) if k == "hidden.bias" else 0 * v for k, v in task.init().items()}
    assert movement(task, dead, make_data("cnn").x[:5]).curvature == 0.0


@pytest.mark.parametrize("how", ["mse", "sum", "relative"])
def test_steps_of_the_term_alone_grow_beyond_two(how: Any) -> None:
    torch.manual_seed(0)
    task = Task(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)), dtype=torch.float64)
    data, near = make_data(clients=1), Alignment(fac_reduction=how)
    stream = Batches(data.x, data.y, torch.from_numpy(data.train[0])[None], torch.tensor(0))
    batch, start = next(iter(stream)), task.init()
    a = anchors(task, start, stream)
    step = alignment_step(near, task, start, batch.x, 1.0, 1.0)
    assert step is not None
    for times, grows in ((1.8, False), (2.2, True)):
        lr, p, values = times / step.value, start, []
        for _ in range(200):
            pull = tree.sub(gradient(near.loss(task, a, 1.0), p, batch), gradient(task.loss, p, batch))
            p = {k: w - lr * pull[k] for k, w in p.items()}
            values.append(float(near.gap(task, p, a, stream)))
        assert (values[-1] > 100 * values[0]) == grows
        assert grows or values[-1] <= values[0]


def wide() -> Task:
    """The small MLP with 256 hidden units a layer."""
    torch.manual_seed(0)
    layers = (nn.Linear(5, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 3))
    return Task(nn.Sequential(*layers), dtype=torch.float64)


def ran(task: Task, rounds: int = 6, out: Path | None = None, **keys: Any) -> tuple[list[str], list[float]]:
    """What a run said, and its losses."""
    settings: dict[str, Any] = {"epochs": 3, "batch_size": 8, "workers": 1, "precision": "float64"}
    method = method_of(FedAra, **{"warmup": 2, "safeguard": False, **keys})
    result = simulate(method, task, make_data(), rounds=rounds, out=out, evaluate_every=1, **settings)
    return result.messages, [line["loss"]["mean"] for line in result.curve]


def test_a_run_that_the_anchors_break_says_so_and_a_calm_one_does_not() -> None:
    free = ran(make_task(), lr=0.05, lam=0.0)
    said, losses = ran(make_task(), lr=0.05, lam=30.0)
    assert free[0] == [] and free[1][-1] < 0.6 * free[1][0]
    assert losses[-1] > losses[0]  # nothing is learnt any more
    assert len(said) == 1 and said[0].startswith("FedAra: lr·lam·curvature = ")
    assert "after round 1, on examples of client '" in said[0] and said[0].endswith("; lower lr or lam.")
    calm, losses = ran(make_task(), lr=0.005, lam=10.0)
    assert calm == [] and losses == sorted(losses, reverse=True)


def test_a_wide_model_is_calm_by_default_and_breaks_beyond_the_limit() -> None:
    calm, losses = ran(wide())
    assert calm == [] and losses == sorted(losses, reverse=True)
    said, losses = ran(wide(), lam=30.0)
    assert len(said) == 1 and losses[2] > 2 * losses[1]  # round 3 is the first with all of lam


def test_a_relative_distance_is_advised_where_it_would_be_stable() -> None:
    said, _ = ran(make_task(), lr=0.05, lam=2.0, fac_reduction="sum")
    assert len(said) == 1 and said[0].endswith('; lower lr or lam, or set fac_reduction = "relative".')
    assert ran(make_task(), lr=0.05, lam=2.0, fac_reduction="relative")[0] == []


def test_it_is_said_once_and_kept_on_resume(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"lr": 0.05, "lam": 30.0}
    said, _ = ran(make_task(), 3, tmp_path / "run", **keys)
    again, _ = ran(make_task(), 4, tmp_path / "run", **keys)
    assert again[0] == said[0] and len(again) == 2 and "Resuming" in again[1]


def test_what_is_not_measured() -> None:
    task = make_task("batchnorm")
    assert alignment_step(Alignment(), task, task.init(), make_data("cnn").x[:5], 1.0, 1.0) is None
    assert ran(make_task(), lr=0.05, lam=30.0, optimizer="adamw")[0] == []  # its steps do not grow with lam
    assert method_of(FedAra, lam=4.0, lr=0.5, warmup=2).measured_pull(1) == 0.0
    assert method_of(FedAra, lam=4.0, lr=0.5, warmup=2).measured_pull(2) == 1.0
    assert method_of(FedAra, lam=4.0, lr=0.5, warmup=2, momentum=0.6).measured_pull(9) == pytest.approx(2 / 1.6)
    assert not hasattr(FedAvg(), "measured_pull")
