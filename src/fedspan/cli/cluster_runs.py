"""Whole runs on the machines of a Ray cluster: each on one CPU, with the data of this machine, its files brought back.

Nothing is shared but Ray: data are sent once for each node, what a run directory holds goes with the run, and comes
back when it is done. A machine that is lost takes its runs with it; Ray begins them anew on another.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

from fedspan.cli.console import note
from fedspan.errors import Divergence, FedspanError
from fedspan.storage.atomic import make_directory, replacing
from fedspan.storage.lock import Lock

if TYPE_CHECKING:
    from fedspan.config import RunConfig

LOCK = "lock"
MOST_RETRIES = 5
"""Times that a run is begun anew as its machine was lost."""

Files = dict[str, bytes]
A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True)
class WholeRun:
    """What became of a run."""

    messages: Sequence[str]
    diverged: str | None = None


class ClusterRuns:
    """Carries runs out on the cluster that this process has joined."""

    def __init__(self) -> None:
        from fedspan.method.named_code import allowance
        from fedspan.simulation.cluster.ray_connection import the_ray
        from fedspan.simulation.environment import versions

        self._ray = the_ray()
        self._packages = sorted(allowance().packages)
        self._data: dict[str, Any] = {}
        self._here, self._told = versions(), set[str]()
        self._guard = threading.Lock()
        self._under_way: dict[Any, tuple[Path, bool]] = {}
        how: dict[str, Any] = {"num_cpus": 1, "max_retries": MOST_RETRIES}
        self._remote = self._ray.remote(**how)(carry_out)

    @property
    def cpus(self) -> int:
        """How many runs there can be at a time."""
        return sum(int(n["Resources"].get("CPU", 0)) for n in self._ray.nodes() if n["Alive"])

    def each(self, jobs: Iterable[tuple[A, RunConfig, Path, bool]]) -> Iterator[tuple[A, WholeRun]]:
        """Carry out runs (a label, the configuration, its directory, whether to start over) as machines are free.

        They come as they are done.

        Raises:
            FedspanError: a run's own, or if nobody is left to carry it out.
        """
        rest, labels = iter(jobs), dict[Any, A]()
        more = True
        while more or labels:
            while more and len(labels) <= self.cpus:
                job = next(rest, None)
                more = job is not None
                if job is not None:
                    labels[self._begin(*job[1:])] = job[0]
            if labels:
                reference = self._next(list(labels))
                yield labels.pop(reference), self._end(reference)

    def one(self, config: RunConfig, directory: Path) -> WholeRun:
        """Carry out a run and wait for it; several threads may do so at a time."""
        reference = self._begin(config, directory, False)
        return self._end(self._next([reference]))

    def stop(self) -> None:
        """Give up what is under way."""
        for reference in list(self._under_way):
            self._ray.cancel(reference, force=True)

    def _begin(self, config: RunConfig, directory: Path, fresh: bool) -> Any:
        files = {} if fresh else _files(directory)
        with self._guard:
            data = self._placed(config)
            reference = self._remote.remote(config.to_dict(), [data], files, self._packages)
            self._under_way[reference] = directory, fresh
        return reference

    def _placed(self, config: RunConfig) -> Any:
        """The data of a run, in the cluster's store: the same for all runs that say the same of them."""
        from fedspan.config import assemble_data
        from fedspan.simulation.cluster.ray_connection import placed

        values = config.to_dict()
        key = json.dumps([config.seed, *(values.get(k) for k in ("data", "partition", "model", "task"))], default=str)
        if key not in self._data:
            while len(self._data) > 8:  # Ray holds what runs under way still need
                del self._data[next(iter(self._data))]
            self._data[key] = placed(assemble_data(config))
        return self._data[key]

    def _next(self, references: list[Any]) -> Any:
        """The first of some runs that is done.

        Raises:
            ClusterError: if the cluster has had no CPU for a while.
        """
        from fedspan.simulation.cluster.ray_connection import ClusterError
        from fedspan.simulation.cluster.ray_workers import WAIT_SECONDS

        since = time.monotonic()
        while True:
            done, _ = self._ray.wait(references, num_returns=1, timeout=2.0, fetch_local=False)
            if done:
                return done[0]
            if self.cpus:
                since = time.monotonic()
            elif time.monotonic() - since > WAIT_SECONDS:
                raise ClusterError(
                    "Cluster: no CPU is left to compute on; start nodes with `ray start --address=...` and run the same"
                    " command again: finished runs are not repeated."
                )

    def _end(self, reference: Any) -> WholeRun:
        """Bring a run's files back.

        Raises:
            FedspanError: what the run failed with.
        """
        from fedspan.simulation.cluster.ray_connection import ClusterError

        directory, fresh = self._under_way[reference]
        try:
            said = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError:
            raise
        except self._ray.exceptions.RayError as e:
            raise ClusterError(
                f"Cluster: {directory.name} was begun {MOST_RETRIES + 1} times and lost with its machine each time"
                f" ({type(e).__name__}), most likely for lack of memory; run it here, without --cluster."
            ) from None
        finally:
            del self._under_way[reference]
        if said["error"] is not None:
            raise FedspanError(said["error"].replace(said["place"], str(directory)))
        _write(directory, said["files"], fresh)
        self._compare(said["versions"])
        messages = [m.replace(said["place"], str(directory)) for m in said["messages"]]
        return WholeRun(messages, said["diverged"])

    def _compare(self, there: dict[str, str]) -> None:
        """Say once what a machine has other than this one; every result has it too."""
        unlike = ", ".join(f"{k} {there.get(k)} instead of {v}" for k, v in self._here.items() if there.get(k) != v)
        if unlike and unlike not in self._told:
            self._told.add(unlike)
            note(
                f"Cluster: a machine differs from this one: {unlike}; its runs say so in their results, and may differ"
                " in their last digits from those of other machines."
            )


