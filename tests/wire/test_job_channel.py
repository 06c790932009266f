"""Both ends of a worker's socket: what goes over it, and what does not."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch

from conftest import assert_same
from fedspan.tree import Tree
from fedspan.wire import framing
from fedspan.wire.job_channel import Broadcasts, JobChannel, WorkerChannel
from fedspan.wire.shared_memory import SharedMemory


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of the bodies that were sent."""
    bodies: list[int] = []
    real = framing.send

    def counting(sock: socket.socket, head: dict[str, Any], body: bytes | bytearray = b"") -> None:
        bodies.append(len(body))
        real(sock, head, body)

    monkeypatch.setattr(framing, "send", counting)
    return bodies


@pytest.mark.parametrize("shares", [True, False])
def test_jobs_and_answers_arrive_and_lie_in_shared_memory_where_there_is_any(sent: list[int], shares: bool) -> None:
    if shares and os.name != "posix":
        pytest.skip("descriptors cannot be handed on")
    broadcasts = Broadcasts(SharedMemory() if shares else None)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        parent = WorkerChannel(ours, broadcasts)
        worker = JobChannel(theirs, broadcasts.memory.descriptor if broadcasts.memory else None)
        broadcasts.share("s", {"bias": torch.ones(2000)})
        for k in range(3):
            data: Tree = {"x": torch.full((2000,), float(k)), "e": {}}
            parent.give(broadcasts.letter({"meta": {"k": k}}, data, "s" if k else ""))
            head, mine, common = worker.take()
            assert head["meta"] == {"k": k} and common.keys() == ({"bias"} if k else set())
            assert_same(mine, data)
            worker.answer({"meta": k}, {"y": mine["x"] + 1, "s": common})
            reply = parent.take()
            back = broadcasts.opened(reply)
            assert reply.head["meta"] == k
            assert_same(back, {"y": data["x"] + 1, "s": common})
            back["y"] += 1.0  # what was answered is the parent's alone
        broadcasts.share("s", {"bias": torch.zeros(2000)})
        parent.give(broadcasts.letter({"meta": {}}, {}, "s"))
        assert worker.take()[2]["bias"].sum() == 0
        worker.refuse({"error": "no"})
        assert parent.take().head["error"] == "no"
    if shares:  # only answers of unknown size go over the socket: without a broadcast, and the first one with it
        assert [n > 0 for n in sent] == [False, True, False, True, False, False, False, False]
    else:  # the broadcast goes once for both of its jobs, and again when it is another
        assert [n > 0 for n in sent] == [True, True, True, True, True, True, True, True, True, False]
