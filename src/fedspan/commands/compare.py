"""`fedspan compare`: several methods on the same data, seed by seed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedspan.commands.console import child, directory
from fedspan.commands.run import Experiment, Fresh, Out, Overrides, Quiet, say_dropped
from fedspan.errors import ConfigError

if TYPE_CHECKING:
    from fedspan.config import RunConfig

Methods = Annotated[str, typer.Option("--methods", "-m", help="Names with commas; default: those of [methods].")]
Seeds = Annotated[int, typer.Option("--seeds", help="How many seeds, counted from the file's.", min=1, max=1000)]


def compare(
    exp: Experiment,
    overrides: Overrides = None,
    methods: Methods = "",
    seeds: Seeds = 1,
    out: Out = None,
    fresh: Fresh = False,
    quiet: Quiet = False,
) -> None:
    """Run several methods on the same data; one directory per method and seed, finished ones are not repeated."""
    from fedspan.commands.running import run_all
    from fedspan.config import load_config

    config = load_config(exp, overrides or [])
    names = [m.strip() for m in methods.split(",") if m.strip()] or list(config.methods)
    if not names:
        raise ConfigError("compare: name methods with --methods a,b,c, or give the file [methods.NAME] sections.")
    where = directory(out, config.name)
    jobs = plan(config, names, seeds, where)
    run_all(jobs, config.name, where / "report.html", fresh=fresh, quiet=quiet)


def plan(config: RunConfig, names: list[str], seeds: int, where: Path) -> list[tuple[str, RunConfig, Path]]:
    """The runs of a comparison, all of them checked before the first one starts."""
    names = list(dict.fromkeys(names))
    for name in names:
        say_dropped(name, config.fields_of(name, names)[1])
    return [
        (f"{name}-{seed}", config.resolve(name, names, seed), child(where, f"{name}-{seed}"))
        for seed in range(config.seed, config.seed + seeds)
        for name in names
    ]
