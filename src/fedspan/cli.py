"""The command line: `fedspan COMMAND ...`. Errors are one line; tracebacks only with FEDSPAN_DEBUG=1."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fedspan import __version__
from fedspan.commands.analyse import analyse
from fedspan.commands.compare import compare
from fedspan.commands.console import fail, note
from fedspan.commands.data import data, partition
from fedspan.commands.demo import demo
from fedspan.commands.deploy import deploy
from fedspan.commands.doctor import doctor
from fedspan.commands.export import export
from fedspan.commands.methods import methods
from fedspan.commands.onboard import onboard
from fedspan.commands.report import report
from fedspan.commands.reproduce import reproduce
from fedspan.commands.run import run
from fedspan.commands.sweep import sweep
from fedspan.commands.theory import theory
from fedspan.commands.traffic import bytes_
from fedspan.errors import FedspanError
from fedspan.pool import keep_heap

FAULT, STOPPED = 2, 130


class Group(TyperGroup):
    """Turns the errors a person can mend into one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except (FedspanError, OSError) as e:
            if os.environ.get("FEDSPAN_DEBUG") == "1" or isinstance(e, BrokenPipeError):
                raise
            fail(str(e))
            raise typer.Exit(FAULT) from None
        except KeyboardInterrupt:
            note("Stopped.")
            raise typer.Exit(STOPPED) from None


app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Personalised federated learning with low-rank structure: simulate, compare, deploy.",
)
for command in (demo, run, compare, sweep, reproduce, report, methods, data, partition, doctor, export, onboard):
    app.command()(command)
app.command("bytes")(bytes_)
app.command()(theory)
app.add_typer(analyse, name="analyse")
app.add_typer(deploy, name="deploy")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedspan {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Personalised federated learning with low-rank structure: simulate, compare, deploy."""


def main() -> None:
    """The entry point `fedspan`."""
    keep_heap()  # the process is ours alone; CFL's server step on 100 clients took half its time in page faults
    app()


if __name__ == "__main__":
    main()
