"""Executors: who runs the chunks of a round, this process or worker processes; on several machines see `cluster`.

Worker processes are forked once (or spawned, see `spawned_workers`), one thread each: two single-threaded processes use
two cores fully; threads would wait for each other (interpreter lock, page faults). Jobs and answers are told over
sockets, their trees lie in memory that all of them share. With one worker everything runs in this process, which is
also the way to debug.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import selectors
import signal
import socket
import sys
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar

import torch

from fedspan import tree
from fedspan.errors import ConfigError, FedspanError
from fedspan.storage.malloc import keep_freed_memory, return_freed_memory
from fedspan.tree import EMPTY, Tree
from fedspan.wire.job_channel import Broadcasts, JobChannel, Letter, WorkerChannel
from fedspan.wire.shared_memory import shared_memory

Meta: TypeAlias = dict[str, Any]
ChunkHandler: TypeAlias = Callable[[Meta, Tree, Tree], tuple[Meta, Tree]]
"""(what to do, its own tree, the broadcast tree) → (what happened, a tree)."""

StartMethod: TypeAlias = Literal["auto", "fork", "spawn"]


@dataclass(frozen=True)
class Job:
    """One piece of work; `shared` names the broadcast tree it needs."""

    meta: Meta
    data: Tree = field(default_factory=dict)
    shared: str = ""
    rows: Sequence[Any] = ()
    """Of every client where its row is, if the executor keeps rows; None for an initial one."""
    packs: Sequence[slice] = ()
    """How new rows are divided that the executor is to keep."""


JOBS_AHEAD = 2
"""Jobs for each worker that exist at a time: the one it works on, and one made meanwhile for whoever is done first."""

RESULTS_AHEAD = 8
"""Jobs for each worker that are taken before the results of those ahead of them have been handed on."""

MOST_DEATHS = 3
"""Workers that one job may end before it is given up."""

JOBS_BETWEEN_RETURNS = 32
"""Jobs after which a worker returns the memory it keeps: gaps between tensors of many sizes grow with their number."""

PATIENCE = 10.0
"""Seconds of work in this process before workers are spawned that nobody asked for: their start takes seconds too."""


class WorkerError(RuntimeError):
    """A worker failed; carries its traceback."""


class WorkerDied(FedspanError):
    """Workers end on one job, again and again."""


class Executor(Protocol):
    """Runs jobs somewhere; the results come in the order of the jobs, wherever and whenever they are done."""

    def share(self, name: str, data: Tree) -> None:
        """Make a tree available to the jobs that name it; it replaces what had that name."""
        ...

    def empty(self, like: Tree) -> Tree:
        """Uninitialised tensors of these types and shapes, from where jobs need not copy them."""
        ...

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[Meta, Tree]]:
        """Results of all jobs, in order, as soon as each and all before it are done.

        A job is taken from `jobs` only when it is about to be done: few of them need to exist at a time.
        """
        ...

    def close(self) -> None:
        """Let go of whatever runs them; a later `run` starts anew."""
        ...


class InProcess:
    """Runs jobs in this process, one after another."""

    def __init__(self, handler: ChunkHandler) -> None:
        self.handler = handler
        self._shared: dict[str, Tree] = {}

    def share(self, name: str, data: Tree) -> None:
        """Make a tree available to the jobs that name it; it replaces what had that name."""
        self._shared[name] = data

    def empty(self, like: Tree) -> Tree:
        """Uninitialised tensors of these types and shapes."""
        found: Tree = tree.map(lambda t: torch.empty(t.shape, dtype=t.dtype), like)
        return found

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[Meta, Tree]]:
        """Results of all jobs, in order; each job is taken when the one before it is done."""
        for job in jobs:
            yield self.handler(job.meta, job.data, self._shared.get(job.shared, EMPTY))

    def close(self) -> None:
        """Nothing is held."""


def available_cores() -> int:
    """Cores this process may use; all of the machine where the system does not tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def can_fork() -> bool:
    """Whether workers can be forks of this process: forking one that uses torch is safe on Linux only."""
    return sys.platform == "linux" and hasattr(os, "fork")


