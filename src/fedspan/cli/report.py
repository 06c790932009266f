"""`fedspan report`: finished runs as a page or a table."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedspan.cli.console import note, say, user_path
from fedspan.errors import ConfigError

if TYPE_CHECKING:
    from fedspan.report.runs import Run


class TableFormat(StrEnum):
    """What can be written."""

    html = "html"
    markdown = "markdown"
    csv = "csv"
    latex = "latex"


Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories, or folders of them.")]
File = Annotated[Path | None, typer.Option("--out", help="File to write; html: default report.html in the first RUN.")]
Kind = Annotated[TableFormat, typer.Option("--format", help="A page (html), or the table alone.")]
Leading = Annotated[
    str | None, typer.Option("--measure", help="The measure that leads a table; default: the first of the runs.")
]
Title = Annotated[str, typer.Option("--title", help="Title of the page.")]


def report(
    runs: Runs, out: File = None, kind: Kind = TableFormat.html, title: Title = "", named: Leading = None
) -> None:
    """Write one page, or one table, of finished runs."""
    from fedspan import report as reports
    from fedspan.report.measures import measure_of

    found = finished_runs(runs)
    if out is not None:
        user_path(out, "--out")
        if not out.resolve().parent.is_dir():
            raise ConfigError(f"--out: the folder {out.parent} must exist. Make it first.")
    if kind is TableFormat.html:
        if named is not None:
            raise ConfigError("report: --measure goes with a table (--format); a page shows every measure.")
        where = out or runs[0] / "report.html"
        reports.write_page(found, where, title or runs[0].resolve().name)
        say(f"Report: {where}")
        return
    rows = reports.summary_rows(found, measure=measure_of(found, named))
    write = {
        TableFormat.markdown: reports.to_markdown,
        TableFormat.csv: reports.to_csv,
        TableFormat.latex: reports.to_latex,
    }[kind]
    text = write(rows)
    if out is None:
        typer.echo(text, nl=False)
    else:
        out.write_text(text, encoding="utf-8", newline="\n")
        say(f"Table: {out}")


def finished_runs(paths: list[Path]) -> list[Run]:
    """The finished runs that paths are or hold; of others it is said that they are left out."""
    from fedspan.report import load_runs

    waiting: list[Path] = []
    found = load_runs(paths, waiting)
    for path in waiting:
        note(f"{path} has not finished; left out.")
    return found
