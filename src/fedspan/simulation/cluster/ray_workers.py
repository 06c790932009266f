"""Chunks on the machines of a Ray cluster: one actor for every CPU, one thread each.

What handles chunks goes to every node once, and so does a broadcast. A job goes to an actor on the node that has most
of its clients' rows; new rows stay there, as objects that belong to the run's process and outlive the actor. An actor
or node that dies is replaced as far as the cluster has CPUs, and its chunk repeated: a chunk is a function of what it
is given, so the result has the same bits. Nodes that join later are used too.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from fedspan.errors import FedspanError
from fedspan.simulation.cluster.ray_connection import (
    ClusterError,
    count_bytes,
    from_bytes,
    opened,
    placed,
    the_ray,
    to_bytes,
)
from fedspan.simulation.cluster.remote_rows import FETCH_SECONDS, RowPack, RowPlace
from fedspan.simulation.environment import versions
from fedspan.simulation.record import RowsLost
from fedspan.simulation.workers import ChunkHandler, Job, JobWindow, Meta, WorkerDied, answer_of
from fedspan.storage.malloc import keep_freed_memory
from fedspan.storage.row_table import uninitialised
from fedspan.tree import EMPTY, Tree

JOBS_OPEN = 4
"""Jobs for each actor that exist at a time: more to choose from, as their rows are elsewhere anyway."""

RESULTS_AHEAD = 8
"""Jobs for each actor that are taken before the results of those ahead of them have been handed on."""

MOST_DEATHS = 5
"""Actors that one chunk may end before it is given up: machines come and go more often than memory runs out."""

MOST_FAULTS = 3
"""Actors that cannot be started on a node before it is left alone."""

PINNED = 0.75
"""Share of a chunk's rows on one node from which no other node takes it."""

WAIT_SECONDS = 60.0
"""Without any actor, for nodes to come back or CPUs to become free, before a run gives up."""

LOOK_SECONDS = 2.0
"""Between two looks at which nodes there are."""


@dataclass(eq=False)
class ActorState:
    """An actor as the run's process sees it."""

    handle: Any
    node: str
    waiting: Any = None
    """What is to come from it: that it is ready, or an answer."""
    ready: bool = False
    job: int | None = None
    packs: Sequence[Any] = ()
    """References of the rows that come with the answer."""


@dataclass
class ClusterFacts:
    """What a run knows of the machines that computed it."""

    traffic: Counter[str] = field(default_factory=Counter)
    """Bytes that went from machine to machine, by purpose, as payloads count them."""
    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """CPUs and versions of every node that took part."""
    deaths: int = 0

    def to_json(self) -> dict[str, Any]:
        """For the result: nodes that are alike once, with their number."""
        alike: dict[str, dict[str, Any]] = {}
        for about in self.nodes.values():
            entry = alike.setdefault(str(about), {"nodes": 0, **about})
            entry["nodes"] += 1
        return {"machines": list(alike.values()), "bytes": dict(self.traffic), "actors_lost": self.deaths}


