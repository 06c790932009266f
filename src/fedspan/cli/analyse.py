"""`fedspan analyse`: a closer look at what a run has learnt."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedspan.cli.console import Picture, note, say, show, table, user_path
from fedspan.cli.onboard import RunPath
from fedspan.cli.running import open_run
from fedspan.errors import ConfigError
from fedspan.storage.atomic import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedspan.report.matching_panel import Found, Matching
    from fedspan.report.subspace_panel import Coordinates, Structure
    from fedspan.simulation.simulator import Simulation
    from fedspan.studies.theory.outcome import Outcome


_CLIENTS = 40  # lines of a table


Out = Annotated[Path | None, typer.Option("--out", help="Folder for subspace.json and figures; default RUN-subspace.")]
MatchOut = Annotated[
    Path | None, typer.Option("--out", help="Folder for matching.json, figures; default RUN-matching.")
]
Clusters = Annotated[int | None, typer.Option("--clusters", help="k of k-means; default: the true groups.", min=1)]
Refresh = Annotated[bool, typer.Option("--refresh", help="First let every client solve for its v again.")]
Kinds = Annotated[list[Picture] | None, typer.Option("--format", help="png (default), svg, pdf; may be repeated.")]

Source = Annotated[str, typer.Option("--source", help="Where samples come from, see `fedspan data`.")]
Root = Annotated[str | None, typer.Option("--root", help="Where data sets lie; default $FEDSPAN_DATA.")]
Pixels = Annotated[int | None, typer.Option("--size", help="Shrink pictures to this many pixels a side.", min=1)]
Model = Annotated[str, typer.Option("--model", help="A model by name.")]
Hidden = Annotated[int, typer.Option("--hidden", help="Hidden units of an mlp; below 2,000 parameters H is exact.")]
Few = Annotated[int, typer.Option("--few", help="Samples of the small set.")]
Many = Annotated[int, typer.Option("--many", help="Samples of the large set.")]
TrainEpochs = Annotated[int, typer.Option("--epochs", help="Epochs of training.")]
Every = Annotated[int, typer.Option("--every", help="Look at the Hessian every so many epochs.")]
Seeds = Annotated[int, typer.Option("--seeds", help="How many seeds.")]
Lr = Annotated[float, typer.Option("--lr", help="Step size of SGD, minibatches of 32.")]
Samples = Annotated[int, typer.Option("--samples", help="Random vectors for the Frobenius norm where H is not exact.")]
HessianOut = Annotated[Path | None, typer.Option("--out", help="Folder to write to; default runs/hessian-rank.")]
UpdateOut = Annotated[Path | None, typer.Option("--out", help="Folder to write to; default RUN-update-rank.")]

analyse = typer.Typer(no_args_is_help=True, help="A closer look at what a run has learnt.")


@analyse.callback()
def _analyse() -> None:
    """A closer look at what a run has learnt."""


@analyse.command()
def subspace(
    run: RunPath, out: Out = None, clusters: Clusters = None, refresh: Refresh = False, kinds: Kinds = None
) -> None:
    """Where the clients of a pfl-mf run lie in the shared subspace, whether they form groups, and its spectrum."""
    from fedspan.report import subspace_panel as look
    from fedspan.report.runs import load_run

    where = _beside(run, out, "subspace")
    loaded = load_run(run)
    if not look.is_subspace(loaded):
        raise ConfigError(f"analyse subspace: the run must be of pfl-mf. Got one of {loaded.method}.")
    of = refreshed(open_run(run, "analyse")[1]) if refresh else look.coordinates(loaded)
    found, over = look.structure(of, clusters), look.norms(loaded.lines)
    show(table(["", ""], _rows(of, found, over)))
    say(look.sentence(of, found))
    if of.untrained:
        note("--refresh lets clients that never took part solve for their v first.")
    where.mkdir(parents=True, exist_ok=True)
    _write(where / "subspace.json", facts(of, found, over, loaded.result["names"]))
    figures = {
        "embedding": lambda: look.embedding_figure(of, found),
        "singular_values": lambda: look.spectrum_figure(found),
        "norms": lambda: look.norms_figure(over),
    }
    _draw(figures, where, kinds)
    say(f"Figures and subspace.json: {where}")


@analyse.command()
def matching(run: RunPath, out: MatchOut = None, kinds: Kinds = None) -> None:
    """Who was matched with whom in a factorized-fl run, how alike the clients are, and whether groups are found."""
    from fedspan.report import matching_panel as look
    from fedspan.report.measures import monitored
    from fedspan.report.runs import load_run

    where = _beside(run, out, "matching")
    loaded = load_run(run)
    of = look.matching(loaded)
    found, kept = look.found_in(of), look.history(loaded.lines, len(of.names))
    over = monitored(loaded.lines)
    titles, rows = _partners(of, found)
    show(table(titles, rows[:_CLIENTS], right=(2,)))
    if len(rows) > _CLIENTS:
        say(f"({_CLIENTS} of {len(rows)} clients; matching.json holds all)")
    say(look.sentence(of, found))
    where.mkdir(parents=True, exist_ok=True)
    _write(where / "matching.json", look.facts(of, found, loaded.lines))
    figures: dict[str, Callable[[], Figure]] = {"matching": lambda: look.matching_figure(of)}
    if kept:
        figures["likeness_over_rounds"] = lambda: look.history_figure(of, kept)
    if over:
        figures["monitor"] = lambda: look.curves_figure(over)
    _draw(figures, where, kinds)
    say(f"Figures and matching.json: {where}")


@analyse.command("hessian-rank")
def hessian_rank(
    source: Source = "digits",
    root: Root = None,
    size: Pixels = None,
    model: Model = "mlp",
    hidden: Hidden = 10,
    few: Few = 50,
    many: Many = 500,
    epochs: TrainEpochs = 40,
    every: Every = 5,
    seeds: Seeds = 5,
    lr: Lr = 0.1,
    samples: Samples = 30,
    out: HessianOut = None,
    kinds: Kinds = None,
) -> None:
    """The stable rank of the loss's Hessian for models trained on few and on many samples, also at equal steps."""
    from fedspan.studies.theory.hessian_rank import Plan, run

    where = user_path(out or Path("runs") / "hessian-rank", "--out")
    plan = Plan(
        source=source, root=root, size=size, model=model, hidden=hidden, few=few, many=many, epochs=epochs,
        every=every, seeds=seeds, lr=lr, samples=samples,
    )  # fmt: skip
    _conclude(run(plan, say=note), where, "hessian_rank", kinds)


