"""A watcher that outlives its parent, to stop what the parent started if it can no longer do so itself.

The kernel can end children with their parent on Linux alone, and children only: Flower's own children would stay. So a
small process waits at the end of a pipe that closes when the parent ends, however it ends. Needs no torch.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from fedspan.deploy.operations import processes

DONE = b"done\n"
"""What a parent says that has stopped everything itself."""

PATIENCE = 5.0
"""Seconds that each part has to end by itself, when its parent was killed."""


@contextmanager
def stopped_afterwards(folders: Sequence[Path], remove: Path | None = None) -> Iterator[None]:
    """Stop the processes of these folders, in this order, after the block, even if this process is killed inside it.

    Args:
        remove: a folder to be removed if it is killed, since nobody else is left to do so.
    """
    order = {
        "folders": [str(f.resolve()) for f in folders],
        "remove": None if remove is None else str(remove.resolve()),
    }
    watcher = subprocess.Popen(
        [sys.executable, "-m", "fedspan.deploy.operations.watcher", json.dumps(order)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C and the end of a terminal are the parent's
    )
    assert watcher.stdin is not None
    try:
        yield
    finally:
        for folder in folders:
            processes.stop(folder)
        with suppress(OSError):
            watcher.stdin.write(DONE)
            watcher.stdin.close()
        watcher.wait()


def watch_parent(folders: Sequence[Path], remove: Path | None) -> None:
    """Wait for the parent's word or its end; after its end, stop what it has started."""
    if sys.stdin.buffer.read() == DONE:
        return
    for folder in folders:
        processes.stop(folder, PATIENCE)
    if remove is not None:
        shutil.rmtree(remove, ignore_errors=True)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):  # whoever ends the parent's kind ends the parent
        signal.signal(number, signal.SIG_IGN)
    told = json.loads(sys.argv[1])
    watch_parent([Path(f) for f in told["folders"]], Path(told["remove"]) if told["remove"] else None)
