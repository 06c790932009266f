"""A Unix socket in a folder that only its owner can enter, and the messages that go through it. Needs no torch."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from fedspan.storage.atomic import replacing

MOST_HEAD, MOST_BODY = 1 << 24, 1 << 36


def serve(note: Path, answer: Callable[[socket.socket], None]) -> None:
    """Open a socket, write to `note` where it is, and answer its owner's connections one by one until SIGTERM."""
    folder = Path(tempfile.mkdtemp(prefix="fedspan-"))  # rights 0700; short, as socket paths must be

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit

    signal.signal(signal.SIGTERM, stop)
    listener = socket.socket(socket.AF_UNIX)
    try:
        path = folder / "door.sock"
        listener.bind(str(path))
        os.chmod(path, 0o600)
        listener.listen(4)
        with replacing(note) as place:
            place.write_text(json.dumps({"socket": str(path), "pid": os.getpid()}))
            os.chmod(place, 0o600)
        print("Ready.", flush=True)
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                if _owner(connection) == os.getuid():
                    connection.settimeout(60.0)  # for a request that never comes; the work itself may take longer
                    answer(connection)
    finally:
        listener.close()
        with contextlib.suppress(OSError, ValueError):
            if json.loads(note.read_text())["pid"] == os.getpid():
                note.unlink()
        shutil.rmtree(folder, ignore_errors=True)


def send(connection: socket.socket, head: dict[str, Any], body: bytes) -> None:
    """Send a head of JSON and a body."""
    text = json.dumps(head).encode()
    connection.sendall(struct.pack("<QQ", len(text), len(body)) + text)
    if body:  # after an empty one the other side may have answered and gone, which would look like a fault
        connection.sendall(body)


def receive(connection: socket.socket) -> tuple[dict[str, Any], bytes]:
    """The other side's head and body.

    Raises:
        OSError: if it is too long, or ends before its end.
    """
    first, second = struct.unpack("<QQ", _exactly(connection, 16))
    if first > MOST_HEAD or second > MOST_BODY:
        raise OSError("a message is too long")
    head: dict[str, Any] = json.loads(_exactly(connection, first))
    return head, _exactly(connection, second)


def _owner(connection: socket.socket) -> int:
    """The user at the other end."""
    if not hasattr(socket, "SO_PEERCRED"):
        return os.getuid()  # the folder's rights protect it alone
    size = struct.calcsize("3i")
    return int(struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1])


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = connection.recv(min(size, 1 << 20))
        if not part:
            raise OSError("the other side has gone")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
