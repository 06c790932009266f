"""One run from a configuration: resumed by default, shown as it goes, interrupted without loss."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fedspan.cli.console import note, out, say, show
from fedspan.errors import ConfigError, Divergence, FedspanError
from fedspan.storage.atomic import write_atomic
from fedspan.storage.format_number import check_format

if TYPE_CHECKING:
    from fedspan.cli.cluster_runs import ClusterRuns
    from fedspan.config import RunConfig
    from fedspan.data.federated import FederatedData
    from fedspan.simulation.settings import Settings
    from fedspan.simulation.simulator import Simulation

STOPPED = 130
"""Exit code after Ctrl-C, as shells have it."""


def finished(directory: Path, config: RunConfig) -> dict[str, Any] | None:
    """The result of this very experiment, if it is there with at least as many rounds."""
    from fedspan.config import load_config

    with suppress(OSError, ValueError, KeyError, TypeError):  # FedspanError is a ValueError: then it has to be run
        result: dict[str, Any] = json.loads((directory / "result.json").read_text(encoding="utf-8"))
        check_format(result, str(directory / "result.json"))
        held = load_config(directory / "config.toml")
        same = held.identity() == config.identity() and held.evaluate == config.evaluate
        return result if same and result["rounds"] >= config.rounds else None
    return None


def result_of(
    config: RunConfig, directory: Path, *, quiet: bool, label: str, runs: ClusterRuns | None = None
) -> tuple[dict[str, Any] | None, bool]:
    """The result of a run, carried out or found done, and whether it was found; None if it diverges, which is kept.

    Args:
        runs: carries it out on a cluster.
    """
    marker = directory / "diverged.json"
    if marker.is_file():
        return None, True
    result = finished(directory, config)
    if result is not None:
        return result, True
    try:
        if runs is None:
            execute(config, directory, quiet=quiet, label=label)
        elif (diverged := runs.one(config, directory).diverged) is not None:
            raise Divergence(diverged)
    except Divergence as e:
        directory.mkdir(parents=True, exist_ok=True)
        write_atomic(marker, json.dumps({"why": str(e)}) + "\n")
        return None, False
    made: dict[str, Any] = json.loads((directory / "result.json").read_text(encoding="utf-8"))
    return made, False


def data_changed(directory: Path, config: RunConfig) -> str | None:
    """What to say of a finished run whose data are not those it was computed on; None if they are, or it is not known.

    The data are read and hashed, nothing else is built or computed.
    """
    from fedspan.config import assemble_data
    from fedspan.data.digest import data_digest
    from fedspan.storage.checkpoint import recorded_identity

    before = {k.removeprefix("data."): v for k, v in recorded_identity(directory / "checkpoints").items()}
    try:
        now = data_digest(assemble_data(config).to(config.train.torch_dtype))
    except (FedspanError, OSError) as e:
        return f"{directory}: the data it was computed on cannot be read now ({e}); the result is of those before."
    other = [name for name, found in now.items() if name in before and before[name] != found]
    if not other:
        return None
    return (
        f"{directory}: the data have changed since ({', '.join(other)} differ), and the result is of those before;"
        " --fresh computes it anew, or choose another directory with --out."
    )


def simulation_of(
    config: RunConfig,
    directory: Path,
    *,
    fresh: bool = False,
    read_only: bool = False,
    data: FederatedData | None = None,
    settings: Settings | None = None,
    cluster: str | None = None,
) -> Simulation:
    """The run that a configuration describes, as far as its directory has it.

    Args:
        data: instead of those that the configuration names.
        settings: instead of the configuration's, where they cannot change the numbers.
        cluster: address of a Ray cluster that computes its rounds.
    """
    from fedspan.config import assemble
    from fedspan.simulation.simulator import Simulation

    method, task, data = assemble(config, data)
    return Simulation(
        method,
        task,
        data,
        rounds=config.rounds,
        seed=config.seed,
        settings=settings or config.train,
        out=directory,
        fresh=fresh,
        config=config.recorded(),
        read_only=read_only,
        devices=config.devices,
        evaluate=config.evaluate,
        defence=config.defence,
        asynchronous=config.asynchronous,
        cluster=cluster,
    )


def open_run(run: Path, who: str) -> tuple[RunConfig, Simulation]:
    """Rebuild a run from its directory, to look at it; nothing in it is changed.

    Raises:
        ConfigError: if it is not a run directory with a checkpoint.
    """
    from fedspan.config import load_config

    if not (run / "config.toml").is_file() or not any((run / "checkpoints").glob("manifest-*.json")):
        raise ConfigError(f"{who}: {run} must be a run directory with a checkpoint. Run the experiment first.")
    config = load_config(run / "config.toml")
    simulation = simulation_of(config, run, read_only=True)
    done = simulation.record.progress.round
    if done < config.rounds:
        note(f"{run} has done {done} of {config.rounds} rounds; it is taken as it is now.")
    return config, simulation


def execute(
    config: RunConfig,
    directory: Path,
    *,
    fresh: bool = False,
    quiet: bool = False,
    label: str = "",
    said: set[str] | None = None,
    cluster: str | None = None,
) -> None:
    """Do what is left of a run; all of it is in the directory afterwards.

    Args:
        cluster: address of a Ray cluster that computes its rounds.
        said: what the command has said of other runs, without their numbers, and need not say again.

    Raises:
        typer.Exit: with 130 after Ctrl-C; the state has been saved.
    """
    from fedspan.config import to_toml

    simulation = simulation_of(config, directory, fresh=fresh, cluster=cluster)
    # Only now: a directory of another experiment has been refused, and keeps its own configuration.
    write_atomic(directory / "config.toml", to_toml(config))
    told = len(simulation.messages)
    for message in simulation.messages:
        _note_once(message, said)
    progress = simulation.record.progress
    sent, lead = _traffic(progress.totals), [m.name for m in config.evaluate.found()]
    shown = _Shown(label or config.method["name"], config.rounds, progress.round, sent, quiet, lead)
    try:
        with shown:
            simulation.run(shown.on_round)
    except KeyboardInterrupt:
        note(f"Stopped after round {simulation.record.progress.round}; run the same command to go on.")
        raise typer.Exit(STOPPED) from None
    for message in simulation.messages[told:]:
        note(message)


def _note_once(message: str, said: set[str] | None) -> None:
    """Note a sentence; one about the data once for all runs, though seeds deal examples out a little differently."""
    key = re.sub(r"[\d.,]*\d(e[+-]?\d+)?", "#", message) if message.startswith("Data: ") else message
    if said is None or key not in said:
        note(message)
    if said is not None:
        said.add(key)


def _traffic(totals: Any) -> float:
    return float(totals["up"] + totals["down"] + totals["announce"])


def _on_devices(line: dict[str, Any]) -> str:
    """The time on the clients' devices, and how late uploads were, where a run knows them."""
    if "clock" not in line:
        return ""
    late = f", staleness {line['staleness']['mean']:.1f}" if "staleness" in line else ""
    return f"{line['clock']['total']:,.4g} s on devices{late}"


