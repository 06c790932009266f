"""Rounds of a real method one at a time, with its state in sight."""

from __future__ import annotations

import torch
from torch import Tensor

from fedspan import tree
from fedspan.method import ClientInfo, Federation, Method
from fedspan.randomness import generator, key
from fedspan.simulation.driver import advance
from fedspan.simulation.engine import Engine
from fedspan.simulation.transport import Collected, partial_sum
from fedspan.studies.theory.problem import Problem
from fedspan.tree import Tree


class Rounds:
    """The driver's steps of a round without its record, transport and guards: for thousands of very small rounds.

    Every gradient is over all of a client's examples. `server` and `rows` are the state and may be set.
    """

    def __init__(self, method: Method, problem: Problem, seed: int = 0) -> None:
        self.method, self.data, self.seed = method, problem.data, seed
        self.engine = Engine(method, problem.task, self.data, seed, None, 1, "vmap")
        self.clients, self.round = self.data.clients, 0
        federation = Federation(self.clients, seed)
        self.server: Tree = method.init_server(problem.task, federation)
        self.common: Tree = self.engine.able.announces.common(problem.task, federation)
        who = [ClientInfo(i, None, key(seed, "client", i), seed) for i in range(self.clients)]
        self.rows: Tree = tree.stack([method.init_client(problem.task, w) for w in who])

    def step(self, ids: list[int] | None = None) -> None:
        """One round of clients `ids` (all if None); a round nobody takes part in changes nothing."""
        self.round += 1
        ids = list(range(self.clients)) if ids is None else ids
        if not ids:
            return
        at = torch.tensor(ids)
        shared, own = self.method.download(self.server, at, None, self.round)
        answer = self.engine.update(None, self.round, ids, tree.take(self.rows, at), shared, own, self.common)
        sent, got = answer.sent, Collected(ids)
        got.add(ids, sent.weight.tolist(), sent.each, partial_sum(self.engine.able, sent, shared, None))
        server = advance(self.method, self.server, self.round, got, sizes=self.data.sizes, dtype=sent.weight.dtype)
        self.server = self.server if server is None else server
        self.rows = tree.map(lambda old, new: old.index_copy(0, at, new), self.rows, answer.rows)


def start_of(method: Method, problem: Problem, seed: int = 0) -> tuple[Tensor, Tensor]:
    """U⁰ [d, r] and V⁰ [n, r] as the method draws them."""
    run = Rounds(method, problem, seed)
    return run.server["U"], run.rows["v"]


def trajectory(
    method: Method,
    problem: Problem,
    rounds: int,
    *,
    p: float = 1.0,
    seed: int = 0,
    start: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """U [T+1, d, r] and V [T+1, n, r] of a run in which every client takes part with probability p (Theorem 1)."""
    run = Rounds(method, problem, seed)
    if start is not None:
        run.server, run.rows = run.server | {"U": start[0]}, run.rows | {"v": start[1]}
    U, V = [run.server["U"]], [run.rows["v"]]
    for t in range(1, rounds + 1):
        chosen = generator(seed, "sample", t).random(run.clients) < p
        run.step(chosen.nonzero()[0].tolist())
        U.append(run.server["U"])
        V.append(run.rows["v"])
    return torch.stack(U), torch.stack(V)
