"""`fedspan reproduce`: a published table run again, row by row, beside the paper's figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedspan.cli.cluster_runs import ClusterRuns, cluster_runs, spread
from fedspan.cli.console import child, directory, listed, note, say, show, table
from fedspan.cli.run import Cluster, Out, Overrides, Quiet
from fedspan.errors import ConfigError, FedspanError
from fedspan.storage.atomic import write_atomic

if TYPE_CHECKING:
    from fedspan.studies.papers import PaperExperiment, PaperJob, Result, RowOutcome

Name = Annotated[
    str | None,
    typer.Argument(metavar="[NAME]", help="An experiment, or a .toml file of your own.", show_default=False),
]
QuickRun = Annotated[bool, typer.Option("--quick", help="Scaled down to a minute or two; not comparable.")]
Seeds = Annotated[int | None, typer.Option("--seeds", help="How many seeds.", min=1, max=1000, show_default=False)]
Rows = Annotated[str, typer.Option("--rows", help="Only these rows, with commas, e.g. local,pfl-mf-r10.")]
Steps = Annotated[
    str, typer.Option("--lr", help="Learning rates every row chooses from instead of the file's, e.g. 0.01,0.1.")
]
Tuning = Annotated[
    int | None,
    typer.Option("--tuning-rounds", help="Rounds to choose learning rates by.", min=1, show_default=False),
]
Root = Annotated[str | None, typer.Option("--root", help="Where data sets lie; default $FEDSPAN_DATA.")]


def reproduce(
    name: Name = None,
    overrides: Overrides = None,
    quick: QuickRun = False,
    seeds: Seeds = None,
    rows: Rows = "",
    lr: Steps = "",
    tuning_rounds: Tuning = None,
    out: Out = None,
    root: Root = None,
    quiet: Quiet = False,
    cluster: Cluster = None,
) -> None:
    """Run a paper's table again and show it beside the printed figures; finished runs are not repeated."""
    from fedspan.studies.papers import candidates, config_of, describe, load_experiment, reproduce_row, trials

    if name is None:
        return _list()
    if "=" in name and not name.endswith(".toml"):
        raise ConfigError(f"reproduce: name an experiment before settings. Got {name[:60]!r}.")
    whole = load_experiment(name)
    experiment = whole.quicken() if quick else whole
    wanted = listed(rows)
    if not wanted and quick:
        wanted = list(whole.quick.rows or ())
    if wanted:
        experiment = experiment.select(wanted)
    experiment = experiment.retune(_steps(lr), tuning_rounds)
    settings = ([] if root is None else [f"data.root={json.dumps(root)}"]) + (overrides or [])
    count = experiment.seeds if seeds is None else seeds
    # All of it is checked before the first run starts; a test is checked at the first learning rate.
    total, tuned = 0, False
    for row in experiment.rows:
        config = config_of(experiment, row, row.lr[0], row.rules[0], settings)
        choices = len(trials(candidates(experiment, row, settings)))
        tuned = tuned or choices > 0
        total += choices + count
    where = directory(out, whole.name, *(["quick"] if quick else []))
    said = describe(experiment, config, count, tuned)
    for line in said:
        say(line)
    say(f"{len(experiment.rows)} rows, {total} runs; directory {where}.")
    outcomes: list[RowOutcome] = []
    with cluster_runs(cluster) as runs:
        shown = _Shown(where, total, quiet, bars=not quick and not quiet, runs=runs)
        done = spread(lambda row: reproduce_row(experiment, row, count, settings, shown.run), experiment.rows, runs)
        for outcome in done:
            outcomes.append(outcome)
            _write(where, experiment, said, outcomes, everything=not rows)  # a long table can be watched
    _conclude(where, experiment, outcomes, everything=not rows)


def _steps(text: str) -> list[float]:
    """The learning rates of `--lr`, smallest first."""
    try:
        return sorted({float(part) for part in listed(text)})
    except ValueError:
        raise ConfigError(f"reproduce: --lr takes numbers with commas, e.g. 0.01,0.1. Got {text[:60]!r}.") from None


