"""A finished run whose data have changed says so; warnings about data are said once for all runs of a command."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from conftest import call
from fedspan.storage.checkpoint import recorded_identity

FILE = """
name = "own"
rounds = 1
[data]
source = "own.npz"
[partition]
clients = 3
[model]
kind = "logistic"
[method]
name = "fedavg"
[train]
workers = 1
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from fedspan.config import _source

    monkeypatch.chdir(tmp_path)
    (tmp_path / "exp.toml").write_text(FILE)
    write()
    _source.cache_clear()  # another command would be another process
    return tmp_path


def write(change: float = 0.0, scale: float = 1.0) -> None:
    """A table of which one value is changed, and one column is larger."""
    from fedspan.config import _source

    x = np.random.default_rng(0).normal(size=(90, 4)).astype(np.float32)
    x[:, 3] *= scale
    x[17, 2] += change
    np.savez("own.npz", x=x, y=np.arange(90) % 3)
    _source.cache_clear()


def words(said: object) -> str:
    return " ".join(str(said.stderr).split())  # type: ignore[attr-defined]


def test_a_finished_run_notices_one_changed_value(here: Path) -> None:
    first = call("run", "exp.toml", "-q")
    result = (here / "runs/own-0/result.json").read_bytes()
    assert "is finished already" in words(call("run", "exp.toml", "-q"))
    write(change=1e-3)
    again = call("run", "exp.toml", "-q")
    assert "the data have changed since (examples differ), and the result is of those before; --fresh" in words(again)
    assert again.stdout == first.stdout and (here / "runs/own-0/result.json").read_bytes() == result
    write()
    assert "is finished already" in words(call("run", "exp.toml", "-q"))


def test_nothing_but_the_data_is_read(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call("run", "exp.toml", "-q")
    from fedspan.cli import running

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a simulation was built")

    monkeypatch.setattr(running, "simulation_of", fail)
    write(change=1.0)
    assert "the data have changed" in words(call("run", "exp.toml", "-q"))


def test_data_that_are_gone_do_not_hide_the_result(here: Path) -> None:
    call("run", "exp.toml", "-q")
    (here / "own.npz").unlink()
    from fedspan.config import _source

    _source.cache_clear()
    again = call("run", "exp.toml", "-q")
    assert "the data it was computed on cannot be read now" in words(again) and "accuracy" in again.stdout


def test_compare_notices_it_for_every_run(here: Path) -> None:
    arguments = ("compare", "exp.toml", "--methods", "fedavg,local", "-q")
    call(*arguments)
    write(change=1.0)
    assert words(call(*arguments)).count("the data have changed since") == 2


def test_compare_says_a_warning_about_data_once(here: Path) -> None:
    write(scale=1000.0)
    said = words(call("compare", "exp.toml", "--methods", "fedavg,local", "--seeds", "2", "-q", "method.lr=0.001"))
    assert said.count("Data: deviations of features differ") == 1
    for run in ("fedavg-0", "fedavg-1", "local-0", "local-1"):  # and every run keeps it
        assert "deviations of features differ" in (here / "runs/own" / run / "result.json").read_text()


def test_what_differs_between_runs_is_said_of_each(here: Path) -> None:
    said = words(call("compare", "exp.toml", "--methods", "ditto,fedprox", "-q", "methods.ditto.lam=30",
                      "methods.fedprox.mu=30", "method.lr=0.1"))  # fmt: skip
    assert "Ditto: " in said and "FedProx: " in said


def test_an_identity_is_read_from_the_newest_whole_generation(here: Path) -> None:
    call("run", "exp.toml", "-q", "rounds=2")
    folder = here / "runs/own-0/checkpoints"
    found = recorded_identity(folder)
    assert {"data.examples", "data.labels", "data.split"} <= found.keys()
    newest = max(folder.glob("manifest-*.json"), key=lambda p: int(p.stem.split("-")[1]))
    newest.write_text(newest.read_text().replace("examples", "exemples"))
    older = recorded_identity(folder)
    assert older in ({}, found)
    assert recorded_identity(here / "nowhere") == {}
