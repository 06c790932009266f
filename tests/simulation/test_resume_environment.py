"""Going on with a run: other data are refused, other versions are said and recorded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedspan
from conftest import make_data, make_task
from fedspan.data.federated import FederatedData
from fedspan.errors import CheckpointError, FedspanError
from fedspan.methods import FedAvg
from fedspan.report.provenance import configuration
from fedspan.report.runs import group, load_run
from fedspan.simulation import environment, record
from fedspan.simulation.environment import credit, differences_on_resume, versions
from fedspan.simulation.result import Result
from fedspan.simulation.settings import Settings
from fedspan.simulation.simulator import Simulation
from fedspan.storage.format_number import FORMAT

NOW = {"fedspan": "0.1.0", "python": "3.12.1", "torch": "2.7.0", "numpy": "2.0.0", "machine": "x86_64", "cpu": "A"}


def play(out: Path, rounds: int, data: FederatedData | None = None) -> Result:
    settings = Settings(precision="float64", workers=1, checkpoint_seconds=0.0)
    data = make_data() if data is None else data
    return Simulation(FedAvg(), make_task(), data, rounds=rounds, settings=settings, out=out).run()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Another environment from now on: `elsewhere(torch="2.8.0")`."""

    def change(**values: str) -> None:
        monkeypatch.setattr(record, "versions", lambda device: {**versions(device), **values})

    return change


def test_most_of_x_changed_between_two_rounds_is_refused(tmp_path: Path) -> None:
    data = make_data()
    play(tmp_path, 3, data)
    x = data.x.clone()
    x[1::2] += 1.0
    with pytest.raises(CheckpointError, match=r"another configuration: data\.examples is .* there and .* here"):
        play(tmp_path, 4, replace(data, x=x))
    assert play(tmp_path, 4, data).rounds == 4


def test_rounds_are_credited_to_the_versions_that_computed_them(tmp_path: Path, elsewhere: Any) -> None:
    play(tmp_path, 3)
    elsewhere(torch="99.0.0")
    said = play(tmp_path, 5).messages
    elsewhere(torch="99.0.0", cpu="abacus")
    play(tmp_path, 6)
    result = json.loads((tmp_path / "result.json").read_text())
    assert [(s["first"], s["last"], s["versions"]["torch"]) for s in result["spans"]] == [
        (1, 3, torch.__version__), (4, 5, "99.0.0"), (6, 6, "99.0.0"),
    ]  # fmt: skip
    assert result["spans"][2]["versions"]["cpu"] == "abacus"
    assert [m for m in said if f"torch 99.0.0 instead of {torch.__version__}" in m and "Rounds to 3" in m]
    assert sum("another environment" in m for m in result["messages"]) == 2  # kept for whoever reads the result


def test_a_result_of_one_environment_has_one_span(tmp_path: Path) -> None:
    play(tmp_path, 1)
    result = play(tmp_path, 2)
    assert result.spans == [{"first": 1, "last": 2, "versions": versions()}]
    assert not [m for m in result.messages if "environment" in m]


def test_looking_at_a_run_elsewhere_changes_nothing(tmp_path: Path, elsewhere: Any) -> None:
    play(tmp_path, 2)
    elsewhere(torch="99.0.0")
    looked = Simulation(
        FedAvg(),
        make_task(),
        make_data(),
        rounds=2,
        out=tmp_path,
        read_only=True,
        settings=Settings(precision="float64"),
    )
    assert not [m for m in looked.messages if "environment" in m]
    assert [s["versions"]["torch"] for s in play(tmp_path, 2).spans] == [torch.__version__]  # no round was added


@pytest.mark.parametrize(
    ("change", "notes", "warnings"),
    [
        ({}, 0, 0),
        ({"fedspan": "0.1.7"}, 1, 0),
        ({"python": "3.13.0"}, 1, 0),
        ({"fedspan": "0.2.0"}, 0, 1),
        ({"torch": "2.7.1"}, 0, 1),
        ({"numpy": "2.1.0"}, 0, 1),
        ({"cpu": "B"}, 0, 1),
        ({"fedspan": "0.1.7", "torch": "2.8.0", "cpu": "B"}, 1, 1),
    ],
)
def test_the_rule(change: dict[str, str], notes: int, warnings: int) -> None:
    spans = credit([], 3, NOW)
    found = differences_on_resume(spans, NOW | change)
    assert [len(f) for f in found] == [notes, warnings]
    text = " ".join(found[0] + found[1])
    assert all(f"{k} {v} instead of {NOW[k]}" in text for k, v in change.items())


def test_credit_never_overlaps() -> None:
    spans = credit(credit(credit([], 2, NOW), 2, NOW | {"cpu": "B"}), 5, NOW | {"cpu": "B"})
    assert [(s["first"], s["last"]) for s in spans] == [(1, 2), (3, 5)]
    assert credit([], 0, NOW) == []


def test_the_environment_is_named() -> None:
    found = environment.versions()
    assert found["fedspan"] == fedspan.__version__ and all(found.values())
    assert torch.backends.cpu.get_cpu_capability() in found["cpu"]


def test_every_file_of_a_run_says_its_format(tmp_path: Path) -> None:
    play(tmp_path, 2)
    assert json.loads((tmp_path / "result.json").read_text())["format"] == FORMAT
    assert [json.loads(s)["format"] for s in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [FORMAT] * 2
    manifest = next((tmp_path / "checkpoints").glob("manifest-*.json"))
    assert json.loads(manifest.read_text())["schema"] == FORMAT
    assert "format" not in play(tmp_path, 3).curve[0]


def test_metrics_of_a_newer_fedspan_are_refused(tmp_path: Path) -> None:
    play(tmp_path, 2)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace(f'"format": {FORMAT}', f'"format": {FORMAT + 1}'))
    with pytest.raises(FedspanError, match=f"newer fedspan .format {FORMAT + 1}, this one reads up to {FORMAT}"):
        play(tmp_path, 3)


def test_the_report_shows_who_computed_which_rounds(tmp_path: Path, elsewhere: Any) -> None:
    play(tmp_path, 3)
    one = configuration(group([load_run(tmp_path)]))
    assert f"torch {torch.__version__}" in one and "rounds 1 to 3:" not in one
    elsewhere(torch="<b>99")
    play(tmp_path, 4)
    two = configuration(group([load_run(tmp_path)]))
    assert f"rounds 1 to 3: fedspan {fedspan.__version__}" in two and "rounds 4 to 4:" in two
    assert "torch &lt;b&gt;99" in two and "<b>99" not in two


def test_the_report_refuses_a_result_of_a_newer_fedspan_and_reads_an_older_one(tmp_path: Path) -> None:
    play(tmp_path, 1)
    where = tmp_path / "result.json"
    result = json.loads(where.read_text())
    where.write_text(json.dumps({k: v for k, v in result.items() if k not in ("format", "spans")}))
    assert "Versions: fedspan" in configuration(group([load_run(tmp_path)]))
    for number, said in ((FORMAT + 1, "newer fedspan"), ("3", "must be an integer"), (-1, "must be an integer")):
        where.write_text(json.dumps({**result, "format": number}))
        with pytest.raises(FedspanError, match=said):
            load_run(tmp_path)
