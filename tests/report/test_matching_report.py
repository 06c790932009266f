"""Who was matched with whom: read from a checkpoint, judged against the true groups, drawn, and shown on the page."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import call, register_while
from fedspan.learn.task import Task
from fedspan.method import Federation, Observed, Panel, Round
from fedspan.methods.factorized_fl.matching_panel import (
    Matches,
    drawings,
    facts,
    history,
    matches,
    matching_panel,
    matrices_of,
    sentence,
    statistics,
)
from fedspan.methods.fedavg import FedAvg
from fedspan.report.canvas import save
from fedspan.report.charts import figure_of
from fedspan.report.measures import monitored
from fedspan.report.page import panels, write_page
from fedspan.report.registered import seen_of
from fedspan.report.runs import Run, group, load_run
from fedspan.tree import Tree

EXPERIMENT = """
rounds = 4
[data]
source = "digits"
limit = 300
[partition]
kind = "permuted-groups"
clients = 8
groups = 2
[model]
hidden = [4]
[method]
name = "toy"
[train]
evaluate_every = 2
workers = 1
"""


@dataclass(frozen=True, kw_only=True)
class Toy(FedAvg, Observed):
    """FedAvg that pretends to match the clients of a group, and client 0 once with client 1 of the other group."""

    def init_server(self, task: Task, federation: Federation) -> Tree:
        n, groups = federation.clients, federation.groups
        same = torch.zeros(n, n) if groups is None else (groups[:, None] == groups[None, :]).float()
        start = super().init_server(task, federation)
        return {**start, "same": same, "sigma": torch.zeros(n, n), "matched": torch.zeros(n, n)}

    def server_update(self, server: Tree, round: Round) -> Tree:
        matched = server["matched"] + server["same"]
        if round.round == 2:
            matched[0, 1] += 1
        sigma = 0.4 + 0.05 * round.round * server["same"] + 0.1 * torch.eye(len(matched))
        return {**super().server_update(server, round), "same": server["same"], "sigma": sigma, "matched": matched}

    def size(self, server: Tree) -> float:
        return super().size({"theta": server["theta"]})

    def monitor(self, server: Tree) -> dict[str, float]:
        return {"similarity_mean": float(server["sigma"].mean()), "neighbours": 4.0}

    def matrices(self, server: Tree) -> dict[str, torch.Tensor]:
        return {"sigma": torch.where(server["sigma"] > 0.41, server["sigma"], torch.nan)}

    def panels(self) -> Sequence[Panel]:
        return (matching_panel(),)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """A method of one's own, registered as long as these tests run."""
    with pytest.MonkeyPatch.context() as patch:
        register_while(patch, "toy", Toy)
        yield


