"""`fedspan compare`: several methods on the same data, seed by seed; or finished runs, side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedspan.cli.console import Picture, child, directory, listed, note, say, show, table, user_path
from fedspan.cli.report import finished_runs
from fedspan.cli.run import Cluster, Fresh, Out, Quiet, say_dropped
from fedspan.cli.sweep import folder
from fedspan.cli.tune import Processes
from fedspan.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedspan.config import RunConfig
    from fedspan.report.measures import Measure
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
Leading = Annotated[
    str | None, typer.Option("--measure", help="Runs: the measure that leads; default: all, the file's first first.")
]
Pictures = Annotated[
    list[Picture] | None, typer.Option("--format", help="Runs: figures in --out; default pdf and png.")
]
Tune = Annotated[
    int | None,
    typer.Option("--tune", help="Trials for every method, on development seeds.", min=1, max=1000, show_default=False),
]
TuneSeeds = Annotated[int, typer.Option("--tune-seeds", help="Development seeds each trial runs on.", min=1, max=10)]


def compare(
    exp: What,
    overrides: More = None,
    methods: Methods = "",
    seeds: Seeds = 1,
    target: Aim = None,
    against: Against = "",
    out: Out = None,
    kinds: Pictures = None,
    measure: Leading = None,
    fresh: Fresh = False,
    quiet: Quiet = False,
    tune: Tune = None,
    tune_seeds: TuneSeeds = 1,
    workers: Processes = 1,
    cluster: Cluster = None,
) -> None:
    """Run several methods on the same data, or compare finished runs.

    Of an experiment file: one directory per method and seed; finished ones are not repeated. With --tune every method
    first gets the same trials on development seeds, to choose lr, or what spaces name (method.rank=int:1:8). Of run
    directories: tables and tests; --out FOLDER writes them as Markdown, CSV and LaTeX with figures.
    """
    if exp.is_dir():
        if methods or seeds != 1 or fresh or tune or cluster:
            raise ConfigError(
                "compare: --methods, --seeds, --tune, --fresh and --cluster go with an experiment file. Got finished"
                " runs."
            )
        compare_runs([exp, *map(Path, overrides or [])], target, against or None, out, kinds, measure)
        return
    if target is not None or against or kinds or measure:
        raise ConfigError(
            "compare: --target, --against, --measure and --format go with finished runs. Got an experiment file."
        )
    from fedspan.cli.running import run_all
    from fedspan.config import load_config
    from fedspan.studies.tuning import split_spaces

    texts = list(overrides or [])
    if tune is not None:
        compare_tuned(exp, texts, listed(methods), seeds, out, tune, tune_seeds, workers, fresh, quiet, cluster)
        return
    if split_spaces(texts)[0]:
        raise ConfigError("compare: spaces such as method.lr=log:1e-3:1 go with --tune N. Got no --tune.")
    config = load_config(exp, texts)
    names = methods_of(config, listed(methods))
    where = directory(out, config.name)
    jobs = plan(config, names, seeds, where)
    run_all(jobs, config.name, where / "report.html", fresh=fresh, quiet=quiet, cluster=cluster)


def methods_of(config: RunConfig, typed: list[str]) -> list[str]:
    """The methods to compare: those that were typed, else those of the file."""
    names = typed or list(config.methods)
    if not names:
        raise ConfigError("compare: name methods with --methods a,b,c, or give the file [methods.NAME] sections.")
    return list(dict.fromkeys(names))


def compare_tuned(
    exp: Path,
    texts: list[str],
    typed: list[str],
    seeds: int,
    out: Path | None,
    trials: int,
    tune_seeds: int,
    workers: int,
    fresh: bool,
    quiet: bool,
    cluster: str | None = None,
) -> None:
    """Tune every method with the same budget on development seeds, then run it on the reported ones."""
    from fedspan.cli.running import run_all
    from fedspan.cli.tune import tune_methods
    from fedspan.config import load_config
    from fedspan.report.given import NOTE, TITLES
    from fedspan.studies.tuning import reported_seeds, split_spaces

    config = load_config(exp, split_spaces(texts)[1])
    reported = reported_seeds(config.seed, seeds)
    names = methods_of(config, typed)
    where = directory(out, config.name)
    for name in names:
        say_dropped(name, config.fields_of(name, names)[1])
    how: dict[str, Any] = {"trials": trials, "seeds": tune_seeds, "workers": workers, "cluster": cluster}
    tuned = tune_methods(exp, texts, names, **how, where=where, quiet=quiet)
    called = labels(names)
    show(table(TITLES, [[called[name], *told.cells()] for name, (_, told) in tuned.items()], right=[2, 7, 8]))
    say(NOTE)
    told_of = {f"{called[name]}-{seed}": told for seed in reported for name, (_, told) in tuned.items()}
    jobs = [
        (f"{called[name]}-{seed}", replace(best, seed=seed), child(where, f"{called[name]}-{seed}"))
        for seed in reported
        for name, (best, _) in tuned.items()
    ]
    keep = lambda label, place: told_of[label].write(place)
    run_all(jobs, config.name, where / "report.html", fresh=fresh, quiet=quiet, after=keep, cluster=cluster)


def plan(config: RunConfig, names: list[str], seeds: int, where: Path) -> list[tuple[str, RunConfig, Path]]:
    """The runs of a comparison, all of them checked before the first one starts."""
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
    paths: list[Path],
    target: float | None,
    against: str | None,
    out: Path | None,
    kinds: list[Picture] | None,
    named: str | None = None,
) -> None:
    """Finished runs as a table, with what it took to reach a target, and client by client against one of them."""
    from fedspan import report
    from fedspan.report import paired, side_by_side
    from fedspan.report.measures import measure_of, measures_of
    from fedspan.report.runs import group
    from fedspan.report.tables import usual_target

    runs = finished_runs(paths)
    measure = measure_of(runs, named)
    if target is None:
        target = usual_target(report.summary_rows(runs, measure=measure))
    rows = report.summary_rows(runs, target, measure)
    show(report.to_rich(rows))
    judged = [measure] if named else measures_of(runs)
    for each in judged:
        if ways := side_by_side.protocol_rows(runs, each):
            say(f"{each.title}, as other protocols of evaluation report it:")
            made = side_by_side.grid(ways, each)
            show(table(made.titles, [[c.text for c in row] for row in made.rows], right=range(3, len(made.titles))))
    for sentence in side_by_side.left_out(group(runs)):
        note(sentence)
    found = {each: some for each in judged if (some := paired.pairs(runs, against, each))}
    for each, some in found.items():
        if len(judged) > 1:
            say(f"Client by client, {each.words}:")
        made = paired.grid(some)
        show(table(made.titles, [[c.text for c in row] for row in made.rows], right=range(1, len(made.titles))))
    if found:
        say(paired.NOTE)
    else:
        note("Nothing to compare client by client: no two rows have the same clients and seeds.")
    if out is None:
        return
    user_path(out, "--out")
    out.mkdir(parents=True, exist_ok=True)
    texts = {"table.md": report.to_markdown(rows), "table.csv": report.to_csv(rows), "table.tex": report.to_latex(rows)}
    if ways_told := side_by_side.to_markdown(runs):
        texts |= {"protocols.md": ways_told, "protocols.csv": side_by_side.to_csv(runs)}
    for each, some in found.items():
        name = "paired" if each == judged[0] else f"paired-{each.name}"
        texts |= {f"{name}.md": paired.to_markdown(some), f"{name}.csv": paired.to_csv(some)}
        texts |= {f"{name}.tex": paired.to_latex(some)}
    for name, text in texts.items():
        (out / name).write_text(text, encoding="utf-8", newline="\n")
    pictures = _figures(runs, against, list(found), judged)
    written = [*texts]
    for name, draw in pictures.items():
        for kind in kinds or [Picture.pdf, Picture.png]:
            written.append(report.save(draw, out / f"{name}.{kind.value}").name)
    say(f"Written to {out}: {', '.join(written)}")


def _figures(
    runs: list[Run], against: str | None, differ: list[Measure], judged: list[Measure]
) -> dict[str, Callable[[], Figure]]:
    """Figures by the first measure, and those of clients and rounds by the others."""
    from fedspan.report import figures, paired

    first = judged[0]
    found: dict[str, Callable[[], Figure]] = {
        "over-rounds": partial(figures.curves_figure, runs, "round", first),
        "over-bytes": partial(figures.curves_figure, runs, "bytes", first),
        "over-time": partial(figures.curves_figure, runs, "seconds", first),
        "clients": partial(figures.clients_figure, runs, first),
        "bytes": partial(figures.bytes_figure, runs),
    }
    for measure in judged[1:]:
        found[f"over-rounds-{measure.name}"] = partial(figures.curves_figure, runs, "round", measure)
        found[f"clients-{measure.name}"] = partial(figures.clients_figure, runs, measure)
    for measure in differ:
        end = "" if measure == first else f"-{measure.name}"
        found[f"differences{end}"] = partial(paired.differences_figure, runs, against, measure)
    return found
