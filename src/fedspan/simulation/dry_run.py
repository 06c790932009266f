"""One round of one client, from the common start and outside any run: to see what it sends, or what it costs."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import NamedTuple

import torch

from fedspan import tree
from fedspan.data.federated import FederatedData
from fedspan.learn.task import Task
from fedspan.method import Federation, Method
from fedspan.simulation.engine import Answer, Engine
from fedspan.tree import Tree


class DryRun(NamedTuple):
    """What a client had and received, and what it gave; rows and answers are stacked, one deep."""

    rows: Tree
    common: Tree
    down: Tree
    answer: Answer


def dry_run_round(
    method: Method,
    task: Task,
    data: FederatedData,
    client: int,
    batch: int,
    *,
    epochs: int = 1,
    round: int = 1,
    level: int = 0,
    within: tuple[AbstractContextManager[object], ...] = (),
) -> DryRun:
    """Run one round of one client through the engine, as the simulator does; its update inside `within`."""
    engine = Engine(method, task, data, 0, batch, epochs, "loop")
    capacities = tuple(engine.able.capacity(task, i) for i in range(data.clients))
    capacity = engine.able.capacity(task, client, level)
    federation = Federation(data.clients, 0, capacities, data.groups)
    first = engine.model(federation.kinds[0])
    server, common = method.init_server(first, federation), engine.able.announces.common(first, federation)
    rows = tree.stack([engine.begin(capacity, client)])
    down = method.download(server, torch.tensor([client]), capacity, round)
    with ExitStack() as stack:
        for context in within:
            stack.enter_context(context)
        answer = engine.update(capacity, round, [client], rows, down.shared, down.own, common)
    return DryRun(rows, common, {**down.shared, **tree.take(down.own, 0)}, answer)