class RayPool:
    """Runs jobs on the actors of the cluster this process has joined.

    Args:
        workers: how many actors at most; one for each CPU of the cluster if None.
        told: hears what became of actors and nodes.
        facts: where machines and bytes are noted; they outlive the pool.
    """

    def __init__(
        self,
        handler: ChunkHandler,
        workers: int | None = None,
        told: Callable[[str], None] | None = None,
        facts: ClusterFacts | None = None,
    ) -> None:
        self.handler, self.workers, self.told = handler, workers, told
        self.facts = facts or ClusterFacts()
        self.home: str = the_ray().get_runtime_context().get_node_id()
        self._versions = count(1)
        self._shared: dict[str, tuple[int, Any, int]] = {}  # version, reference, bytes
        self._had: set[tuple[int, str]] = set()  # versions of broadcasts, and nodes that have them
        self._actors: list[ActorState] = []
        self._message: Any = None
        self._faults: Counter[str] = Counter()
        self._fault = ""
        self._looked = 0.0
        self._nodes: dict[str, int] = {}  # living nodes, and their CPUs

    def share(self, name: str, data: Tree) -> None:
        """Make a tree available to the jobs that name it; it replaces what had that name."""
        packed = to_bytes(data)
        self._shared[name] = next(self._versions), the_ray().put(packed), count_bytes(packed)

    def empty(self, like: Tree) -> Tree:
        """Uninitialised tensors of these types and shapes."""
        return uninitialised(like)

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[Meta, Tree]]:
        """Results of all jobs, in order, as soon as each and all before it are done.

        New rows of a job with `packs` stay where they are; the answer's `rows` are their places.

        Raises:
            WorkerDied: if a job has ended several actors, one after another.
            ClusterError: if nobody is left to do them.
            RowsLost: if rows that a job needs are gone.
        """
        self._fill()
        number = max(1, len(self._actors))
        window = JobWindow(jobs, JOBS_OPEN * number, RESULTS_AHEAD * number)
        try:
            yield from self._results(window)
        finally:
            for actor in self._actors:  # an error, or nobody wants the rest: what still comes is nobody's answer
                actor.job, actor.packs = None, ()

    def _results(self, window: JobWindow[Job]) -> Iterator[tuple[Meta, Tree]]:
        ray = the_ray()
        alone = time.monotonic()
        while True:
            while window.make():  # also while no actor is ready yet
                pass
            if not window.busy:
                return
            self._give_all(window)
            awaited = {actor.waiting: actor for actor in self._actors if actor.waiting is not None}
            heard: list[Any] = []
            if awaited:
                heard, _ = ray.wait(list(awaited), num_returns=1, timeout=LOOK_SECONDS)
                if heard:  # whoever else is done by now
                    heard, _ = ray.wait(list(awaited), num_returns=len(awaited), timeout=0)
            else:
                time.sleep(0.2)
            for reference in heard:
                self._hear(awaited[reference], window)
            for result in window.results():
                self._give_all(window)  # so that nobody is idle while the result is looked at
                yield result
            if any(actor.ready for actor in self._actors):
                alone = time.monotonic()
            elif time.monotonic() - alone > WAIT_SECONDS or self._all_faulty:
                raise self._nobody()
            self._fill()

    def close(self) -> None:
        """Let go of the actors; rows stay where they are."""
        for actor in self._actors:
            self._end(actor)
        self._actors, self._looked = [], 0.0

    # ------------------------------------------------------------------------------------------- actors

    def _fill(self) -> None:
        """Start the actors that are missing: one for every CPU of every node that is alive."""
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return
        ray = the_ray()
        alive = {n["NodeID"]: int(n["Resources"].get("CPU", 0)) for n in ray.nodes() if n["Alive"]}
        self._nodes, self._looked = alive, time.monotonic()
        for node, cpus in alive.items():
            if self._faults[node] >= MOST_FAULTS:
                continue
            for _ in range(cpus - sum(a.node == node for a in self._actors)):
                if self.workers is not None and len(self._actors) >= self.workers:
                    return
                self._actors.append(self._start(node))

    def _start(self, node: str) -> ActorState:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        ray = the_ray()
        if self._message is None:
            self._message = placed(self.handler)
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        how: dict[str, Any] = {"num_cpus": 1, "max_restarts": 0, "max_task_retries": 0}
        made = ray.remote(ChunkActor).options(scheduling_strategy=strategy, **how)
        handle = made.remote([self._message], _numerics())
        return ActorState(handle, node, handle.about.remote())

    def _end(self, actor: ActorState) -> None:
        with contextlib.suppress(Exception):  # it is gone, or Ray is
            the_ray().kill(actor.handle)

    @property
    def _all_faulty(self) -> bool:
        """Whether no node that is there can start an actor."""
        there = [node for node, cpus in self._nodes.items() if cpus]
        return bool(there) and all(self._faults[node] >= MOST_FAULTS for node in there)

    def _nobody(self) -> FedspanError:
        cpus = sum(self._nodes.values())
        if self._all_faulty:
            return ClusterError(f"Cluster: no machine can compute what it was sent ({self._fault}).")
        if cpus:
            return ClusterError(
                f"Cluster: none of its {cpus} CPUs became free within {WAIT_SECONDS:g} seconds; end what else runs on"
                " it, or set train.workers to fewer. The run can be resumed."
            )
        return ClusterError(
            "Cluster: no CPU is left to compute on; start nodes with `ray start --address=...` and run the same"
            " command again: it goes on from the last checkpoint."
        )

    # ------------------------------------------------------------------------------------------- jobs

    def _give_all(self, window: JobWindow[Job]) -> None:
        """Give every idle actor a job that suits it, as far as there are any."""
        for actor in self._actors:
            if actor.ready and actor.waiting is None:
                found = window.take(lambda job, node=actor.node: self._fit(job, node))  # type: ignore[misc]
                if found is not None:
                    self._give(actor, *found)

    def _fit(self, job: Job, node: str) -> float:
        """Which share of a job's rows a node has; below 0 if the job is to wait for the node that has most."""
        where = Counter(place.pack.node for place in job.rows if place is not None)
        if not where:
            return 0.5
        mine, others = where[node] / len(job.rows), {a.node for a in self._actors if a.ready} - {node}
        return -1.0 if any(where[n] / len(job.rows) > PINNED for n in others) else mine

    def _give(self, actor: ActorState, k: int, job: Job) -> None:
        data = to_bytes(job.data)
        shared = self._shared.get(job.shared)
        kept = [(place.pack.reference, place.index) if place is not None else None for place in job.rows]
        traffic, far = self.facts.traffic, actor.node != self.home
        if far:
            traffic["jobs"] += count_bytes(data)
        if shared is not None and far and (shared[0], actor.node) not in self._had:
            self._had.add((shared[0], actor.node))
            traffic["broadcasts"] += shared[2]
        for pack in {place.pack for place in job.rows if place is not None}:
            if actor.node != pack.node and actor.node not in pack.copies:
                pack.copies.add(actor.node)
                traffic["rows between nodes"] += pack.bytes
        told = {"meta": job.meta, "shared": job.shared, "rows": bool(job.rows), "packs": list(job.packs)}
        call = actor.handle.work.options(num_returns=1 + len(job.packs))
        made = call.remote(told, data, shared and (shared[0], [shared[1]]), kept)
        found = made if isinstance(made, list) else [made]
        actor.waiting, actor.job, actor.packs = found[0], k, found[1:]

    def _hear(self, actor: ActorState, window: JobWindow[Job]) -> None:
        """Take what an actor has to say: that it is ready, an answer, or its end."""
        ray = the_ray()
        try:
            said = ray.get(actor.waiting)
        except ray.exceptions.RayTaskError:  # nothing that can be done again with another outcome
            self._actors.remove(actor)
            self._end(actor)
            raise
        except ray.exceptions.RayError as e:
            self._lose(actor, window, e)
            return
        actor.waiting = None
        if not actor.ready:
            actor.ready = True
            self._faults[actor.node] = 0
            self._note_node(actor.node, said)
            return
        k, packs, actor.job, actor.packs = actor.job, actor.packs, None, ()
        if k is None:  # it was asked by somebody who has gone
            return
        head, data, sizes = said
        if head.get("lost"):
            raise RowsLost("Cluster: private states of clients were on a node that is gone")
        window.answered(k)
        if actor.node != self.home:
            self.facts.traffic["answers"] += count_bytes(data)
        meta, answer = answer_of(head, from_bytes(data))
        if sizes:
            made = [RowPack(ref, size, actor.node, {actor.node}) for ref, (_, size) in zip(packs, sizes)]
            answer["rows"] = [RowPlace(pack, n) for pack, (rows, _) in zip(made, sizes) for n in range(rows)]
        window.done(k, (meta, answer))

    def _lose(self, actor: ActorState, window: JobWindow[Job], why: Exception) -> None:
        """Do without an actor; its job comes next."""
        self._actors.remove(actor)
        self._end(actor)
        self._looked, self.facts.deaths = 0.0, self.facts.deaths + 1
        if not actor.ready:
            self._faults[actor.node] += 1
            self._fault = _reason(why)
            return
        k, actor.job = actor.job, None
        if k is not None and window.repeat(k) >= MOST_DEATHS:
            raise WorkerDied(
                f"Simulator: {MOST_DEATHS} actors of the cluster ended unexpectedly on the same chunk, most likely for"
                " lack of memory. Use a smaller train.chunk; the run can be resumed."
            )
        if self.told is not None:
            self.told(
                "Cluster: an actor ended unexpectedly, or its machine did; its chunk was repeated and gives the same"
                " numbers."
            )

    def _note_node(self, node: str, said: dict[str, str]) -> None:
        """Remember what a node computes with, and say it if that is not what this process has."""
        if node in self.facts.nodes:
            return
        self.facts.nodes[node] = {"cpus": self._nodes.get(node, 0), "versions": said}
        here = versions()
        unlike = [f"{k} {said.get(k)} instead of {v}" for k, v in here.items() if said.get(k) != v]
        if unlike and self.told is not None:
            self.told(
                f"Cluster: a machine differs from this one: {', '.join(unlike)}; the numbers may differ in their last"
                " digits from those of one machine, and from run to run."
            )


