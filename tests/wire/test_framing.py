"""Frames on sockets: what is sent arrives, a broken frame is an OSError, and the isolated asker frames alike."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from fedspan.deploy.operations import prefork_request
from fedspan.wire import framing

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    a, b = socket.socketpair()
    with a, b:
        yield a, b


@pytest.mark.parametrize(
    ("head", "body"),
    [({}, b""), ({"text": "θ", "n": [1, None, 0.5]}, b"\x00\xff" * 3), ({"large": True}, bytes(3_000_000))],
    ids=["nothing", "small", "larger-than-a-buffer"],
)
def test_a_message_arrives_as_it_was_sent(pair: Pair, head: dict[str, Any], body: bytes) -> None:
    sender = threading.Thread(target=framing.send, args=(pair[0], head, body))
    sender.start()
    got = framing.receive(pair[1])
    sender.join()
    assert got == (head, body) and isinstance(got[1], bytearray)


def test_messages_do_not_run_into_one_another(pair: Pair) -> None:
    for k in range(3):
        framing.send(pair[0], {"k": k}, bytes(k))
    assert [framing.receive(pair[1]) for _ in range(3)] == [({"k": k}, bytes(k)) for k in range(3)]


@pytest.mark.parametrize("part", [0, 7, 16, 20, -1])
def test_a_message_that_ends_early_is_an_error_of_the_connection(pair: Pair, part: int) -> None:
    text = json.dumps({"k": 1}).encode()
    frame = framing.LENGTHS.pack(len(text), 5) + text + b"12345"
    pair[0].sendall(frame[:part])
    pair[0].close()
    with pytest.raises(OSError, match="the other side has gone"):
        framing.receive(pair[1])


@pytest.mark.parametrize("lengths", [(framing.MOST_HEAD + 1, 0), (2, framing.MOST_BODY + 1)])
def test_a_message_that_claims_too_much_is_not_waited_for(pair: Pair, lengths: tuple[int, int]) -> None:
    pair[0].sendall(framing.LENGTHS.pack(*lengths))
    with pytest.raises(OSError, match="too long"):
        framing.receive(pair[1])


def test_the_program_without_fedspan_frames_as_the_framing_does(pair: Pair) -> None:
    head = {"arguments": ["--token", "θ"]}
    framing.send(pair[0], head)
    pair[0].sendall(prefork_request.frame(json.dumps(head).encode()))
    first = pair[1].recv(1 << 16)
    assert first[: len(first) // 2] == first[len(first) // 2 :]


def test_the_program_that_asks_for_a_fork_needs_nothing_installed() -> None:
    code = "import sys, runpy; runpy.run_path(sys.argv[1]); sys.exit('fedspan' in sys.modules)"
    subprocess.run([sys.executable, "-I", "-S", "-c", code, prefork_request.__file__], check=True, timeout=60)


def test_framing_and_counting_need_no_torch() -> None:
    code = "import sys, fedspan.wire.framing, fedspan.wire.ledger; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
