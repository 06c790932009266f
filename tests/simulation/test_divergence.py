"""Training that leaves the finite numbers: noticed, explained, never saved."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from conftest import make_data, make_task
from fedspan import tree
from fedspan.errors import Divergence
from fedspan.learn.task import Task
from fedspan.method import Capacity, Down, Federation, Method, Round, Sent, Visit
from fedspan.methods import METHODS, make
from fedspan.simulation.result import Result
from fedspan.simulation.settings import Settings
from fedspan.simulation.simulator import Simulation
from fedspan.storage.checkpoint import RunDirectory
from fedspan.tree import Tree


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waiting for the disk."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def fields(name: str, lr: float) -> dict[str, Any]:
    """Options of a method that takes its steps as they are: shortened ones would hardly ever diverge."""
    own = {"rank": 3, "v_steps": 2, "v_safeguard": False} if name == "pfl-mf" else {}
    return {"lr": lr, "safeguard": False, **own}


def simulation(method: Method, out: Path | None = None, rounds: int = 12, seed: int = 3, **settings: Any) -> Simulation:
    chosen = {"workers": 1, "batch_size": 8, "epochs": 2, "evaluate_every": 4, "checkpoint_seconds": 0.0, **settings}
    task = Task(make_task().module, dtype=torch.float32 if settings.get("precision") != "float64" else torch.float64)
    s = Settings(**chosen)
    return Simulation(method, task, make_data(seed=seed), rounds=rounds, seed=seed, settings=s, out=out)


def run(method: Method, out: Path | None = None, **more: Any) -> Result:
    return simulation(method, out, **more).run()


def leaves_of(path: Path, rows: Tensor) -> list[Tensor]:
    """The leaves of client records [n, bytes], cut as the file's own description says."""
    raw = path.read_bytes()
    described = json.loads(json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]["structure"])
    found, at = [], 0
    for text in words(described):  # for example float32[3, 4]
        kind, _, shape = text.partition("[")
        dtype: torch.dtype = getattr(torch, kind)
        size = math.prod(json.loads("[" + shape)) * dtype.itemsize
        found.append(rows[:, at : at + size].contiguous().view(dtype) if size else rows[:, :0])
        at += size
    assert at == rows.shape[1]
    return found


def words(described: Any) -> list[str]:
    """The texts of nested tables and lists, in order."""
    if isinstance(described, str):
        return [described]
    return [w for part in (described.values() if isinstance(described, dict) else described) for w in words(part)]


def assert_saved_is_finite(out: Path, least: int = 1) -> int:
    """Every number of every checkpoint file is finite, and the newest one loads; its round."""
    files = list((out / "checkpoints").glob("*.safetensors"))
    assert len(files) >= least
    for path in files:
        for name, t in load_file(path).items():
            parts = leaves_of(path, t) if t.dtype == torch.uint8 and name == "rows" else [t]
            for part in parts:
                assert not part.is_floating_point() or bool(torch.isfinite(part).all()), (path.name, name)
    assert not list((out / "checkpoints").glob("*.tmp"))
    loaded = RunDirectory(out / "checkpoints", None, read_only=True).load()
    assert loaded is not None and tree.all_finite(loaded.server)
    return loaded.round


def assert_explained(error: Divergence) -> None:
    text = str(error)
    assert text.startswith("Simulator: ") and "\n" not in text and len(text) < 300, text
    assert "smaller lr (now " in text and "train.on_divergence='halve'" in text and "is kept" in text, text


@pytest.mark.parametrize(("name", "factor"), [(n, 1e30 if k % 6 else 1e3) for k, n in enumerate(sorted(METHODS))])
def test_a_step_size_too_large_stops_with_the_last_good_state(name: str, factor: float, tmp_path: Path) -> None:
    """Methods differ in what they bear: at 1000 times the usual step some still stay finite, at 10^30 none does."""
    method = make(name, **fields(name, 0.1 * factor))
    try:
        run(method, tmp_path, epochs=1)
    except Divergence as e:
        assert_explained(e)
        done = assert_saved_is_finite(tmp_path)
        assert done < 12 and not (tmp_path / "result.json").exists()
        with pytest.raises(Divergence):  # resumed, it says the same
            run(method, tmp_path, epochs=1)
        assert assert_saved_is_finite(tmp_path) == done
    else:
        assert factor < 1e30
        assert assert_saved_is_finite(tmp_path) == 12
        assert (tmp_path / "result.json").exists()


