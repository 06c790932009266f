"""A Unix socket in a folder that only its owner can enter. Messages on it: `wire.framing`. Needs no torch."""

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

from fedspan.storage.atomic import replacing

LONGEST = 103
"""Bytes of a socket's path on macOS; Linux takes four more."""


def serve(note: Path, answer: Callable[[socket.socket], None]) -> None:
    """Open a socket, write to `note` where it is, and answer its owner's connections one by one until SIGTERM."""
    folder = _folder()

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit

    signal.signal(signal.SIGTERM, stop)
    listener = socket.socket(socket.AF_UNIX)
    try:
        path = folder / "node.sock"
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
            if json.loads(note.read_text(encoding="utf-8"))["pid"] == os.getpid():
                note.unlink()
        shutil.rmtree(folder, ignore_errors=True)


def _folder() -> Path:
    """A new folder of rights 0700 whose path leaves room for a socket's, of which macOS takes 103 bytes."""
    usual = tempfile.gettempdir()
    short = len(os.fsencode(usual)) <= LONGEST - len("/fedspan-xxxxxxxx/node.sock")
    return Path(tempfile.mkdtemp(prefix="fedspan-", dir=usual if short else "/tmp"))


def _owner(connection: socket.socket) -> int:
    """The user at the other end."""
    if not hasattr(socket, "SO_PEERCRED"):
        return os.getuid()  # the folder's rights protect it alone
    size = struct.calcsize("3i")
    return int(struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1])
