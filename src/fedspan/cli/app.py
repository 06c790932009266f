"""The command line: `fedspan COMMAND ...`. Errors are one line; tracebacks only with FEDSPAN_DEBUG=1."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fedspan import __version__
from fedspan.cli.analyse import analyse
from fedspan.cli.bytes import bytes_
from fedspan.cli.capacity import capacity
from fedspan.cli.compare import compare
from fedspan.cli.console import fail, note
from fedspan.cli.data import data, partition
from fedspan.cli.demo import demo
from fedspan.cli.deploy import deploy
from fedspan.cli.diagnose import diagnose
from fedspan.cli.doctor import doctor
from fedspan.cli.export import export
from fedspan.cli.methods import methods
from fedspan.cli.onboard import onboard
from fedspan.cli.report import report
from fedspan.cli.reproduce import reproduce
from fedspan.cli.run import run
from fedspan.cli.sweep import sweep
from fedspan.cli.targets import targets
from fedspan.cli.theory import theory
from fedspan.cli.watch import watch
from fedspan.errors import FedspanError
from fedspan.storage.malloc import keep_heap

FAULT, STOPPED = 2, 130


class CommandGroup(TyperGroup):
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
    cls=CommandGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Personalised federated learning with low-rank structure: simulate, compare, deploy.",
)
for command in (
    demo,
    diagnose,
    run,
    compare,
    sweep,
    reproduce,
    report,
    watch,
    targets,
    methods,
    data,
    partition,
    doctor,
):
    app.command()(command)
for another in (export, onboard, capacity, theory):
    app.command()(another)
app.command("bytes")(bytes_)
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
