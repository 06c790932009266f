"""`evaluate_after`: the model a client has right after a local round of its own, which leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conftest import assert_close, make_data, make_task
from conftest import finished as run
from fedspan import tree
from fedspan.learn.sgd import sgd
from fedspan.methods import make
from fedspan.simulation.simulator import Simulation


def judged(sim: Simulation, client: int, weights: Any) -> float:
    """Loss of plain weights on a client's test part."""
    x = sim.data.x[torch.from_numpy(sim.data.test[client])]
    output = make_task().predict(weights, x)
    return float(torch.nn.functional.cross_entropy(output, sim.data.labels(client, "test")))


@pytest.mark.parametrize("mapping", ["vmap", "loop"])
def test_it_is_the_locally_trained_model(mapping: str) -> None:
    """FedAvg's global model, trained on the batches that the client would see next."""
    sim = run(make("fedavg", lr=0.2), rounds=2, evaluate_after=True, mapping=mapping)
    result = sim.result  # type: ignore[attr-defined]
    engine = run(make("fedavg", lr=0.2), rounds=0, mapping="loop").engine
    visit, _, _ = engine._visit(4, 3, sim.method.plan(), {})
    trained = sgd(make_task().loss, sim.record.server["theta"], visit["train"], 0.2)
    assert result.per_client["loss_after"][4] == pytest.approx(judged(sim, 4, trained), abs=1e-12)
    assert result.per_client["loss"][4] == pytest.approx(judged(sim, 4, sim.record.server["theta"]), abs=1e-12)
    assert result.accuracy["after"] == pytest.approx(result.measures["accuracy_after"]["mean"])
    assert result.curve[-1]["accuracy_after"]["mean"] == result.accuracy["best_after"]


# One method for every place where a model can be: the upload, the state, a difference, one of several, factors, inner
# factors.
PLACES: list[tuple[str, dict[str, Any]]] = [
    ("fedper", {}),
    ("cfl", {}),
    ("ifca", {"clusters": 2}),
    ("fedara", {"ratio": (1.0, 0.5), "watch": True}),
    ("mfedloru", {"rank": 3, "ranks": (3, 1), "tau": 3}),
    ("factorized-fl-alpha", {"mu_start": "dense"}),
    ("pfl-mf-joint", {"rank": 2}),
    ("pfl-mf-adaptive", {"rank": 2}),
    ("fedproto", {}),
]


@pytest.mark.parametrize(("name", "fields"), PLACES, ids=[n for n, _ in PLACES])
def test_it_leaves_no_trace_and_fits_the_client_better(name: str, fields: dict[str, Any]) -> None:
    method = make(name, lr=0.1, **fields)
    more: dict[str, Any] = {"rounds": 1, "data": make_data(), "epochs": 4}
    plain, after = run(method, **more), run(method, evaluate_after=True, **more)
    a, b = plain.result, after.result  # type: ignore[attr-defined]
    assert plain.record.digest() == after.record.digest()
    assert a.bytes == b.bytes and a.per_client.items() <= b.per_client.items()
    assert b.measures["loss_after"]["mean"] < a.measures["loss"]["mean"]
    assert not any(k.endswith("_after") for k in a.per_client) and "alignment_after" not in b.per_client


def test_without_a_step_nothing_differs() -> None:
    sim = run(make("fedara", ratio=(1.0, 0.5), lr=0.0), "cnn", rounds=1, evaluate_after=True)
    c = sim.result.per_client  # type: ignore[attr-defined]
    assert_close(torch.tensor(c["loss"]), torch.tensor(c["loss_after"]))
    assert tree.all_finite(sim.record.server)


@pytest.mark.parametrize("mapping", ["vmap", "loop"])
def test_fedas_is_judged_as_it_was_trained(mapping: str) -> None:
    """Its `personal` aligns a received body; a model that has just been trained was aligned before, and stays."""
    method = make("fedas", lr=0.1, lr_align=0.2, align_epochs=2)
    sim = run(method, rounds=3, evaluate_after=True, mapping=mapping)
    capacity, t, part = sim.record.capacity(4), sim.record.progress.round + 1, sim.data.test[4]
    assert len(part)
    down = sim.engine.able.download(sim.record.server, torch.tensor([4]), capacity, t)
    visit, _, _ = sim.engine._visit(4, t, method.plan(), {})
    kept, _ = method.client_update(sim.task, sim.record.row(4), down.shared, visit)
    loss = judged(sim, 4, {**kept["theta"], **kept["h"]})
    assert sim.result.per_client["loss_after"][4] == pytest.approx(loss, abs=1e-12)  # type: ignore[attr-defined]
