"""`fedspan methods`: what there is, what it shares and what it sends."""

from __future__ import annotations

import inspect
import json
from typing import Annotated, Any

import typer

from fedspan.cli.console import say, show, table

Json = Annotated[bool, typer.Option("--json", help="A JSON list instead of a table.")]
Name = Annotated[str | None, typer.Argument(metavar="[NAME]", help="One method in full.", show_default=False)]


UNSAID = "not said by the method"


def methods(name: Name = None, as_json: Json = False) -> None:
    """List the methods: what stays private, what the server receives, and what it can compute from that."""
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
        f = found[0]
        pairs = {k: v for k, v in f.items() if k not in ("fields", "received", "discloses")}
        show(table(["", ""], [(k, ", ".join(v) if isinstance(v, list) else v) for k, v in pairs.items()]))
        say("What the server receives from a client, here with a perceptron of 4-8-2, besides its weight:")
        show(table(["part", "shape"], [(k, "×".join(map(str, v)) or "1") for k, v in f["received"].items()]))
        say(f"What it can compute from that, with default fields: {computed(f)}.")
        show(table(["field", "default"], f["fields"].items()))
        return
    titles = [
        "method",
        "paper",
        "private",
        "down",
        "up as mean",
        "up each",
        "secure sum",
        "devices differ",
        "disclosed",
    ]
    keys = ["name", "paper", "private", "shared", "sent_mean", "sent_each", "secure_aggregation", "heterogeneous"]
    rows = [[", ".join(f[k]) if isinstance(f[k], list) else f[k] for k in keys] for f in found]
    show(table(titles, [[*row, computed(f, "keywords")] for row, f in zip(rows, found, strict=True)]))
    say("up as mean: the server needs only a weighted mean. up each: it sees every client's own copy.")
    say("disclosed: what the server can compute from an upload, as attacks found it; there is no secure sum yet.")
    say("fedspan methods NAME shows one method with its fields; --json gives everything.")


def computed(facts: dict[str, Any], how: str = "words") -> str:
    """What the server can compute, of the facts about a method."""
    said = facts["discloses"]
    return UNSAID if said is None else ("; " if how == "words" else ", ").join(said[how]) or "nothing"
