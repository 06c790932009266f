"""`fedspan analyse`: a closer look at what a run has learnt."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedspan.cli.console import Picture, listed, note, say, show, table, user_path
from fedspan.cli.onboard import RunPath
from fedspan.cli.running import open_run
from fedspan.errors import ConfigError
from fedspan.storage.atomic import write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedspan.method.panels import Models, Panel
    from fedspan.report.runs import Run
    from fedspan.simulation.simulator import Simulation
    from fedspan.studies.theory.outcome import Outcome


_ROWS = 40  # of a table


Out = Annotated[Path | None, typer.Option("--out", help="Folder for subspace.json and figures; default RUN-subspace.")]
PanelsOut = Annotated[
    Path | None, typer.Option("--out", help="Folder for a folder per panel; default RUN-PANEL each, beside RUN.")
]
MatchOut = Annotated[
    Path | None, typer.Option("--out", help="Folder for matching.json, figures; default RUN-matching.")
]
Clusters = Annotated[int | None, typer.Option("--clusters", help="k of k-means; default: the true groups.", min=1)]
Refresh = Annotated[bool, typer.Option("--refresh", help="First let every client fit its model again.")]
Kinds = Annotated[list[Picture] | None, typer.Option("--format", help="png (default), svg, pdf; may be repeated.")]

Source = Annotated[str, typer.Option("--source", help="Where samples come from, see `fedspan data`.")]
Root = Annotated[str | None, typer.Option("--root", help="Where data sets lie; default $FEDSPAN_DATA.")]
Pixels = Annotated[int | None, typer.Option("--size", help="Shrink pictures to this many pixels a side.", min=1)]
Model = Annotated[str, typer.Option("--model", help="A model by name.")]
Hidden = Annotated[int, typer.Option("--hidden", help="Hidden units of an mlp; below 2,000 parameters H is exact.")]
Few = Annotated[int, typer.Option("--few", help="Samples of the small set.")]
Many = Annotated[int, typer.Option("--many", help="Samples of the large set.")]
TrainEpochs = Annotated[int, typer.Option("--epochs", help="Epochs of training.")]
Every = Annotated[int, typer.Option("--every", help="Look at the Hessian every so many epochs.")]
Seeds = Annotated[int, typer.Option("--seeds", help="How many seeds.")]
FirstSeed = Annotated[int, typer.Option("--first-seed", help="The first of the seeds.")]
Widths = Annotated[
    str | None, typer.Option("--widths", help="Hidden units to compare, as 4,16,64: one row each, at start and end.")
]
Tanh = Annotated[bool, typer.Option("--tanh", help="An mlp with tanh in place of ReLU.")]
Json = Annotated[bool, typer.Option("--json", help="Table, sentence and numbers as JSON; writes no files.")]
Lr = Annotated[float, typer.Option("--lr", help="Learning rate of SGD, minibatches of 32.")]
Samples = Annotated[int, typer.Option("--samples", help="Random vectors for the Frobenius norm where H is not exact.")]
HessianOut = Annotated[Path | None, typer.Option("--out", help="Folder to write to; default runs/hessian-rank.")]
UpdateOut = Annotated[Path | None, typer.Option("--out", help="Folder to write to; default RUN-update-rank.")]

analyse = typer.Typer(no_args_is_help=True, help="A closer look at what a run has learnt.")


@analyse.callback()
def _analyse() -> None:
    """A closer look at what a run has learnt."""


@analyse.command()
def panels(
    run: RunPath, out: PanelsOut = None, clusters: Clusters = None, refresh: Refresh = False, kinds: Kinds = None
) -> None:
    """Everything a run's method shows of itself: each of its panels in a folder of its own."""
    from fedspan.report.registered import panels_of
    from fedspan.report.runs import load_run

    loaded = load_run(run)
    brought = panels_of(loaded)
    if not brought:
        say(f"{loaded.method} brings no panels.")
    for panel in brought:
        where = _beside(run, None, panel.name) if out is None else user_path(out, "--out") / panel.name
        _look(run, loaded, panel, where, clusters, refresh, kinds)


@analyse.command()
def subspace(
    run: RunPath, out: Out = None, clusters: Clusters = None, refresh: Refresh = False, kinds: Kinds = None
) -> None:
    """Where the clients of a run lie in the subspace they share, whether they form groups, and its spectrum."""
    _panel(run, "subspace", out, clusters, refresh, kinds)


@analyse.command()
def matching(run: RunPath, out: MatchOut = None, kinds: Kinds = None) -> None:
    """Who was matched with whom in a run, how alike the clients are, and whether groups are found."""
    _panel(run, "matching", out, None, False, kinds)


def _panel(
    run: Path, name: str, out: Path | None, clusters: int | None, refresh: bool, kinds: list[Picture] | None
) -> None:
    """One panel of a run, which its method must bring."""
    from fedspan.report.registered import methods_with, panels_of
    from fedspan.report.runs import load_run

    where = _beside(run, out, name)
    loaded = load_run(run)
    panel = next((p for p in panels_of(loaded) if p.name == name), None)
    if panel is None:
        brought = ", ".join(methods_with(name))
        raise ConfigError(
            f"analyse {name}: the run must be of a method with this panel: {brought}. Got one of {loaded.method}."
        )
    _look(run, loaded, panel, where, clusters, refresh, kinds)


