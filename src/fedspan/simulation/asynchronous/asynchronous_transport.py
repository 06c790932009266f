"""The transport of an asynchronous simulation: a local one whose clients train when the simulated clock says so.

A client is computed when it starts, from the server's state of that moment, together with all others that start before
the next step. What it made waits until its time has come: its upload and its new private state are part of every
checkpoint, so that no state of the server but the present one has to be kept, and a run that was killed goes on with
the same bits. Until then its private state, by which it may be judged, is the one it started with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from fedspan import tree, wire
from fedspan.errors import ConfigError, PromiseError
from fedspan.learn.aggregate import sums_by_part
from fedspan.method import Capacity
from fedspan.simulation.asynchronous.late_uploads import changes, check_method, check_sent, on_top_of
from fedspan.simulation.asynchronous.timeline import Asynchronous, Events, Flight, Timeline
from fedspan.simulation.defence import Defence
from fedspan.simulation.devices import Clock, Devices
from fedspan.simulation.dry_run import dry_run_round
from fedspan.simulation.engine import Engine
from fedspan.simulation.local_transport import LocalTransport
from fedspan.simulation.record import Record
from fedspan.simulation.settings import Settings
from fedspan.simulation.transport import Collected, lifted
from fedspan.simulation.workers import Meta
from fedspan.tree import Tree
from fedspan.wire import Direction, Ledger

START = "start"
"""What a chunk of clients does that begins to train."""


def check_run(
    rule: Asynchronous, engine: Engine, settings: Settings, devices: Devices, defence: Defence | None
) -> None:
    """Refuse what cannot run asynchronously, before anything runs.

    Raises:
        ConfigError: if the method's late uploads have no meaning, or what is asked for does not go together.
    """
    if engine.device.type != "cpu":
        raise ConfigError(
            f"Asynchronous: train.device must be 'cpu', as late uploads are kept there. Got {str(engine.device)!r}."
        )
    rule.check_with(settings, devices, defence)
    rule.places(engine.data.clients, settings)
    if any(way.model == "own" for way in engine.ways(settings.evaluate_after)):
        raise ConfigError(
            "Asynchronous: evaluate.models must not have 'own', as clients train on while others are judged. Got it;"
            " use 'trained'."
        )
    check_method(engine.able)
    size = min(len(engine.data.train[0]), engine.batch_size or 32)
    check_sent(engine.able, dry_run_round(engine.method, engine.task, engine.data, 0, size, round=2).answer.sent)


class AsynchronousTransport(LocalTransport):
    """Brings work to simulated clients that do not wait for one another.

    Args:
        rule: how many train at a time, how many uploads make a step, and what late ones weigh; `check_run` has passed.
    """

    clock: Clock

    def __init__(
        self, engine: Engine, record: Record, devices: Devices, rule: Asynchronous, *, rounds: int = 0
    ) -> None:
        super().__init__(engine, record, devices, rounds=rounds)
        self.rule, self.places = rule, rule.places(self.data.clients, self.settings)
        self._estimates = engine.able.estimated.estimates()

    def events(self, t: int) -> Events:
        """What happens on the simulated clock until step t."""
        held = Timeline.from_json(self.record.progress.timeline, self.record.flights)
        return held.until_step(t, self.rule, self.places, self.data.clients, self.engine.seed, self._seconds)

    def train(self, t: int, sampled: Sequence[int], ledger: Ledger) -> Collected:
        """Compute those who start now; collect the uploads that arrive before step t."""
        self.record.settle()
        events = self.events(t)
        told: dict[str, Meta] = dict(self.record.progress.timeline.get("uploads", {}))
        flights = dict(self.record.flights)
        loads = {f.client: len(self.data.train[f.client]) for f in events.started}
        groups = self._groups(START, t, list(loads), ledger, loads)
        for job, meta, made in self._finite(t, self._jobs(START, t, groups, lambda _: {})):
            for k, i in enumerate(job["ids"]):
                told[str(i)] = {"bytes": meta["bytes"], "changed": meta["changed"]}
                flights[str(i)] = tree.map(lambda a, k=k: a[k].clone(), made)
        got = Collected([f.client for f in events.arrived])
        present = self._present(t, got.asked)
        for flight in (*events.arrived, *events.late):
            i = flight.client
            upload, about = flights.pop(str(i)), told.pop(str(i))
            ledger.add_names(Direction.UP, about["bytes"])
            self.record.stage([i], tree.map(lambda a: a[None], upload["row"]))
            if i in present:
                self._add(got, t, flight, upload, about, present[i])
        self.record.flights = flights
        self.record.progress.timeline = {**events.after.to_json(), "uploads": told}
        got.facts |= self._facts(t, events)
        return got

    def _present(self, t: int, ids: Sequence[int]) -> dict[int, Tree]:
        """What clients would receive of the server's present state; nothing is sent."""
        found: dict[int, Tree] = {}
        by_capacity: dict[Capacity, list[int]] = {}
        for i in ids:
            by_capacity.setdefault(self.record.capacity(i), []).append(i)
        for capacity, mine in by_capacity.items():
            down = self.engine.able.download(self.record.server, torch.tensor(mine), capacity, t)
            found |= {i: {**down.shared, **tree.take(down.own, k)} for k, i in enumerate(mine)}
        return found

    def _add(self, got: Collected, t: int, flight: Flight, upload: Tree, about: Meta, present: Tree) -> None:
        """Add an upload as a change of what is there now, with the weight that its age leaves it.

        Raises:
            PromiseError: if the download has changed its form since the client began.
        """
        mean, changed = on_top_of(upload["mean"], present, self._estimates)
        if changed != about["changed"]:
            raise PromiseError(
                f"{type(self.engine.method).__name__}: download must keep names and shapes in an asynchronous run. In"
                f" round {t} they are not those of round {flight.round}."
            )
        weight = upload["weight"] * self.rule.factor(t - flight.round)
        sums, totals = sums_by_part(tree.map(lambda a: a[None], mean), weight[None], {}, keep_factors=True)
        got.add([flight.client], [float(weight)], {}, {"sums": sums, "totals": totals})

    def _facts(self, t: int, events: Events) -> dict[str, Any]:
        """What the round's line says: the clock, and how many rounds had overtaken the uploads."""
        since = float(self.record.lines[-1]["clock"]["total"]) if self.record.lines else 0.0
        stale = [t - f.round for f in events.arrived]
        flops = sum(self._timed(f.client)[1] for f in (*events.arrived, *events.late))
        now, last = events.after.now, events.arrived[-1].client
        return {
            "clock": {"seconds": now - since, "slowest": last, "flops": flops, "total": now},
            "staleness": {
                "mean": sum(stale) / len(stale),
                "max": max(stale),
                "uploads": {str(s): n for s, n in sorted(Counter(stale).items())},
                "thrown_away": len(events.late),
            },
        }

    # ------------------------------------------------------------------------------------------------ clock

    def _seconds(self, client: int) -> float:
        return self._timed(client)[0]

    def _timed(self, client: int) -> tuple[float, float]:
        """Seconds and operations of a client's round, which are the same in every round."""
        return self.clock.alone(client, len(self.data.train[client]), self.record.capacity(client))

    # ------------------------------------------------------------------------------------------------ chunks

    def _handle(self, meta: Meta, data: Tree, broadcast: Tree) -> tuple[Meta, Tree]:
        if meta["do"] != START:
            return super()._handle(meta, data, broadcast)
        capacity, ids, able = self.capacities[meta["capacity"]], meta["ids"], self.engine.able
        shared, own = broadcast["shared"], data["own"]
        rows = self._taken(meta, data)
        answer = self.engine.update(capacity, meta["round"], ids, rows, shared, own, broadcast["common"])
        if bad := self._not_finite(ids, answer):
            return {"bad": bad}, {}
        check_sent(able, answer.sent)
        self._check_weights(ids, answer.sent)
        mean, made = lifted(able, answer.sent, shared, capacity), []
        changed: list[str] = []
        for k in range(len(ids)):
            down = {**shared, **tree.take(own, k)}
            change, changed = changes(tree.take(mean, k), down, self._estimates)
            made.append(change)
        sizes = wire.count(tree.take(answer.sent, 0).parts)
        facts = {"bad": [], "bytes": sizes, "changed": changed}
        return facts, {"row": answer.rows, "weight": answer.sent.weight, "mean": tree.stack(made)}
