"""The warm worker of a node: one process that holds torch, the data and the model, so that a message costs no import.

Flower starts a process for every message. That process hands the message over a Unix socket that only its owner can
reach, and does the work itself where no worker runs. Needs no torch until it works.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import struct
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

from fedspan.errors import FedspanError
from fedspan.whole import replacing

MOST_HEAD, MOST_BODY = 1 << 24, 1 << 36
NOTE = "worker.json"


class WorkerFault(FedspanError):
    """The worker says why it could not do a request."""


def call(node: Path, head: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes] | None:
    """Ask the warm worker of a node; None if none runs.

    Raises:
        WorkerFault: if it could not do it; doing it here would end the same way.
    """
    try:
        where = json.loads((node / NOTE).read_text())["socket"]
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(where)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    with connection:
        try:
            _send(connection, head, body)
            answer, data = _receive(connection)
        except OSError:
            return None  # it was killed on the way; its state on disk is whole, so the work can be done here
    if "error" in answer:
        raise WorkerFault(str(answer["error"])[:2000])
    return answer["facts"], data


def serve(node: Path) -> None:
    """Answer requests until SIGTERM; the socket lies in a folder of its own that only its owner can enter."""
    from fedspan.flower.service import Service

    service = Service(node)
    folder = Path(tempfile.mkdtemp(prefix="fedspan-"))  # rights 0700; short, as socket paths must be
    note = node / NOTE

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit

    signal.signal(signal.SIGTERM, stop)
    listener = socket.socket(socket.AF_UNIX)
    try:
        path = folder / "worker.sock"
        listener.bind(str(path))
        os.chmod(path, 0o600)
        listener.listen(4)
        with replacing(note) as place:
            place.write_text(json.dumps({"socket": str(path), "pid": os.getpid()}))
            os.chmod(place, 0o600)
        print("Worker: ready.", flush=True)
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                if _owner(connection) != os.getuid():
                    continue
                connection.settimeout(60.0)  # for a request that never comes; the work itself may take longer
                head, body = _receive(connection)
                try:
                    facts, data = service.handle(head["experiment"], head["facts"], body)
                    _send(connection, {"facts": facts}, data)
                except Exception as e:
                    print(f"Worker: {type(e).__name__}: {e}", file=sys.stderr, flush=True)
                    _send(connection, {"error": f"{type(e).__name__}: {e}"}, b"")
    finally:
        listener.close()
        with contextlib.suppress(OSError, ValueError):
            if json.loads(note.read_text())["pid"] == os.getpid():
                note.unlink()
        shutil.rmtree(folder, ignore_errors=True)


def _owner(connection: socket.socket) -> int:
    """The user at the other end."""
    if not hasattr(socket, "SO_PEERCRED"):
        return os.getuid()  # the folder's rights protect it alone
    size = struct.calcsize("3i")
    return int(struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1])


def _send(connection: socket.socket, head: dict[str, Any], body: bytes) -> None:
    text = json.dumps(head).encode()
    connection.sendall(struct.pack("<QQ", len(text), len(body)) + text)
    if body:  # after an empty one the other side may have answered and gone, which would look like a fault
        connection.sendall(body)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], bytes]:
    first, second = struct.unpack("<QQ", _exactly(connection, 16))
    if first > MOST_HEAD or second > MOST_BODY:
        raise OSError("worker: a message is too long")
    head: dict[str, Any] = json.loads(_exactly(connection, first))
    return head, _exactly(connection, second)


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = connection.recv(min(size, 1 << 20))
        if not part:
            raise OSError("worker: the other side has gone")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