@analyse.command("update-rank")
def update_rank(run: RunPath, out: UpdateOut = None, kinds: Kinds = None) -> None:
    """The rank of what a run of fedloru (or its kin) has added to each weight, round by round; replays the run."""
    from fedspan.studies.theory import update_rank as look

    where = _beside(run, out, "update-rank")
    _conclude(look.run(open_run(run, "analyse")[1]), where, "update_rank", kinds)


def _conclude(outcome: Outcome, where: Path, name: str, kinds: list[Picture] | None) -> None:
    """The table and the sentence of a check, its numbers and its figure."""
    show(table(outcome.titles, outcome.rows, right=range(1, len(outcome.titles))))
    say(outcome.says)
    where.mkdir(parents=True, exist_ok=True)
    _write(where / f"{name}.json", outcome.numbers)
    _draw({name: outcome.draw}, where, kinds)
    say(f"Figure and {name}.json: {where}")


def _partners(of: Matching, found: Found) -> tuple[list[str], list[list[str]]]:
    """A line per client: its group, how many others it received from, and the most frequent of them."""
    rows = []
    for k in of.order:
        often = ", ".join(f"{of.names[i]} ({of.matched[k, i]:.0f})" for i in found.partners[k])
        group = "n/a" if of.groups is None else str(of.groups[k])
        others = int((of.matched[k] > 0).sum()) - int(of.matched[k, k] > 0)
        rows.append([of.names[k], group, str(others), often or "nobody"])
    return ["client", "group", "received from", "most often from (times)"], rows


