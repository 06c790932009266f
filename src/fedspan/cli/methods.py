"""`fedspan methods`: what there is, what it shares and what it sends."""

from __future__ import annotations

import inspect
import json
from typing import Annotated, Any

import typer

from fedspan.cli.console import say, show, table

Json = Annotated[bool, typer.Option("--json", help="A JSON list instead of a table.")]
Name = Annotated[str | None, typer.Argument(metavar="[NAME]", help="One method in full.", show_default=False)]


Markdown = Annotated[bool, typer.Option("--markdown", help="The page docs/methods.md.")]


def methods(name: Name = None, as_json: Json = False, as_markdown: Markdown = False) -> None:
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
    if as_markdown:
        typer.echo(page(found))
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


def page(found: list[dict[str, Any]]) -> str:
    """All methods as one Markdown page, from what they declare, send and say of themselves."""
    from fedspan.cli.probe import published, traffic
    from fedspan.methods import METHODS
    from fedspan.methods.equivalences import of

    def words(value: Any) -> str:
        return ", ".join(value) if isinstance(value, list) else str(value)

    lines = [
        "# Methods",
        "",
        "Written by `make docs` from the methods themselves; what is kept and sent was measured. Bytes are those of",
        "one client in its first round, down and up, with default fields and a perceptron of 64-32-10 (2,410",
        "parameters; FedAvg: 9,640 each way). Limiting cases are tested to 1e-12, see",
        "[equivalences](equivalences.md); published tables are those that `fedspan reproduce` runs the method in,",
        "beside the printed figures.",
        "",
        "| method | paper | equations | file | kept | down | up as mean | up each | secure sum | bytes down / up |"
        " limiting cases tested | published tables |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    keys = ("name", "paper", "equations", "file", "private", "shared", "sent_mean", "sent_each", "secure_aggregation")
    for f in found:
        down, up = traffic(f["name"])
        cases = "; ".join(line.words for line in of(f["name"]))
        more = [f"{down:,} / {up:,}", cases, words(published(f["name"]))]
        lines.append("| " + " | ".join([*(words(f[k]) for k in keys), *more]) + " |")
    for f in found:
        lines += [
            "",
            f"## {f['name']}",
            "",
            inspect.getdoc(METHODS[f["name"]]) or "",
            "",
            "| field | default |",
            "|---|---|",
        ]
        lines += [f"| `{k}` | `{v}` |" for k, v in f["fields"].items()]
    return "\n".join(lines)
