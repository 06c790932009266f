"""Ask a node's starter for a process: prefork_request.py NOTE PROGRAM [ARGUMENT...]

Where nobody answers, it runs PROGRAM itself.

Run as a file, without fedspan on the path: it imports next to nothing, since it is run for every message.
"""

import json
import os
import socket
import struct
import sys


def frame(head: bytes) -> bytes:
    """Frame a message without a body as `wire.framing` does, which cannot be imported here."""
    return struct.pack("<QQ", len(head), 0) + head


def main(note: str, program: str, arguments: list[str]) -> None:
    """Hand the arguments over, or become the program."""
    try:
        with open(note) as file:
            where = json.load(file)["socket"]
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(20.0)
            connection.connect(where)
            connection.sendall(frame(json.dumps({"arguments": arguments}).encode()))
            if connection.recv(1):
                return
    except (OSError, ValueError, KeyError, TypeError):
        pass  # no starter
    os.execv(program, [program, *arguments])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
