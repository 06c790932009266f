"""`fedspan compare`: several methods on the same data, seed by seed; or finished runs, side by side."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedspan.cli.console import Picture, child, directory, listed, note, say, show, table, user_path
from fedspan.cli.report import finished_runs
from fedspan.cli.run import Fresh, Out, Quiet, say_dropped
from fedspan.cli.sweep import folder
from fedspan.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedspan.config import RunConfig
    from fedspan.report.runs import Run


What = Annotated[
    Path, typer.Argument(metavar="EXP.toml|RUN", help="An experiment file, or finished runs.", show_default=False)
]
More = Annotated[
    list[str] | None,
    typer.Argument(metavar="[section.key=value|RUN]...", help="Values to replace, or more runs.", show_default=False),
]
Methods = Annotated[str, typer.Option("--methods", "-m", help="Names with commas; default: those of [methods].")]
Seeds = Annotated[int, typer.Option("--seeds", help="How many seeds, counted from the file's.", min=1, max=1000)]
Aim = Annotated[
    float | None,
    typer.Option("--target", help="Runs: the accuracy (0 to 1) or error to reach; default near the best."),
]
Against = Annotated[str, typer.Option("--against", help="Runs: compare client by client with this row; default best.")]
Pictures = Annotated[
    list[Picture] | None, typer.Option("--format", help="Runs: figures in --out; default pdf and png.")
]


def compare(
    exp: What,
    overrides: More = None,
    methods: Methods = "",
    seeds: Seeds = 1,
    target: Aim = None,
    against: Against = "",
    out: Out = None,
    kinds: Pictures = None,
    fresh: Fresh = False,
    quiet: Quiet = False,
) -> None:
    """Run several methods on the same data, or compare finished runs.

    Of an experiment file: one directory per method and seed; finished ones are not repeated. Of run directories: tables
    and tests; --out FOLDER writes them as Markdown, CSV and LaTeX with figures.
    """
    if exp.is_dir():
        if methods or seeds != 1 or fresh:
            raise ConfigError("compare: --methods, --seeds and --fresh go with an experiment file. Got finished runs.")
        compare_runs([exp, *map(Path, overrides or [])], target, against or None, out, kinds)
        return
    if target is not None or against or kinds:
        raise ConfigError("compare: --target, --against and --format go with finished runs. Got an experiment file.")
    from fedspan.cli.running import run_all
    from fedspan.config import load_config

    config = load_config(exp, overrides or [])
    names = listed(methods) or list(config.methods)
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
    called = labels(names)
    return [
        (f"{called[name]}-{seed}", config.resolve(name, names, seed), child(where, f"{called[name]}-{seed}"))
        for seed in range(config.seed, config.seed + seeds)
        for name in names
    ]


def labels(names: list[str]) -> dict[str, str]:
    """What methods are called in a table and their directories: code by its class, if no other has that name."""
    short = {name: name.rpartition(":")[2] for name in names}
    return {name: cls if list(short.values()).count(cls) == 1 else folder(name) for name, cls in short.items()}


def compare_runs(
    paths: list[Path], target: float | None, against: str | None, out: Path | None, kinds: list[Picture] | None
) -> None:
    """Finished runs as a table, with what it took to reach a target, and client by client against one of them."""
    from fedspan import report
    from fedspan.report import paired
    from fedspan.report.tables import usual_target

    runs = finished_runs(paths)
    if target is None:
        target = usual_target(report.summary_rows(runs))
    rows = report.summary_rows(runs, target)
    found = paired.pairs(runs, against)
    show(report.to_rich(rows))
    if found:
        made = paired.grid(found)
        show(table(made.titles, [[c.text for c in row] for row in made.rows], right=range(1, len(made.titles))))
        say(paired.NOTE)
    else:
        note("Nothing to compare client by client: no two rows have the same clients and seeds.")
    if out is None:
        return
    user_path(out, "--out")
    out.mkdir(parents=True, exist_ok=True)
    texts = {"table.md": report.to_markdown(rows), "table.csv": report.to_csv(rows), "table.tex": report.to_latex(rows)}
    if found:
        texts |= {"paired.md": paired.to_markdown(found), "paired.csv": paired.to_csv(found)}
        texts |= {"paired.tex": paired.to_latex(found)}
    for name, text in texts.items():
        (out / name).write_text(text, encoding="utf-8", newline="\n")
    pictures = _figures(runs, against, bool(found))
    written = [*texts]
    for name, draw in pictures.items():
        for kind in kinds or [Picture.pdf, Picture.png]:
            written.append(report.save(draw, out / f"{name}.{kind.value}").name)
    say(f"Written to {out}: {', '.join(written)}")


def _figures(runs: list[Run], against: str | None, differ: bool) -> dict[str, Callable[[], Figure]]:
    from fedspan.report import figures, paired

    found: dict[str, Callable[[], Figure]] = {
        "over-rounds": partial(figures.curves_figure, runs, "round"),
        "over-bytes": partial(figures.curves_figure, runs, "bytes"),
        "over-time": partial(figures.curves_figure, runs, "seconds"),
        "clients": partial(figures.clients_figure, runs),
        "bytes": partial(figures.bytes_figure, runs),
    }
    return found | ({"differences": partial(paired.differences_figure, runs, against)} if differ else {})
