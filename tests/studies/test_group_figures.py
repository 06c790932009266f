"""Figures by named group of clients: in the tables of reproduce, and as measures of claims."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from conftest import call
from fedspan import report
from fedspan.data.sources.catalog import DOMAINS
from fedspan.errors import ConfigError
from fedspan.studies.claims.claim_runs import measured
from fedspan.studies.papers import load_experiment
from fedspan.studies.papers.group_figures import by_group, named_groups
from fedspan.studies.papers.published import parse

MADE: dict[str, Any] = {
    "groups": [1, 0, 1, 0],
    "names": ["Tree&Flower-0", "7-9-0", "Tree&Flower-1", "7-9-1"],
    "per_client": {"accuracy": [0.5, 0.1, 0.7, None], "accuracy_after": [1.0, 0.2, 0.8, 0.4], "loss": [1.0] * 4},
}

TINY = """
rounds = 1
[data]
source = "digits"
limit = 300
[partition]
kind = "domains"
clients = 4
domains = ["0-4", "5-9"]
[model]
hidden = [8]
[train]
workers = 1
[paper]
title = "A table with groups"
groups = ["0-4", "5-9"]
[paper.values]
Local = [50.5, 0.25]
Elsewhere = [99.0]
[paper.group_values]
Local = [40.25, 60.75]
[grid]
lr = [0.5]
[runs]
seeds = 2
[[rows]]
label = "Local"
method = "local"
[[rows]]
label = "FedAvg"
method = "fedavg"
"""


def test_groups_are_named_by_the_names_of_their_clients() -> None:
    assert named_groups(MADE) == {"7-9": [1, 3], "Tree&Flower": [0, 2]}
    assert by_group(MADE) == {"7-9": 0.1, "Tree&Flower": pytest.approx(0.6)}
    for change in (
        {"names": ["0", "1", "2", "3"]},  # clients without names
        {"names": ["a-0", "b-0", "b-1", "a-1"]},  # groups that cut across the names
        {"names": ["a-0", "a-1", "a-2", "a-3"]},  # one name for all
        {"groups": None},
        {"names": []},
    ):
        assert named_groups({**MADE, **change}) == {} == by_group({**MADE, **change})


def test_a_claim_has_accuracies_of_named_groups_by_every_protocol() -> None:
    result = {**MADE, "measures": {"accuracy": {"mean": 0.4}}, "accuracy": {"last5": 0.3}}
    result["bytes"] = {"up": 2_000_000, "down": 500_000, "announce": 250_000, "evaluate": 9, "names": {}}
    found = measured({200: result, 201: None})
    assert list(found)[:2] == ["accuracy", "accuracy_last5"]
    assert {k: v["200"] for k, v in found.items() if "flower" in k or "7_9" in k} == pytest.approx(
        {
            "accuracy_tree_flower": 0.6,
            "accuracy_7_9": 0.1,
            "accuracy_after_tree_flower": 0.9,
            "accuracy_after_7_9": 0.3,
        }
    )
    assert found["accuracy_7_9"]["201"] is None
    assert found["megabytes"] == {"200": 2.75, "201": None}


def test_a_table_has_a_column_for_each_named_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "write_page", lambda *_: None)  # slow, and not what is asked
    (tmp_path / "groups.toml").write_text(TINY)
    call("reproduce", "groups.toml", "--out", "out")
    result = json.loads((tmp_path / "out/result.json").read_text())
    local = result["rows"][0]
    runs = [json.loads((tmp_path / "out" / t["directory"] / "result.json").read_text()) for t in local["tests"]]
    for group, (name, printed) in enumerate((("0-4", 40.25), ("5-9", 60.75))):
        of = [i for i, g in enumerate(runs[0]["groups"]) if g == group]
        mean = sum(r["per_client"]["accuracy"][i] for r in runs for i in of) / (2 * len(of))
        assert local["groups"][name]["mean"] == pytest.approx(mean) and local["groups"][name]["paper"] == printed
    assert result["rows"][1]["groups"]["0-4"]["paper"] is None

    table = [line.split(" | ") for line in (tmp_path / "out/table.md").read_text().splitlines() if line[:1] == "|"]
    assert {len(line) for line in table} == {10}
    assert table[0][3:7] == ["difference", "0-4 %", "5-9 %", "lr chosen"]
    assert table[2][4].startswith(f"{100 * local['groups']['0-4']['mean']:.2f} ± ") and table[2][4].endswith("(40.25)")
    assert "(" not in table[3][4] and "not here yet" in table[4]
    rows = list(csv.DictReader((tmp_path / "out/table.csv").read_text().splitlines()))
    assert float(rows[0]["ours: 5-9"]) == pytest.approx(100 * local["groups"]["5-9"]["mean"])


def test_printed_figures_of_groups_belong_to_rows_and_groups() -> None:
    for wrong in ("Local = [40.25]", "Somebody = [1.0, 2.0]"):
        with pytest.raises(ConfigError, match="a figure for each of 2 groups"):
            parse(TINY.replace("Local = [40.25, 60.75]", wrong), "groups")


def test_the_domains_of_the_paper_are_those_of_the_data() -> None:
    paper = load_experiment("table1-cifar100-domains").paper
    assert paper.groups == tuple(DOMAINS) and paper.group_values.keys() == paper.values.keys()
    for row, figures in paper.group_values.items():  # printed averages are not means of the columns, but near
        assert abs(sum(figures) / 5 - paper.values[row][0]) < 1.6, row
