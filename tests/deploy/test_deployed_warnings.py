"""What a deployment says before a run: the server of its settings, a node of its own data, to its owner alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flower_grid import LocalGrid

from fedspan.cli import deploy as commands
from fedspan.config import from_dict
from fedspan.deploy.envelope import Facts
from fedspan.deploy.experiment import DataKind, read_experiment
from fedspan.deploy.local_grid import AT_ONCE, FIRST_NODE
from fedspan.deploy.node.service import WARNINGS, Service
from fedspan.deploy.server.exchange import Roster
from fedspan.deploy.server.server import Server
from fedspan.storage.toml import parse_toml

CLIENTS = 3
KIND = DataKind((4,), 2)


def text(method: str, source: str = "own.npz") -> str:
    return f"""
name = "t"
rounds = 1
[data]
source = "{source}"
classes = 2
[partition]
clients = {CLIENTS}
[model]
kind = "logistic"
[method]
{method}
"""


def node_of(folder: Path, scale: float) -> Service:
    """A node with a table of its own, of which the last column is larger by `scale`."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 4)).astype(np.float32) * np.array([1.0, 1.0, 1.0, scale], np.float32)
    np.savez(folder / "own.npz", x=x, y=np.arange(40) % 2)
    (folder / "node.toml").write_text("")
    (folder / "node.json").write_text(json.dumps({"data": str(folder / "own.npz")}))
    return Service(folder)


def run(tmp_path: Path, experiment: str, scales: tuple[float, ...]) -> tuple[Any, list[str], list[Facts]]:
    """A run on nodes of these scales: its result, what the server logged, and every answer it got."""
    nodes = [node_of(tmp_path / f"n{i}", scale) for i, scale in enumerate(scales)]
    answers: list[Facts] = []

    def handle(_: Mapping[str, Any], node: Mapping[str, Any], facts: Facts, payload: bytes) -> tuple[Facts, bytes]:
        found = nodes[int(node["number"])].handle(experiment, facts, payload)
        answers.append(found[0])
        return found

    said: list[str] = []
    roster = Roster(tuple(FIRST_NODE + i for i in range(CLIENTS)), ("n0", "n1", "n2"))
    grid: Any = LocalGrid(handle, CLIENTS)  # type: ignore[arg-type]
    server = Server(
        read_experiment(experiment, KIND), KIND, grid, roster, policy=AT_ONCE, out=tmp_path / "run", log=said.append
    )
    return server.run(), said, answers


def test_the_server_says_what_settings_show(tmp_path: Path) -> None:
    result, said, _ = run(tmp_path, text('name = "pfl-mf"\nrank = 8\nlr = 1e9'), (1.0, 1.0, 1.0))
    rank = [s for s in said if s.startswith("PflMf: rank = 8 is larger than the number of clients, 3")]
    assert len(rank) == 1 and said.index(rank[0]) < min(k for k, s in enumerate(said) if s.startswith("Round 1 of"))
    assert rank[0] in result.messages


def test_the_server_says_that_losses_explode(tmp_path: Path) -> None:
    result, said, _ = run(tmp_path, text('name = "fedavg"\nlr = 1e9'), (1.0, 1.0, 1.0))
    exploded = [s for s in said if s.startswith("Evaluation after round 1: the mean loss is")]
    assert len(exploded) == 1 and exploded[0] in result.messages


def test_a_node_tells_its_owner_and_nobody_else(tmp_path: Path) -> None:
    result, said, answers = run(tmp_path, text('name = "fedavg"\nlr = 0.001'), (1000.0, 1.0, 1.0))
    told = (tmp_path / "n0" / WARNINGS).read_text()
    assert told.startswith("Data: deviations of features differ by a factor of") and told.count("\n") == 1
    assert not (tmp_path / "n1" / WARNINGS).exists()
    assert not any("deviations" in s for s in [*said, *result.messages])
    kept = [{k for k in a if k != "sums"} for a in answers]
    hello = {"do", "round", "examples", "held_out", "experiment", "shape", "classes", "dtype"}
    assert hello in kept and all("deviations" not in json.dumps(a, default=str) for a in answers)
    assert "deviations" not in (tmp_path / "run" / "status.json").read_text()


def test_data_that_were_mended_are_not_spoken_of(tmp_path: Path) -> None:
    service = node_of(tmp_path / "n", 1.0)
    (tmp_path / "n" / WARNINGS).write_text("Data: something of an earlier run.\n")
    service.handle(text('name = "fedavg"'), {"do": "hello", "round": 0, "client": 0, "clients": CLIENTS}, b"")
    assert not (tmp_path / "n" / WARNINGS).exists()


def test_ordering_a_run_says_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    values = parse_toml(text('name = "ditto"\nlam = 30.0\nlr = 0.1').encode(), "the experiment")
    commands._warn(from_dict(values).resolve(), CLIENTS)
    found = capsys.readouterr()
    assert "is beyond stability" in " ".join((found.out + found.err).split())