def forks(method: StartMethod) -> bool:
    """Whether workers are forks of this process; otherwise they are spawned.

    Raises:
        ConfigError: if forks are asked for and cannot be had.
    """
    if method == "fork" and not can_fork():
        raise ConfigError("Train: start_method='fork' needs Linux; use 'auto' or 'spawn', with the same numbers.")
    return method != "spawn" and can_fork()


def executor_of(
    handler: ChunkHandler,
    workers: int | None,
    told: Callable[[str], None] | None = None,
    method: StartMethod = "auto",
) -> Executor:
    """Worker processes, or this one where one is enough.

    Args:
        workers: one for each core if None.
        told: hears what became of workers.

    Raises:
        ConfigError: in a worker that is being started, when a module it imports runs a simulation.
    """
    if Pool.forbidden:
        raise ConfigError(
            "Simulator: a worker must not start a simulation of its own; put what a module runs when it is imported"
            ' under if __name__ == "__main__":'
        )
    number = workers or available_cores()
    if number == 1:
        return InProcess(handler)
    if forks(method):
        return Pool(handler, number, told)
    from fedspan.simulation.spawned_workers import SpawnedPool  # imports what only this needs

    return SpawnedPool(handler, number, told, PATIENCE if workers is None else 0.0)


@dataclass
class WorkerProcess:
    """A process that answers jobs, as its parent sees it."""

    channel: WorkerChannel
    pid: int
    job: int | None = None  # the job it works on
    ended: bool = False

    def end(self) -> None:
        """End it, whatever it does, and wait for it."""
        if self.ended:
            return
        self.ended = True
        self.channel.sock.close()
        self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


Item = TypeVar("Item")


class JobWindow(Generic[Item]):
    """The jobs of one `run`, taken from an iterable a few at a time.

    Args:
        most_open: how many may be taken that have no result.
        most_ahead: how many may be taken whose results have not been handed on.
    """

    def __init__(self, jobs: Iterable[Item], most_open: int, most_ahead: int) -> None:
        self._source, self._most_open, self._most_ahead = enumerate(jobs), most_open, most_ahead
        self._open: dict[int, Item] = {}  # taken, and without a result
        self._next: deque[int] = deque()  # of those: made, or to be repeated, and with no worker
        self._deaths: Counter[int] = Counter()
        self._done: dict[int, tuple[Meta, Tree]] = {}
        self._handed_on = 0
        self._taken: int | None = 0  # None: there are no more

    def make(self) -> bool:
        """Take one more job from the iterable, for later; whether there was one to be taken now."""
        if self._taken is None or len(self._open) >= self._most_open:
            return False
        if self._taken - self._handed_on >= self._most_ahead:
            return False
        found = next(self._source, None)
        if found is None:
            self._taken = None
            return False
        self._taken += 1
        self._open[found[0]] = found[1]
        self._next.append(found[0])
        return True

    def take(self, fit: Callable[[Item], float] | None = None) -> tuple[int, Item] | None:
        """The next job to be done, and its number; None where there is none now.

        Args:
            fit: how well a job suits whoever takes it; below 0 it is left to others. Of equals the first is taken.
        """
        if fit is not None:
            while self.make():  # to choose from
                pass
            suits = {k: fit(self._open[k]) for k in self._next}
            best = max(self._next, key=suits.__getitem__, default=None)
            if best is None or suits[best] < 0:
                return None
            self._next.remove(best)
            return best, self._open[best]
        if not self._next and not self.make():
            return None
        k = self._next.popleft()
        return k, self._open[k]

    def answered(self, k: int) -> None:
        """Note that job k is done, and needs not be held any more."""
        del self._open[k]

    def done(self, k: int, result: tuple[Meta, Tree]) -> None:
        """Note the result of job k."""
        self._done[k] = result

    def repeat(self, k: int) -> int:
        """Let job k be done again, first of all; how often that was asked for."""
        self._next.appendleft(k)
        self._deaths[k] += 1
        return self._deaths[k]

    def results(self) -> Iterator[tuple[Meta, Tree]]:
        """Results that are there, in order, up to the first one that is not."""
        while self._handed_on in self._done:
            result = self._done.pop(self._handed_on)
            self._handed_on += 1
            yield result

    @property
    def busy(self) -> bool:
        """Whether some job has been taken and has no result."""
        return bool(self._open)


