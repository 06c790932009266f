"""`fedspan tune` and `compare --tune`, really run on small digits in a temporary directory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import call, failing
from fedspan.config import load_config
from fedspan.report import load_runs
from fedspan.report.given import FILE, Given

pytest.importorskip("optuna")
pytestmark = pytest.mark.slow

SMALL = """
name = "small"
rounds = 4
[data]
source = "digits"
limit = 240
[partition]
kind = "permuted-groups"
clients = 4
groups = 2
[model]
hidden = [8]
[method]
name = "fedper"
[methods.fedavg]
[methods.fedavg-ft]
[methods.pfl-mf]
rank = 2
[train]
workers = 1
"""
SPACE = "method.lr=log:1e-3:1"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exp.toml").write_text(SMALL)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(threads)


def told(*arguments: str) -> dict[str, Any]:
    found = json.loads(call("tune", "exp.toml", *arguments, "--json").stdout)
    return {k: v for k, v in found.items() if k != "best_configuration"}


def states(where: Path) -> dict[str, str]:
    """The hash of every trial's state, by its directory."""
    return {p.parent.name: json.loads(p.read_text())["digest"] for p in where.glob("s*/result.json")}


def test_tune_finds_writes_and_repeats_nothing(tmp_path: Path) -> None:
    text = call("tune", "exp.toml", SPACE, "--trials", "6", "--out", "t").output
    assert "Best: trial" in text and "accuracy % (validation)" in text and "rounds done" in text
    best = load_config("t/best.toml")
    kept = json.loads((tmp_path / "t" / "tune.json").read_text())
    assert best.method["lr"] == kept["best"]["values"]["method.lr"] and best.seed == 0
    assert best.train.evaluate_part == "test" and best.partition.validation == 0
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "t").glob("s*/result.json")}
    again = told(SPACE, "--trials", "6", "--out", "t")
    assert again["best"] == kept["best"] and again["trials"] == kept["trials"]
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "t").glob("s*/result.json")} == before
    longer = told(SPACE, "--trials", "7", "--out", "t")
    assert longer["trials"][:6] == kept["trials"]


@pytest.mark.long
def test_processes_change_no_result(tmp_path: Path) -> None:
    options = (SPACE, "method.momentum=choice:0,0.5", "--trials", "6", "--measure", "loss")
    one, two = told(*options, "--out", "a"), told(*options, "--out", "b", "--workers", "2")
    assert one == two and not one["higher_is_better"] and states(tmp_path / "a") == states(tmp_path / "b")


@pytest.mark.timeout(300)
@pytest.mark.long
@pytest.mark.parametrize("workers", ["1", "2"])
def test_killed_and_resumed_it_ends_with_the_same_trials(tmp_path: Path, workers: str) -> None:
    """kill -9 in the middle of trials; what it had begun is finished, and nothing else is decided."""
    options = ["tune", "exp.toml", SPACE, "rounds=40", "--trials", "6", "--out", "killed", "--workers", workers]
    begun = subprocess.Popen(
        [sys.executable, "-m", "fedspan.cli.app", *options],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    end = time.monotonic() + 90
    while time.monotonic() < end and begun.poll() is None:
        if len(list((tmp_path / "killed").glob("s*/metrics.jsonl"))) >= 3:
            break
        time.sleep(0.02)
    assert begun.poll() is None, "it ended before it could be killed"
    begun.send_signal(signal.SIGKILL)
    begun.wait(20)
    assert not (tmp_path / "killed" / "tune.json").exists()
    end = time.monotonic() + 20  # processes for trials notice that nobody waits for them
    while True:
        try:
            resumed = told(*options[2:])
            break
        except AssertionError as e:
            if "is in use by process" not in str(e) or time.monotonic() > end:
                raise
            time.sleep(0.2)
    whole = told(SPACE, "rounds=40", "--trials", "6", "--out", "whole")
    assert resumed == whole and states(tmp_path / "killed") == states(tmp_path / "whole")


def test_compare_gives_every_method_the_same_budget(tmp_path: Path) -> None:
    options = ("compare", "exp.toml", "--tune", "2", "seed=200", "--seeds", "2", "--quiet", "method.momentum=0.5")
    text = call(*options).output
    assert "lr log:0.001:1" in text and "steps a round" in text and "never of the reported ones" in text
    where = tmp_path / "runs" / "small"
    names = ("fedavg", "fedavg-ft", "pfl-mf")
    assert sorted(p.name for p in where.iterdir() if p.is_dir()) == sorted(
        ["tuning", *(f"{n}-{seed}" for n in names for seed in (200, 201))]
    )
    seeds = {load_config(p).seed for p in where.glob("tuning/*/config.toml")}
    parts = {load_config(p).train.evaluate_part for p in where.glob("tuning/*/config.toml")}
    assert seeds == {0} and parts == {"validation"} and len(list(where.glob("tuning/*"))) == 2 * len(names)
    for name in names:
        given = Given.model_validate_json((where / f"{name}-201" / FILE).read_bytes())
        config = load_config(where / f"{name}-201" / "config.toml")
        assert (given.trials, given.rounds, given.seeds) == (2, 4, [0])
        assert config.method["lr"] == given.chosen["method.lr"] and config.partition.validation == 0
        assert given.steps > 0 and (given.steps_before_use > 0) == (name == "fedavg-ft")
        assert given.edges, "of two values the better one has nothing on one side"
    page = (where / "report.html").read_text(encoding="utf-8")
    assert "What each row was given" in page and "lr log:0.001:1" in page
    assert len(load_runs(where)) == 6, "trials are no results"
    before = {p: p.stat().st_mtime_ns for p in where.rglob("result.json")}
    assert "already finished" in call(*options).output
    assert {p: p.stat().st_mtime_ns for p in where.rglob("result.json")} == before


def test_what_is_refused() -> None:
    assert "never on reported ones. Got seed 200" in failing("tune", "exp.toml", SPACE, "seed=200")
    assert "seeds 8 to 10" in failing("tune", "exp.toml", SPACE, "seed=8", "--seeds", "3")
    assert "name at least one space" in failing("tune", "exp.toml", "rounds=2")
    assert "fedper has no field 'rank'" in failing("tune", "exp.toml", "method.rank=int:1:3")
    assert "lr must be" in failing("tune", "exp.toml", "method.lr=float:-1:1")
    assert "add seed=200" in failing("compare", "exp.toml", "--tune", "2")
    assert "--measure must be one that the runs have" in failing(
        "tune", "exp.toml", SPACE, "--trials", "1", "--measure", "x", "--json", "rounds=1"
    )
    assert "go with an experiment file" in failing("compare", ".", "--tune", "2")
    assert "go with --tune" in failing("compare", "exp.toml", SPACE)


def test_without_optuna_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert "pip install 'fedspan[tune]'" in failing("tune", "exp.toml", SPACE)