def _look(
    run: Path, loaded: Run, panel: Panel, where: Path, clusters: int | None, refresh: bool, kinds: list[Picture] | None
) -> None:
    """What a panel finds in a run, on the terminal, as JSON and as figures."""
    from fedspan.report.charts import figure_of
    from fedspan.report.registered import seen_of

    models = refitted(open_run(run, "analyse")[1], panel) if refresh else None
    found = panel.look(seen_of(loaded, loaded.method, models, clusters))
    show(table(found.titles, found.table[:_ROWS], right=found.numbers))
    if len(found.table) > _ROWS:
        say(f"({_ROWS} of {len(found.table)} rows; {panel.name}.json holds all)")
    say(found.says)
    if found.note:
        note(found.note)
    where.mkdir(parents=True, exist_ok=True)
    _write(where / f"{panel.name}.json", found.facts)
    _draw({drawing.name: partial(figure_of, drawing) for drawing in found.drawings}, where, kinds)
    say(f"Figures and {panel.name}.json: {where}")


def refitted(simulation: Simulation, panel: Panel) -> Models:
    """Every client's model, fitted anew as a panel says; the run itself is not changed.

    Raises:
        ConfigError: if the panel does not say how.
    """
    import torch

    from fedspan import tree, wire
    from fedspan.method.panels import Models

    if panel.refit is None:
        raise ConfigError(f"analyse {panel.name}: --refresh needs a method that can fit models anew. Leave it out.")
    engine, record, t = simulation.engine, simulation.record, simulation.record.progress.round
    weights = []
    for i in range(simulation.data.clients):
        capacity = record.capacity(i)
        task = engine.model(capacity)
        down = engine.able.download(record.server, torch.tensor([i]), capacity, t, use=True)
        visit = engine.visit(capacity, t, i, panel.refit.plan(task), record.common)
        both, _ = wire.roundtrip({**down.shared, **tree.take(down.own, 0)}, engine.able.coded.codecs(t))
        weights.append(tree.detach(panel.refit.fit(task, record.row(i), both, visit)))
    return Models(engine.model(record.capacity(0)), weights)


@analyse.command("hessian-rank")
def hessian_rank(
    source: Source = "digits",
    root: Root = None,
    size: Pixels = None,
    model: Model = "mlp",
    hidden: Hidden = 10,
    few: Few = 50,
    many: Many = 500,
    epochs: TrainEpochs = 40,
    every: Every = 5,
    seeds: Seeds = 5,
    first_seed: FirstSeed = 200,
    lr: Lr = 0.1,
    samples: Samples = 30,
    widths: Widths = None,
    tanh: Tanh = False,
    out: HessianOut = None,
    kinds: Kinds = None,
    as_json: Json = False,
) -> None:
    """The stable rank of the loss's Hessian on few and on many samples: same weights, equal steps, equal epochs."""
    from fedspan.studies.theory.hessian_rank import Plan, by_width, run

    where = user_path(out or Path("runs") / "hessian-rank", "--out")
    plan = Plan(
        source=source, root=root, size=size, model=model, hidden=hidden, few=few, many=many, epochs=epochs,
        every=every, seeds=seeds, first_seed=first_seed, lr=lr, samples=samples, activation="tanh" if tanh else "relu",
    )  # fmt: skip
    outcome = run(plan, say=note) if widths is None else by_width(plan, _integers(widths, "--widths"), say=note)
    if as_json:
        typer.echo(json.dumps(outcome.facts(), indent=1, allow_nan=False))
        return
    _conclude(outcome, where, "hessian_rank", kinds)


def _integers(text: str, what: str) -> list[int]:
    """Numbers that an option names with commas between."""
    if not (parts := listed(text)) or not all(part.isdecimal() for part in parts):
        raise ConfigError(f"hessian-rank: {what} must be integers with commas between, as 4,16,64. Got {text!r}.")
    return [int(part) for part in parts]


@analyse.command("update-rank")
def update_rank(run: RunPath, out: UpdateOut = None, kinds: Kinds = None) -> None:
    """The rank of what a run with low-rank updates has added to each weight, round by round; replays the run."""
    from fedspan.studies.theory import update_rank as look

    where = _beside(run, out, "update-rank")
    _conclude(look.run(open_run(run, "analyse")[1]), where, "update_rank", kinds)


def _conclude(outcome: Outcome, where: Path, name: str, kinds: list[Picture] | None) -> None:
    """The table and the sentence of a check, its numbers and its figure."""
    show(table(outcome.titles, outcome.rows, right=range(1, len(outcome.titles))))
    say(outcome.says)
    where.mkdir(parents=True, exist_ok=True)
    _write(where / f"{name}.json", outcome.numbers)
    _draw({name: outcome.draw}, where, kinds)
    say(f"Figure and {name}.json: {where}")


def _beside(run: Path, out: Path | None, what: str) -> Path:
    """The folder for what is found: as asked for, or beside the run."""
    base = run if run.name not in ("", "..") else run.resolve()
    return user_path(out or base.with_name(f"{base.name}-{what}"), "--out")


def _draw(figures: Mapping[str, Callable[[], Figure]], where: Path, kinds: list[Picture] | None) -> None:
    from fedspan.report.canvas import save

    for name, draw in figures.items():
        for kind in dict.fromkeys(kinds or [Picture.png]):
            save(draw, where / f"{name}.{kind.value}")


def _write(path: Path, values: Mapping[str, Any]) -> None:
    write_atomic(path, json.dumps(values, indent=1, allow_nan=False) + "\n")