def several(jobs: Iterable[Job]) -> tuple[bool, Iterable[Job]]:
    """Whether there is more than one job, and all of them."""
    rest = iter(jobs)
    first = list(islice(rest, 2))

    def every() -> Iterator[Job]:
        while first:
            yield first.pop(0)  # not to be held any longer
        yield from rest

    return len(first) > 1, every()


class Pool(InProcess):
    """Runs jobs on `workers` processes; a single job is not worth the way to one.

    A worker that dies (killed, out of memory) is replaced and its job repeated: a job is a function of what it is
    given, so the result has the same bits.

    Args:
        told: hears a sentence for every worker that was replaced.
    """

    forbidden = False
    """Whether this process is a worker that is being started."""

    def __init__(self, handler: ChunkHandler, workers: int, told: Callable[[str], None] | None = None) -> None:
        super().__init__(handler)
        self.workers, self.told = workers, told
        self._broadcasts = Broadcasts(shared_memory())
        self._processes: list[WorkerProcess] = []

    def share(self, name: str, data: Tree) -> None:
        """Make a tree available to the jobs that name it; it replaces what had that name."""
        super().share(name, data)
        self._broadcasts.share(name, data)

    def empty(self, like: Tree) -> Tree:
        """Uninitialised tensors of these types and shapes, in shared memory where there is any."""
        memory = self._broadcasts.memory
        return super().empty(like) if memory is None else memory.empty(like)

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[Meta, Tree]]:
        """Results of all jobs, in order, as soon as each and all before it are done.

        Raises:
            WorkerDied: if a job has ended several workers, one after another.
        """
        many, jobs = several(jobs)
        if not many:
            yield from super().run(jobs)
            return
        self._fill()
        letters = (self._broadcasts.letter({"meta": job.meta}, job.data, job.shared) for job in jobs)
        window = JobWindow(letters, JOBS_AHEAD * self.workers, RESULTS_AHEAD * self.workers)
        try:
            with selectors.DefaultSelector() as ready:
                for w in range(self.workers):
                    self._register(ready, w)
                while self._give_all(ready, window):
                    heard = ready.select(0)
                    while not heard and window.make():  # while all of them are busy
                        heard = ready.select(0)
                    for entry, _ in heard or ready.select():
                        self._take(ready, entry.data, window)
                    for result in window.results():
                        self._give_all(ready, window)  # so that nobody is idle while the result is looked at
                        yield result
        finally:
            if any(p.job is not None for p in self._processes):
                # An error, or nobody wants the rest: answers still under way must not be taken for later ones.
                self.close()

    def close(self) -> None:
        """Stop the workers and wait for them."""
        for process in self._processes:
            process.end()
        self._processes = []
        self._broadcasts = Broadcasts(shared_memory())  # the old one's memory goes with the last tensor in it
        for name, data in self._shared.items():
            self._broadcasts.share(name, data)

    # ------------------------------------------------------------------------------------------- parent side

    def _fill(self) -> None:
        """Start the workers that are missing."""
        while len(self._processes) < self.workers:
            self._processes.append(self._start())

    def _start(self) -> WorkerProcess:
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        with interrupts_held():  # until the child ignores them: it must not run the parent's handler
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
        if pid == 0:
            code = 1
            try:
                for s in [ours, *(p.channel.sock for p in self._processes)]:
                    s.close()
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                die_with_parent(parent)
                serve(JobChannel(theirs, self._descriptor), self.handler)
                code = 0
            finally:
                os._exit(code)
        theirs.close()
        return WorkerProcess(WorkerChannel(ours, self._broadcasts), pid)

    @property
    def _descriptor(self) -> int | None:
        """Of the memory that is shared with workers."""
        memory = self._broadcasts.memory
        return None if memory is None else memory.descriptor

    def _register(self, ready: selectors.BaseSelector, worker: int) -> None:
        ready.register(self._processes[worker].channel.sock, selectors.EVENT_READ, worker)

    def _give_all(self, ready: selectors.BaseSelector, window: JobWindow[Letter]) -> bool:
        """Give every idle worker a job, as far as there are any; whether any worker has one."""
        for w in range(self.workers):
            if self._processes[w].job is None:
                self._give(ready, w, window)
        return window.busy

    def _give(self, ready: selectors.BaseSelector, worker: int, window: JobWindow[Letter]) -> None:
        """Send the next job to a worker; one that is found dead is replaced, and its replacement gets the job."""
        while (found := window.take()) is not None:
            process = self._processes[worker]
            process.job, letter = found
            try:
                process.channel.give(letter)
                return
            except OSError:
                self._replace(ready, worker, window)

    def _take(self, ready: selectors.BaseSelector, worker: int, window: JobWindow[Letter]) -> None:
        """Receive what a worker has to say, an answer or its end, and give it something to do."""
        process = self._processes[worker]
        try:
            reply = process.channel.take()
        except OSError:
            self._replace(ready, worker, window)
            self._give(ready, worker, window)
            return
        k, process.job = process.job, None
        assert k is not None
        window.answered(k)
        self._give(ready, worker, window)  # before the answer is looked at, so that it need not wait
        window.done(k, answer_of(reply.head, self._broadcasts.opened(reply)))

    def _replace(self, ready: selectors.BaseSelector, worker: int, window: JobWindow[Letter]) -> None:
        """Start a worker in the place of a dead one; the dead one's job comes next."""
        dead = self._processes[worker]
        ready.unregister(dead.channel.sock)
        dead.end()
        k, dead.job = dead.job, None
        if k is not None and window.repeat(k) >= MOST_DEATHS:
            raise WorkerDied(
                f"Simulator: {MOST_DEATHS} workers ended unexpectedly on the same chunk, the last one process"
                f" {dead.pid}, most likely for lack of memory. Use a smaller train.chunk, or train.workers=1; the"
                " run can be resumed."
            )
        self._processes[worker] = self._start()
        self._register(ready, worker)
        if self.told is not None:
            self.told(
                f"Simulator: worker {worker} (process {dead.pid}) ended unexpectedly and was replaced; its chunk was"
                " repeated and gives the same numbers."
            )


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Keep Ctrl-C waiting, where the system can."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def answer_of(head: Meta, data: Tree) -> tuple[Meta, Tree]:
    """What a worker answered.

    Raises:
        FedspanError: the worker's own, of the same class and sentence.
        WorkerError: any other error, with its traceback.
    """
    if "error" in head:
        known: list[type[Exception]] = [FedspanError, *FedspanError.__subclasses__()]
        raise next((c for c in known if c.__name__ == head["kind"]), WorkerError)(head["error"])
    return head["meta"], data


# ------------------------------------------------------------------------------------------- worker side


def serve(channel: JobChannel, handler: ChunkHandler) -> None:
    """Answer the jobs that come until the other side has gone."""
    keep_freed_memory()
    gc.freeze()  # what was there before has come to stay: looking through it again and again would also copy its pages
    torch.set_num_threads(1)
    for jobs in count():
        try:
            head, data, broadcast = channel.take()
        except OSError:
            return
        if jobs % JOBS_BETWEEN_RETURNS == JOBS_BETWEEN_RETURNS - 1:
            return_freed_memory()
        try:
            meta, tree = handler(head["meta"], data, broadcast)
            channel.answer({"meta": meta}, tree)
        except FedspanError as e:
            channel.refuse({"error": str(e), "kind": type(e).__name__})
        except BaseException:
            channel.refuse({"error": traceback.format_exc(), "kind": ""})


def die_with_parent(parent: int) -> None:
    """Ask the kernel to end this process when its parent ends, however it ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)
