"""Worker processes for one machine: forked once, fed over sockets, one thread each.

Two single-threaded processes use two cores fully; threads would wait for each other (interpreter lock, page faults).
Trees travel as safetensors bytes. With one worker everything runs in this process, which is also the way to debug.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from fedspan.errors import FedspanError
from fedspan.storage.malloc import keep_heap
from fedspan.tree import EMPTY, Tree
from fedspan.wire import pack, unpack

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


class Pool:
    """Runs jobs on `workers` processes; the results come in the order of the jobs, whatever the workers do."""

    def __init__(self, handler: ChunkHandler, workers: int) -> None:
        self.handler = handler
        self.workers = workers if sys.platform == "linux" else 1  # forking a process that uses torch is safe on Linux
        self._shared: dict[str, Tree] = {}
        self._packed: dict[str, bytes] = {}
        self._socks: list[socket.socket] = []
        self._pids: list[int] = []
        self._has: list[set[str]] = []

    def share(self, name: str, data: Tree) -> None:
        """Make a tree available to the jobs that name it; it replaces what had that name."""
        self._shared[name] = data
        self._packed.pop(name, None)
        for has in self._has:
            has.discard(name)

    def run(self, jobs: list[Job]) -> Iterator[tuple[Meta, Tree]]:
        """Results of all jobs, in order, as soon as each and all before it are done."""
        if self.workers <= 1 or len(jobs) <= 1:
            for job in jobs:
                yield self.handler(job.meta, job.data, self._shared.get(job.shared, EMPTY))
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

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        common = b""
        if job.shared and job.shared not in self._has[worker]:
            if job.shared not in self._packed:
                self._packed[job.shared] = pack(self._shared[job.shared])
            common = self._packed[job.shared]
            self._has[worker].add(job.shared)
        try:
            head = {"meta": job.meta, "shared": job.shared, "new": bool(common)}
            _send(self._socks[worker], head, pack(job.data), common)
        except OSError:
            raise self._dead(worker) from None

    def _answer(self, worker: int) -> tuple[Meta, Tree]:
        try:
            head, data, _ = _receive(self._socks[worker])
        except (EOFError, OSError):
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
        keep_heap()
        torch.set_num_threads(1)
        shared: dict[str, Tree] = {}
        while True:
            try:
                head, data, common = _receive(sock)
            except (EOFError, OSError):
                return
            try:
                if head["new"]:
                    shared[head["shared"]] = unpack(common)
                meta, tree = self.handler(head["meta"], unpack(data), shared.get(head["shared"], EMPTY))
                _send(sock, {"meta": meta}, pack(tree))
            except FedspanError as e:
                _send(sock, {"error": str(e), "kind": type(e).__name__})
            except BaseException:
                _send(sock, {"error": traceback.format_exc(), "kind": ""})


def _send(sock: socket.socket, head: Meta, data: bytes = b"", common: bytes = b"") -> None:
    text = json.dumps(head).encode()
    sock.sendall(struct.pack("<QQQ", len(text), len(data), len(common)) + text)
    for part in (data, common):
        if part:
            sock.sendall(part)


def _receive(sock: socket.socket) -> tuple[Meta, bytearray, bytearray]:
    sizes = struct.unpack("<QQQ", _exactly(sock, 24))
    text, data, common = (_exactly(sock, n) for n in sizes)
    return json.loads(bytes(text)), data, common


def _exactly(sock: socket.socket, n: int) -> bytearray:
    buffer = bytearray(n)
    view, got = memoryview(buffer), 0
    while got < n:
        k = sock.recv_into(view[got:])
        if k == 0:
            raise EOFError
        got += k
    return buffer


def die_with_parent(parent: int) -> None:
    """Ask the kernel to end this process when its parent ends, however it ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)
