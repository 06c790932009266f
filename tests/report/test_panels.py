"""Panels that methods bring: a method of one's own is drawn like those of the package, and none is asked by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from conftest import call, failing, register_while
from fedspan import tree
from fedspan.cli.running import open_run
from fedspan.errors import ConfigError
from fedspan.method import Abilities, About, Findings, Observed, Panel, Seen, Yardstick
from fedspan.method.panels import BarChart, Drawing, HeatMap, LineChart, ScatterChart
from fedspan.methods import METHODS, make
from fedspan.methods.fedavg import FedAvg
from fedspan.report.canvas import save
from fedspan.report.charts import figure_of
from fedspan.report.page import panels, write_page
from fedspan.report.palette import looks, stays_behind
from fedspan.report.registered import methods_with, panels_of, role, seen_of, yardstick
from fedspan.report.runs import Group, Run, group, load_run

EXPERIMENT = """
rounds = 2
[data]
source = "digits"
limit = 200
[partition]
kind = "permuted-groups"
clients = 5
groups = 2
[model]
hidden = [4]
[method]
name = "own"
[train]
participation = 0.6
workers = 1
"""


@dataclass(frozen=True, kw_only=True)
class Own(FedAvg, Observed):
    """FedAvg that shows the size of its model, and says what it was given."""

    def panels(self) -> Sequence[Panel]:
        return (Panel("sizes", "How large <it> is", "Bars of the layers' norms.", "sizes", self.sizes),)

    def sizes(self, seen: Seen) -> Findings:
        """The norms of the layers."""
        norms = np.array([float(w.norm()) for w in seen.server["theta"].values()])
        chart = BarChart(values=norms, title="norms", x="layer", note=f"{len(norms)} layers")
        hidden = Drawing("hidden", "Not on the page.", ((chart,),), (3.0, 2.0), on_page=False)
        return Findings(
            f"After round {seen.round} of {seen.label}, {len(seen.names)} clients.",
            (Drawing("sizes", f"Layers of {seen.label}.", ((chart,),), (3.0, 2.0)), hidden),
            {"norms": norms.tolist()},
            ("layer", "norm"),
            [[k, f"{n:.2f}"] for k, n in zip(seen.server["theta"], norms)],
            (1,),
            "look closer",
        )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a method of one's own, registered only while it goes."""
    where = tmp_path_factory.mktemp("runs")
    (where / "exp.toml").write_text(EXPERIMENT)
    with pytest.MonkeyPatch.context() as patch:
        register_while(patch, "own", Own)
        call("run", str(where / "exp.toml"), "--out", str(where / "own"), "-q")
    return where / "own"


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The method is known here."""
    register_while(monkeypatch, "own", Own)


@pytest.mark.usefixtures("registered")
def test_a_method_of_ones_own_is_drawn_on_the_page(run: Path, tmp_path: Path) -> None:
    text = write_page([load_run(run)], tmp_path / "page.html").read_text()
    assert "<h2>How large &lt;it&gt; is</h2>\n<p>Bars of the layers' norms.</p>" in text
    assert "After round 2 of own, 5 clients." in text and 'aria-label="Layers of own."' in text
    assert "Not on the page." not in text and "What methods show" not in text


@pytest.mark.usefixtures("registered")
def test_a_method_whose_panels_fail_costs_one_line(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Own, "sizes", lambda self, seen: 1 / 0)
    section = panels(group([load_run(run)]))
    assert section.count('<p class="note">No sizes of own: division by zero</p>') == 1
    monkeypatch.setattr(Own, "panels", lambda self: 1 / 0)
    assert '<p class="note">No panels of own: division by zero</p>' in panels(group([load_run(run)]))


@pytest.mark.usefixtures("registered")
def test_analyse_writes_every_panel_that_the_method_brings(run: Path, tmp_path: Path) -> None:
    said = call("analyse", "panels", str(run), "--out", str(tmp_path / "look"), "--format", "svg")
    assert "After round 2 of own, 5 clients." in said.stdout and "look closer" in said.stderr
    assert {p.name for p in (tmp_path / "look" / "sizes").iterdir()} == {"sizes.svg", "hidden.svg", "sizes.json"}
    assert len(json.loads((tmp_path / "look" / "sizes" / "sizes.json").read_text())["norms"]) == 4
    assert "brings no panels" in call("analyse", "panels", str(plain(run, tmp_path))).stdout
    assert "--refresh needs a method" in failing("analyse", "panels", str(run), "--refresh")
    assert "Got one of own" in failing("analyse", "subspace", str(run))


def plain(run: Path, where: Path) -> Path:
    """A run of fedavg."""
    call("run", str(run.parent / "exp.toml"), "method.name=fedavg", "--out", str(where / "plain"), "-q")
    return where / "plain"


def test_a_method_that_is_not_registered_here_costs_one_line(run: Path, tmp_path: Path) -> None:
    loaded = load_run(run)
    text = write_page([loaded], tmp_path / "page.html").read_text()
    assert text.count("No panels of own") == 1 and "must be registered where its report is written" in text
    assert "<h2>Clients</h2>" in text and "<strong>own</strong> reaches" in text
    assert "must be registered" in failing("analyse", "panels", str(run))
    beside = Run(loaded.path, {**loaded.result, "method": "pfl-mf", "config": {}}, [])
    assert "No coordinates of pfl-mf" in panels(group([beside]))  # a state of another method


def test_reports_import_no_code_that_a_run_names(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    loaded = load_run(run)
    config = {**loaded.config, "method": {"name": "trap:Trap"}}
    text = panels(group([Run(loaded.path, {**loaded.result, "method": "trap:Trap", "config": config}, [])]))
    assert "No panels of trap:Trap" in text and "trap" not in sys.modules


def test_states_of_clients_are_those_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "exp.toml").write_text(EXPERIMENT)
    more = ("method.name=fedper", "rounds=1")
    call("run", str(tmp_path / "exp.toml"), *more, "--out", str(tmp_path / "run"), "-q")
    seen = seen_of(load_run(tmp_path / "run"), "it")
    (rows,) = seen.rows()
    record = open_run(tmp_path / "run", "test")[1].record
    assert 0 < len(rows.ids) < 5 and seen.groups is not None and len(seen.names) == 5
    for k, i in enumerate(rows.ids.tolist()):
        assert tree.digest(tree.take(rows.states, k)) == tree.digest(record.row(i))
    assert tree.digest(seen.server) == tree.digest(record.server) and seen.round == 1


@pytest.mark.parametrize("name", [n for n in METHODS if Abilities(make(n)).observed.panels()])
def test_panels_of_every_method_keep_their_promises(name: str, tmp_path: Path) -> None:
    (tmp_path / "exp.toml").write_text(EXPERIMENT)
    more = (f"method.name={name}", "rounds=1", "train.participation=1.0", "model.hidden=[6, 6]")
    call("run", str(tmp_path / "exp.toml"), *more, "--out", str(tmp_path / "run"), "-q")
    run = load_run(tmp_path / "run")
    brought = panels_of(run)
    assert brought and len({p.name for p in brought}) == len(brought), "panels of a method have names of their own"
    for panel in brought:
        assert panel.name.isidentifier() and panel.title and panel.about.endswith(".") and panel.noun
        found = panel.look(seen_of(run, "the label"))
        assert found.says.endswith(".") and json.dumps(found.facts, allow_nan=False) != "{}", "facts are plain values"
        assert found.table and {len(row) for row in found.table} == {len(found.titles)}, "a row has a cell per heading"
        assert len({d.name for d in found.drawings}) == len(found.drawings) > 0
        for drawing in found.drawings:
            assert "the label" in drawing.label
            assert "<svg" in save(partial(figure_of, drawing), tmp_path / f"{drawing.name}.svg").read_text()


def test_a_run_that_is_going_has_no_panels_yet(run: Path) -> None:
    loaded = load_run(run)
    going = {k: v for k, v in loaded.result.items() if k != "names"}
    section = panels(group([Run(loaded.path, {**going, "method": "pfl-mf", "config": {}}, [])]))
    assert "which a run tells when it has finished" in section


def test_every_kind_of_chart_is_drawn(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    heat = partial(HeatMap, values=rng.random((3, 3)))
    rows = [
        [ScatterChart(points=rng.random((9, 2)), labels=np.arange(9) % 3, x="x-axis", y="y-axis", legend="kinds")],
        [BarChart(values=np.arange(20.0), title="bars", note="a note")],
        [LineChart(points=(), title="empty"), LineChart(points=[(1, 1.0), (2, 90.0)], title="up", logarithmic=True)],
        [heat(title="free", scale="shades", names=("a", "b", "c"), groups=np.array([1, 0, 1]))],
        [heat(title="one", limits=(0.0, 1.0)), heat(title="two", limits=(0.0, 1.0))],
    ]
    words = {0: ("x-axis", "y-axis", "kinds"), 1: ("bars", "a note"), 2: ("nothing was recorded", "up")}
    words |= {3: ("free", "shades", ">b<"), 4: ("one", "two")}
    for k, row in enumerate(rows):
        text = save(lambda r=row: figure_of(Drawing("d", "", (r,), (5.0, 3.0))), tmp_path / f"{k}.svg").read_text()
        assert all(w in text for w in words[k]) and "<image" not in text
    alike = figure_of(Drawing("d", "", [[heat(values=np.full((3, 3), 6.0))]], (3.0, 3.0)))
    assert alike.axes[0].collections[0].get_clim() == (0.0, 6.0)
    together = figure_of(Drawing("d", "", [rows[3], rows[4]], (5.0, 6.0)))
    assert len(together.axes) == 4 + 2  # a place for each, one of them empty, and two scales of colours


def test_a_yardstick_is_one_method_and_not_what_extends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [name for name in METHODS if role(name) == "alone"] == ["local"]
    assert [name for name in METHODS if role(name) == "common"] == ["fedavg"]
    assert [name for name in METHODS if role(name) == "told"] == ["oracle"]
    assert Own.about.yardstick is None and Own.about.reference == FedAvg.about.reference
    assert yardstick("nobody") is None and not stays_behind("nobody")

    @dataclass(frozen=True, kw_only=True)
    class Quiet(FedAvg):
        """A yardstick of one's own."""

        about = About(yardstick=Yardstick("alone", "doing nothing"))

    assert looks([Group("quiet", ())])["quiet"].colour == looks([Group("other", ())])["other"].colour
    register_while(monkeypatch, "quiet", Quiet)
    assert looks([Group("quiet", ())])["quiet"] == looks([Group("local", ())])["local"]


def test_panels_are_found_by_what_methods_bring() -> None:
    assert methods_with("subspace") == ["pfl-mf", "pfl-mf-paper", "pfl-mf-joint"]
    assert methods_with("matching") == ["factorized-fl-alpha", "factorized-fl-beta"]
    assert methods_with("sizes") == []
    with pytest.raises(ConfigError, match="A panel's name must be"):
        Panel("../up", "Title", "About.", "noun", lambda seen: Findings("Nothing."))
    with pytest.raises(ConfigError, match="A drawing's name must be"):
        Drawing("a/b", "Label.", (), (1.0, 1.0))


def test_a_table_is_written_without_importing_torch(run: Path) -> None:
    command = f"import sys; from fedspan.report import *; print(to_csv(summary_rows(load_runs({str(run)!r}))))"
    done = subprocess.run([sys.executable, "-c", f"{command}; assert 'torch' not in sys.modules"], capture_output=True)
    assert done.returncode == 0 and done.stdout.startswith(b"label,method"), done.stderr.decode()