class _Shown:
    """Rounds as they are done: a bar on a terminal, otherwise a line now and then."""

    def __init__(
        self, label: str, rounds: int, done: int, sent: float, quiet: bool, metrics: Sequence[str] = ()
    ) -> None:
        self.label, self.rounds, self.quiet, self.sent, self.metrics = label, rounds, quiet, sent, metrics
        self.start, self.first = time.monotonic(), done
        self.accuracy = ""
        self.every = max(1, -(-rounds // 5))
        columns = (TextColumn("{task.description:<14}"), BarColumn(), MofNCompleteColumn())
        extra = (TextColumn("{task.fields[facts]}"), TimeRemainingColumn())
        self.bar = Progress(*columns, *extra, console=out) if out.is_terminal and not quiet else None
        if self.bar is not None:
            self.task = self.bar.add_task(label, total=rounds, completed=done, facts="")

    def __enter__(self) -> _Shown:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def on_round(self, line: dict[str, Any]) -> None:
        """Told after every round."""
        t, found = line["round"], line.get("accuracy")
        if found:
            self.accuracy = f"accuracy {100 * found['mean']:.1f} %"
        elif line.get("loss"):
            self.accuracy = f"loss {line['loss']['mean']:.4g}"
        asked = [f"{m} {line[m]['mean']:.4g}" for m in self.metrics if m not in ("accuracy", "loss") and line.get(m)]
        if asked:
            usual = [self.accuracy] if found and "accuracy" in self.metrics else []
            self.accuracy = ", ".join([*usual, *asked])
        self.sent += _traffic(line["bytes"])
        facts = ", ".join(filter(None, (self.accuracy, f"{self.sent / 1e6:,.2f} MB", _on_devices(line))))
        if self.bar is not None:
            self.bar.update(self.task, completed=t, facts=facts)
        elif not self.quiet and (t % self.every == 0 or t == self.rounds):
            left = (time.monotonic() - self.start) / max(1, t - self.first) * (self.rounds - t)
            say(f"{self.label}: round {t} of {self.rounds}, {facts}, {left:.0f} s left")


def run_all(
    jobs: Sequence[tuple[str, RunConfig, Path]],
    title: str,
    page: Path,
    *,
    fresh: bool = False,
    quiet: bool = False,
    after: Callable[[str, Path], None] | None = None,
    cluster: str | None = None,
) -> None:
    """Run a list of (label, configuration, directory), leaving out what is finished; then table and report page.

    `after` is called for each run that is done, before table and page are made. A run that diverges does not take the
    others with it: it is left out of the table, and the command fails at the end.

    Args:
        cluster: address of a Ray cluster whose machines share the runs.

    Raises:
        Divergence: if any run diverged.
    """
    lost: list[str] = []
    said: set[str] = set()
    todo: list[tuple[str, RunConfig, Path]] = []
    for label, config, directory in jobs:
        if not fresh and finished(directory, config) is not None:
            note(data_changed(directory, config) or f"{label}: already finished in {directory}.")
            continue
        if cluster is not None:
            todo.append((label, config, directory))
            continue
        try:
            execute(config, directory, fresh=fresh, quiet=quiet, label=label, said=said)
        except Divergence as e:
            note(f"{label}: {e}")
            lost.append(label)
    if todo:
        lost += _run_on_cluster(todo, cluster, fresh, quiet, said)
    done = [directory for label, _, directory in jobs if label not in lost]
    for label, _, directory in jobs:
        if after is not None and label not in lost:
            after(label, directory)
    if done:
        conclude(done, page, title)
    if lost:
        raise Divergence(f"{len(lost)} of {len(jobs)} runs diverged and are not in the table: {', '.join(lost)}.")


def _run_on_cluster(
    jobs: Sequence[tuple[str, RunConfig, Path]], cluster: str | None, fresh: bool, quiet: bool, said: set[str]
) -> list[str]:
    """Carry runs out on a cluster; the labels of those that diverged.

    Raises:
        typer.Exit: with 130 after Ctrl-C; what was done is kept.
    """
    from fedspan.cli.cluster_runs import cluster_runs

    lost: list[str] = []
    done, start = 0, time.monotonic()
    try:
        with cluster_runs(cluster) as runs:
            assert runs is not None
            for label, run in runs.each((label, config, place, fresh) for label, config, place in jobs):
                done += 1
                for message in run.messages:
                    _note_once(message, said)
                if run.diverged is not None:
                    note(f"{label}: {run.diverged}")
                    lost.append(label)
                elif not quiet:
                    say(f"{label}: done, {done} of {len(jobs)}, after {time.monotonic() - start:.0f} s")
    except KeyboardInterrupt:
        note(f"Stopped with {done} of {len(jobs)} runs done; the same command goes on, runs under way begin anew.")
        raise typer.Exit(STOPPED) from None
    return lost


def conclude(directories: Sequence[Path], page: Path, title: str) -> None:
    """Print the table of finished runs and write the report page."""
    from fedspan.report import load_runs, summary_rows, to_rich, write_page

    runs = load_runs(directories)
    show(to_rich(summary_rows(runs)))
    try:
        write_page(runs, page, title)
        say(f"Report: {page}")
    except FedspanError as e:  # the numbers are safe on disk: a page that cannot be drawn is worth a note only
        note(f"No report page: {e}")
