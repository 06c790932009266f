"""The round driver: sample, ask, collect, average, watch, announce, evaluate, record; again until all rounds are done.

It is the same for a simulation and for a deployment, which differ in their transport and in a few hooks.
"""

from __future__ import annotations

import copy
import math
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fedspan import tree
from fedspan.data.federated import Index
from fedspan.errors import Divergence
from fedspan.method import Abilities, Method, Round
from fedspan.method.fields import flat, with_keys
from fedspan.method.promises import Unchanged, check_server
from fedspan.methods import name_of
from fedspan.randomness import generator
from fedspan.simulation import evaluation
from fedspan.simulation.engine import Engine, NoHeadToFit
from fedspan.simulation.environment import versions
from fedspan.simulation.protocols import RECEIVED, JudgedModel
from fedspan.simulation.record import Progress, Record, RowsLost
from fedspan.simulation.result import Result
from fedspan.simulation.settings import sample
from fedspan.simulation.transport import Collected, MeasuredClients, Sums, Transport
from fedspan.tree import Tree
from fedspan.wire import Direction, Ledger

MATRIX_CLIENTS = 100  # beyond that a matrix over the clients would swell every line of the metrics
MOST_HALVINGS = 3
MOST_RETURNS = 5
"""Times that a run goes back to one state as private states were lost with their machines."""

Line: TypeAlias = dict[str, Any]
OnRound: TypeAlias = Callable[[Line], None]


@dataclass(frozen=True)
class Evaluated:
    """Measures of every client that was looked at, and their summaries."""

    clients: dict[str, list[float | None]]
    found: dict[str, dict[str, float]]
    left_out: dict[str, dict[str, str]] = field(default_factory=dict)
    """By metric the clients, by name, that do not define it, and why."""


@dataclass(frozen=True)
class Before:
    """The state before a round, to go back to."""

    server: Tree
    common: Tree
    news: dict[str, Tree]
    flights: dict[str, Tree]
    progress: Progress


