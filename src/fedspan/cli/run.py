"""`fedspan run`: one experiment."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from fedspan.cli.console import directory, note, say, size

Experiment = Annotated[Path, typer.Argument(metavar="EXP.toml", help="The experiment file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[section.key=value]...", help="Values that replace those of the file.", show_default=False),
]
Out = Annotated[Path | None, typer.Option("--out", help="Directory to write to.", show_default=False)]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start over instead of resuming.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
Cluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="auto|HOST:PORT",
        help="Compute on the Ray cluster of this machine (auto), or of this head. Needs fedspan[ray].",
        show_default=False,
    ),
]


def run(
    exp: Experiment,
    overrides: Overrides = None,
    out: Out = None,
    fresh: Fresh = False,
    quiet: Quiet = False,
    cluster: Cluster = None,
) -> None:
    """Run one experiment; a run that was interrupted goes on where it was. Default directory: runs/NAME-SEED."""
    from fedspan.cli.running import data_changed, execute, finished
    from fedspan.config import load_config

    config = load_config(exp, overrides or [])
    name = config.method["name"]
    say_dropped(name, config.fields_of(name)[1])
    config = config.resolve()
    where = directory(out, config.name, str(config.seed))
    if not fresh and finished(where, config) is not None:
        usual = f"{where} is finished already. --fresh starts over; more rounds (rounds=N) continue it."
        note(data_changed(where, config) or usual)
    else:
        with _joined(cluster):  # before anything is read: an address nobody answers at is said at once
            execute(config, where, fresh=fresh, quiet=quiet, cluster=cluster)
    say(outcome(json.loads((where / "result.json").read_text(encoding="utf-8"))))
    say(f"Results: {where}")


def _joined(cluster: str | None) -> AbstractContextManager[None]:
    """A place in a cluster, if one is asked for."""
    if cluster is None:
        return nullcontext()
    from fedspan.simulation.cluster.ray_connection import joined

    return joined(cluster)


def say_dropped(name: str, dropped: list[str]) -> None:
    """Tell which shared keys a method does without."""
    if dropped:
        note(f"{name}: has no {', '.join(dropped)}; left out, as another method of the file has it.")


def outcome(result: dict[str, Any]) -> str:
    """A finished run in one line."""
    found, sent = result["accuracy"], result["bytes"]
    if found:
        first = f"accuracy {100 * found['mean']:.2f} % (worst tenth {100 * found['p10']:.2f} %)"
    else:
        first = ", ".join(f"{k} {v['mean']:.4g}" for k, v in result["measures"].items())
    seconds = sum(result["seconds"].values())
    return (
        f"{result['method']}, {result['rounds']} rounds, seed {result['seed']}: {first};"
        f" {size(sent['up'])} up, {size(sent['down'] + sent['announce'])} down; {seconds:.1f} s"
    )
