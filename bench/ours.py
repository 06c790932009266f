"""fedspan as a user gets it: a whole run with its evaluation, checkpoints and end, read off the run's own record.

`python -m bench.ours WORKLOAD METHOD [PRECISION [ROUNDS]]`.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bench.measurement import Measurement, main
from bench.rows import METHODS, rounds_of
from bench.workloads import CLASSES, LR, PARTICIPATION, Workload
from fedspan.data.federated import FederatedData
from fedspan.learn.task import Task
from fedspan.methods import make
from fedspan.models import build
from fedspan.simulation.settings import Settings, sample
from fedspan.simulation.simulator import Simulation

SEED = 0
EMPTY: Mapping[str, Any] = {}


def simulation(
    w: Workload, row: str, data: FederatedData, rounds: int, options: Mapping[str, Any] = EMPTY, **settings: Any
) -> Simulation:
    """The run of a row: 10 % of the clients in a round, evaluated once, at the end; `options` are the model's.

    Of the settings `fields` are more fields of the method.
    """
    name, fields, _ = METHODS[row]
    fields = fields | settings.pop("fields", {})
    task = Task(lambda: build(w.model, tuple(data.x.shape[1:]), CLASSES, **options), seed=SEED)
    out = settings.pop("out", None)
    chosen = Settings(participation=PARTICIPATION, batch_size=w.batch, evaluate_every=10**9, **settings)
    method = make(name, **({"lr": LR} | fields))
    return Simulation(method, task, data, rounds=rounds, seed=SEED, settings=chosen, out=out)


def federated(w: Workload, shape: tuple[int, ...] | None = None) -> FederatedData:
    """The workload's data as fedspan takes them."""
    made = w.data(shape)
    x, y = torch.from_numpy(made.x), torch.from_numpy(made.y)
    return FederatedData(x=x, y=y, train=made.train, test=made.test, classes=CLASSES)


def with_precision(precision: str) -> dict[str, str]:
    """The setting for a precision.

    Raises:
        SystemExit: if this version has no such setting.
    """
    if precision == "float32":
        return {}
    if "precision" not in {f.name for f in dataclasses.fields(Settings)}:
        raise SystemExit("this version has no train.precision")
    return {"precision": precision}


def measure(w: Workload, row: str, precision: str = "float32", rounds: str = "") -> Measurement:
    """Run a row: examples and seconds of all rounds but the first, of the evaluation, and of the whole run."""
    data = federated(w)
    timed = int(rounds or rounds_of(w, row))
    with tempfile.TemporaryDirectory(prefix="fedspan-bench-") as out:
        start = time.perf_counter()
        result = simulation(w, row, data, timed + 1, out=Path(out) / "run", **with_precision(precision)).run()
        whole = time.perf_counter() - start
    sizes = data.sizes
    chosen = Settings(participation=PARTICIPATION)
    seen = sum(int(sizes[sample(data.clients, chosen, SEED, t)].sum()) for t in range(2, timed + 2))
    return {
        "examples": seen,
        "seconds": sum(line["seconds"] for line in result.curve[1:]),
        "rounds": timed,
        "evaluate_seconds": result.seconds["evaluate"],
        "whole_seconds": whole,
        "mapping": result.mapping,
    }


if __name__ == "__main__":
    main(measure)