def _reason(why: Exception) -> str:
    """The last line of what an actor ended with."""
    lines = [line.strip() for line in str(why).splitlines() if line.strip()]
    return (lines[-1] if lines else type(why).__name__)[:300]


def _numerics() -> dict[str, Any]:
    """What of torch's own state decides numbers."""
    return {
        "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
    }


# ------------------------------------------------------------------------------------------- on a node


class ChunkActor:
    """Handles chunks, one after another, in a process of a node.

    Args:
        message: in a list, what `placed` made of the handler.
    """

    def __init__(self, message: list[Any], numerics: dict[str, Any]) -> None:
        keep_freed_memory()
        torch.set_num_threads(1)
        torch.set_default_dtype(getattr(torch, numerics["dtype"]))
        torch.use_deterministic_algorithms(numerics["deterministic"])
        torch.set_float32_matmul_precision(numerics["matmul"])
        self.handler: ChunkHandler = opened(message[0])
        self._broadcasts: dict[str, tuple[int, Tree]] = {}

    def about(self) -> dict[str, str]:
        """What numbers depend on here."""
        return versions()

    def pid(self) -> int:
        """This process."""
        return os.getpid()

    def work(self, told: Meta, data: Any, shared: Any, kept: list[Any]) -> Any:
        """One chunk: what happened, its tree and the sizes of its packs; then the packs, each an object of its own.

        Args:
            shared: version of the broadcast, and in a list its reference; None if the job reads none.
            kept: of every client reference and index of its row.
        """
        nothing = (None,) * len(told["packs"])
        try:
            mine = from_bytes(data)
            if told["rows"]:
                found = _rows(kept)
                if found is None:
                    return _several(({"lost": True}, to_bytes({}), []), nothing)
                mine["kept"] = found
            meta, answer = self.handler(told["meta"], mine, self._broadcast(told["shared"], shared))
            rows = answer.pop("rows", None) if told["packs"] else None
            if rows is None:
                return _several(({"meta": meta}, to_bytes(answer), []), nothing)
            packs = [rows[part] for part in told["packs"]]
            return _several(({"meta": meta}, to_bytes(answer), [(len(p), p.nbytes) for p in packs]), packs)
        except FedspanError as e:
            return _several(({"error": str(e), "kind": type(e).__name__}, to_bytes({}), []), nothing)
        except Exception:
            return _several(({"error": traceback.format_exc(), "kind": ""}, to_bytes({}), []), nothing)

    def _broadcast(self, name: str, shared: Any) -> Tree:
        if shared is None:
            return EMPTY
        version, (reference,) = shared
        if name not in self._broadcasts or self._broadcasts[name][0] != version:
            self._broadcasts[name] = version, from_bytes(the_ray().get(reference))
        return self._broadcasts[name][1]


def _rows(kept: Sequence[Any]) -> list[Any] | None:
    """The records of a chunk's clients, None for those that begin; None if some are gone."""
    ray = the_ray()
    wanted = list({ref.hex(): ref for ref, _ in filter(None, kept)}.values())
    try:
        found = dict(zip([ref.hex() for ref in wanted], ray.get(wanted, timeout=FETCH_SECONDS)))
    except (ray.exceptions.ObjectLostError, ray.exceptions.GetTimeoutError):
        return None
    return [None if one is None else found[one[0].hex()][one[1]] for one in kept]


def _several(first: Any, rest: Sequence[Any]) -> Any:
    """What a call returns that has as many returns."""
    return (first, *rest) if rest else first
