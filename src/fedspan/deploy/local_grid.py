"""A Flower federation in one process: messages are written and read as Flower does it, and a real ClientApp answers.

It takes a method as an object, so it tries out a deployment of code of one's own without keys, ports or processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from fedspan.data.federated import FederatedData
from fedspan.deploy.envelope import Facts
from fedspan.deploy.experiment import DataKind, Experiment
from fedspan.deploy.node.app_factory import make_client_app
from fedspan.deploy.node.client_state import Held, Personal
from fedspan.deploy.node.node import Node
from fedspan.deploy.policy import Policy
from fedspan.deploy.server.exchange import Roster
from fedspan.deploy.server.server import Server

FIRST_NODE = 100
AT_ONCE = Policy(poll=0.01, wait=0.0, deadline=60.0)
"""Nodes of this process answer before anybody could wait for them."""


def written_and_read(message: Message) -> Message:
    """What arrives on the other side: every object of the message as its bytes, and back."""
    objects = get_all_nested_objects(message)
    number = message.object_id
    copy = inflate_object_from_contents(number, {k: o.deflate() for k, o in objects.items()})
    assert isinstance(copy, Message)
    copy.metadata.__dict__["_message_id"] = number
    return copy


class Nodes:
    """Hands requests to the nodes of this process."""

    def __init__(self, nodes: Mapping[int, Node]) -> None:
        self.nodes = dict(nodes)

    def __call__(
        self, run: Mapping[str, Any], node: Mapping[str, Any], facts: Facts, payload: bytes
    ) -> tuple[Facts, bytes]:
        return self.nodes[int(node["number"])].handle(facts, payload)


class LocalGrid:
    """Answers at once. `spoil` may change a reply, return None (lost) or an `Error`; `away` holds numbers of nodes."""

    def __init__(self, handle: Nodes, clients: int) -> None:
        TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1  # as inside a run
        self.handle, self.app, self.clients = handle, make_client_app(handle), clients
        self.replies: dict[str, Message] = {}
        self.away: set[int] = set()
        self.sent: list[Message] = []
        self.spoil: Callable[[int, Message], Message | None] = lambda i, reply: reply

    def get_node_ids(self) -> Iterable[int]:
        """The nodes that are there."""
        return [FIRST_NODE + i for i in range(self.clients) if i not in self.away]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Hand messages to their nodes, and keep the answers; the numbers of the messages."""
        numbers = []
        for message in messages:
            arrived = written_and_read(message)
            self.sent.append(arrived)
            number, node = arrived.metadata.message_id, arrived.metadata.dst_node_id
            i = node - FIRST_NODE
            context = Context(1, node, {"number": i}, RecordDict(), {})
            try:
                reply: Message | None = self.app(arrived, context)
            except Exception as e:  # as flwr-clientapp does
                reply = Message(Error(code=1, reason=f"{type(e)}:<'{e}'>"), reply_to=arrived)
            assert reply is not None
            reply = self.spoil(i, reply)
            if reply is not None:
                self.replies[number] = reply if reply.has_error() else written_and_read(reply)
            numbers.append(number)
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The answers to these messages, as far as they are there."""
        return [self.replies.pop(k) for k in message_ids if k in self.replies]


def deploy_here(
    experiment: Experiment, data: FederatedData, root: Path, policy: Policy | None = None, out: Path | None = None
) -> tuple[Server, LocalGrid]:
    """A server and one node per client of the data, in this process; `root` holds what the nodes keep."""
    clients = data.clients
    grid = LocalGrid(Nodes({i: Node(experiment, data, i, root / f"node-{i}") for i in range(clients)}), clients)
    roster = Roster(tuple(FIRST_NODE + i for i in range(clients)), tuple(f"n{i}" for i in range(clients)), data.groups)
    kind = DataKind.of(data)
    server = Server(experiment, kind, grid, roster, policy=policy or AT_ONCE, out=out)
    return server, grid


def held_by(grid: LocalGrid, server: Server, i: int) -> Held:
    """What node i keeps on its disk."""
    node, e = grid.handle.nodes[i], server.experiment
    with Personal(node.root, e.name, e.key, server.record.progress.deployed["lineage"], i) as personal:
        held = personal.load(1 << 40)
    assert held is not None
    return held
