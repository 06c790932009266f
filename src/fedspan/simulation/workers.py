"""Executors: who runs the chunks of a round on one machine, this process or worker processes.

Worker processes are forked once, fed over sockets, one thread each: two single-threaded processes use two cores fully;
threads would wait for each other (interpreter lock, page faults). Trees travel as safetensors bytes. With one worker
everything runs in this process, which is also the way to debug.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch

from fedspan.errors import FedspanError
from fedspan.storage.malloc import keep_freed_memory
from fedspan.tree import EMPTY, Tree
from fedspan.wire import framing, pack, unpack

Meta: TypeAlias = dict[str, Any]
ChunkHandler: TypeAlias = Callable[[Meta, Tree, Tree], tuple[Meta, Tree]]
"""(what to do, its own tree, the broadcast tree) → (what happened, a tree)."""


@dataclass(frozen=True)
class Job:
    """One piece of work; `shared` names the broadcast tree it needs."""

    meta: Meta
    data: Tree = field(default_factory=dict)
    shared: str = ""


class WorkerError(RuntimeError):
    """A worker failed; carries its traceback."""


class Executor(Protocol):
    """Runs jobs somewhere; the results come in the order of the jobs, wherever and whenever they are done."""

    def share(self, name: str, data: Tree) -> None:
        """Make a tree available to the jobs that name it; it replaces what had that name."""
        ...

    def run(self, jobs: list[Job]) -> Iterator[tuple[Meta, Tree]]:
        """Results of all jobs, in order, as soon as each and all before it are done."""
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

    def run(self, jobs: list[Job]) -> Iterator[tuple[Meta, Tree]]:
        """Results of all jobs, in order."""
        for job in jobs:
            yield self.handler(job.meta, job.data, self._shared.get(job.shared, EMPTY))

    def close(self) -> None:
        """Nothing is held."""


def executor_of(handler: ChunkHandler, workers: int) -> Executor:
    """Worker processes, or this one where one is enough; forking a process that uses torch is safe on Linux only."""
    return Pool(handler, workers) if workers > 1 and sys.platform == "linux" else InProcess(handler)


class Pool(InProcess):
    """Runs jobs on `workers` processes; a single job is not worth the way to one."""

    def __init__(self, handler: ChunkHandler, workers: int) -> None:
        super().__init__(handler)
        self.workers = workers
        self._packed: dict[str, bytes] = {}
        self._socks: list[socket.socket] = []
        self._pids: list[int] = []
        self._has: list[set[str]] = []

    def share(self, name: str, data: Tree) -> None:
        """Make a tree available to the jobs that name it; it replaces what had that name."""
        super().share(name, data)
        self._packed.pop(name, None)
        for has in self._has:
            has.discard(name)

    def run(self, jobs: list[Job]) -> Iterator[tuple[Meta, Tree]]:
        """Results of all jobs, in order, as soon as each and all before it are done."""
        if len(jobs) <= 1:
            yield from super().run(jobs)
            return
        if not self._socks:
            self._start()
        done: dict[int, tuple[Meta, Tree]] = {}
        at: dict[int, int] = {}  # worker → job
        waiting = iter(range(len(jobs)))
        try:
            with selectors.DefaultSelector() as ready:
                for w, s in enumerate(self._socks):
                    ready.register(s, selectors.EVENT_READ, w)
                    self._give(w, jobs, waiting, at)
                for k in range(len(jobs)):
                    while k not in done:
                        for entry, _ in ready.select():
                            w = entry.data
                            done[at[w]] = self._answer(w)
                            del at[w]
                            self._give(w, jobs, waiting, at)
                    yield done.pop(k)
        finally:
            if at:  # an error, or nobody wants the rest: answers still under way must not be taken for later ones
                self.close()

    def close(self) -> None:
        """Stop the workers and wait for them."""
        for s in self._socks:
            s.close()
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self._socks, self._pids, self._has = [], [], []

    # ------------------------------------------------------------------------------------------- parent side

    def _start(self) -> None:
        for _ in range(self.workers):
            ours, theirs = socket.socketpair()
            sys.stdout.flush()
            sys.stderr.flush()
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    for s in [ours, *self._socks]:
                        s.close()
                    self._serve(theirs, parent)
                    code = 0
                finally:
                    os._exit(code)
            theirs.close()
            self._socks.append(ours)
            self._pids.append(pid)
            self._has.append(set())

    def _give(self, worker: int, jobs: list[Job], waiting: Iterator[int], at: dict[int, int]) -> None:
        k = next(waiting, None)
        if k is None:
            return
        job = jobs[k]
        at[worker] = k
        try:
            if job.shared and job.shared not in self._has[worker]:
                if job.shared not in self._packed:
                    self._packed[job.shared] = pack(self._shared[job.shared])
                framing.send(self._socks[worker], {"share": job.shared}, self._packed[job.shared])
                self._has[worker].add(job.shared)
            framing.send(self._socks[worker], {"meta": job.meta, "shared": job.shared}, pack(job.data))
        except OSError:
            raise self._dead(worker) from None

    def _answer(self, worker: int) -> tuple[Meta, Tree]:
        try:
            head, data = framing.receive(self._socks[worker])
        except OSError:
            raise self._dead(worker) from None
        if "error" in head:
            known: list[type[Exception]] = [FedspanError, *FedspanError.__subclasses__()]
            raise next((c for c in known if c.__name__ == head["kind"]), WorkerError)(head["error"])
        return head["meta"], unpack(data)

    def _dead(self, worker: int) -> WorkerError:
        return WorkerError(
            f"Simulator: worker {worker} (process {self._pids[worker]}) ended unexpectedly, most likely for lack of"
            " memory. Use a smaller train.chunk, or train.workers=1; the run can be resumed."
        )

    # ------------------------------------------------------------------------------------------- worker side

    def _serve(self, sock: socket.socket, parent: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent(parent)
        keep_freed_memory()
        torch.set_num_threads(1)
        shared: dict[str, Tree] = {}
        while True:
            try:
                head, data = framing.receive(sock)
            except OSError:
                return
            try:
                if "share" in head:  # asked for by the job that comes next
                    shared[head["share"]] = unpack(data)
                    continue
                meta, tree = self.handler(head["meta"], unpack(data), shared.get(head["shared"], EMPTY))
                framing.send(sock, {"meta": meta}, pack(tree))
            except FedspanError as e:
                framing.send(sock, {"error": str(e), "kind": type(e).__name__})
            except BaseException:
                framing.send(sock, {"error": traceback.format_exc(), "kind": ""})


def die_with_parent(parent: int) -> None:
    """Ask the kernel to end this process when its parent ends, however it ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)
