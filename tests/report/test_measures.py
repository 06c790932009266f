"""Measures beyond accuracy, from the file to the page: what they tell apart, which end is worst, who is left out."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from test_report import result as hand_made

from conftest import call, failing
from fedspan.report import load_runs, side_by_side, summary_rows
from fedspan.report.measures import measure_of, measures_of, value
from fedspan.report.page import page
from fedspan.report.paired import pairs
from fedspan.report.runs import Run, as_run, group

METHODS = ("fedavg", "local", "ditto", "fedrep", "pfl-mf")

EXPERIMENT = """
rounds = 20
[data]
source = "landmines.npz"
root = "ROOT"
[partition]
kind = "natural"
split = "client"
[model]
kind = "mlp"
hidden = [8]
[method]
lr = 0.1
[methods.pfl-mf]
rank = 2
[train]
epochs = 2
evaluate_every = 5
workers = 1
[evaluate]
metrics = ["accuracy", "roc_auc"]
models = ["received", "own", "trained"]
"""


@pytest.fixture(scope="module")
def rare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five methods on twenty clients with 6 % positive examples, in two groups that differ in where these lie."""
    root = tmp_path_factory.mktemp("rare")
    rng, n, d = np.random.default_rng(200), 200, 9
    way = np.linalg.qr(rng.normal(size=(d, 2)))[0].T
    x, y = [], []
    for i in range(20):
        positive = rng.permutation(n) < round(0.06 * n)
        x.append(rng.normal(size=(n, d)) + 1.3 * np.outer(positive, (way[0] if i % 2 else -way[0]) + 0.5 * way[1]))
        y.append(positive.astype(np.int64))
    owner = np.repeat(np.arange(20), n)
    np.savez(root / "landmines.npz", x=np.concatenate(x).astype(np.float32), y=np.concatenate(y), client=owner)
    (root / "exp.toml").write_text(EXPERIMENT.replace("ROOT", str(root)))
    out = root / "out"
    call("compare", str(root / "exp.toml"), "seed=200", "--methods", ",".join(METHODS), "--out", str(out), "--quiet")
    return out


@pytest.mark.long
def test_roc_auc_tells_apart_what_accuracy_cannot(rare: Path) -> None:
    runs = load_runs(rare)
    accuracy, auc = measures_of(runs)
    assert (accuracy.name, auc.name) == ("accuracy", "roc_auc") and auc.higher and not auc.percent
    rows = summary_rows(runs)
    same, apart = [r.mean or 0.0 for r in rows], [r.further[0].mean or 0.0 for r in rows]
    assert max(same) - min(same) < 0.01 < 0.1 < max(apart) - min(apart)
    assert not any(p.wilcoxon is not None and p.wilcoxon < 0.05 for p in pairs(runs))
    assert any(p.wilcoxon is not None and p.wilcoxon < 0.01 for p in pairs(runs, measure=auc))
    html = (rare / "report.html").read_text()
    for words in (
        "ROC AUC over rounds",
        "Every client, ROC AUC",
        "Client by client, ROC AUC",
        "Other protocols, ROC AUC",
    ):
        assert words in html
    assert "trained once more" in html and "Left out of" in html


