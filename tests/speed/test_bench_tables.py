"""Measurements become medians, ratios and tables."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from bench import keep
from bench.__main__ import _begun, _take_turns
from bench.contestants import CONTESTANTS
from bench.outcome import Outcome, long_table, wide_table
from bench.peers import environment
from bench.processes import run

ROOT = Path(__file__).parents[2]


def measured(contestant: str, turn: int, **more: Any) -> dict[str, Any]:
    usual = {"workload": "mlp-100-b256", "peak_mb": 100, "wall_seconds": 3.0, "examples": 1000, "seconds": 1.0}
    return {**usual, "contestant": contestant, "turn": turn, "gradients": 1000} | more


@pytest.fixture
def outcome(tmp_path: Path) -> Outcome:
    made = Outcome(tmp_path / "bench.json", {"cpu": "one", "amx": False})
    for turn, drift in ((1, 1.0), (2, 4.0), (3, 2.0)):  # the machine's speed changes between turns
        made.add(measured("plain-1", turn, seconds=drift))
        made.add(measured("ditto", turn, seconds=2 * drift, gradients=2000, evaluate_seconds=drift, whole_seconds=9.0))
        made.add(measured("fedjax", turn, seconds=drift / 2, version="fedjax 1"))  # ahead of all others
    made.add({"workload": "mlp-100-b256", "contestant": "flower-ray", "turn": 1, "error": "no Ray here"})
    made.add({**measured("job-plain", 1, accuracy=0.951), "workload": "mnist-job"})
    return made


def test_ratios_are_taken_within_a_turn(outcome: Outcome) -> None:
    ditto = next(r for r in outcome.rows() if r["contestant"] == "ditto")
    assert (ditto["gradients_ratio"], ditto["examples_ratio"]) == (1.0, 0.5)
    assert (ditto["examples_per_s"], ditto["evaluate_seconds"], ditto["turns"]) == (250.0, 2.0, 3)


def test_every_row_is_shown_whoever_wins_or_fails(outcome: Outcome) -> None:
    titles, lines = wide_table(outcome.rows())
    assert titles == ["", "MLP 100 b256"]
    assert dict(lines) == {
        "plain loop, 1 thread": "1.00",
        "fedspan ditto": "1.00 (0.50)",
        "FedJAX": "2.00",
        "Flower + Ray, 2 actors": "not run",
    }
    assert any("no Ray here" in line for line in long_table(outcome.rows()))


def test_an_outcome_is_found_again_and_failures_are_measured_anew(outcome: Outcome) -> None:
    again = Outcome.load(outcome.path)
    assert again.rows() == outcome.rows()
    assert again.has("mlp-100-b256", "ditto", 3) and not again.has("mlp-100-b256", "flower-ray", 1)
    again.add(measured("flower-ray", 1))
    assert again.has("mlp-100-b256", "flower-ray", 1) and len(again.measurements) == len(outcome.measurements)


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate_speed", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_what_was_kept(
    outcome: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(keep, "KEPT", tmp_path / "speed.json")
    monkeypatch.setattr(sys, "argv", ["keep", str(outcome.path)])
    keep.main()
    page = "\n".join(generator().speed_tables(json.loads((tmp_path / "speed.json").read_text(encoding="utf-8"))))
    assert "| FedJAX | 2.00 |" in page
    assert "| MLP 100 b256 | fedspan ditto | 500 | 250 | 2.00 | 9.0 | 100 |" in page
    assert "| plain torch, 2 threads | 3.0 | 100 | 95.1 % |" in page
    assert "no Ray here" in page


def test_an_environment_that_cannot_be_made_is_named_in_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*command: str) -> None:
        raise subprocess.CalledProcessError(1, command, stderr="collecting\nERROR: no matching distribution\n")

    monkeypatch.setattr(environment, "PLACE", tmp_path)
    monkeypatch.setattr(environment, "_call", refuse)
    found = environment.prepare(["jax"])
    assert not found.made and found.refused["jax"].endswith("ERROR: no matching distribution")
    outcome, jax = Outcome(tmp_path / "bench.json"), [c for c in CONTESTANTS.values() if c.peer == "jax"]
    _take_turns(outcome, "mlp-100-b256", jax, 2, found)
    assert [r["error"] for r in outcome.rows()] == [found.refused["jax"]]


def test_another_machine_cannot_resume(outcome: Outcome) -> None:
    with pytest.raises(SystemExit, match="start over without --resume"):
        _begun(outcome.path, resume=True)
    assert not _begun(outcome.path, resume=False).measurements


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    assert run([sys.executable, "-c", "raise SystemExit('no such thing')"], tmp_path, 20) == {"error": "no such thing"}
    found = run([sys.executable, "-c", "print('{\"examples\": 3}')"], tmp_path, 20)
    assert found["examples"] == 3 and found["wall_seconds"] > 0
    assert "not done" in run([sys.executable, "-c", "import time; time.sleep(20)"], tmp_path, 0.1)["error"]