def test_the_safeguard_shortens_steps_that_would_diverge() -> None:
    with pytest.raises(Divergence):
        run(make("local", **fields("local", 1e6)))
    guarded = run(make("local", lr=1e6))
    assert guarded.rounds == 12 and guarded.messages == []
    assert guarded.curve[-1]["loss"]["mean"] < 100  # at the thousandth part of this step the plain one gives 10^36


@pytest.mark.parametrize("name", ["local", "pfl-mf"])
def test_workers_notice_as_well(name: str) -> None:
    with pytest.raises(Divergence) as caught:
        run(make(name, **fields(name, 1e29)), workers=2, chunk=2)
    assert_explained(caught.value)


@pytest.mark.parametrize("halvings", [1, 2])
def test_halving_recovers_and_says_so(halvings: int, tmp_path: Path) -> None:
    method = make("ditto", lr=2.0**halvings, lam=1.0, safeguard=False)  # bears a step of 1
    more = {"rounds": 6, "evaluate_every": 100, "on_divergence": "halve"}
    whole = run(method, tmp_path / "whole", **more)
    told = [m for m in whole.messages if "Learning rates halved" in m]
    assert len(told) == halvings and told[0].endswith("(1 of 3).") and told[0].startswith("Simulator: round ")
    assert whole.rounds == 6 and [line["round"] for line in whole.curve] == list(range(1, 7))
    sim = whole.simulation
    assert sim is not None and sim.method.lr == 1.0  # type: ignore[attr-defined]
    assert_saved_is_finite(tmp_path / "whole")
    if halvings == 2:  # the workers must take over the new learning rate
        assert run(method, None, workers=2, **more).digest == whole.digest


@pytest.mark.parametrize("stop", [10, 11, 14])
def test_halvings_are_kept_by_a_killed_run(stop: int, tmp_path: Path) -> None:
    method = Cliff(lr=1.0)
    whole = run(method, None, rounds=15, on_divergence="halve")
    assert [m.rsplit("Learning rates ")[1] for m in whole.messages] == ["halved (1 of 3).", "halved (2 of 3)."]
    killed_after(stop, method, tmp_path)
    again = run(method, tmp_path, rounds=15, on_divergence="halve")
    found = again.simulation
    assert found is not None and found.record.progress.halvings == 2 and found.method.lr == 0.25  # type: ignore[attr-defined]
    assert again.digest == whole.digest and again.per_client == whole.per_client
    assert any("halved" in m for m in again.messages), again.messages  # told by the process that resumed, too


@pytest.mark.parametrize("lr", [0.5, 1.0, 4.0])
def test_halving_a_factorisation_recovers_or_stops_in_good_order(lr: float, tmp_path: Path) -> None:
    try:
        result = run(make("pfl-mf", **fields("pfl-mf", lr)), tmp_path, rounds=6, on_divergence="halve")
    except Divergence as e:
        assert_explained(e)
    else:
        assert result.rounds == 6
    assert_saved_is_finite(tmp_path)


class Killed(BaseException):
    """Stands for the end of the process: nothing is saved after it."""


def killed_after(stop: int, method: Method, out: Path) -> None:
    def on_round(line: dict[str, Any]) -> None:
        if line["round"] == stop:
            raise Killed

    with pytest.raises(Killed):
        simulation(method, out, rounds=15, on_divergence="halve").run(on_round)


def test_halving_ends_after_three_times(tmp_path: Path) -> None:
    method = make("fedavg", **fields("fedavg", 1e30))
    with pytest.raises(Divergence) as caught:
        run(method, tmp_path, on_divergence="halve")
    assert f"now {1e30 / 8:g}" in str(caught.value)
    assert_saved_is_finite(tmp_path)
    with pytest.raises(Divergence):  # the halvings count over all processes of a run
        run(method, tmp_path, on_divergence="halve")


def test_halving_also_halves_a_whole_number() -> None:
    from fedspan.methods import FedAvg

    sim = simulation(FedAvg(lr=8))
    sim._halve()
    assert sim.method.lr == 4.0  # type: ignore[attr-defined]


def test_halving_also_helps_where_only_evaluation_overflows(tmp_path: Path) -> None:
    """Local models may be finite themselves and yet give infinite outputs: that too is a round to take back."""
    lr = next(2.0**k for k in range(8, 40) if evaluation_fails(2.0**k))
    method = make("local", **fields("local", lr))
    result = run(method, tmp_path, on_divergence="halve", rounds=1, evaluate_every=1, epochs=1)
    assert result.rounds == 1 and any("halved" in m for m in result.messages)