def test_compare_and_targets_take_any_measure(rare: Path, tmp_path: Path) -> None:
    shown = call(
        "compare", str(rare), "--measure", "roc_auc", "--out", str(tmp_path / "made"), "--format", "svg"
    ).output
    assert "ROC AUC, as other protocols" in shown and "accuracy %, as" not in shown
    told = list(csv.DictReader((tmp_path / "made/protocols.csv").read_text().splitlines()))
    assert {r["model"] for r in told} == {"as received", "own last", "trained once more"}
    assert {r["over"] for r in told if r["measure"] == "roc_auc"} == {"clients", "examples"}
    first = next(csv.DictReader((tmp_path / "made/table.csv").read_text().splitlines()))
    assert float(first["roc_auc"]) > 0.7 and "accuracy_pooled" in first
    both = call("compare", str(rare), "--out", str(tmp_path / "all"), "--format", "svg").output
    assert "Client by client, ROC AUC" in both and (tmp_path / "all/paired-roc_auc.md").is_file()
    assert (tmp_path / "all/over-rounds-roc_auc.svg").is_file() and (tmp_path / "all/differences.svg").is_file()
    reached = call("targets", str(rare), "--measure", "roc_auc", "--target", "0.7").output
    assert "pfl-mf" in reached and "not reached" in reached
    assert "one of accuracy, roc_auc" in failing("targets", str(rare), "--measure", "auc", "--target", "0.7")
    assert "take the place of --accuracy" in failing("targets", str(rare), "--accuracy", "0.7", "--target", "0.7")
    table = call("report", str(rare), "--format", "markdown", "--measure", "roc_auc_after").output
    assert table.startswith("| method | ROC AUC after (± over clients) |")


def test_another_question_is_answered_without_training(rare: Path) -> None:
    run, exp = rare / "fedavg-200", rare.parent / "exp.toml"
    before = json.loads((run / "result.json").read_text())
    asked = 'evaluate.metrics=["ece"]'
    call("run", str(exp), "seed=200", asked, "--out", str(run), "--quiet")
    after = json.loads((run / "result.json").read_text())
    assert after["digest"] == before["digest"] and after["seconds"]["train"] == before["seconds"]["train"]
    assert "ece" in after["measures"] and not after["evaluation"]["metrics"]["ece"]["higher"]
    call("run", str(exp), "seed=200", "--out", str(run), "--quiet")  # and back
    assert json.loads((run / "result.json").read_text())["measures"] == before["measures"]


def asked_run(method: str, values: tuple[float | None, ...], higher: bool, name: str = "gap") -> Run:
    """A run whose clients have these values of a metric."""
    made = hand_made(method)
    kept = [v for v in values if v is not None]
    made["per_client"] = {"id": list(range(len(values))), "n": [5] * len(values), name: list(values)}
    summary = {"mean": float(np.mean(kept)), "std": float(np.std(kept)), "p10": float(np.percentile(kept, 10))}
    made["measures"] = {name: {**summary, "weighted": summary["mean"], "pooled": 0.5}}
    made["names"] = [str(i) for i in range(len(values))]
    ways = {"as received": {"mean": {"last": summary["mean"]}}}
    left = {name: {"2": "it needs examples of two classes"}}
    made["evaluation"] = {"metrics": {name: {"higher": higher}}, "protocols": {name: ways}, "left_out": left}
    return as_run(made)


@pytest.mark.parametrize("higher", [True, False])
def test_the_worst_tenth_is_the_worst(higher: bool) -> None:
    runs = [asked_run("a", (0.1, 0.2, None, 0.9), higher), asked_run("b", (0.3, 0.3, None, 0.4), higher)]
    measure = measure_of(runs)
    assert measure.name == "gap" and measure.higher is higher
    kept = [0.1, 0.2, 0.9]
    assert value(runs[0], measure, "worst") == pytest.approx(np.percentile(kept, 10 if higher else 90))
    rows = summary_rows(runs)
    assert [r.label for r in rows] == (["a", "b"] if higher else ["b", "a"])
    assert pairs(runs)[0].gains.shape == (3,)  # of the clients that both have
    said = side_by_side.left_out(group(runs))
    assert said == ["Left out of gap: client 2 (it needs examples of two classes)."]
    assert "Left out of gap" in page(runs)


def test_names_from_a_file_stay_harmless() -> None:
    run = asked_run("a", (0.1, 0.2), True, name="../../outside")
    assert measure_of([run]).name != "../../outside"
    odd = asked_run("a", (0.1, 0.2), True)
    odd.result["evaluation"] = {"metrics": 3, "protocols": [1], "left_out": "no"}
    assert side_by_side.left_out(group([odd])) == [] and side_by_side.to_markdown([odd]) == ""
