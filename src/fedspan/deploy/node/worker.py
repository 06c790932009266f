"""The warm worker of a node: one process that holds torch, the data and the model, so that a message costs no import.

Flower starts a process for every message. That process hands the message over a Unix socket that only its owner can
reach, and does the work itself where no worker runs. Needs no torch until it works.
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

from fedspan.deploy.operations import unix_socket
from fedspan.errors import FedspanError
from fedspan.wire import framing

NOTE = "worker.json"


class WorkerFault(FedspanError):
    """The worker says why it could not do a request."""


def call(node: Path, head: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes] | None:
    """Ask the warm worker of a node; None if none runs.

    Raises:
        WorkerFault: if it could not do it; doing it here would end the same way.
    """
    try:
        where = json.loads((node / NOTE).read_text(encoding="utf-8"))["socket"]
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(where)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    with connection:
        try:
            framing.send(connection, head, body)
            answer, data = framing.receive(connection)
        except OSError:
            return None  # it was killed on the way; its state on disk is whole, so the work can be done here
    if "error" in answer:
        raise WorkerFault(str(answer["error"])[:2000])
    return answer["facts"], bytes(data)


def serve(node: Path) -> None:
    """Answer requests until SIGTERM."""
    from fedspan.deploy.node.service import Service

    service = Service(node)

    def answer(connection: socket.socket) -> None:
        head, body = framing.receive(connection)
        try:
            facts, data = service.handle(head["experiment"], head["facts"], bytes(body))
            framing.send(connection, {"facts": facts}, data)
        except Exception as e:
            print(f"Worker: {type(e).__name__}: {e}", file=sys.stderr, flush=True)
            framing.send(connection, {"error": f"{type(e).__name__}: {e}"})

    unix_socket.serve(node / NOTE, answer)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
