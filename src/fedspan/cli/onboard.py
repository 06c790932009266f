"""`fedspan onboard`: a client that was never trained joins a finished run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedspan.cli.console import say, show, size, table, user_path
from fedspan.cli.running import open_run
from fedspan.errors import ConfigError, FedspanError

if TYPE_CHECKING:
    from fedspan.config import RunConfig
    from fedspan.simulation.onboarding import Onboarded
    from fedspan.simulation.simulator import Simulation

RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.", show_default=False)]
Data = Annotated[
    Path,
    typer.Option("--data", help="npz with x, y, perhaps x_test, y_test (pictures as bytes or in 0..1), or a table."),
]
Name = Annotated[str, typer.Option("--client-name", help="What to call the client.")]
Out = Annotated[Path | None, typer.Option("--out", help="Write the personal model (.safetensors).")]
Beside = Annotated[
    Path | None, typer.Option("--beside", help="A run to compare with; default: one beside it with one model for all.")
]
Json = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]


def onboard(
    run: RunPath, data: Data, name: Name = "new", out: Out = None, beside: Beside = None, as_json: Json = False
) -> None:
    """Let a client that was never trained join a run: it downloads once, fits at home, and sends nothing.

    Without x_test and y_test, a quarter of x is kept for testing. x is prepared as the run's source was.
    """
    from fedspan.config.client_file import read_own, read_own_table
    from fedspan.simulation import onboarding as joining

    if out is not None:
        _check_out(out)
    config, simulation = open_run(run, "onboard")
    if simulation.data.preprocessing is not None:
        made = read_own_table(data, config, simulation.data.preprocessing)
        train, test = made.train[0], made.test[0]
        parts = (made.x[train], made.y[train], *((made.x[test], made.y[test]) if len(test) else ()))
        prepared = (
            f"a table, prepared as the run's: {len(made.preprocessing.names) if made.preprocessing else 0} inputs"
        )
    else:
        source, prepared = read_own(data, config, simulation.data.classes, compare=True)
        x, y, held = source.x, source.y, len(source.test_rows)
        end = len(x) - held
        parts = (x[:end], y[:end], *((x[end:], y[end:]) if held else ()))
    new = joining.onboard(simulation, *parts, name=name)
    alone = joining.train_alone(simulation, new)
    other = _join_beside(beside, run, config, new)
    found = _facts(new, prepared)
    found["beside"] = {"alone": {**alone.measures, "lr": alone.lr, "epochs": alone.epochs, "seconds": alone.seconds}}
    if other is not None:
        found["beside"][other.method] = {**other.measures, "visits": other.visits, "seconds": other.seconds}
    if out is not None:
        _export(new, out, config, simulation)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    names = [m.name for m in simulation.engine.gathered]
    rows = [(f"{new.method} (joined)", _how(new), *_cells(new.measures, names, new.seconds))]
    how = f"{alone.epochs} epochs, lr {alone.lr:g} by validation"
    rows.append(("trained alone", how, *_cells(alone.measures, names, alone.seconds)))
    if other is not None:
        rows.append((f"{other.method} (joined)", _how(other), *_cells(other.measures, names, other.seconds)))
    say(f"{name} joins {run.name} after round {new.round}: {found['train']} training, {found['test']} test examples.")
    say(f"x: {prepared}.")
    titles = ["", "how", "accuracy %", "loss", *names, "seconds"]
    show(table(titles, rows, right=range(2, len(titles))))
    say(f"Sent: 0 bytes up, {size(new.bytes_down)} down (once).{_others(run)}")
    if out is not None:
        say(f"Model: {out}")


def _join_beside(given: Path | None, run: Path, config: RunConfig, new: Onboarded) -> Onboarded | None:
    """Let the newcomer join another run: the one named, or one that `compare` put beside, with one model for all.

    What merely lies there may be broken, of something else, or of a method without a place for newcomers.
    """
    from fedspan.config import load_config
    from fedspan.simulation import onboarding as joining

    if given is not None:
        return joining.onboard(open_run(given, "onboard --beside")[1], *new.examples)
    here = run.resolve()
    for folder in sorted(here.parent.glob(f"*-{config.seed}")):
        with suppress(FedspanError, OSError):
            other = load_config(folder / "config.toml")
            same = all(getattr(other, k) == getattr(config, k) for k in ("data", "partition", "model", "seed"))
            if folder == here or not same:
                continue
            simulation = open_run(folder, "onboard")[1]
            if joining.is_one_model(simulation):
                return joining.onboard(simulation, *new.examples)
    return None


def _facts(new: Onboarded, prepared: str) -> dict[str, Any]:
    return {
        **{k: getattr(new, k) for k in ("name", "method", "round", "accuracy", "measures", "visits", "seconds")},
        "train": len(new.data.train[0]),
        "test": len(new.data.test[0]),
        "bytes": {"up": new.bytes_up, "down": new.bytes_down},
        "v": None if new.v is None else new.v.tolist(),
        "prepared": prepared,
    }


def _cells(measures: dict[str, float], metrics: Sequence[str], seconds: float) -> list[str]:
    accuracy = measures.get("accuracy")
    rest = ["n/a" if (v := measures.get(name)) is None else f"{v:.4f}" for name in ("loss", *metrics)]
    return ["n/a" if accuracy is None else f"{100 * accuracy:.2f}", *rest, f"{seconds:.2f}"]


def _how(new: Onboarded) -> str:
    if new.v is not None:
        return f"v solved, {len(new.v)} numbers"
    return f"private part trained in {new.visits} visits" if new.visits else "the shared model as it is"


def _others(run: Path) -> str:
    """How the run's own clients do, for comparison, if the run says so."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        mean = json.loads((run / "result.json").read_text(encoding="utf-8"))["accuracy"]["mean"]
        return f" The run's own clients reach {100 * float(mean):.2f} % on average."
    return ""


def _check_out(out: Path) -> None:
    user_path(out, "onboard: --out")
    if out.suffix != ".safetensors":
        raise ConfigError(f"onboard: --out must end in .safetensors. Got {out.name!r}.")
    if not out.resolve().parent.is_dir():
        raise ConfigError(f"onboard: the folder {out.parent} must exist. Make it first.")


def _export(new: Onboarded, out: Path, config: RunConfig, simulation: Simulation) -> None:
    """The same layout as `fedspan export` writes."""
    from fedspan.config.personal_model import write_personal

    data = simulation.data
    write_personal(
        out,
        config,
        new.weights,
        new.task.init().keys(),
        client="new",
        name=new.name,
        round=new.round,
        shape=data.x.shape[1:],
        classes=data.classes,
    )
