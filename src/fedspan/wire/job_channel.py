"""Both ends of the socket between a process and a worker: jobs go one way, answers the other.

Heads are JSON. Trees lie in shared memory where there is any: the worker reads what it is given in place, and writes
its answer to a block that was left to it with the job. A broadcast is written once for all workers. Where descriptors
cannot be handed on, and for an answer that is larger than was expected, trees travel as safetensors bytes.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from fedspan.tree import EMPTY, Tree
from fedspan.wire import framing
from fedspan.wire.payload import pack, unpack
from fedspan.wire.shared_memory import SharedMemory, Span, Told, Visitor, tree_at

Head: TypeAlias = dict[str, Any]


class Broadcast(NamedTuple):
    """A tree that many jobs read; `version` tells it from what had its name before."""

    version: int
    data: Tree


class Broadcasts:
    """The named trees of a process, and the memory it shares with its workers.

    Args:
        memory: None if trees must travel as bytes.
    """

    def __init__(self, memory: SharedMemory | None) -> None:
        self.memory = memory
        self._answers: dict[str, int] = {}  # bytes of the largest answer to jobs that read a broadcast
        self._versions = count(1)
        self._trees: dict[str, Broadcast] = {}
        self._packed: dict[int, bytes] = {}
        self._placed: dict[int, tuple[Told, list[Tensor]]] = {}

    def share(self, name: str, data: Tree) -> None:
        """Let a tree take the place of the one that had this name."""
        if (old := self._trees.get(name)) is not None:
            self._packed.pop(old.version, None)
            self._placed.pop(old.version, None)
        self._trees[name] = Broadcast(next(self._versions), data)

    def version(self, name: str) -> int:
        """What tells the tree of this name from earlier ones."""
        return self._trees[name].version

    def packed(self, name: str) -> bytes:
        """It as bytes, packed once."""
        version, data = self._trees[name]
        if version not in self._packed:
            self._packed[version] = pack(data)
        return self._packed[version]

    def letter(self, head: Head, data: Tree, shared: str = "") -> Letter:
        """A job to be sent: what to do, its own tree, the name of the broadcast it reads."""
        memory = self.memory
        if memory is None:
            return Letter({**head, "shared": shared}, pack(data), shared)
        told, held = memory.place(data)
        head = {**head, "data": told}
        if shared:
            where, more = self._place(memory, shared)
            head["shared"], held = [shared, self.version(shared), where], [*held, *more]
        room = None
        if expected := self._answers.get(shared):
            room = memory.room(expected)
            head["room"] = memory.span(room)
        return Letter(head, b"", shared, room, held)

    def opened(self, reply: Reply) -> Tree:
        """The tree of an answer; where there was room for it, its tensors lie there."""
        if "data" in reply.head and reply.letter.room is not None:
            return tree_at(reply.head["data"], [reply.letter.room])
        if not reply.body:
            return EMPTY
        size, name = len(reply.body), reply.letter.shared
        self._answers[name] = max(self._answers.get(name, 0), size + size // 8)
        return unpack(reply.body)

    def _place(self, memory: SharedMemory, name: str) -> tuple[Told, list[Tensor]]:
        """Where a broadcast lies, and what holds it; written once."""
        version, data = self._trees[name]
        if version not in self._placed:
            self._placed[version] = memory.place(data)
        return self._placed[version]


@dataclass(frozen=True)
class Letter:
    """A job, ready to be sent to any worker, as often as need be; holds what the worker is going to read."""

    head: Head
    body: bytes = b""
    shared: str = ""
    room: Tensor | None = None
    held: Sequence[Tensor] = ()


@dataclass(frozen=True)
class Reply:
    """A worker's answer, with the letter that asked for it."""

    head: Head
    body: bytearray
    letter: Letter


class WorkerChannel:
    """The end of a process that gives jobs, one at a time, and takes their answers."""

    def __init__(self, sock: socket.socket, broadcasts: Broadcasts) -> None:
        self.sock, self._broadcasts = sock, broadcasts
        self._versions: dict[str, int] = {}  # of the broadcasts that were sent as bytes
        self._letter = Letter({})

    def give(self, letter: Letter) -> None:
        """Send a job and, where it is not in shared memory, the broadcast it needs.

        Raises:
            OSError: if the worker has gone.
        """
        self._letter, name = letter, letter.shared
        if self._broadcasts.memory is None and name and self._versions.get(name) != self._broadcasts.version(name):
            framing.send(self.sock, {"broadcast": name}, self._broadcasts.packed(name))
            self._versions[name] = self._broadcasts.version(name)
        framing.send(self.sock, letter.head, letter.body)

    def take(self) -> Reply:
        """The worker's answer.

        Raises:
            OSError: if the worker has gone.
        """
        head, body = framing.receive(self.sock)
        letter, self._letter = self._letter, Letter({})
        return Reply(head, body, letter)


class JobChannel:
    """The worker's end: takes jobs and answers them.

    Args:
        descriptor: of the memory that the other side shares; None if trees travel as bytes.
    """

    def __init__(self, sock: socket.socket, descriptor: int | None = None) -> None:
        self.sock = sock
        self._visitor = Visitor(descriptor) if descriptor is not None else None
        self._broadcasts: dict[str, Broadcast] = {}
        self._room: Span | None = None

    def take(self) -> tuple[Head, Tree, Tree]:
        """The next job: its head, its own tree, the broadcast it reads.

        Raises:
            OSError: if the other side has gone.
        """
        while True:
            head, body = framing.receive(self.sock)
            if "broadcast" not in head:
                break
            self._broadcasts[head["broadcast"]] = Broadcast(0, unpack(body))
        self._room = Span(*head["room"]) if "room" in head else None
        if self._visitor is None:
            return head, unpack(body), self._broadcasts[head["shared"]].data if head["shared"] else EMPTY
        return head, self._visitor.read(head["data"]), self._read_broadcast(self._visitor, head.get("shared"))

    def _read_broadcast(self, visitor: Visitor, shared: list[Any] | None) -> Tree:
        if shared is None:
            return EMPTY
        name, version, told = shared
        if name not in self._broadcasts or self._broadcasts[name].version != version:
            self._broadcasts[name] = Broadcast(version, visitor.read(told))
        return self._broadcasts[name].data

    def answer(self, head: Head, data: Tree) -> None:
        """Send the answer to the job that was taken last."""
        told = None
        if self._visitor is not None and self._room is not None:
            told = self._visitor.write(self._room, data)
        if told is not None:
            framing.send(self.sock, {**head, "data": told})
        else:
            framing.send(self.sock, head, pack(data))

    def refuse(self, head: Head) -> None:
        """Say why there is no answer."""
        framing.send(self.sock, head)