def _beside(run: Path, out: Path | None, what: str) -> Path:
    """The folder for what is found: as asked for, or beside the run."""
    base = run if run.name not in ("", "..") else run.resolve()
    return user_path(out or base.with_name(f"{base.name}-{what}"), "--out")


def _draw(figures: Mapping[str, Callable[[], Figure]], where: Path, kinds: list[Picture] | None) -> None:
    from fedspan.report.canvas import save

    for name, draw in figures.items():
        for kind in dict.fromkeys(kinds or [Picture.png]):
            save(draw, where / f"{name}.{kind.value}")


def refreshed(simulation: Simulation) -> Coordinates:
    """The coordinates after every client has solved for its v on the final U; the run itself is not changed."""
    import numpy as np
    import torch

    from fedspan import tree
    from fedspan.methods.pfl_mf import InSubspace
    from fedspan.report.subspace_panel import Coordinates

    method, record, data = simulation.method, simulation.record, simulation.data
    assert isinstance(method, InSubspace)
    engine, task = simulation.engine, simulation.task
    names, t = method.factorised(task), record.progress.round
    Q = torch.linalg.qr(record.server["U"].double()).Q
    down = dict(method.download(record.server, torch.tensor([0]), None, t).shared)
    rows = []
    for i in range(data.clients):
        visit = engine.visit(None, t, i, method.onboard_plan(task), record.common)
        weights = tree.detach(method.refit(task, record.row(i), down, visit))
        rows.append(Q.T @ tree.ravel(tree.select(weights, names)).double())  # Qᵀ θ_i = R_U v_i
    groups = None if data.groups is None else data.groups.numpy().astype(np.int64)
    return Coordinates(torch.stack(rows).numpy(), groups, t, refreshed=True)


def _rows(of: Coordinates, found: Structure, over: dict[str, list[float]]) -> list[tuple[str, str]]:
    groups = "not known" if of.groups is None else str(len(set(of.groups.tolist())))
    values = ", ".join(f"{v:.3g}" for v in found.singular_values[:8])
    rows = [
        ("after round", str(of.round)),
        ("coefficients", "solved again for every client" if of.refreshed else "as the clients hold them"),
        ("clients, rank, true groups", f"{len(of.points)}, {of.points.shape[1]}, {groups}"),
        ("clusters (k-means)", str(found.k)),
        ("silhouette", "n/a" if found.silhouette is None else f"{found.silhouette:.3f}"),
        ("adjusted Rand index", "n/a" if found.rand_index is None else f"{found.rand_index:.3f}"),
        ("variance in the plane", f"{sum(found.shares):.1%}"),
        ("singular values of [θ_i]", values + (", …" if len(found.singular_values) > 8 else "")),
        ("effective rank", f"{found.effective_rank:.2f}"),
    ]
    for name, what in (("U_norm", "norm of U"), ("U_condition", "condition of U")):
        if over[name]:
            first, last = (f"{v:.3g} (round {r:.0f})" for v, r in ((over[name][k], over["round"][k]) for k in (0, -1)))
            rows.append((what, f"{first} → {last}"))
    return rows


def facts(of: Coordinates, found: Structure, over: dict[str, list[float]], names: list[str]) -> dict[str, Any]:
    """What `subspace.json` holds."""
    return {
        "round": of.round,
        "refreshed": of.refreshed,
        "untrained": of.untrained,
        "k": found.k,
        "silhouette": found.silhouette,
        "adjusted_rand_index": found.rand_index,
        "variance_shares": list(found.shares),
        "singular_values": found.singular_values.tolist(),
        "effective_rank": found.effective_rank,
        "monitor": over,
        "clients": {
            "name": names,
            "group": None if of.groups is None else of.groups.tolist(),
            "cluster": found.clusters.tolist(),
            "plane": found.plane.tolist(),
            "coordinates": of.points.tolist(),
        },
    }


def _write(path: Path, values: dict[str, Any]) -> None:
    write_whole(path, json.dumps(values, indent=1, allow_nan=False) + "\n")
