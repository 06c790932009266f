"""The command line: `fedspan COMMAND ...`. Errors are one line; tracebacks only with FEDSPAN_DEBUG=1."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fedspan import __version__
from fedspan.cli.analyse import analyse
from fedspan.cli.attack import attack
from fedspan.cli.bytes import bytes_
from fedspan.cli.capacity import capacity
from fedspan.cli.claims import claims
from fedspan.cli.code import with_code
from fedspan.cli.compare import compare
from fedspan.cli.console import fail, note
from fedspan.cli.data import data, partition
from fedspan.cli.demo import demo
from fedspan.cli.diagnose import diagnose
from fedspan.cli.doctor import doctor
from fedspan.cli.export import export
from fedspan.cli.interrupts import one_interrupt
from fedspan.cli.members import deploy
from fedspan.cli.methods import methods
from fedspan.cli.new import new
from fedspan.cli.onboard import onboard
from fedspan.cli.report import report
from fedspan.cli.reproduce import reproduce
from fedspan.cli.run import run
from fedspan.cli.sweep import sweep
from fedspan.cli.targets import targets
from fedspan.cli.theory import theory
from fedspan.cli.tune import tune
from fedspan.cli.watch import watch
from fedspan.errors import FedspanError
from fedspan.storage.malloc import keep_freed_memory

FAULT, STOPPED = 2, 130
NAMES_NO_CODE = {"keys", "server", "status", "stop", "proxy", "predict", "export"}
NAMES_NO_CODE |= {"request", "admit", "renew", "revoke", "audit"}
"""Commands of `deploy` that assemble nothing, or on a node, where its own settings decide."""

SERVES_OTHERS = {"node"}
"""Commands that work on somebody else's text: what the user's settings allow to own experiments does not go there."""


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
# Those that assemble an experiment can be told whose code it may name.
for command in (
    demo,
    with_code(diagnose),
    with_code(run),
    with_code(compare),
    with_code(sweep),
    with_code(tune),
    reproduce,
    with_code(report),
):
    app.command()(command)
for command in (watch, targets, methods, with_code(partition), doctor):
    app.command()(command)
for command in (with_code(export), with_code(onboard), with_code(capacity), theory, with_code(attack)):
    app.command()(command)
app.command("bytes")(with_code(bytes_))
for entry in [*analyse.registered_commands, *deploy.registered_commands]:
    if entry.callback is not None and entry.callback.__name__ not in NAMES_NO_CODE:
        entry.callback = with_code(entry.callback, settings=entry.callback.__name__ not in SERVES_OTHERS)
app.add_typer(analyse, name="analyse")
app.add_typer(claims, name="claims")
app.add_typer(data, name="data")
app.add_typer(deploy, name="deploy")
app.add_typer(new, name="new")


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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Windows writes to files and pipes in an old code page, which has no θ.
            stream.reconfigure(errors="replace")
    keep_freed_memory()  # the process is ours alone; CFL's server step on 100 clients took half its time in page faults
    with one_interrupt():
        app()


if __name__ == "__main__":
    main()
