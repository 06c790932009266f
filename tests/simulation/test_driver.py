"""The round driver over a transport that only writes down what it is asked: the order of a round, what is undone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from flower_grid import deployed
from torch import Tensor

from conftest import make_data, make_task
from fedspan.errors import Divergence
from fedspan.learn.task import Task
from fedspan.method import Announces, Capacity, Down, Federation, Method, Round, Visit
from fedspan.simulation.driver import RoundDriver
from fedspan.simulation.engine import Engine
from fedspan.simulation.protocols import RECEIVED, JudgedModel
from fedspan.simulation.record import Record
from fedspan.simulation.settings import Settings
from fedspan.simulation.simulator import Simulation
from fedspan.simulation.transport import Collected, MeasuredClients
from fedspan.tree import Tree
from fedspan.wire import Direction, Ledger

DOUBLE = torch.float64


@dataclass(frozen=True, kw_only=True)
class Counting(Method, Announces):
    """The server adds up the means and announces every even round; round `bad` gives infinity."""

    lr: float = 8.0
    bad: int = 0

    def init_server(self, task: Task, federation: Federation) -> Tree:
        return {"s": torch.zeros((), dtype=DOUBLE)}

    def common(self, task: Task, federation: Federation) -> Tree:
        return {"heard": torch.zeros((), dtype=DOUBLE)}

    def announce(self, server: Tree, round: int) -> Tree | None:
        return {"s": server["s"]} if round % 2 == 0 else None

    def hear(self, common: Tree, news: Tree) -> Tree:
        return {"heard": common["heard"] + 1}

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        return Down(shared=dict(server))

    def server_update(self, server: Tree, round: Round) -> Tree:
        grown = torch.inf if round.round == self.bad and self.lr > 1.0 else 1.0
        return {"s": server["s"] + grown * round.mean["x"]}

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        return task.init()


class Notebook:
    """A transport whose clients all send 1."""

    who = "Notebook"
    counted: tuple[Direction, ...] = (Direction.UP, Direction.EVALUATE, Direction.META)

    def __init__(self, engine: Engine, repeats: bool, enough: bool) -> None:
        self.engine, self.repeats, self.enough = engine, repeats, enough
        self.asked: list[str] = []

    @property
    def sizes(self) -> Any:
        return self.engine.data.sizes

    def advice(self) -> str:
        return "do less."

    def ready(self) -> None:
        self.asked.append("ready")

    def train(self, t: int, sampled: Sequence[int], ledger: Ledger) -> Collected:
        self.asked.append(f"train {t}")
        ledger.add(Direction.UP, 8 * len(sampled), "x")
        got = Collected(sampled, enough=self.enough)
        total = {"sums": {"x": torch.tensor(float(len(sampled)), dtype=DOUBLE)}, "totals": {}}
        got.add(list(sampled), [1.0] * len(sampled), {}, total)
        return got

    def keep(self) -> None:
        self.asked.append("keep")

    def take_back(self) -> None:
        self.asked.append("take back")

    def announce(self, news: Tree, ledger: Ledger) -> None:
        self.asked.append("announce")

    def measure(self, t: int, chosen: Sequence[int], ledger: Ledger, way: JudgedModel = RECEIVED) -> MeasuredClients:
        self.asked.append(f"measure {t}")
        ledger.add(Direction.EVALUATE, 5)
        return MeasuredClients({"n": dict.fromkeys(chosen, 2.0), "loss": dict.fromkeys(chosen, 1.0)})

    def close(self) -> None:
        self.asked.append("close")


class Driver(RoundDriver):
    def _about(self) -> dict[str, Any]:
        return {"mapping": "none"}


def driver(
    method: Method, rounds: int = 3, *, repeats: bool = True, enough: bool = True, out: Path | None = None, **more: Any
) -> tuple[Driver, Notebook]:
    settings = Settings(**{"precision": "float64", "evaluate_every": 2} | more)
    engine = Engine(method, make_task(), make_data(), 0, 8, 1, "loop")
    federation = Federation(7, 0, (None,) * 7)
    record = Record(engine, federation, settings, config={}, out=out, fresh=False, clients=False)
    transport = Notebook(engine, repeats, enough)
    return Driver(engine, record, transport, rounds=rounds, config={}), transport


def test_a_run_asks_for_everything_in_order() -> None:
    run, notebook = driver(Counting())
    result = run.run()
    rounds = [["ready", "train 1", "keep"], ["ready", "train 2", "keep", "announce", "measure 2"]]
    rounds += [["ready", "train 3", "keep", "measure 3"], ["close"]]
    assert notebook.asked == [x for part in rounds for x in part]
    assert float(run.record.server["s"]) == 3.0 and float(run.record.common["heard"]) == 1.0
    assert result.bytes == {"up": 168, "evaluate": 10, "meta": 168, "names": {"up": {"x": 168}, "down": {}}}
    assert [line["bytes"] for line in run.record.lines][:2] == [
        {"up": 56, "meta": 56},
        {"up": 56, "evaluate": 5, "meta": 56},
    ]


def test_a_round_without_enough_answers_changes_nothing() -> None:
    run, notebook = driver(Counting(), rounds=2, enough=False)
    run.run()
    assert float(run.record.server["s"]) == 0.0 and "announce" not in notebook.asked
    assert [line["skipped"] for line in run.record.lines] == [True, True]


def test_a_round_that_diverges_is_repeated_with_half_the_learning_rate() -> None:
    run, notebook = driver(Counting(bad=2), rounds=2, on_divergence="halve")
    run.run()
    assert notebook.asked.count("train 2") == 4 and notebook.asked.count("take back") == 3
    assert run.method.lr == notebook.engine.method.lr == 1.0  # type: ignore[attr-defined]
    assert run.record.progress.totals["up"] == 2 * 56  # what was taken back is not counted


@pytest.mark.parametrize(("repeats", "policy"), [(True, "stop"), (False, "halve"), (False, "stop")])
def test_where_a_round_cannot_be_repeated_the_state_before_it_is_saved(
    tmp_path: Path, repeats: bool, policy: str
) -> None:
    run, notebook = driver(Counting(bad=2), repeats=repeats, out=tmp_path, on_divergence=policy)
    with pytest.raises(Divergence, match="Notebook: the server's state is not finite after round 2; do less"):
        run.run()
    assert notebook.asked[-4:] == ["ready", "train 2", "take back", "close"]
    again, _ = driver(Counting(bad=2), repeats=repeats, out=tmp_path, on_divergence=policy)
    assert again.record.progress.round == 1 and float(again.record.server["s"]) == 1.0
    again.record.close()


def test_a_deployment_that_diverges_stops_and_says_so(tmp_path: Path) -> None:
    from fedspan.methods import FedAvg

    server, _ = deployed(FedAvg(lr=0.1), tmp_path / "nodes", rounds=3)
    start = server.record.server
    server.record.progress.start_norm = server.record.progress.last_norm = 1e-9
    server.record.progress.round = 9  # from the tenth on, growth is watched
    server.rounds, server.out = 10, tmp_path
    server.record.server = {"theta": {k: v * 1e3 for k, v in start["theta"].items()}}
    before = server.record.server
    with pytest.raises(Divergence, match="Server: the norm of the server's state rose"):
        server.run()
    assert server.record.server is before
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "stopped"


def test_both_kinds_of_runs_share_the_driver() -> None:
    from fedspan.deploy.server.server import Server

    for own in (Simulation, Server):
        assert issubclass(own, RoundDriver)
        assert not {"_step", "_round", "_evaluate", "_measure", "_result", "_halve"} & vars(own).keys()
