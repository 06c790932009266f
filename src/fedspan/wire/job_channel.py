"""Both ends of the socket between a process and a worker: jobs go one way, answers the other.

Heads are JSON. Trees lie in shared memory where there is any: the worker reads what it is given in place, and writes
its answer to a block that was left to it with the job. A broadcast is written once for all workers. Where descriptors
cannot be handed on, and for an answer that is larger than was expected, trees travel as safetensors bytes.
"""

from __future__ import annotations

import socket
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
        self.answers: dict[str, int] = {}  # the largest answer to jobs that read a broadcast
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

    def placed(self, memory: SharedMemory, name: str) -> Told:
        """Where it lies, written once."""
        version, data = self._trees[name]
        if version not in self._placed:
            self._placed[version] = memory.place(data)
        return self._placed[version][0]


class WorkerChannel:
    """The end of a process that gives jobs, one at a time, and takes their answers."""

    def __init__(self, sock: socket.socket, broadcasts: Broadcasts) -> None:
        self.sock, self._broadcasts = sock, broadcasts
        self._versions: dict[str, int] = {}  # of the broadcasts that were sent as bytes
        self._shared = ""
        self._room: Tensor | None = None
        self._held: list[Tensor] = []  # what the worker reads now

    def give(self, head: Head, data: Tree, shared: str) -> None:
        """Send a job and the broadcast it needs.

        Raises:
            OSError: if the worker has gone.
        """
        self._shared = shared
        memory = self._broadcasts.memory
        if memory is None:
            self._give_bytes(head, data, shared)
            return
        told, self._held = memory.place(data)
        head = {**head, "data": told}
        if shared:
            head["shared"] = [shared, self._broadcasts.version(shared), self._broadcasts.placed(memory, shared)]
        self._room = None
        if expected := self._broadcasts.answers.get(shared):
            self._room = memory.room(expected)
            head["room"] = memory.span(self._room)
        framing.send(self.sock, head)

    def _give_bytes(self, head: Head, data: Tree, shared: str) -> None:
        if shared and self._versions.get(shared) != self._broadcasts.version(shared):
            framing.send(self.sock, {"broadcast": shared}, self._broadcasts.packed(shared))
            self._versions[shared] = self._broadcasts.version(shared)
        framing.send(self.sock, {**head, "shared": [shared]} if shared else head, pack(data))

    def take(self) -> tuple[Head, Tree]:
        """The worker's answer, its tensors in the block that was left for them.

        Raises:
            OSError: if the worker has gone.
        """
        head, body = framing.receive(self.sock)
        room, self._room, self._held = self._room, None, []
        if "data" in head and room is not None:
            return head, tree_at(head["data"], [room])
        found = unpack(body) if body else EMPTY
        if body and self._broadcasts.memory is not None:
            expected = self._broadcasts.answers
            expected[self._shared] = max(expected.get(self._shared, 0), len(body) + len(body) // 8)
        return head, found


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
            return head, unpack(body), self._broadcasts[head["shared"][0]].data if "shared" in head else EMPTY
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