def evaluation_fails(lr: float) -> bool:
    try:
        run(make("local", **fields("local", lr)), rounds=1, evaluate_every=1, epochs=1)
    except Divergence as e:
        return "evaluation" in str(e)
    return False


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", ["fedavg", "pfl-mf"])
def test_healthy_runs_raise_no_alarm(name: str, seed: int) -> None:
    result = run(make(name, **fields(name, 0.1)), seed=seed, rounds=12, epochs=1, batch_size=16, evaluate_every=100)
    assert result.messages == [] and result.rounds == 12


@dataclass(frozen=True, kw_only=True)
class Growing(Method):
    """The server's norm is multiplied by `factor` in every round after round `quiet`."""

    lr: float = 0.5
    factor: float = 20.0
    quiet: int = 10

    def init_server(self, task: Task, federation: Federation) -> Tree:
        return {"w": torch.full((4,), 2.0)}

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        return Down(shared={"w": server["w"]})

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        return client, Sent(weight=visit.examples, mean={"w": down["w"] * 1.0})

    def server_update(self, server: Tree, round: Round) -> Tree:
        return {"w": round.mean["w"] * (self.factor * self.lr / 0.5 if round.round > self.quiet else 1.0)}

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        return task.init()


@dataclass(frozen=True, kw_only=True)
class Cliff(Growing):
    """Moves by its learning rate, and explodes from round 11 on unless that is below 0.3."""

    def server_update(self, server: Tree, round: Round) -> Tree:
        grow = 100.0 if round.round > self.quiet and self.lr > 0.3 else 1.0
        return {"w": (server["w"] + self.lr) * grow}


@dataclass(frozen=True, kw_only=True)
class Blind(Growing):
    """Trains, but predicts nonsense."""

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        return {k: t * math.nan for k, t in task.init().items()}


def test_evaluation_that_is_not_finite_keeps_the_rounds_before_it(tmp_path: Path) -> None:
    """However rarely checkpoints are written otherwise."""
    with pytest.raises(Divergence, match="evaluation after round 5 gave NaN or infinity"):
        run(Blind(), tmp_path, rounds=5, evaluate_every=5, checkpoint_seconds=1000.0)
    assert assert_saved_is_finite(tmp_path) >= 4


def norm_at(out: Path) -> float:
    loaded = RunDirectory(out / "checkpoints", None, read_only=True).load()
    assert loaded is not None
    return math.sqrt(float(tree.squared_norm(loaded.server)))


def test_an_exploding_norm_is_an_alarm_although_all_is_finite(tmp_path: Path) -> None:
    with pytest.raises(Divergence) as caught:
        run(Growing(), tmp_path, rounds=30)
    assert_explained(caught.value)
    assert "norm of the server's state rose to 80 in round 11, from 4 before and 4 at the start" in str(caught.value)
    assert assert_saved_is_finite(tmp_path) == 10 and norm_at(tmp_path) == pytest.approx(4.0)


def test_slow_growth_without_end_is_an_alarm_too(tmp_path: Path) -> None:
    with pytest.raises(Divergence, match="in round 14, from 256 before and 4 at the start"):
        run(Growing(factor=4.0), tmp_path, rounds=30)  # 16, 64, 256, then 1024 > 100 times the start
    assert norm_at(tmp_path) == pytest.approx(256.0)


def test_the_alarm_survives_a_resume_and_sleeps_in_the_first_rounds(tmp_path: Path) -> None:
    run(Growing(), tmp_path / "a", rounds=10)
    with pytest.raises(Divergence, match="in round 11, from 4 before and 4 at the start"):
        run(Growing(), tmp_path / "a", rounds=30)
    assert run(Growing(quiet=0), rounds=9).rounds == 9
    assert run(Growing(quiet=0, factor=1.4), rounds=10).rounds == 10  # 29 times the start


def test_a_matrix_that_cannot_be_decomposed_is_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    def decompose(self: Method, server: Tree, round: Round) -> Tree:
        torch.linalg.cholesky(-torch.eye(2))
        return server

    monkeypatch.setattr(METHODS["fedavg"], "server_update", decompose)
    sim = Simulation(
        make("fedavg"), make_task(), make_data(), rounds=1, settings=Settings(workers=1, precision="float64")
    )
    with pytest.raises(Divergence, match="cannot decompose what it received in round 1; use a smaller lr"):
        sim.run()
