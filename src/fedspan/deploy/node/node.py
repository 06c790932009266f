"""A node's work: one client of an experiment, by the very functions the simulator uses."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from fedspan import tree, wire
from fedspan.data.federated import FederatedData
from fedspan.deploy.envelope import Facts
from fedspan.deploy.experiment import DataKind, Experiment, seat
from fedspan.deploy.node.client_state import Held, Personal
from fedspan.errors import Divergence, Refused
from fedspan.method import Abilities
from fedspan.simulation.engine import Engine
from fedspan.storage.tree_file import save_tree
from fedspan.tree import Tree


class Node:
    """One client's data, its experiment and its state on disk.

    Args:
        data: holds this client's examples at place `client`; others in it are not looked at.
        root: the folder for personal states.
    """

    def __init__(self, experiment: Experiment, data: FederatedData, client: int, root: Path) -> None:
        self.experiment, self.data, self.place, self.root = experiment, data, client, root
        self._seated: tuple[tuple[int, int], Engine] | None = None

    @property
    def kind(self) -> DataKind:
        """What its examples look like."""
        return DataKind.of(self.data)

    def handle(self, asked: Facts, payload: bytes) -> tuple[Facts, bytes]:
        """Answer one request of the server: `hello`, `train` or `evaluate`."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as in the simulator, so that the numbers are the same
        try:
            do = {"hello": self._hello, "train": self._train, "evaluate": self._evaluate}.get(asked["do"])
            if do is None:
                raise Refused(f"Node: it can say hello, train or evaluate. Asked to {str(asked['do'])[:60]!r}.")
            facts, answer = do(asked, payload)
            return {"do": asked["do"], "round": asked["round"], **facts}, answer
        finally:
            torch.set_num_threads(threads)

    def _hello(self, asked: Facts, payload: bytes) -> tuple[Facts, bytes]:
        held_out = getattr(self.data, self.experiment.settings.evaluate_part)[self.place]
        sizes = {"examples": len(self.data.train[self.place]), "held_out": len(held_out)}
        return {**sizes, "experiment": self.experiment.key, **self.kind.facts()}, b""

    def _train(self, asked: Facts, payload: bytes) -> tuple[Facts, bytes]:
        number, t = int(asked["client"]), int(asked["round"])
        engine = self._engine(asked)
        capacity = self.experiment.capacity(number, _level(asked))
        with self._personal(asked) as personal:
            held = self._hear(personal.load(t) or self._begin(asked), asked, payload)
            if isinstance(held, int):
                return {"status": "stale", "heard": held}, b""
            down = self._down(asked, payload, t)
            answer = engine.update(
                capacity, t, [number], tree.stack([held.row]), down, {}, held.common, raw=True
            )  # the codecs are really applied below
            row, sent = tree.take(answer.rows, 0), tree.take(answer.sent, 0)
            if not (tree.all_finite(row) and tree.all_finite(sent)):
                raise Divergence(f"Node: round {t} gave NaN or infinity; its state before it is kept.")
            if held.round == 0:
                personal.save(replace(held, round=0))  # so that a server set back to the start is followed there
            personal.save(replace(held, row=tree.contiguous(row), round=t))
        codecs = engine.able.coded.codecs(t)
        upload = {"mean": wire.encode(sent.mean, codecs), "each": wire.encode(sent.each, codecs)}
        upload |= {"weights": sent.weights} if sent.weights else {}
        facts = {"status": "done", "weight": float(sent.weight), "heard": held.heard, "ahead": held.ahead}
        return facts, wire.pack(tree.contiguous(upload))

    def _evaluate(self, asked: Facts, payload: bytes) -> tuple[Facts, bytes]:
        number, t = int(asked["client"]), int(asked["round"])
        engine, capacity = self._engine(asked), self.experiment.capacity(number, _level(asked))
        with self._personal(asked) as personal:
            before = personal.load(t + 1) or self._begin(asked)
            held = self._hear(before, asked, payload)
            if isinstance(held, int):
                return {"status": "stale", "heard": held}, b""
            down = self._down(asked, payload, t)
            if held.heard != before.heard:
                personal.save(held)
            part = str(asked.get("part", "test"))
            rows = tree.stack([held.row])
            got = engine.evaluate(capacity, t, [number], rows, down, {}, held.common, part)
            weights = engine.personal(capacity, t, number, held.row, down, held.common)
            about = {"round": t, "client": number, "kind": asdict(self.kind), "text": self.experiment.text}
            about |= {"level": _level(asked)}
            words = {"about": json.dumps(about)}
            save_tree(personal.path / "personal.safetensors", tree.contiguous(weights), words)
        facts = {"status": "done", "sums": {k: float(v[0]) for k, v in got.sums.items()}, "heard": held.heard}
        if got.metrics:  # of this node's own predictions, which stay here
            values = {name: own[0] if math.isfinite(own[0]) else None for name, own in got.metrics.items()}
            why = {name: next(iter(some.values())) for name, some in got.left_out.items()}
            facts |= {"metrics": values, "left_out": why}
        return facts, b""

    # ------------------------------------------------------------------------------------------------ parts

    def _engine(self, asked: Facts) -> Engine:
        """The engine with this client at its place among the others; built once."""
        place = int(asked["client"]), int(asked["clients"])
        if self._seated is None or self._seated[0] != place:
            self._seated = place, self.experiment.engine(seat(self.data, self.place, *place))
        return self._seated[1]

    def _personal(self, asked: Facts) -> Personal:
        e = self.experiment
        return Personal(self.root, e.name, e.key, str(asked["lineage"]), int(asked["client"]))

    def _begin(self, asked: Facts) -> Held:
        e, number = self.experiment, int(asked["client"])
        federation = e.federation(int(asked["clients"]))
        capacity = federation.capacities[number]
        engine = self._engine(asked)
        row = engine.begin(capacity, number)
        common = engine.able.announces.common(engine.model(federation.kinds[0]), federation)
        return Held(tree.contiguous(row), tree.contiguous(common), 0, 0)

    def _hear(self, held: Held, asked: Facts, payload: bytes) -> Held | int:
        """The state after the announcements of a request; how many it has heard, if those do not follow on them."""
        brought = wire.unpack(payload)
        if asked.get("whole"):
            return replace(held, common=brought["common"], heard=int(asked["told"]))
        if held.heard > int(asked["told"]) or held.heard < int(asked["base"]):
            return held.heard
        common = held.common
        for k in range(held.heard + 1, int(asked["told"]) + 1):
            common = Abilities(self.experiment.method).announces.hear(common, brought["news"][str(k)])
        return replace(held, common=tree.contiguous(common), heard=int(asked["told"]))

    def _down(self, asked: Facts, payload: bytes, t: int) -> Tree:
        """The download, decoded."""
        like: Tree = {}
        for entry in asked["coded"].values():
            like |= meta_tree(entry)
        return wire.decode(wire.unpack(payload)["down"], Abilities(self.experiment.method).coded.codecs(t), like)


def _level(asked: Facts) -> int:
    """At which of its levels the client is, as the server has it: 0 is what it can afford."""
    return int(asked.get("level", 0))


def describe_coded(payload: Tree, names: set[str]) -> dict[str, Any]:
    """Types and shapes of the parts of a payload that travel coded, for the other side to decode them."""

    def entry(name: str, part: Any) -> dict[str, Any]:
        flat = tree.flatten({name: part})
        leaves = {path: [str(t.dtype).removeprefix("torch."), list(t.shape)] for path, t in flat.items()}
        return {"leaves": leaves, "empty": tree.empty_paths({name: part})}

    return {name: entry(name, part) for name, part in payload.items() if name in names}


def meta_tree(entry: dict[str, Any]) -> Tree:
    """A tree of the described types and shapes that holds no numbers, under its name."""
    leaves = {k: torch.empty(s, dtype=getattr(torch, d), device="meta") for k, (d, s) in entry["leaves"].items()}
    return tree.unflatten(leaves, entry["empty"])
