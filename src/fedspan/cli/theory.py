"""`fedspan theory`: what the pFL-MF, FedLoRU and Factorized-FL papers claim, run and drawn."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedspan.cli.console import Picture, directory, note, say, show, table
from fedspan.errors import ConfigError

if TYPE_CHECKING:
    from fedspan.studies.theory.outcome import Outcome


class TheoryCheck(StrEnum):
    """What can be checked."""

    theorem_1 = "theorem-1"
    example_1 = "example-1"
    example_2 = "example-2"
    movielens = "movielens"
    figure_1 = "figure-1"
    spiked_hessian = "spiked-hessian"
    factor_updates = "factor-updates"
    factor_layouts = "factor-layouts"
    factor_sparsity = "factor-sparsity"


REAL = (TheoryCheck.movielens, TheoryCheck.factor_updates, TheoryCheck.factor_layouts, TheoryCheck.factor_sparsity)
"""Checks on real data; the others make their own."""


Name = Annotated[
    TheoryCheck, typer.Argument(metavar="NAME", help=f"One of {', '.join(TheoryCheck)}.", show_default=False)
]
Out = Annotated[Path | None, typer.Option("--out", help="Directory to write to; default runs/theory.")]
Figure = Annotated[Picture, typer.Option("--figure", help="Kind of figure.")]
Root = Annotated[str | None, typer.Option("--root", help="movielens, factor-*: where data lie; default $FEDSPAN_DATA.")]
Quick = Annotated[bool, typer.Option("--quick", help="factor-*: a few pictures and epochs, only to see that it works.")]
Json = Annotated[bool, typer.Option("--json", help="Table, sentence and numbers as JSON; writes no files.")]


def theory(
    name: Name,
    out: Out = None,
    figure: Figure = Picture.png,
    root: Root = None,
    quick: Quick = False,
    as_json: Json = False,
) -> None:
    """Check what the pFL-MF paper, FedLoRU (spiked-hessian) or Factorized-FL (factor-*) claims.

    Writes a figure and its numbers as JSON.
    """
    from fedspan.report.canvas import save

    if root is not None and name not in REAL:
        raise ConfigError(f"theory: --root goes with {', '.join(REAL)}. Got it with {name}, which makes its own data.")
    if quick and not name.startswith("factor-"):
        raise ConfigError(f"theory: --quick goes with the checks called factor-*. Got it with {name}.")
    if quick:
        note("--quick: too few pictures and epochs for the numbers to mean anything.")
    where = None if as_json else directory(out, "theory")
    outcome = perform(name, root, quick)
    if where is None:
        typer.echo(json.dumps(outcome.facts(), indent=1, allow_nan=False))
        return
    show(table(outcome.titles, outcome.rows, right=range(1, len(outcome.titles))))
    say(outcome.says)
    say(f"Numbers: {outcome.write(where / f'{name}.json')}")
    say(f"Figure: {save(outcome.draw, where / f'{name}.{figure}')}")


def perform(name: TheoryCheck, root: str | None = None, quick: bool = False) -> Outcome:
    """Run one check; only its own module is imported."""
    if name is TheoryCheck.theorem_1:
        from fedspan.studies.theory.convergence import theorem_1

        return theorem_1.run(say=note)
    if name is TheoryCheck.example_1:
        from fedspan.studies.theory import example_1

        return example_1.run()
    if name is TheoryCheck.example_2:
        from fedspan.studies.theory import example_2

        return example_2.run()
    if name is TheoryCheck.spiked_hessian:
        from fedspan.studies.theory import spiked_hessian

        return spiked_hessian.run()
    if name is TheoryCheck.movielens:
        from fedspan.studies.theory import movielens

        return movielens.run(root, say=note)
    if name is TheoryCheck.factor_updates:
        from fedspan.studies.theory import factor_updates

        return factor_updates.run(root, quick, say=note)
    if name is TheoryCheck.factor_layouts:
        from fedspan.studies.theory import factor_layouts

        return factor_layouts.run(root, quick, say=note)
    if name is TheoryCheck.factor_sparsity:
        from fedspan.studies.theory import factor_sparsity

        return factor_sparsity.run(root, quick, say=note)
    from fedspan.studies.theory import figure_1

    return figure_1.run()
