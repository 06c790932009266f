"""The benchmark counts what it says it counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from bench.counting import count
from bench.models import build
from bench.rows import METHODS
from bench.workloads import PARTICIPATION, WORKLOADS, Workload

from fedspan import models
from fedspan.simulation.settings import Settings, sample

TINY = replace(WORKLOADS["mlp-100-b32"], clients=20, examples=600, batch=16)
ROUNDS = 2


def sizes_of_the_timed_rounds(w: Workload) -> np.ndarray:
    sizes = np.array([len(rows) for rows in w.data((1, 2, 2)).train])
    chosen = Settings(participation=PARTICIPATION)
    return np.concatenate([sizes[sample(w.clients, chosen, 0, t)] for t in range(2, ROUNDS + 2)])


@pytest.mark.parametrize(
    ("row", "formula"),
    [
        ("fedavg", lambda n: n),
        ("ditto", lambda n: 2 * n),
        ("fedrep", lambda n: 11 * n),
        ("pfl-mf-paper", lambda n: n + np.minimum(n, TINY.batch)),
    ],
)
def test_counted_gradients_are_those_of_the_formula(row: str, formula: object) -> None:
    assert count(TINY, row, ROUNDS) == int(formula(sizes_of_the_timed_rounds(TINY)).sum())  # type: ignore[operator]


def test_what_the_safeguard_repeats_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.ours.LR", 3.0)  # so that some phases overshoot
    assert count(TINY, "fedavg", ROUNDS) == int(sizes_of_the_timed_rounds(TINY).sum())


def test_every_row_names_a_method() -> None:
    from fedspan.methods import make

    for name, fields, cost in METHODS.values():
        assert make(name, lr=0.1, **fields) and cost >= 1


@pytest.mark.parametrize("name", ["mlp-100-b32", "cnn-100-b32", "resnet9-100-b32"])
def test_plain_models_have_the_parameters_of_fedspans(name: str) -> None:
    w = WORKLOADS[name]
    ours = models.build(w.model, w.shape, 10)
    assert sorted(tuple(p.shape) for p in build(w).parameters()) == sorted(tuple(p.shape) for p in ours.parameters())


def test_clients_hold_every_example_once() -> None:
    held = np.concatenate([*TINY.data((1,)).train, *TINY.data((1,)).test])
    assert sorted(held.tolist()) == list(range(TINY.examples))
    data = replace(WORKLOADS["cnn-100-b32"], examples=30_000).data((1,))  # more than there are pictures
    rows = np.concatenate([*data.train, *data.test])
    assert len(rows) == 30_000 and len(data.x) == 20_000 and rows.max() < 20_000
