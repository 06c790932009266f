"""How messages are framed on a socket: two lengths, a head of JSON, a body of bytes. Needs no torch.

Worker processes of a simulation and the sockets of a node's own processes speak it alike.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

LENGTHS = struct.Struct("<QQ")
"""Bytes of the head and of the body, before both."""

MOST_HEAD, MOST_BODY = 1 << 24, 1 << 36


def send(sock: socket.socket, head: dict[str, Any], body: bytes | bytearray = b"") -> None:
    """Send a head and a body."""
    text = json.dumps(head).encode()
    sock.sendall(LENGTHS.pack(len(text), len(body)) + text)
    if body:  # after an empty one the other side may have answered and gone, which would look like a fault
        sock.sendall(body)


def receive(sock: socket.socket) -> tuple[dict[str, Any], bytearray]:
    """The other side's head and body; the body can be written to, so that tensors may share its memory.

    Raises:
        OSError: if it is too long, or ends before its end.
    """
    first, second = LENGTHS.unpack(exactly(sock, LENGTHS.size))
    if first > MOST_HEAD or second > MOST_BODY:
        raise OSError("a message is too long")
    head: dict[str, Any] = json.loads(bytes(exactly(sock, first)))
    return head, exactly(sock, second)


def exactly(sock: socket.socket, size: int) -> bytearray:
    """So many bytes of the other side.

    Raises:
        OSError: if it ends before them.
    """
    buffer = bytearray(size)
    view, got = memoryview(buffer), 0
    while got < size:
        n = sock.recv_into(view[got:])
        if n == 0:
            raise ConnectionResetError("the other side has gone")
        got += n
    return buffer
