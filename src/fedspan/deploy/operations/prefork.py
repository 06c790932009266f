"""A node's starter: the process Flower wants for every message, forked from one that has imported Flower already.

Flower's executor runs the program `flwr-clientapp`, whose imports cost more than a second of computing each time. A
node's folder has a program of that name that comes first on its path: it asks the starter for a fork, and runs Flower's
own program where none answers. Needs no torch.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import sys
from pathlib import Path

from fedspan.deploy.operations import prefork_request, unix_socket
from fedspan.wire import framing

NOTE = "starter.json"
PROGRAM = "flwr-clientapp"


def install(node: Path) -> Path:
    """Write the program that asks the starter to a folder of the node; that folder."""
    here = node / "bin"
    here.mkdir(mode=0o700, exist_ok=True)
    real = Path(sys.executable).parent / PROGRAM
    # Isolated and without site-packages: it starts in a fiftieth of a second.
    words = [sys.executable, "-I", "-S", prefork_request.__file__, str(node / NOTE), str(real)]
    (here / PROGRAM).write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    (here / PROGRAM).chmod(0o700)
    return here


def serve(node: Path) -> None:
    """Fork a process for every request, until SIGTERM."""
    from flwr.supernode.cli.flwr_clientapp import flwr_clientapp

    import fedspan.deploy.node.client_app  # noqa: F401 (what the forked process is going to load)

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them

    def answer(connection: socket.socket) -> None:
        head, _ = framing.receive(connection)
        if os.fork() == 0:
            status = 1
            try:
                connection.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                sys.argv = [PROGRAM, *map(str, head["arguments"])]
                flwr_clientapp()
                status = 0
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)  # nothing of the starter's own may be cleared away here
        framing.send(connection, {"started": True})

    unix_socket.serve(node / NOTE, answer)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