@contextmanager
def cluster_runs(address: str | None) -> Iterator[ClusterRuns | None]:
    """Whole runs on the cluster at an address; None if there is no address. What is under way ends with the block."""
    if address is None:
        yield None
        return
    from fedspan.simulation.cluster.ray_connection import joined

    with joined(address):
        runs = ClusterRuns()
        try:
            yield runs
        except BaseException:
            runs.stop()
            raise


def spread(work: Callable[[A], B], items: Sequence[A], runs: ClusterRuns | None) -> Iterator[B]:
    """What comes of each item, in order; on a cluster as many at a time as it has CPUs."""
    if runs is None:
        yield from map(work, items)
        return
    pool = ThreadPoolExecutor(max(1, min(len(items), runs.cpus)))
    try:
        yield from pool.map(work, items)
    except BaseException:
        runs.stop()  # so that threads that wait for a run end
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def carry_out(values: dict[str, Any], data: list[Any], files: Files, packages: Sequence[str]) -> dict[str, Any]:
    """On a node: do what is left of a run in a directory that is gone afterwards, and give back what is in it.

    Args:
        data: in a list, what `placed` made of the data.
        files: what the run's directory holds so far.
    """
    from fedspan.cli.running import simulation_of
    from fedspan.config import from_dict, to_toml
    from fedspan.methods import allow_code
    from fedspan.simulation.cluster.ray_connection import opened
    from fedspan.simulation.environment import versions
    from fedspan.storage.atomic import write_atomic

    said: dict[str, Any] = {"diverged": None, "error": None, "messages": [], "files": {}, "versions": versions()}
    with tempfile.TemporaryDirectory(prefix="fedspan-") as place:
        at = Path(place)
        said["place"] = place
        try:
            allow_code(*packages)
            for name, content in files.items():
                (at / name).parent.mkdir(parents=True, exist_ok=True)
                (at / name).write_bytes(content)
            config = from_dict(values)
            alone = replace(config.train, workers=1)
            simulation = simulation_of(config, at, data=opened(data[0]), settings=alone)
            write_atomic(at / "config.toml", to_toml(config))
            try:
                simulation.run()
            except Divergence as e:
                said["diverged"] = str(e)
            said["messages"] = list(simulation.messages)
            said["files"] = _files(at)
        except FedspanError as e:
            said["error"] = str(e)
    return said


def _files(directory: Path) -> Files:
    """What is in a run's directory."""
    if not directory.is_dir():
        return {}
    found = (p for p in sorted(directory.rglob("*")) if p.is_file() and p.name != LOCK and p.suffix != ".tmp")
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in found}


def _write(directory: Path, files: Files, fresh: bool) -> None:
    """Let a run's directory hold these files; its result comes last."""
    checkpoints = directory / "checkpoints"
    make_directory(checkpoints)
    lock = Lock(checkpoints)
    try:
        kept = {directory / name for name in files}
        for old in [p for p in checkpoints.iterdir() if p.is_file() and p not in kept and p.name != LOCK]:
            old.unlink()
        if fresh:
            (directory / "result.json").unlink(missing_ok=True)
        for name in sorted(files, key=lambda n: (n == "result.json", n)):
            inside = PurePosixPath(name)
            if inside.is_absolute() or ".." in inside.parts:
                raise FedspanError(
                    f"Cluster: a run must not bring files from outside its directory. Got {name[:100]!r}."
                )
            make_directory((directory / inside).parent)
            with replacing(directory / inside) as place:
                place.write_bytes(files[name])
    finally:
        lock.close()
