"""Experiment files with the papers' figures, and the command that runs them: checked, chosen, tested, resumed."""

from __future__ import annotations

import csv
import json
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import call
from fedspan import report
from fedspan.cli import running
from fedspan.errors import ConfigError
from fedspan.methods import METHODS
from fedspan.studies.papers import available, candidates, config_of, describe, finals, load_experiment
from fedspan.studies.papers.curves import Series, _figure, draw, series
from fedspan.studies.papers.experiment_file import PaperRow, slug
from fedspan.studies.papers.published import parse
from fedspan.studies.papers.step_sizes import RowOutcome

TINY = """
rounds = 2
[data]
source = "digits"
limit = 300
[partition]
kind = "permuted-groups"
clients = 6
groups = 2
[model]
hidden = [8]
[train]
workers = 1
[paper]
title = "A tiny table"
reference = "Nobody, nowhere 2025"
table = "Table 7"
columns = ["digits"]
[paper.values]
Local = [50.5, 0.25]
Elsewhere = [99.0]
[grid]
lr = [0.1, 0.5]
[runs]
seeds = 2
validation = 0.1
[quick]
lr = [0.5]
rows = ["local"]
[quick.set]
rounds = 1
"partition.clients" = 4
[[rows]]
label = "Local"
method = "local"
[[rows]]
label = "pFL-MF r={rank} (paper form)"
method = "pfl-mf-paper"
paper = "Local"
vary = { rank = [2] }
rules = [{ p = 0.1, v_scale = "1/n" }, { v_scale = "1" }]
"""
BROKEN = """
[[rows]]
label = "FedAvg, far too fast"
method = "fedavg"
lr = [1e17, 1e18]
fields = { safeguard = false }
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDSPAN_DEBUG", raising=False)
    (tmp_path / "tiny.toml").write_text(TINY)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(threads)


def reproduce(*arguments: str, code: int = 0) -> Any:
    return call("reproduce", *arguments, code=code)


# ------------------------------------------------------------------------------------------------ the files


def test_all_setups_are_there() -> None:
    names = {name.removeprefix("pfl-mf/") for name in available() if name.startswith("pfl-mf/")}
    table1 = {f"table1-{d}-dir{a}" for d in ("mnist", "cifar10", "cifar100") for a in ("05", "1")}
    table2 = {"table2-cifar100-groups", "table2-permuted-mnist", "table2-femnist-e1", "table2-femnist-e5"}
    assert names == table1 | table2 | {"figure-rank", "figure-local-steps"}


@pytest.mark.parametrize("name", [n for n in available() if n.startswith("pfl-mf/")])
def test_every_row_is_a_valid_experiment(name: str) -> None:
    whole, checked = load_experiment(name), set()
    assert whole.name == name.split("/")[-1] and whole.paper.title and whole.paper.reference
    for experiment in (whole, whole.quicken().select(whole.quick.rows or [])):
        for row in experiment.rows:
            for rule in row.rules[: 1 if row.method in checked else None]:
                checked.add(row.method)
                config = config_of(experiment, row, row.lr[-1], rule, ["data.root=/nowhere"])
                assert config.method["name"] == row.method in METHODS
                assert {**row.fields, **rule, "lr": row.lr[-1]}.items() <= config.method.items()
                assert config.train.participation == 0.1 and config.train.sampling == "bernoulli"
                assert config.partition.validation == 0 and config.partition.test == 0.25
        assert experiment.rows
    assert set(whole.missing) <= {"APFL", "CFL", "FLUTE", "FedAlt", "FedAS", "pFedFDA"}


@pytest.mark.parametrize(
    ("name", "label", "figure"),
    [
        ("table1-mnist-dir05", "Local", [92.12, 0.59]),
        ("table1-mnist-dir1", "FedAlt", [97.91, 0.05]),
        ("table1-cifar10-dir05", "pFL-MF r=1", [43.89, 3.49]),
        ("table1-cifar10-dir1", "FedRep", [55.4, 2.06]),
        ("table1-cifar100-dir05", "FedAS", [8.48, 1.79]),
        ("table1-cifar100-dir1", "pFL-MF r=10", [36.84, 1.50]),
        ("table2-permuted-mnist", "pFL-MF r=15", [39.31, 0.042]),
        ("table2-cifar100-groups", "FedAvg", [36.40, 1.31]),
        ("table2-femnist-e1", "pFL-MF r=15", [73.59, 0.092]),
        ("table2-femnist-e5", "FedAvg", [77.19, 0.013]),
    ],
)
def test_figures_are_the_papers(name: str, label: str, figure: list[float]) -> None:
    assert load_experiment(name).paper.values[label] == figure


def test_setups_are_the_papers() -> None:
    def of(name: str) -> Any:
        e = load_experiment(name)
        return config_of(e, e.rows[0], 0.1, {}, [])

    assert of("table1-cifar10-dir1").partition.options == {"alpha": 1.0, "min_samples": 10}
    groups = of("table2-cifar100-groups").partition
    assert (groups.kind, groups.clients, groups.options) == ("label-groups", 500, {"groups": 20})
    femnist = of("table2-femnist-e5")
    assert femnist.train.epochs == 5 and femnist.partition.options == {"fraction": 0.3, "min_samples": 10}
    rank = load_experiment("figure-rank")
    assert [r.fields["rank"] for r in rank.rows[:20]] == list(range(1, 21)) and len(rank.rows) == 80
    assert config_of(rank, rank.rows[-1], 0.1, {}, []).data.source == "cifar10"
    steps = {(r.fields["rank"], r.fields["u_steps"]) for r in load_experiment("figure-local-steps").rows}
    assert steps == {(r, k) for r in (1, 10, 20) for k in (1, 10, 20)}


def test_grid_of_the_paper_form() -> None:
    e = load_experiment("pfl-mf/table2-permuted-mnist").select(["pfl-mf-r10-paper-form", "local"])
    grids = {row.label: candidates(e, row) for row in e.rows}
    assert [j.lr for j in grids["Local"]] == [0.03, 0.1, 0.3, 0.5, 1.0]
    paper = grids["pFL-MF r=10 (paper form)"]
    assert [j.lr for j in paper[:7]] == [0.001, 0.01, 0.03, 0.1, 0.3, 0.5, 1.0] and len(paper) == 14
    assert [(j.config.method.get("p"), j.config.method["v_scale"]) for j in (paper[0], paper[7])] == [
        (0.1, "1/n"),
        (None, "1"),
    ]
    for job in paper:
        assert job.config.partition.validation == 0.05 and job.config.train.evaluate_part == "validation"
        assert job.config.seed == 0 and len(job.folder.name) <= 100
    assert len({j.folder for j in paper}) == 14
    assert finals(e, e.rows[0], 0.1, {}, 2)[1].config.train.evaluate_part == "test"


def test_seeds_of_the_tests_may_be_others_than_that_of_the_choice() -> None:
    e = parse(TINY.replace("seeds = 2", "seeds = 2\nfirst_seed = 200"), "tiny")
    assert {job.config.seed for job in candidates(e, e.rows[0])} == {0}
    assert [job.config.seed for job in finals(e, e.rows[0], 0.1, {}, 2)] == [200, 201]
    said = " ".join(describe(e, config_of(e, e.rows[0], 0.1, {}, []), 2))
    assert "of each client, seed 0)" in said and "over seeds 200 to 201." in said
    with pytest.raises(ConfigError, match="first_seed must be an integer >= 0"):
        parse(TINY.replace("seeds = 2", "first_seed = -1"), "tiny")


def test_validation_takes_nothing_from_the_test_part() -> None:
    from fedspan.config import assemble_data

    e = parse(TINY, "tiny")
    tuning = assemble_data(candidates(e, e.rows[0])[0].config)
    test = assemble_data(finals(e, e.rows[0], 0.1, {}, 1)[0].config)
    for i in range(tuning.clients):
        assert set(tuning.test[i]) == set(test.test[i])
        assert set(tuning.validation[i]) <= set(test.train[i]) and len(tuning.validation[i])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('paper = "Local"', 'paper = "Lokal"'), "must name a figure"),
        (('method = "local"\n', 'method = "local"\nlabl = 1\n'), "unknown key 'labl'.*label"),
        (('label = "pFL-MF r={rank} (paper form)"', 'label = "Local"'), "different labels"),
        (("Elsewhere = [99.0]", "Elsewhere = [1.0, 2.0, 3.0]"), r"\[mean, ±\]"),
        (("lr = [0.1, 0.5]", "lr = []"), "at least one learning rate"),
        (("seeds = 2", "seeds = 0"), "at least 1"),
        (("validation = 0.1", "validation = 0.9"), "fraction in"),
        (("rank = [2]", "rank = 2"), "vary must be"),
    ],
)
def test_bad_files(change: tuple[str, str], message: str) -> None:
    assert change[0] in TINY
    with pytest.raises(ConfigError, match=message):
        parse(TINY.replace(*change), "tiny")


def test_accuracy_is_shown_between_none_and_all_however_wide_its_interval() -> None:
    wide = Series("wide", "r", (1.0, 2.0), (50.0, 95.0), (1.0, 60.0), ())
    low, high = _figure("r", (wide,), "seconds").axes[0].get_ylim()
    assert 0 < low < 49 and high == 100
    narrow = replace(wide, spread=(1.0, 1.0))
    low, high = _figure("r", (narrow,), "seconds").axes[0].get_ylim()
    assert 40 < low < 49 and 96 < high < 100


def test_a_panel_of_seconds_shows_the_slower_ones_too() -> None:
    pytest.importorskip("matplotlib")
    quick, slow = (Series(f"{s} s", "r", (1, 2, 3), (9, 9, 9), (0, 0, 0), (s, s, s)) for s in (1.0, 5.0))
    low, high = _figure("r", (quick, slow), "seconds").axes[1].get_ylim()
    assert low == 0 and high > 5


def test_slugs() -> None:
    assert slug("pFL-MF r=10 (paper form)") == "pfl-mf-r10-paper-form"
    e = load_experiment("table2-permuted-mnist")
    assert [r.fields["rank"] for r in e.select(["pFL-MF r=1"]).rows] == [1, 1, 1]
    assert len(e.select(["*-default"]).rows) == 5


# ------------------------------------------------------------------------------------------------ the command


def test_end_to_end_and_again(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "tiny.toml").write_text(TINY + BROKEN)
    said = reproduce("tiny.toml", "--out", "out").stdout
    assert "3 rows, 14 runs" in said and "[1/14] Local, lr 0.1, validation, seed 0: done" in said
    assert "quick" not in said and (here / "out/report.html").is_file()
    result = json.loads((here / "out/result.json").read_text())
    local, paper, broken = result["rows"]
    assert [v["lr"] for v in local["validation"]] == [0.1, 0.5] and len(paper["validation"]) == 4
    best = max(local["validation"], key=lambda v: v["accuracy"])
    assert local["lr"] == best["lr"] and [t["seed"] for t in local["tests"]] == [0, 1]
    tests = [t["accuracy"]["mean"] for t in local["tests"]]
    assert local["mean"] == pytest.approx(sum(tests) / 2) and local["std_over_seeds"] is not None
    assert local["difference"] == pytest.approx(100 * local["mean"] - 50.5)
    assert broken["diverged"] and broken["mean"] is None and not broken["tests"]
    assert result["not_here_yet"] == {"Elsewhere": [99.0]}
    for entry in [*local["validation"], *local["tests"]]:
        assert (
            tomllib.loads((here / "out" / entry["directory"] / "config.toml").read_text())["method"]["name"] == "local"
        )

    table = (here / "out/table.md").read_text()
    assert f"| Local | 50.50 ± 0.25 | {100 * local['mean']:.2f} ± " in table and "Table 7, digits" in table
    assert "| FedAvg, far too fast |  | diverged |" in table and "| Elsewhere | 99.00 | not here yet |" in table
    rows = list(csv.DictReader((here / "out/table.csv").read_text().splitlines()))
    assert [r["row"] for r in rows] == ["Local", "pFL-MF r=2 (paper form)", "FedAvg, far too fast"]
    assert float(rows[0]["ours"]) == pytest.approx(100 * local["mean"]) and rows[2]["ours"] == ""
    assert rows[1]["fields"] == "rank=2" and rows[1]["rule"]
    first = json.loads((here / "out" / result["rows"][1]["tests"][0]["directory"] / "result.json").read_text())["bytes"]
    assert float(rows[1]["mb_up"]) == pytest.approx(first["up"] / 1e6) and float(rows[1]["mb_down"]) > 0
    assert float(rows[0]["mb_up"]) == 0 and rows[2]["mb_up"] == ""

    # The report of such a directory is that of its test runs: two seeds of two rows, no choice of learning rates.
    shown = list(csv.DictReader(call("report", "out", "--format", "csv").stdout.splitlines()))
    assert len(shown) == 2 and {r["seeds"] for r in shown} == {"0 1"}

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a finished run was repeated")

    monkeypatch.setattr(running, "execute", never)
    monkeypatch.setattr(report, "write_page", lambda *_: None)  # slow, and drawn once already
    again = reproduce("tiny.toml", "--out", "out").stdout
    assert again.count("] ") == again.count("already ") == 12
    assert json.loads((here / "out/result.json").read_text()) == result


def test_quick_rows_overrides_and_more_seeds(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "write_page", lambda *_: None)
    said = reproduce("tiny.toml", "--quick")
    assert "quick: 4 clients, 1 rounds, 300 examples; not comparable with the paper" in said.stdout
    result = json.loads((here / "runs/tiny-quick/result.json").read_text())
    assert [r["label"] for r in result["rows"]] == ["Local"] and result["rows"][0]["difference"] is None
    reproduce("tiny.toml", "method.lr=0.3", "rounds=1", "--seeds", "1", "--rows", "local", "--out", "o")
    result = json.loads((here / "o/result.json").read_text())
    (row,) = result["rows"]
    assert row["lr"] == 0.3 and len(row["tests"]) == 1
    assert not row["validation"] and "Learning rates: given." in (here / "o/table.md").read_text()  # nothing to choose
    assert "not here yet" not in (here / "o/table.md").read_text()


def test_a_seed_that_diverges_is_shown(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedspan.errors import Divergence

    monkeypatch.setattr(report, "write_page", lambda *_: None)
    real = running.execute

    def sometimes(config: Any, *more: Any, **options: Any) -> None:
        if config.seed == 1:
            raise Divergence("Simulator: made up.")
        real(config, *more, **options)

    monkeypatch.setattr(running, "execute", sometimes)
    reproduce("tiny.toml", "--out", "o", "--rows", "local", "rounds=1")
    (row,) = json.loads((here / "o/result.json").read_text())["rows"]
    assert row["diverged"] and row["mean"] is None and row["tests"][0]["accuracy"] is not None
    assert "diverged (1 of 2 seeds)" in (here / "o/table.md").read_text()


def test_listing_and_wrong_names() -> None:
    assert "pfl-mf/table2-permuted-mnist" in reproduce().stdout
    for arguments, message in (
        (["tiny.toml", "--lr", "0.1,fast"], "--lr takes numbers"),
        (["table2-permuted-mnits"], "Did you mean 'table2-permuted-mnist'?"),
        (["rounds=3"], "name an experiment before settings"),
        (["nothing.toml"], "cannot be read"),
        (["tiny.toml", "--rows", "locl"], "Did you mean 'local'?"),
        (["tiny.toml", "partition.kind=idd"], "Did you mean 'iid'?"),
        (["tiny.toml", "seed=200"], "never on reported ones"),
    ):
        lines = reproduce(*arguments, code=2).stderr.strip().splitlines()
        assert len(lines) == 1 and message in lines[0], lines


def test_step_sizes_from_the_command_line(here: Path) -> None:
    e = load_experiment("tiny.toml").retune((0.2, 0.4, 0.8), 1)
    jobs = candidates(e, e.rows[0])
    assert [job.lr for job in jobs] == [0.2, 0.4, 0.8] and {job.config.rounds for job in jobs} == {1}
    assert load_experiment("tiny.toml").retune() == load_experiment("tiny.toml")
    said = reproduce("tiny.toml", "--rows", "local", "--lr", "0.4", "--seeds", "1", "rounds=1", "--out", "o").stdout
    assert "1 rows, 1 runs" in said and "lr 0.4, test, seed 0: done" in said


def test_rows_that_are_tuned_alike_share_their_validation_runs() -> None:
    e = load_experiment("table2-permuted-mnist")
    names = ("pfl-mf-r5-paper-form", "pfl-mf-r15-paper-form", "pfl-mf-r15-default", "pfl-mf-rank-found-default")
    few, many, plain, found = (e.select([s]).rows[0] for s in names)
    folders = [{job.folder for job in candidates(e, row)} for row in (few, many, plain, found)]
    assert folders[0] == folders[1] and len(folders[0]) == 14
    assert {job.config.method["rank"] for job in candidates(e, few)} == {10}
    assert len(folders[2]) == 5 and not folders[2] & folders[3]
    tests = [finals(e, row, 0.5, {}, 1)[0] for row in (few, many, plain, found)]
    assert [t.config.method["rank"] for t in tests] == [5, 15, 15, "auto"]
    assert len({t.folder for t in tests}) == 4


def test_rows_that_differ_in_one_number_are_drawn(tmp_path: Path) -> None:
    e = load_experiment("figure-rank").select(["mnist-r1", "mnist-r10", "mnist-r2", "mnist-r3"])

    def outcome(row: PaperRow, accuracy: float) -> RowOutcome:
        (job,) = finals(e, row, 0.1, row.rules[0], 1)
        result = {"accuracy": {"mean": accuracy}, "seconds": {"train": 2.0, "evaluate": 1.0}}
        return RowOutcome(row=row, chosen=job, tests=((job, result),))

    found = series([outcome(row, 0.1 * k) for k, row in enumerate(e.rows, 1)])
    assert [s.label for s in found] == ["MNIST (paper form)", "MNIST (default)"] and {s.name for s in found} == {"r"}
    assert found[0].x == (1, 2, 3, 10) and found[0].accuracy == pytest.approx((10, 20, 30, 40))
    assert found[0].seconds == (3, 3, 3, 3) and draw("r", found, tmp_path / "f.svg").read_text().count("MNIST") >= 2
    wide = draw("K", [replace(s, x=(20, 50, 100, 400)) for s in found], tmp_path / "w.svg").read_text()
    assert all(f">{k}<" in wide for k in (20, 50, 100, 400)) and "$" not in wide  # a logarithmic axis, in plain numbers
    two = [outcome(row, 0.5) for row in e.rows if row.fields["rank"] < 3]
    assert series(two) == []
    diverged = [RowOutcome(row=row) for row in e.rows]
    assert series(diverged) == []