def _list() -> None:
    from fedspan.studies.papers import available, load_experiment

    found = [(name, load_experiment(name)) for name in available()]
    lines = [(name, e.paper.title, len(e.rows), e.seeds) for name, e in found]
    show(table(["experiment", "what it is", "rows", "seeds"], lines, right=(2, 3)))
    say("fedspan reproduce NAME --quick tries one in a minute or two; without --quick it takes hours.")


class _Shown:
    """Carries runs out here or on a cluster, a line for each; what is finished or has diverged before is only told."""

    def __init__(self, where: Path, total: int, quiet: bool, bars: bool, runs: ClusterRuns | None = None) -> None:
        self.where, self.total, self.quiet, self.bars, self.done, self.runs = where, total, quiet, bars, 0, runs

    def run(self, job: PaperJob) -> Result | None:
        """The result of a job; None if it diverged."""
        from fedspan.cli.running import result_of

        self.done += 1
        place = child(self.where / job.folder.parent, job.folder.name)
        label = f"{job.row.label}, {job.setting}, {job.purpose}, seed {job.config.seed}"
        result, found = result_of(job.config, place, quiet=not self.bars, label=label, runs=self.runs)
        before = "already " if found else ""
        if not self.quiet:
            facts = f"{before}diverged" if result is None else f"{before}done: {_facts(result)}"
            say(f"[{self.done}/{self.total}] {label}: {facts}")
        return result


def _facts(result: Result) -> str:
    mean = result["accuracy"].get("mean")
    shown = "no accuracy" if mean is None else f"{100 * mean:.2f} %"
    return f"{shown}, {sum(result['seconds'].values()):.1f} s"


def _write(
    where: Path, experiment: PaperExperiment, said: Sequence[str], outcomes: Sequence[RowOutcome], everything: bool
) -> None:
    from fedspan.studies.papers import to_csv, to_json, to_markdown

    where.mkdir(parents=True, exist_ok=True)
    write_atomic(where / "table.md", to_markdown(experiment, said, outcomes, everything))
    write_atomic(where / "table.csv", to_csv(experiment, outcomes))
    write_atomic(
        where / "result.json", json.dumps(to_json(experiment, said, outcomes), indent=1, allow_nan=False) + "\n"
    )


def _conclude(where: Path, experiment: PaperExperiment, outcomes: Sequence[RowOutcome], everything: bool) -> None:
    from fedspan.studies.papers import cells, right, titles

    shown = titles(outcomes)
    show(table(shown, cells(experiment, outcomes, everything), right=right(shown)))
    if experiment.quickened:
        note("quick: not comparable with the paper.")
    say(f"Table: {where / 'table.md'}, {where / 'table.csv'}; everything: {where / 'result.json'}")
    for picture in _pictures(where, outcomes):
        say(f"Figure: {picture}")
    page = _page(where, experiment, outcomes)
    if page is not None:
        say(f"Report: {page}")


def _pictures(where: Path, outcomes: Sequence[RowOutcome]) -> list[Path]:
    """A figure for each number that rows differ in; none without matplotlib."""
    from fedspan.studies.papers.curves import draw, series

    found = series(outcomes)
    try:
        return [
            draw(name, [s for s in found if s.name == name], where / f"over-{name}.png")
            for name in dict.fromkeys(s.name for s in found)
        ]
    except FedspanError as e:
        note(f"No figure: {e}")
        return []


def _page(where: Path, experiment: PaperExperiment, outcomes: Sequence[RowOutcome]) -> Path | None:
    """The report page of the test runs, under the labels of the table."""
    from fedspan.report import load_runs, write_page
    from fedspan.report.runs import Run

    methods = [o.row.method for o in outcomes]
    runs: list[Run] = []
    for o in outcomes:
        # The page knows local and fedavg by their names; rows that share a method need their labels.
        name = o.row.method if methods.count(o.row.method) == 1 else o.row.label
        done = [where / job.folder for job, result in o.tests if result is not None]
        runs += [Run(r.path, {**r.result, "method": name}, r.lines) for r in (load_runs(done) if done else [])]
    if not runs:
        return None
    title = experiment.paper.title or experiment.name
    page = where / "report.html"
    try:
        write_page(runs, page, f"{title} (quick, not comparable)" if experiment.quickened else title)
    except FedspanError as e:  # the numbers are safe on disk: a page that cannot be drawn is worth a note only
        note(f"No report page: {e}")
        return None
    return page
