"""Federations on the grid of this process, on the small data of the other tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conftest import assert_close, make_data, make_task
from fedspan.data.federated import FederatedData
from fedspan.deploy.experiment import Experiment
from fedspan.deploy.local_grid import FIRST_NODE, LocalGrid, Nodes, deploy_here, held_by, written_and_read
from fedspan.deploy.policy import Policy
from fedspan.deploy.server.server import Server
from fedspan.learn.task import Task
from fedspan.method import Method
from fedspan.methods import name_of
from fedspan.simulation.result import Result
from fedspan.simulation.settings import Settings
from fedspan.simulation.simulator import Simulation

__all__ = ["FIRST_NODE", "LocalGrid", "Nodes", "assert_same_run", "deployed", "deployed_on", "experiment_of"]
__all__ += ["held_by", "written_and_read"]


def experiment_of(method: Method, task: Task, rounds: int, **settings: Any) -> Experiment:
    chosen = {
        "participation": 1.0,
        "batch_size": 8,
        "epochs": 2,
        "precision": "float64",
        "evaluate_every": 100,
    } | settings
    config = {"method": {"name": name_of(method)}, "rounds": rounds}
    return Experiment(method, task, 5, Settings(**chosen), rounds, "test", config)


def deployed(
    method: Method, root: Path, *, rounds: int = 2, clients: int = 3, policy: Policy | None = None, **settings: Any
) -> tuple[Server, LocalGrid]:
    """A server and its nodes on the small federation of the other tests."""
    data, task = make_data(clients=clients), make_task()
    return deployed_on(experiment_of(method, task, rounds, **settings), data, root, policy)


def deployed_on(
    experiment: Experiment, data: FederatedData, root: Path, policy: Policy | None = None, out: Path | None = None
) -> tuple[Server, LocalGrid]:
    return deploy_here(experiment, data, root, policy, out)


def assert_same_run(sim: Simulation, expected: Result, server: Server, grid: LocalGrid, result: Result) -> None:
    """The simulator and the deployment have the same server, clients, measures and bytes."""
    assert not server.transport.refusals
    assert_close(sim.record.server, server.record.server)
    assert_close(sim.record.common, server.record.common)
    for i in range(sim.data.clients):
        assert_close(sim.record.row(i), held_by(grid, server, i).row)
    for measure, values in expected.per_client.items():
        assert values == pytest.approx(result.per_client[measure], abs=1e-12)
    assert [expected.bytes[k] for k in ("up", "down", "meta")] == [result.bytes[k] for k in ("up", "down", "meta")]