class RoundDriver(ABC):
    """A run over a transport; `run()` does what is left to do.

    Args:
        engine: the method with its task, as clients run it.
        record: the run's state, found again or new.
        rounds: how many there shall be in all.
        config: the configuration to keep with the results.
    """

    always_save: ClassVar[bool] = False
    """Whether to write a checkpoint after every round, however quick."""

    def __init__(
        self, engine: Engine, record: Record, transport: Transport, *, rounds: int, config: dict[str, Any]
    ) -> None:
        self.engine, self.record, self.transport, self.rounds, self.config = engine, record, transport, rounds, config
        self.method, self.seed, self.settings, self.out = engine.method, engine.seed, record.settings, record.out
        self.clients = record.federation.clients
        self._busy = False
        self._last: Evaluated | None = None
        self._without: set[JudgedModel] = set()
        self._engines = [engine]  # by how often learning rates were halved
        self._returns: list[int] = []
        for _ in range(record.progress.halvings):
            self._halve()

    @property
    def messages(self) -> list[str]:
        """What a person should be told: resumption, damage found, learning rates halved."""
        return self.record.messages

    def run(self, on_round: OnRound | None = None) -> Result:
        """Do the rounds that are left, evaluate, and return the result.

        Raises:
            Divergence: if training leaves the finite numbers; the last good state has been saved.
        """
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # so that the numbers are the same in this process and in every worker
        told = [self.record.progress.round]
        try:
            while True:
                try:
                    return self._rest(on_round, told)
                except RowsLost as e:
                    self._go_back(e)
        except KeyboardInterrupt:
            if not self._busy:  # in the middle of a round the last checkpoint is the last consistent state
                with suppress(RowsLost):  # then it is too
                    self.record.save(force=True)
            raise
        finally:
            self.transport.close()
            torch.set_num_threads(threads)
            self.record.close()

    def _rest(self, on_round: OnRound | None, told: list[int]) -> Result:
        """Do what is left; `told` has the last round that somebody heard of, who does not hear of it twice."""
        while self.record.progress.round < self.rounds:
            with self._undisturbed() as interrupted:
                line = self._step()
            if line["round"] > told[0]:
                told[0] = line["round"]
                self._stepped(line)
                if on_round is not None:
                    on_round(line)
            if interrupted:
                _interrupt()
        if self._last is None:  # a run of no rounds, or one that was finished before
            self.transport.ready()
            self._last = self._evaluate(self.record.progress.round, Ledger())
        self.record.save(force=True)
        return self._result()

    def _go_back(self, why: RowsLost) -> None:
        """Go back to where all private states were last at home: what has been lost since is computed again.

        Raises:
            RowsLost: if that has not helped before.
        """
        self.record.go_back()
        done = self.record.progress.round
        self._returns.append(done)
        if self._returns.count(done) > MOST_RETURNS:
            raise RowsLost(f"{why}, {MOST_RETURNS + 1} times after round {done}; the run can be resumed from there.")
        del self._engines[self.record.progress.halvings + 1 :]
        if self.engine is not self._engines[-1]:
            self.engine = self.transport.engine = self._engines[-1]
            self.method = self.engine.method
            self.transport.close()
        self._busy, self._last = False, None
        self.messages.append(f"{why}; rounds from {done + 1} on are computed again, with the same numbers.")

    # ------------------------------------------------------------------------------------------------ hooks

    @property
    def names(self) -> Sequence[str]:
        """What clients are called."""
        return self.engine.data.names

    def _undisturbed(self) -> AbstractContextManager[list[bool]]:
        """Around every round; a list that is not empty afterwards asks to stop."""
        return nullcontext([])

    def _stepped(self, line: Line) -> None:  # noqa: B027 (a hook that only some fill)
        """Called after every round that was kept."""

    def _sampled(self, t: int) -> Sequence[int]:
        """Who begins to train in round t."""
        return sample(self.clients, self.settings, self.seed, t)

    @abstractmethod
    def _about(self) -> dict[str, Any]:
        """Fields of the result that only this kind of run knows."""

    # ------------------------------------------------------------------------------------------------ a round

    def _step(self) -> Line:
        """One round with its evaluation; a round that diverges is taken back whole."""
        t = self.record.progress.round + 1
        while True:
            self.transport.ready()
            self._busy = True
            before = self._remember()
            try:
                line = self._measured_round(t)
                break
            except Divergence as e:
                self._take_back(before)
                if not self._may_repeat():
                    self.record.save(force=True)
                    raise
                self._repeat_with_half(str(e))
        self.record.lines.append(line)
        self._busy = False
        self.record.save(force=self.always_save)
        return line

    def _measured_round(self, t: int) -> Line:
        """A round, its evaluation where one is due, and the bytes of both."""
        start, ledger = time.perf_counter(), Ledger()
        line = self._round(t, ledger)
        progress = self.record.progress
        progress.round = t
        line["seconds"] = time.perf_counter() - start
        progress.seconds["train"] += line["seconds"]
        due = t % self.settings.evaluate_every == 0 or t == self.rounds
        if due:
            line |= self._measure(t, ledger)
        progress.bytes.merge(ledger)
        line["bytes"] = ledger.totals(d for d in self.transport.counted if due or d != Direction.EVALUATE)
        return line

    def _round(self, t: int, ledger: Ledger) -> Line:
        """Sample, ask, collect; average, watch, announce; keep."""
        r, able = self.record, self.engine.able
        sampled = self._sampled(t)
        got = self.transport.train(t, sampled, ledger)
        server = None
        if got.enough:
            dtype = self.settings.torch_dtype
            sizes = r.defence.capped_sizes(self.transport.sizes)
            server = advance(self.method, r.server, t, got, sizes=sizes, dtype=dtype, placed=self.engine.at_home)
        common, news = r.common, None
        if server is not None:
            r.progress.last_norm = self._watch(t, server)
            news = able.announces.announce(server, t)
        if news is not None:
            common = self.engine.at_home(able.announces.hear(common, news))
        # Nothing of the round is kept before all of it is known to be finite.
        self.transport.keep()
        r.server, r.common = tree.contiguous(r.server if server is None else server), tree.contiguous(common)
        if news is not None:
            self.transport.announce(news, ledger)
        ledger.add(Direction.META, 8 * len(got.weights))  # the weight of each upload
        skipped = server is None
        return {"round": t, "sampled": len(sampled), "answered": len(got.weights), "skipped": skipped, **got.facts}

    def _watch(self, t: int, server: Tree) -> float:
        """Raise before a state that is not finite, or grows without bound, replaces a good one."""
        p, by = self.record.progress, self.transport
        return watch(
            self.engine.able, t, server, before=p.last_norm, start=p.start_norm, who=by.who, advice=by.advice()
        )

    # ------------------------------------------------------------------------------------------------ divergence

    def _remember(self) -> Before:
        r = self.record
        return Before(r.server, r.common, dict(r.news), dict(r.flights), copy.deepcopy(r.progress))

    def _take_back(self, before: Before) -> None:
        r = self.record
        r.server, r.common, r.news, r.progress = before.server, before.common, before.news, before.progress
        r.flights = before.flights
        self.transport.take_back()

    def _may_repeat(self) -> bool:
        halve = self.settings.on_divergence == "halve" and self.transport.repeats
        return halve and self.record.progress.halvings < MOST_HALVINGS

    def _repeat_with_half(self, why: str) -> None:
        progress = self.record.progress
        progress.halvings += 1
        self._halve()
        progress.notes.append(f"{why} Learning rates halved ({progress.halvings} of {MOST_HALVINGS}).")
        self.messages.append(progress.notes[-1])

    def _halve(self) -> None:
        """Halve every learning rate of the method; workers start anew with it."""
        rates = {k: v for k, v in flat(self.method).items() if k == "lr" or k.startswith("lr_")}
        self.method = with_keys(self.method, **{k: v / 2 for k, v in rates.items() if v is not None})
        self.engine = self.transport.engine = replace(self.engine, method=self.method)
        self._engines.append(self.engine)
        self.transport.close()

    # ------------------------------------------------------------------------------------------------ evaluation

    def _measure(self, t: int, ledger: Ledger) -> Line:
        """Evaluate, and return what belongs into the round's line."""
        start = time.perf_counter()
        self._last = self._evaluate(t, ledger)
        self.record.progress.seconds["evaluate"] += time.perf_counter() - start
        observed, kept = self.engine.able.observed, {}
        seen = observed.monitor(self.record.server)
        if self.clients <= MATRIX_CLIENTS:
            kept = {k: _rounded(m) for k, m in observed.matrices(self.record.server).items()}
        return {**self._last.found, **({"monitor": seen} if seen else {}), **({"matrices": kept} if kept else {})}

    def _evaluate(self, t: int, ledger: Ledger) -> Evaluated:
        """Per-client measures with a fresh download for every client, and their summaries."""
        chosen = list(range(self.clients))
        if self.settings.evaluate_clients is not None and t < self.rounds:
            rng = generator(self.seed, "evaluate", t)
            size = min(len(chosen), self.settings.evaluate_clients)
            chosen = sorted(rng.choice(chosen, size, replace=False).tolist())
        clients: dict[str, list[float | None]] = {}
        left_out: dict[str, dict[str, str]] = {}
        pooled: dict[str, float] = {}
        for way in self._ways():
            got = self._judged(t, chosen, ledger, way)
            if got is None:
                continue
            columns = _per_client(got.sums, chosen)
            columns |= {name: [some.get(i) for i in chosen] for name, some in got.metrics.items()}
            clients |= {k + way.suffix: v for k, v in columns.items() if k != "n" or way == RECEIVED}
            pooled |= {k + way.suffix: v for k, v in got.pooled.items()}
            for name, why in got.left_out.items():
                left_out[name + way.suffix] = {self.names[i]: text for i, text in why.items()}
        found = {k: v for k, v in evaluation.summarise(clients).items() if v}
        if self.engine.judging.asked:
            found = evaluation.with_pooled(found, {m.name: m.higher for m in self.engine.metrics}, pooled)
        if not all(math.isfinite(x) for v in found.values() for x in v.values()):
            by = self.transport
            raise Divergence(f"{by.who}: evaluation after round {t} gave NaN or infinity; {by.advice()}")
        if self.record.history is not None:
            self.record.history.add(t, chosen, clients)
        return Evaluated({"id": list(map(float, chosen)), **clients}, found, left_out)

    def _ways(self) -> list[JudgedModel]:
        """How clients are judged, as far as the method has such models."""
        return [w for w in self.engine.ways(self.settings.evaluate_after) if w not in self._without]

    def _judged(self, t: int, chosen: list[int], ledger: Ledger, way: JudgedModel) -> MeasuredClients | None:
        """What clients measure of one model; None, and a message, if the method has none of this kind."""
        # Trained once more is the local round that would come next; its download is the one just counted.
        at, counted = (t + 1 if way.model == "trained" else t), ledger if way == RECEIVED else Ledger()
        try:
            return self.transport.measure(at, chosen, counted, way)
        except NoHeadToFit as e:
            self._without.add(way)
            self.messages.append(f"Evaluate: no model '{way.words}': {e}.")
            return None

    # ------------------------------------------------------------------------------------------------ results

    def _result(self) -> Result:
        assert self._last is not None
        p, lines = self.record.progress, self.record.lines
        names = {d.value: p.bytes.by_name(d) for d in (Direction.UP, Direction.DOWN)}
        result = Result(
            method=name_of(self.method),
            seed=self.seed,
            rounds=p.round,
            accuracy=evaluation.protocols(self._last.found, lines),
            measures=self._last.found,
            per_client=self._last.clients,
            bytes={**p.bytes.totals(self.transport.counted), "names": names},
            seconds=dict(p.seconds),
            config=self.config,
            versions=versions(self.engine.device),
            curve=lines,
            digest=self.record.digest(),
            messages=self.messages,
            spans=p.spans,
            evaluation=self._evaluation(self._last),
            **self._about(),
        )
        if self.out is not None:
            result.write(Path(self.out))
        return result

    def _evaluation(self, made: Evaluated) -> dict[str, Any]:
        """What was asked of evaluations, who was left out of what, and what every protocol would report."""
        if not self.engine.judging.asked:
            return {}
        metrics = {m.name: m for m in self.engine.metrics}
        lead = next((n for n in ("accuracy", "rmse", "loss") if n in made.found), None)
        higher = {k: m.higher for k, m in metrics.items()} or ({} if lead is None else {lead: lead == "accuracy"})
        ways, lines = self._ways(), self.record.lines
        told = {k: evaluation.side_by_side(k, up, ways, made.found, lines) for k, up in higher.items()}
        unit = {k: m.low >= 0.0 and m.high <= 1.0 for k, m in metrics.items()}
        about = {k: {"higher": up, "fraction": unit.get(k, k == "accuracy")} for k, up in higher.items()}
        return {"metrics": about, "protocols": told, "left_out": made.left_out}