@pytest.fixture(scope="module")
def run(registered: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a method that keeps the two matrices."""
    where = tmp_path_factory.mktemp("runs")
    (where / "exp.toml").write_text(EXPERIMENT)
    call("run", str(where / "exp.toml"), "--out", str(where / "toy"), "-q")
    call("run", str(where / "exp.toml"), "method.name=fedavg", "--out", str(where / "plain"), "-q")
    return where / "toy"


def hashes(folder: Path) -> dict[str, str]:
    files = (p for p in sorted(folder.rglob("*")) if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_matches_are_counted_against_the_true_groups(run: Path) -> None:
    loaded = load_run(run)
    seen = seen_of(loaded, "it")
    of = matches(seen)
    found = statistics(of)
    assert of.round == 4 and of.groups is not None and of.groups.tolist() == [0, 1] * 4
    assert of.order.tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert found.pairs == 8 * 3 * 4 + 1 and found.inside == pytest.approx(96 / 97)
    assert found.by_chance == pytest.approx(24 / 56) and found.separation == 1.0
    assert found.similarity_inside == pytest.approx(0.6) and found.similarity_across == pytest.approx(0.4)
    assert found.partners[0] == [2, 4, 6] and found.partners[5] == [1, 3, 7]
    assert sentence(of, found).startswith("97 matches in 4 rounds, 99% of them inside a true group (43% if")
    kept = history(loaded.lines, 8)["sigma"]
    assert [r for r, _ in kept] == [2, 4] and kept[0][1][0, 2] == pytest.approx(0.5) and np.isnan(kept[0][1][0, 1])
    assert [r for r, _ in seen.monitored["similarity_mean"]] == [2, 4]


def test_matrices_are_found_where_methods_keep_them() -> None:
    held = {"sigma": torch.eye(3), "matched": torch.ones(3, 3, dtype=torch.int32)}
    for server in (held, {"u": torch.ones(3), "seen": held}, {"sigma": torch.ones(4), "seen": held}):
        found = matrices_of(server, 3)
        assert found is not None and found[0].trace() == 3.0 and found[1].sum() == 9.0
    assert matrices_of({"seen": held}, 4) is None and matrices_of({"sigma": torch.eye(3)}, 3) is None


def test_any_matrices_are_borne() -> None:
    names = ["a", "b", "c"]
    lone = Matches(np.full((3, 3), np.nan), np.eye(3), names, None, 2)
    assert "nobody has been matched" in sentence(lone, statistics(lone))
    assert facts(lone, statistics(lone), {}, {})["sigma"] == [[None] * 3] * 3
    unknown = Matches(np.eye(3), np.ones((3, 3)), names, None, 2)
    assert "6 matches in 2 rounds; the true groups are not known." in sentence(unknown, statistics(unknown))
    alike = Matches(np.ones((3, 3)), np.ones((3, 3)), names, np.array([0, 0, 1]), 1)
    assert statistics(alike).separation == 0.5 and statistics(alike).inside == statistics(alike).by_chance
    one = Matches(np.ones((3, 3)), np.ones((3, 3)), names, np.zeros(3, np.int64), 1)
    assert statistics(one).similarity_across is None and sentence(one, statistics(one)).endswith("matched alike).")
    lines: list[dict[str, Any]] = [
        {"round": 1, "matrices": {"sigma": [[1.0, None, 0.5]] * 3, "other": [[1.0]], "bad": [[1], "x"]}},
        {"round": 2, "matrices": 3, "monitor": {"a": None, "b": 1.0}},
    ]
    kept = history(lines, 3)
    assert list(kept) == ["sigma"] and np.isnan(kept["sigma"][0][1][0, 1])
    assert monitored(lines) == {"b": [(2, 1.0)]}


def test_figures_bear_many_clients_and_unknown_similarity(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    many = Matches(rng.random((90, 90)), np.ones((90, 90)), [str(i) for i in range(90)], np.arange(90) % 3, 7)
    drawn = drawings(many, {}, {}, "it", "")
    assert [d.name for d in drawn] == ["matching"] and drawn[0].on_page
    text = save(lambda: figure_of(drawn[0]), tmp_path / "many.svg").read_text()
    assert "similarity (60 of 90 clients)" in text and "<image" not in text
    blank = Matches(np.full((2, 2), np.nan), np.zeros((2, 2)), ["a", "b"], None, 0)
    kept = {"sigma": [(1, blank.sigma)], "u": [(1, np.eye(2)), (2, np.eye(2))]}
    for drawing in drawings(blank, kept, {"neighbours": [(1, 2.0)]}, "it", ""):
        assert save(partial(figure_of, drawing), tmp_path / f"{drawing.name}.svg").read_text().count("<svg") == 1
    assert {p.name for p in tmp_path.iterdir()} == {
        "many.svg", "matching.svg", "similarity_over_rounds.svg", "monitor.svg",
    }  # fmt: skip


def test_command_prints_writes_and_leaves_the_run_alone(run: Path, tmp_path: Path) -> None:
    before, out = hashes(run), tmp_path / "look"
    said = call("analyse", "matching", str(run), "--out", str(out)).stdout
    assert hashes(run) == before and "99% of them inside" in said and "2 (4)" in said
    kinds = {"matching.png", "similarity_over_rounds.png", "monitor.png"}
    assert {p.name for p in out.iterdir()} == kinds | {"matching.json"}
    assert all((out / k).read_bytes()[:4] == b"\x89PNG" for k in kinds)
    told = json.loads((out / "matching.json").read_text())
    assert told["share_inside_groups"] == pytest.approx(96 / 97) and len(told["matched"]) == 8
    assert [m["round"] for m in told["matrices"]["sigma"]] == [2, 4] and told["monitor"]["neighbours"][0] == [2, 4.0]
    for path, says in (
        (run.with_name("plain"), "with this panel: factorized-fl-alpha, factorized-fl-beta, toy. Got one of fedavg"),
        (tmp_path / "none", "must be a run directory"),
    ):
        lines = call("analyse", "matching", str(path), "--out", str(tmp_path / "x"), code=2).stderr.strip().splitlines()
        assert len(lines) == 1 and says in lines[0], lines
    assert not (tmp_path / "x").exists()


def test_page_shows_who_learns_from_whom(run: Path, tmp_path: Path) -> None:
    plain, toy = load_run(run.with_name("plain")), load_run(run)
    assert panels(group([plain])) == ""
    shown = Run(toy.path, {**toy.result, "method": "Factorized-FL (a row of a table)"}, toy.lines)
    text = write_page([plain, shown], tmp_path / "page.html").read_text()
    assert "Who learns from whom" in text and "99% of them inside a true group" in text
    assert "<image" not in text and text.count("<svg") == 4 and "over bytes" in text
    assert "over the rounds" in text and "sigma, round 4" in text
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("result.json", "metrics.jsonl"):
        (copy / name).write_bytes((run / name).read_bytes())
    section = panels(group([load_run(copy)]))
    assert "No matches of toy" in section and str(tmp_path) not in section


def test_matrices_are_kept_only_of_small_federations(
    run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys.modules["fedspan.simulation.driver"], "MATRIX_CLIENTS", 7)
    (tmp_path / "exp.toml").write_text(EXPERIMENT)
    call("run", str(tmp_path / "exp.toml"), "rounds=2", "--out", str(tmp_path / "large"), "-q")
    large = load_run(tmp_path / "large")
    assert "matrices" not in large.lines[-1] and "monitor" in large.lines[-1]
    assert "matrices" in load_run(run).lines[-1] and "matrices" not in load_run(run.with_name("plain")).lines[-1]
