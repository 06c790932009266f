"""A grid in this process: messages are really written and read as Flower writes them, and a real ClientApp answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Error, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from conftest import assert_close, make_data, make_task
from fedspan.data.federated import FederatedData
from fedspan.deploy.experiment import DataKind, Experiment
from fedspan.deploy.node.app_factory import make_client_app
from fedspan.deploy.node.client_state import Held, Personal
from fedspan.deploy.node.node import Node
from fedspan.deploy.policy import Policy
from fedspan.deploy.server.exchange import Roster
from fedspan.deploy.server.server import Server
from fedspan.learn.task import Task
from fedspan.method import Method
from fedspan.methods import name_of
from fedspan.simulation.result import Result
from fedspan.simulation.settings import Settings
from fedspan.simulation.simulator import Simulation

FIRST_NODE = 100
TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1  # as inside a run


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

    def __call__(self, run: Mapping[str, Any], node: Mapping[str, Any], facts: Any, payload: bytes) -> Any:
        return self.nodes[int(node["number"])].handle(facts, payload)


def held_by(grid: FakeGrid, server: Server, i: int) -> Held:
    """What node i keeps on its disk."""
    node, e = grid.handle.nodes[i], server.experiment
    with Personal(node.root, e.name, e.key, server.record.progress.deployed["lineage"], i) as personal:
        held = personal.load(1 << 40)
    assert held is not None
    return held


class FakeGrid:
    """Answers at once. `spoil` may change a reply, return None (lost) or an `Error`; `away` holds numbers of nodes."""

    def __init__(self, handle: Nodes, clients: int) -> None:
        self.handle, self.app, self.clients = handle, make_client_app(handle), clients
        self.replies: dict[str, Message] = {}
        self.away: set[int] = set()
        self.sent: list[Message] = []
        self.spoil: Callable[[int, Message], Message | None] = lambda i, reply: reply

    def get_node_ids(self) -> Iterable[int]:
        return [FIRST_NODE + i for i in range(self.clients) if i not in self.away]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
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
            reply = self.spoil(i, reply)
            if reply is not None:
                self.replies[number] = reply if reply.has_error() else written_and_read(reply)
            numbers.append(number)
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.replies.pop(k) for k in message_ids if k in self.replies]


def experiment_of(method: Method, task: Task, rounds: int, **settings: Any) -> Experiment:
    chosen = {"participation": 1.0, "batch_size": 8, "epochs": 2, "dtype": "float64"} | settings
    config = {"method": {"name": name_of(method)}, "rounds": rounds}
    return Experiment(method, task, 5, Settings(evaluate_every=100, **chosen), rounds, "test", config)


def deployed(
    method: Method, root: Path, *, rounds: int = 2, clients: int = 3, terms: Policy | None = None, **settings: Any
) -> tuple[Server, FakeGrid]:
    """A server and its nodes on the small federation of the other tests."""
    data, task = make_data(clients=clients), make_task()
    return deployed_on(experiment_of(method, task, rounds, **settings), data, root, terms)


def deployed_on(
    experiment: Experiment, data: FederatedData, root: Path, terms: Policy | None = None, out: Path | None = None
) -> tuple[Server, FakeGrid]:
    clients = data.clients
    nodes = {i: Node(experiment, data, i, root / f"node-{i}") for i in range(clients)}
    grid = FakeGrid(Nodes(nodes), clients)
    roster = Roster(tuple(FIRST_NODE + i for i in range(clients)), tuple(f"n{i}" for i in range(clients)), data.groups)
    kind = DataKind(tuple(data.x.shape[1:]), data.classes)
    chosen = terms or Policy(poll=0.01, wait=0.0, deadline=60.0)
    return Server(experiment, kind, grid, roster, terms=chosen, out=out), grid  # type: ignore[arg-type]


def assert_same_run(sim: Simulation, expected: Result, server: Server, grid: FakeGrid, result: Result) -> None:
    """The simulator and the deployment have the same server, clients, measures and bytes."""
    assert not server.transport.refusals
    assert_close(sim.record.server, server.record.server)
    assert_close(sim.record.common, server.record.common)
    for i in range(sim.data.clients):
        assert_close(sim.record.row(i), held_by(grid, server, i).row)
    for measure, values in expected.per_client.items():
        assert values == pytest.approx(result.per_client[measure], abs=1e-12)
    assert [expected.bytes[k] for k in ("up", "down", "meta")] == [result.bytes[k] for k in ("up", "down", "meta")]
