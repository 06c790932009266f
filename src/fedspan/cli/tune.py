"""`fedspan tune`: hyper-parameters by trials on validation parts of development seeds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedspan.cli.console import child, directory, note, say, show, table
from fedspan.cli.run import Cluster, Experiment, Out, Quiet, say_dropped
from fedspan.errors import ConfigError, Divergence, FedspanError
from fedspan.storage.atomic import write_atomic

if TYPE_CHECKING:
    from fedspan.config import RunConfig
    from fedspan.report.given import Given
    from fedspan.studies.tuning import Space, TrialJob, TuningOutcome
    from fedspan.studies.tuning.search import Runner
    from fedspan.studies.tuning.spaces import Value

Waiting = tuple[dict[str, Any], str]
"""A run to be carried out: its configuration as plain values, and its directory."""

Values = Annotated[
    list[str],
    typer.Argument(
        metavar="section.key=SPACE|value...",
        help="Spaces log:a:b, float:a:b, int:a:b, choice:a,b,c; other values replace those of the file.",
        show_default=False,
    ),
]
Trials = Annotated[int, typer.Option("--trials", help="How many sets of values are tried.", min=1, max=1000)]
Seeds = Annotated[int, typer.Option("--seeds", help="Development seeds each trial runs on.", min=1, max=10)]
Judge = Annotated[
    str | None,
    typer.Option(
        "--measure", help="What is to be best; default: the first metric, else accuracy or error.", show_default=False
    ),
]
Processes = Annotated[int, typer.Option("--workers", help="Trials at once; it changes no result.", min=1, max=64)]
Whole = Annotated[bool, typer.Option("--no-pruning", help="Run every trial to its end.")]
Json = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]


def tune(
    exp: Experiment,
    values: Values,
    trials: Trials = 20,
    seeds: Seeds = 1,
    measure: Judge = None,
    workers: Processes = 1,
    no_pruning: Whole = False,
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
    cluster: Cluster = None,
) -> None:
    """Choose hyper-parameters by trials on validation parts, e.g. method.lr=log:1e-3:1; finished ones are not repeated.

    Trials run on development seeds 0 to 9. The best configuration is written as best.toml. Needs fedspan[tune].
    """
    from fedspan.config import load_config, to_toml
    from fedspan.method.fields import keys_of
    from fedspan.methods import find_method
    from fedspan.studies.tuning import development_seeds, split_spaces

    spaces, rest = split_spaces(values)
    if not spaces:
        raise ConfigError("tune: name at least one space, as in method.lr=log:1e-3:1. Got none.")
    config = load_config(exp, rest)
    name = config.method["name"]
    say_dropped(name, config.fields_of(name)[1])
    for space in spaces:
        if space.key.startswith("method.") and space.key[7:] not in keys_of(find_method(name)):
            raise ConfigError(f"tune: {name} has no field '{space.key[7:]}', so it cannot be tuned.")
    chosen = development_seeds(config.seed, seeds)
    where = directory(out, config.name, "tune")

    def made(point: Mapping[str, Value], seed: int) -> RunConfig:
        return _with(exp, rest, point).resolve(name, seed=seed)

    with _processes(where, workers, quiet or as_json, cluster) as run:
        outcome = _search(spaces, made, run, name, trials, chosen, measure, not no_pruning)
    best = made(outcome.best.values, chosen[0])
    write_atomic(where / "best.toml", to_toml(best))
    told = {**_as_json(outcome, spaces, chosen), "best_configuration": str(where / "best.toml")}
    write_atomic(where / "tune.json", json.dumps(told, indent=1, allow_nan=False) + "\n")
    if as_json:
        print(json.dumps(told, indent=1, allow_nan=False))
        return
    keys = [s.key for s in spaces]
    rows = [
        [t.number + 1, *(_shown(t.values[k]) for k in keys), outcome.measure.text(t.value), t.rounds, t.state]
        for t in outcome.trials
    ]
    titles = ["trial", *keys, f"{outcome.measure.title} (validation)", "rounds", "state"]
    show(table(titles, rows, right=range(len(titles) - 1)))
    at = ", ".join(f"{k} = {_shown(v)}" for k, v in outcome.best.values.items())
    reached = outcome.measure.phrase(outcome.best.value)
    say(f"Best: trial {outcome.best.number + 1}, {at}: {reached} on validation parts.")
    say_edges(outcome, name)
    say(f"Configuration: {where / 'best.toml'}; all trials: {where / 'tune.json'}")


def say_edges(outcome: TuningOutcome, who: str) -> None:
    """Tell which values nothing brackets."""
    for key, edge in outcome.edges.items():
        note(
            f"{who}: {key} = {_shown(outcome.best.values[key])} is the {edge} value tried; widen its range or try more."
        )


def tune_methods(
    exp: Path,
    texts: Sequence[str],
    names: Sequence[str],
    *,
    trials: int,
    seeds: int,
    workers: int,
    where: Path,
    quiet: bool,
    cluster: str | None = None,
) -> dict[str, tuple[RunConfig, Given]]:
    """Tune each method of a comparison with the same budget: its experiment, and what it was given, by its name.

    Args:
        texts: search spaces and settings as they were typed.
        where: the comparison's directory; trials lie in a folder `tuning` of it.
        cluster: address of a Ray cluster whose machines share the trials.
    """
    from fedspan.config import load_config
    from fedspan.method.fields import keys_of
    from fedspan.methods import find_method
    from fedspan.report.given import Given
    from fedspan.report.runs import TRIALS
    from fedspan.studies.tuning import USUAL_SPACE, development_seeds, split_spaces, steps_of

    spaces, rest = split_spaces(texts)
    spaces = spaces or split_spaces([USUAL_SPACE])[0]
    chosen = development_seeds(0, seeds)
    config = load_config(exp, rest)
    names = list(dict.fromkeys(names))
    for name in names:
        config.only(name, names)  # all of them are checked before the first trial starts
    found: dict[str, tuple[RunConfig, Given]] = {}
    with _processes(where / TRIALS, workers, quiet, cluster) as run:
        for name in names:
            own = [s for s in spaces if not s.key.startswith("method.") or s.key[7:] in keys_of(find_method(name))]

            def made(point: Mapping[str, Value], seed: int, name: str = name) -> RunConfig:
                return _with(exp, rest, point).resolve(name, names, seed)

            # None is given up early: trials of equal number and length are the same effort for every method.
            outcome = _search(own, made, run, name, trials, chosen, None, prune=False)
            best = outcome.best
            steps, before = steps_of(made(best.values, chosen[0]))
            say_edges(outcome, name)
            told = Given(
                trials=len(outcome.trials),
                diverged=outcome.count("diverged"),
                rounds=best.rounds,
                seeds=chosen,
                measure=outcome.measure.name,
                value=best.value or 0.0,
                searched={s.key: s.text for s in own},
                chosen=best.values,
                edges=outcome.edges,
                steps=steps,
                steps_before_use=before,
            )
            found[name] = made(best.values, config.seed), told
    return found


def _with(exp: Path, rest: Sequence[str], point: Mapping[str, Value]) -> RunConfig:
    """The experiment with the values of a trial."""
    from fedspan.config import load_config

    return load_config(exp, [*rest, *(f"{key}={value}" for key, value in point.items())])


def _search(
    spaces: Sequence[Space],
    made: Callable[[Mapping[str, Value], int], RunConfig],
    run: Runner,
    name: str,
    trials: int,
    seeds: Sequence[int],
    measure: str | None,
    prune: bool,
) -> TuningOutcome:
    from fedspan.studies.tuning import search

    for space in spaces:  # both ends of every range are checked before the first trial starts
        for share in (0.0, 1 - 1e-9):
            made({s.key: s.at(share if s is space else 0.5) for s in spaces}, seeds[0])
    return search(spaces, made, run, who=name, trials=trials, seeds=seeds, measure=measure, prune=prune)


def _as_json(outcome: TuningOutcome, spaces: Sequence[Space], seeds: Sequence[int]) -> dict[str, Any]:
    return {
        "measure": outcome.measure.name,
        "higher_is_better": outcome.measure.higher,
        "seeds": list(seeds),
        "searched": {s.key: s.text for s in spaces},
        "best": vars(outcome.best),
        "edges": outcome.edges,
        "trials": [vars(t) for t in outcome.trials],
    }


def _shown(value: Value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# ------------------------------------------------------------------------------------------------ carrying trials out


@contextmanager
def _processes(where: Path, workers: int, quiet: bool, cluster: str | None = None) -> Iterator[Runner]:
    """What carries trials out in directories below `where`: this process, several that end with it, or a cluster."""
    if cluster is not None:
        from fedspan.cli.cluster_runs import cluster_runs

        with cluster_runs(cluster) as runs:
            assert runs is not None

            def spread(waiting: Sequence[Waiting]) -> None:
                from fedspan.config import from_dict

                for place, run in runs.each((Path(p), from_dict(v), Path(p), False) for v, p in waiting):
                    if run.diverged is not None:
                        write_atomic(place / "diverged.json", json.dumps({"why": run.diverged}) + "\n")

            yield lambda jobs: _carry_out(jobs, where, quiet, spread)
        return
    if workers == 1:

        def one_by_one(waiting: Sequence[Waiting]) -> None:
            for values, place in waiting:
                _trial(values, place, alone=True)

        yield lambda jobs: _carry_out(jobs, where, quiet, one_by_one)
        return
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    from fedspan.method.named_code import allowance

    context = multiprocessing.get_context("spawn")
    packages = sorted(allowance().packages)
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(packages,)) as pool:

        def at_once(waiting: Sequence[Waiting]) -> None:
            for ended in [pool.submit(_trial, values, place, alone=False) for values, place in waiting]:
                ended.result()

        yield lambda jobs: _carry_out(jobs, where, quiet, at_once)


def _begin(packages: Sequence[str]) -> None:
    """In a process for trials: end when the one that began it is gone, killed or not."""
    import multiprocessing
    import os
    import threading
    from multiprocessing.connection import wait

    from fedspan.methods import allow_code

    allow_code(*packages)
    parent = multiprocessing.parent_process()
    if parent is not None:
        ended = parent.sentinel
        threading.Thread(target=lambda: (wait([ended]), os._exit(1)), daemon=True).start()


def _carry_out(
    jobs: Sequence[TrialJob], where: Path, quiet: bool, run: Callable[[Sequence[Waiting]], None]
) -> list[dict[str, Any] | None]:
    """Do what is left of some jobs, equal ones once, and read the line of each one's last round."""
    places = [child(where, job.folder) for job in jobs]
    todo = {p: job for p, job in zip(places, jobs) if _line(p, job) is None and not (p / "diverged.json").is_file()}
    if todo:
        where.mkdir(parents=True, exist_ok=True)
        run([(job.config.to_dict(), str(place)) for place, job in todo.items()])
    lines = [_line(place, job) for place, job in zip(places, jobs)]
    for place, line in zip(places, lines):
        if line is None and not (place / "diverged.json").is_file():
            raise FedspanError(f"tune: {place} has no evaluation of its last round; remove it and run tune again.")
    for job, line, place in zip(jobs, lines, places):
        if not quiet and place in todo:
            say(f"{job.label}: {'diverged' if line is None else f'{job.config.rounds} rounds done'}")
    return lines


def _trial(values: dict[str, Any], place: str, alone: bool) -> None:
    """One run up to its rung, with processes of its own if it is alone; that it diverged is kept too."""
    from fedspan.cli.running import simulation_of
    from fedspan.config import from_dict, to_toml

    config, at = from_dict(values), Path(place)
    simulation = simulation_of(config if alone else replace(config, train=replace(config.train, workers=1)), at)
    write_atomic(at / "config.toml", to_toml(config))
    try:
        simulation.run()
    except Divergence as e:
        write_atomic(at / "diverged.json", json.dumps({"why": str(e)}) + "\n")


def _line(place: Path, job: TrialJob) -> dict[str, Any] | None:
    """The evaluated line of a job's last round; None if it is not there."""
    from fedspan.cli.running import finished

    if finished(place, job.config) is None and not (place / "diverged.json").is_file():
        return None
    try:
        text = (place / "metrics.jsonl").read_text(encoding="utf-8")
    except OSError:
        return None
    for line in map(json.loads, text.splitlines()):
        if line["round"] == job.config.rounds and any(isinstance(v, dict) and "mean" in v for v in line.values()):
            return dict(line)
    return None
