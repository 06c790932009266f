"""`fedspan methods`: what there is, what it shares and what it sends."""

from __future__ import annotations

import inspect
import json
from typing import Annotated

import typer

from fedspan.cli.console import say, show, table

Json = Annotated[bool, typer.Option("--json", help="A JSON list instead of a table.")]
Name = Annotated[str | None, typer.Argument(metavar="[NAME]", help="One method in full.", show_default=False)]


def methods(name: Name = None, as_json: Json = False) -> None:
    """List the methods: what stays private, what the server sees, and whether a secure sum would do."""
    from fedspan.cli.probe import facts
    from fedspan.errors import ConfigError, nearest
    from fedspan.methods import METHODS

    if name is not None and name not in METHODS:
        raise ConfigError(f"Method: unknown method '{name[:60]}'.{nearest(name[:60], METHODS)}")
    found = [facts(n) for n in ([name] if name else METHODS)]
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    if name is not None:
        say(inspect.getdoc(METHODS[name]) or "")
        pairs = {k: v for k, v in found[0].items() if k != "fields"}
        show(table(["", ""], [(k, ", ".join(v) if isinstance(v, list) else v) for k, v in pairs.items()]))
        show(table(["field", "default"], found[0]["fields"].items()))
        return
    titles = ["method", "paper", "private", "down", "up as mean", "up each", "secure sum", "devices differ"]
    keys = ["name", "paper", "private", "shared", "sent_mean", "sent_each", "secure_aggregation", "heterogeneous"]
    show(table(titles, [[", ".join(f[k]) if isinstance(f[k], list) else f[k] for k in keys] for f in found]))
    say("up as mean: the server needs only a weighted mean. up each: it sees every client's own copy.")
    say("fedspan methods NAME shows one method with its fields; --json gives everything.")
