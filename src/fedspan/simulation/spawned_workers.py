"""Worker processes that begin as new interpreters, where a process cannot be forked: on macOS, on Windows, with CUDA.

What handles the chunks is sent to them once, by value, over a pipe that only their parent can write to: cloudpickle
takes lambdas and classes of a script or notebook too, so that the script is not run again in every worker, and needs
no `if __name__ == "__main__"`. Large tensors lie in files that all workers map, each with changes of its own only.
Jobs and answers are told over loopback sockets as they are to forks, in JSON, and their trees lie in the same shared
memory, whose descriptor a worker inherits; on Windows they travel as safetensors bytes. Never a pickle.
"""

from __future__ import annotations

import contextlib
import hmac
import io
import json
import math
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from fedspan.errors import FedspanError
from fedspan.learn import accelerator
from fedspan.simulation.workers import (
    MOST_DEATHS,
    ChunkHandler,
    InProcess,
    Job,
    Meta,
    Pool,
    WorkerProcess,
    interrupts_held,
    serve,
    several,
)
from fedspan.storage.row_table import RowTable
from fedspan.tree import Tree
from fedspan.wire import framing
from fedspan.wire.job_channel import Broadcasts, JobChannel, WorkerChannel

LARGE = 1 << 20
"""Bytes from which a tensor is put into a file that all workers map, rather than sent to each."""

MOST_SECONDS = 300.0
"""For a worker to start in, on however busy a machine."""

HELLO = 32
"""Bytes of the secret by which a worker is known."""

LOOPBACK = "127.0.0.1"

# Modules may lie where only the parent's path leads, fedspan too.
_BEGIN = """
import json, sys
head = json.loads(sys.stdin.buffer.readline())
body = sys.stdin.buffer.read(head["bytes"])
sys.path[:] = head["path"]
from fedspan.simulation.spawned_workers import begin
begin(head, body)
"""


class CannotStart(FedspanError):
    """Workers cannot be spawned, or what they need cannot be sent to them."""


@dataclass
class SpawnedProcess(WorkerProcess):
    """A worker that was spawned; it ends with its standard input at the latest."""

    popen: subprocess.Popen[bytes] = field(kw_only=True)

    def _kill(self) -> None:
        _end(self.popen)