def _interrupt() -> None:
    """Stop as Ctrl-C does; a handler of the caller's hears of it, and may ignore those that follow."""
    if callable(signal.getsignal(signal.SIGINT)) and threading.current_thread() is threading.main_thread():
        signal.raise_signal(signal.SIGINT)
    raise KeyboardInterrupt


# ---------------------------------------------------------------------------------------------------- steps of a round


def advance(
    method: Method,
    server: Tree,
    t: int,
    got: Collected,
    *,
    sizes: Index,
    dtype: torch.dtype,
    placed: Callable[[Any], Any] = lambda values: values,
) -> Tree | None:
    """The server's state after round t; None if the uploads have no weight, and it stays as it is.

    Args:
        placed: brings what was collected, and what a method makes on the host, to the device of the server's state.
    """
    if sum(got.weights.values()) == 0.0:
        return None
    ids = sorted(got.weights)
    told = Round(
        round=t,
        ids=placed(torch.tensor(ids)),
        n=placed(torch.from_numpy(sizes[ids]).to(dtype)),
        weights=placed(torch.tensor([got.weights[i] for i in ids], dtype=dtype)),
        mean=placed(got.mean.result()),
        each=placed(tree.stack([got.each[i] for i in ids])),
        missing=placed(torch.tensor([i for i in got.asked if i not in got.weights], dtype=torch.int64)),
        totals=placed(got.mean.totals),
    )
    given = Unchanged(server=server, mean=told.mean, each=told.each)
    try:
        made = method.server_update(server, told)
    except torch.linalg.LinAlgError as e:  # type: ignore[attr-defined]  # what overflowed has no singular values
        who = type(method).__name__
        raise Divergence(f"{who}: the server cannot decompose what it received in round {t}; use a smaller lr.") from e
    new: Tree = placed(check_server(method, server, made, t))
    given.check(method, "server_update", t)
    return new


def watch(able: Abilities, t: int, server: Tree, *, before: float, start: float, who: str, advice: str) -> float:
    """The norm of a new server state, before it replaces a good one.

    Raises:
        Divergence: if the state is not finite, or grows without bound.
    """
    if not tree.all_finite(server):
        raise Divergence(f"{who}: the server's state is not finite after round {t}; {advice}")
    norm, before, start = able.observed.size(server), max(before, 1.0), max(start, 1.0)
    if t >= 10 and (norm > 100 * start or norm > 10 * before):
        raise Divergence(
            f"{who}: the norm of the server's state rose to {norm:.3g} in round {t}, from {before:.3g} before"
            f" and {start:.3g} at the start; {advice}"
        )
    return norm


def _per_client(sums: Sums, chosen: list[int]) -> dict[str, list[float | None]]:
    return evaluation.per_client({k: np.array([v.get(i, 0.0) for i in chosen], np.float64) for k, v in sums.items()})


def _rounded(matrix: Tensor) -> list[list[float | None]]:
    """A matrix for a line of the metrics: four digits are enough to draw it, and JSON has no NaN."""
    return [[round(v, 4) if math.isfinite(v) else None for v in row] for row in matrix.tolist()]
