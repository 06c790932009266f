"""`fedspan data` and `fedspan partition`: what there is, how to get it, and a look at a split before training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from fedspan.cli.console import out, say, show, size, table, user_path
from fedspan.errors import ConfigError

Root = Annotated[str | None, typer.Option("--root", help="Where data sets lie; default $FEDSPAN_DATA.")]
Exp = Annotated[str | None, typer.Argument(metavar="[EXP.toml]", help="An experiment file.", show_default=False)]
More = Annotated[list[str] | None, typer.Argument(metavar="[section.key=value]...", help="Values to replace.")]
Source = Annotated[str | None, typer.Option("--source", help="A source instead of a file, see `fedspan data`.")]
Kind = Annotated[str | None, typer.Option("--kind", help="Kind of partition, e.g. dirichlet.")]
Clients = Annotated[int | None, typer.Option("--clients", help="Number of clients.")]
Png = Annotated[Path | None, typer.Option("--png", help="Also draw it to a file (.png, .pdf, .svg).")]
Rows = Annotated[int, typer.Option("--rows", help="Rows of the table.", min=0)]


data = typer.Typer(help="List the sources of data and which of them are found on this machine; `get` gets one.")


@data.callback(invoke_without_command=True)
def sources(ctx: typer.Context, root: Root = None) -> None:
    """List the sources of data and which of them are found on this machine; `get` gets one."""
    if ctx.invoked_subcommand is not None:
        return
    from fedspan.data import PARTITIONS, SOURCES

    rows = [(name, found(name, root), about) for name, about in SOURCES.items()]
    show(table(["source", "found", "what it is"], rows))
    base = root or os.environ.get("FEDSPAN_DATA")
    say(f"Looked under {base}." if base else "No folder to look in: set $FEDSPAN_DATA or data.root.")
    say("`fedspan data get NAME` gets one that is not there.")
    parts = [(k, ", ".join(f"{o}={v}" for o, v in p.options.items()), p.description) for k, p in PARTITIONS.items()]
    show(table(["partition", "options", "what it does"], parts))


@data.command()
def get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A data set of `fedspan data`.", show_default=False)],
    mirror: Annotated[
        str | None, typer.Option("--mirror", help="A folder that holds it, instead of the Hugging Face hub.")
    ] = None,
    root: Annotated[str | None, typer.Option("--root", help="Where to put it; default $FEDSPAN_DATA.")] = None,
) -> None:
    """Get a known data set, once, from the Hugging Face hub or a local mirror, and put it where runs look for it."""
    from fedspan.data.sources.fetch import data_root, fetch

    if name != "digits":
        say(f"{name} goes to {data_root(root) / name}, from {mirror or 'the Hugging Face hub'}.")
    made = fetch(name, root, mirror)
    if not made.files:
        say(f"{name} comes from {made.origin}.")
        return
    total = sum((made.place / f).stat().st_size for f in made.files)
    say(f"{made.place}: {', '.join(made.files)} ({size(total)}), from {made.origin}.")
    say(f"Use it with data.source={name} and FEDSPAN_DATA={made.place.parent}.")


def found(name: str, root: str | None) -> str:
    """`yes` with the place, `no`, or nothing for sources that are not known by name."""
    from fedspan.data.formats.arrays import find_idx
    from fedspan.data.formats.leaf import find as find_leaf
    from fedspan.data.formats.matlab import find_svhn
    from fedspan.data.sources.catalog import KNOWN

    if name == "digits":
        return "yes (bundled)"
    if name not in KNOWN:
        return ""
    base = root or os.environ.get("FEDSPAN_DATA")
    places = [Path(base).expanduser() / name] if base else []
    for place in [*places, *(Path(p) for p in KNOWN[name].folders)]:
        held = any(place.glob("train*.parquet")) or find_idx(place) or (KNOWN[name].mat and find_svhn(place))
        held = held or (KNOWN[name].leaf and find_leaf(place)[0])
        if place.is_dir() and held:
            return f"yes ({place})"
    return "no"


def partition(
    exp: Exp = None,
    overrides: More = None,
    source: Source = None,
    kind: Kind = None,
    clients: Clients = None,
    png: Png = None,
    rows: Rows = 20,
) -> None:
    """Show who would hold what: of an experiment file, or of --source, --kind and --clients."""
    from fedspan.config import assemble_data, from_dict, load_config
    from fedspan.data import describe, figure, text_picture

    if png is not None:
        user_path(png, "--png")
    more = list(overrides or [])
    if exp is not None and "=" in exp and not Path(exp).exists():
        more, exp = [exp, *more], None
    given = {"data.source": source, "partition.kind": kind, "partition.clients": clients}
    more = [f"{k}={v}" for k, v in given.items() if v is not None] + more
    if exp is None and source is None and kind is None:
        raise ConfigError("partition: give an experiment file, or --source and --kind.")
    config = load_config(exp, more) if exp is not None else from_dict({}, more, name="partition")
    made = assemble_data(config)
    width = min(100, max(60, out.width)) if out.is_terminal else 80
    say(text_picture(made, width))
    table_rows = describe(made)
    titles = ["client", "group", "train", "validation", "test", "classes", "entropy"]
    keys = ["name", "group", "n_train", "n_val", "n_test", "classes", "entropy"]
    cells = [[f"{r[k]:.2f}" if isinstance(r[k], float) else r[k] for k in keys] for r in table_rows[:rows]]
    if rows:
        show(table(titles, cells, right=range(1, 7)))
    if len(table_rows) > rows > 0:
        say(f"({rows} of {len(table_rows)} clients; --rows N shows more)")
    if png is not None:
        say(f"Figure: {figure(made, png)}")