class SpawnedPool(Pool):
    """Runs jobs on processes that were spawned, with the same bits as forks of this one.

    Where they cannot be started, jobs run in this process, and `told` hears why.

    Args:
        patience: seconds of work that are done in this process before workers are started, as their start takes
            seconds of its own.
        devices: of each worker the accelerator that it computes on.
    """

    def __init__(
        self,
        handler: ChunkHandler,
        workers: int,
        told: Callable[[str], None] | None = None,
        patience: float = 0.0,
        devices: Sequence[torch.device] = (),
    ) -> None:
        super().__init__(handler, workers, told)
        self.devices = devices
        self._given: dict[subprocess.Popen[bytes], torch.device] = {}
        self.patience = patience
        self._sent: bytes | None = None
        self._tables: list[int] = []  # descriptors of tables that what is sent refers to
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[Meta, Tree]]:
        """Results of all jobs, in order, as soon as each and all before it are done.

        Raises:
            WorkerDied: if a job has ended several workers, one after another.
        """
        many, jobs = several(jobs)
        if many and self.patience <= 0.0 and not self._processes:
            try:
                self._fill()
            except CannotStart as e:
                self.patience = math.inf
                if self.told is not None:
                    self.told(f"{e} All clients are computed in this process, with the same numbers.")
        if self.patience <= 0.0:
            yield from super().run(jobs)
            return
        start = time.monotonic()
        try:
            yield from InProcess.run(self, jobs)
        finally:
            self.patience -= time.monotonic() - start

    def close(self) -> None:
        """Stop the workers, wait for them, and remove their files."""
        super().close()
        if self._folder is not None:
            self._folder.cleanup()
        self._folder = self._sent = None

    # ------------------------------------------------------------------------------------------- parent side

    def _fill(self) -> None:
        self._processes += self._spawn(self.workers - len(self._processes))

    def _start(self) -> WorkerProcess:
        return self._spawn(1)[0]

    def _spawn(self, number: int) -> list[SpawnedProcess]:
        """Start workers side by side, and wait until all of them are ready."""
        if number <= 0:
            return []
        coming: dict[bytes, subprocess.Popen[bytes]] = {}
        ready: list[SpawnedProcess] = []
        try:
            body = self._message()
            with socket.create_server((LOOPBACK, 0), backlog=2 * number) as door:
                self._launch(number, door, body, coming)
                until, ended = time.monotonic() + MOST_SECONDS, 0
                while coming:
                    if (process := _welcome(door, coming, self._broadcasts)) is not None:
                        ready.append(process)
                        continue
                    gone = [token for token, popen in coming.items() if popen.poll() is not None]
                    for token in gone:
                        popen, ended = coming.pop(token), ended + 1
                        _end(popen)
                        if ended >= MOST_DEATHS:
                            raise CannotStart(
                                f"Simulator: {MOST_DEATHS} workers ended while they were starting, the last one with"
                                f" code {popen.returncode}; what they wrote stands above, if anything."
                            )
                    self._launch(len(gone), door, body, coming)
                    if time.monotonic() > until:
                        raise CannotStart(f"Simulator: workers were not ready after {MOST_SECONDS:g} seconds.")
        except OSError as e:
            _abandon(coming, ready)
            raise CannotStart(f"Simulator: workers cannot be started here: {e}.") from None
        except BaseException:
            _abandon(coming, ready)
            raise
        return ready

    def _launch(
        self, number: int, door: socket.socket, body: bytes, coming: dict[bytes, subprocess.Popen[bytes]]
    ) -> None:
        """Start processes, then tell each where its parent is and what it needs."""
        memory = [] if self._descriptor is None else [self._descriptor]
        new = {secrets.token_bytes(HELLO): _process([*memory, *self._tables]) for _ in range(number)}
        coming |= new
        assert self._folder is not None
        where = {"port": door.getsockname()[1], "folder": self._folder.name, "memory": self._descriptor}
        about = {"path": sys.path, "bytes": len(body), "torch": _numerics(), **where}
        for token, popen in new.items():
            assert popen.stdin is not None
            own = {"token": token.hex(), "device": self._device_for(popen)}
            with contextlib.suppress(OSError):  # it has ended already, which whoever waits for it is going to see
                popen.stdin.write(json.dumps({**about, **own}).encode() + b"\n" + body)
                popen.stdin.flush()

    def _device_for(self, popen: subprocess.Popen[bytes]) -> str | None:
        """The first accelerator that no living worker has, as text; None if workers compute on processors."""
        self._given = {p: d for p, d in self._given.items() if p.poll() is None}
        free = [d for d in self.devices if d not in self._given.values()]
        if not free:
            return None
        self._given[popen] = free[0]
        return str(free[0])

    def _message(self) -> bytes:
        """What a worker needs, as bytes; large tensors are in files it names.

        Raises:
            CannotStart: if something of it belongs to this process.
        """
        if self._sent is None:
            # Windows does not remove what a dying worker still maps.
            self._folder = tempfile.TemporaryDirectory(prefix="fedspan-", ignore_cleanup_errors=True)
            stream = io.BytesIO()
            pickler = _Pickler(stream, Path(self._folder.name))
            try:
                pickler.dump(self.handler)
            except OSError:  # the disk is full
                self._folder.cleanup()
                raise
            except Exception as e:  # whatever an object of somebody's own raises when it is taken apart
                self._folder.cleanup()
                raise CannotStart(
                    "Simulator: method, model or loss cannot be sent to workers"
                    f" ({type(e).__name__}: {e}); keep open files, locks and generators out of them."
                ) from None
            self._sent, self._tables = stream.getvalue(), pickler.descriptors
        return self._sent


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Takes an object apart; large tensors go into files of a folder, tables of rows are handed on by descriptor."""

    def __init__(self, stream: io.BytesIO, folder: Path) -> None:
        super().__init__(stream)
        self.folder, self.files = folder, 0
        self.descriptors: list[int] = []

    def reducer_override(self, obj: Any) -> Any:
        """How to rebuild a large tensor: map its file."""
        if isinstance(obj, RowTable) and obj.descriptor is not None:
            self.descriptors.append(obj.descriptor)
        if type(obj) is not Tensor or not _worth_a_file(obj):
            return super().reducer_override(obj)
        path, self.files = self.folder / str(self.files), self.files + 1
        obj.reshape(-1).view(torch.uint8).numpy().tofile(path)
        return _mapped, (str(path), tuple(obj.shape), obj.dtype)


def _worth_a_file(t: Tensor) -> bool:
    plain = t.layout is torch.strided and t.device.type == "cpu" and t.is_contiguous() and not t.requires_grad
    return plain and t.nbytes >= LARGE and not (t.is_conj() or t.is_neg() or t.__dict__)


def _mapped(path: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor whose memory is that of a file, shared until somebody writes to it."""
    return torch.from_file(path, shared=False, size=math.prod(shape), dtype=dtype).view(shape)


