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

PREFIX, NAME = "fedspan-", "node.sock"
LONGEST = 103
"""Bytes of a socket's path on macOS; Linux takes four more."""


def serve(note: Path, answer: Callable[[socket.socket], None]) -> None:
    """Open a socket, write to `note` where it is, and answer its owner's connections one by one until SIGTERM."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=_parent()))  # rights 0700

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit

    signal.signal(signal.SIGTERM, stop)
    listener = socket.socket(socket.AF_UNIX)
    try:
        path = folder / NAME
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


def remove_note(note: Path) -> None:
    """Remove a note that nobody serves any more, and the socket of a process that was killed and could not."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        path = Path(json.loads(note.read_text(encoding="utf-8"))["socket"])
        folder = path.parent
        # A note is only a text: nothing but a socket where `serve` puts one is removed.
        if folder.parent == Path(_parent()) and folder.name.startswith(PREFIX) and path.name == NAME:
            if path.is_socket():
                path.unlink()
            folder.rmdir()
    note.unlink(missing_ok=True)


def _parent() -> str:
    """Where socket folders lie: a path that leaves room for a socket's, of which macOS takes 103 bytes."""
    usual = tempfile.gettempdir()
    short = len(os.fsencode(usual)) <= LONGEST - len(f"/{PREFIX}xxxxxxxx/{NAME}")
    return usual if short else "/tmp"


def _owner(connection: socket.socket) -> int:
    """The user at the other end."""
    if not hasattr(socket, "SO_PEERCRED"):
        return os.getuid()  # the folder's rights protect it alone
    size = struct.calcsize("3i")
    return int(struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1])
