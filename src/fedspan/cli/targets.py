"""`fedspan targets`: rounds, bytes and, on devices, computation to a target accuracy, per method."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedspan.cli.console import say, show, size, table, user_path
from fedspan.cli.report import Runs, finished_runs
from fedspan.errors import ConfigError

if TYPE_CHECKING:
    from fedspan.studies.targets import Reached

Accuracy = Annotated[
    list[float] | None,
    typer.Option("--accuracy", help="A target as a fraction (0.8); may be repeated.", show_default=False),
]
Loss = Annotated[
    list[float] | None,
    typer.Option("--loss", help="A target for runs without accuracy; may be repeated.", show_default=False),
]
Named = Annotated[
    str | None,
    typer.Option("--measure", help="The measure of --target, such as roc_auc; default: the first of the runs."),
]
Aims = Annotated[
    list[float] | None,
    typer.Option("--target", help="A target of any measure, in its own unit; may be repeated.", show_default=False),
]
Csv = Annotated[Path | None, typer.Option("--csv", help="Also write the table as CSV.", show_default=False)]
Drawn = Annotated[
    Path | None,
    typer.Option(
        "--figure", help="Draw learning curves over bytes with the targets (.png, .pdf, .svg).", show_default=False
    ),
]


def targets(
    runs: Runs,
    accuracy: Accuracy = None,
    loss: Loss = None,
    aims: Aims = None,
    named: Named = None,
    csv: Csv = None,
    drawn: Drawn = None,
) -> None:
    """Rounds and bytes that finished runs needed to reach a target, one row per method, means over seeds.

    Runs with a section devices also show the time on these and the operations of all clients.
    """
    from fedspan.report.canvas import save
    from fedspan.report.measures import measure_of
    from fedspan.studies import targets as of

    for path in (csv, drawn):
        if path is not None:
            user_path(path, "targets: the file")
    found = finished_runs(runs)
    wanted = [*(accuracy or []), *(loss or [])]
    if (aims or named) and wanted:
        raise ConfigError("targets: --target and --measure take the place of --accuracy and --loss. Got both.")
    percent = measure_of(found, named).percent
    if aims:
        wanted = aims
    elif not wanted or (loss if percent else accuracy):
        option = "target" if named else "accuracy" if percent else "loss"
        raise ConfigError(f"targets: these runs need --{option} with a number.")
    measure, rows = of.reached(found, wanted, named)
    columns = [measure.title, "method", "rounds", "up", "down", "together", "seconds", "on devices", "operations"]
    shown = len(columns) if any(r.clock is not None for r in rows) else 7
    cells = [_cells(r, measure.text(r.target))[:shown] for r in rows]
    show(table(columns[:shown], cells, right=range(2, shown)))
    if any(r.reached < r.seeds for r in rows):
        say("Where not all seeds reached a target, means are over those that did, and flatter the method.")
    if csv is not None:
        csv.write_text(of.to_csv(measure, rows), encoding="utf-8", newline="\n")
        say(f"Table: {csv}")
    if drawn is not None:
        say(f"Figure: {save(lambda: of.figure(found, wanted, named), drawn)}")


def _cells(r: Reached, target: str) -> list[str]:
    if r.round is None or r.up is None or r.down is None:
        return [target, r.label, "not reached", *[""] * 6]
    spread = "" if r.round_spread is None else f" ± {r.round_spread:.1f}"
    rounds = f"{r.round:.1f}{spread}" if r.seeds > 1 else f"{r.round:.0f}"
    if r.reached < r.seeds:
        rounds += f" ({r.reached} of {r.seeds} seeds)"
    seconds = "" if r.seconds is None else f"{r.seconds:.1f}"
    clock = "" if r.clock is None else f"{r.clock:.0f} s"
    operations = "" if r.flops is None else f"{r.flops / 1e12:.3g} TFLOP"
    return [target, r.label, rounds, size(r.up), size(r.down), size(r.up + r.down), seconds, clock, operations]