def _process(descriptors: list[int]) -> subprocess.Popen[bytes]:
    """An interpreter that waits for what to do and has these descriptors too; Ctrl-C is its parent's to handle."""
    command = [sys.executable, *(f"-W{option}" for option in sys.warnoptions), "-c", _BEGIN]
    group = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)  # how Windows keeps Ctrl-C from it
    with interrupts_held():  # which it inherits
        return subprocess.Popen(command, stdin=subprocess.PIPE, creationflags=group, pass_fds=descriptors)


def _welcome(
    door: socket.socket, coming: dict[bytes, subprocess.Popen[bytes]], broadcasts: Broadcasts
) -> SpawnedProcess | None:
    """The next worker that comes to the door within a fifth of a second; strangers are sent away.

    Raises:
        CannotStart: if what it was sent did not work there.
    """
    door.settimeout(0.2)
    try:
        sock, _ = door.accept()
    except TimeoutError:
        return None
    try:
        sock.settimeout(10.0)
        said = framing.exactly(sock, HELLO)
        token = next((t for t in coming if hmac.compare_digest(t, said)), None)
        head = framing.receive(sock)[0] if token is not None else {}
    except OSError:  # no worker of ours; or one that ended, which is seen by its process
        sock.close()
        return None
    if token is None:
        sock.close()
        return None
    if "error" in head:
        sock.close()
        raise CannotStart(f"Simulator: workers cannot use what they were sent ({head['error']}).")
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    popen = coming.pop(token)
    return SpawnedProcess(WorkerChannel(sock, broadcasts), popen.pid, popen=popen)


def _abandon(coming: dict[bytes, subprocess.Popen[bytes]], ready: list[SpawnedProcess]) -> None:
    for popen in coming.values():
        _end(popen)
    for process in ready:
        process.end()


def _end(popen: subprocess.Popen[bytes]) -> None:
    """End a process, whatever it does, and wait for it."""
    popen.kill()
    popen.wait()
    if popen.stdin is not None:
        with contextlib.suppress(OSError):  # what was still to be written has no reader
            popen.stdin.close()


def _numerics() -> dict[str, Any]:
    """What of torch's own state decides numbers; a fork has it from its parent."""
    return {
        "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
    }


# ------------------------------------------------------------------------------------------- worker side


def begin(head: Meta, body: bytes) -> None:
    """Be a worker: rebuild what handles chunks, tell the parent, and answer its jobs until it goes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(head["folder"],), daemon=True).start()
    said: Meta = {}
    Pool.forbidden = True
    try:
        if head["device"] is not None:
            accelerator.assign(torch.device(head["device"]))
        numerics = head["torch"]
        torch.set_default_dtype(getattr(torch, numerics["dtype"]))
        torch.use_deterministic_algorithms(numerics["deterministic"])
        torch.set_float32_matmul_precision(numerics["matmul"])
        handler: ChunkHandler = cloudpickle.loads(body)
    except FedspanError as e:
        said = {"error": str(e)}
    except BaseException as e:  # a module that it needs may do anything when it is imported
        said = {"error": f"{type(e).__name__}: {e}"}
    Pool.forbidden = False
    with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, head["port"])) as sock:  # or it has gone
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(bytes.fromhex(head["token"]))
        framing.send(sock, said)
        if not said:
            serve(JobChannel(sock, head["memory"]), handler)
    os._exit(0)


def _end_with_parent(folder: str) -> None:
    """End this process when its standard input ends, and remove what a parent that was killed has left.

    The parent holds the other side, and lets go of it only after it has ended this process itself.
    """
    try:
        while os.read(0, 1):
            pass
    finally:
        if os.name == "posix":  # elsewhere a launcher may stand between the two and end first
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)
