"""The transport of a simulation: clients are rows of a store on this machine, visited in chunks by an executor."""

from __future__ import annotations

import contextlib
import errno
import importlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedspan import tree, wire
from fedspan.data.federated import FederatedData, Index
from fedspan.errors import Divergence, OutOfMemory
from fedspan.learn.metrics import UndefinedMetric
from fedspan.method import Capacity, Sent
from fedspan.simulation import defence
from fedspan.simulation.defence import Bounds, DefenceHistory, Measured
from fedspan.simulation.devices import Clock, Cost, Devices, largest, measure
from fedspan.simulation.engine import Answer, Engine, EvaluatedChunk, chunk_cuts, chunk_size
from fedspan.simulation.protocols import RECEIVED, JudgedModel
from fedspan.simulation.record import Record
from fedspan.simulation.settings import dropped, sample
from fedspan.simulation.transport import Collected, MeasuredClients, in_order, partial_sum
from fedspan.simulation.workers import Executor, InProcess, Job, Meta, available_cores, executor_of, forks
from fedspan.storage.client_store import ClientStore
from fedspan.tree import Tree
from fedspan.wire import Direction, Ledger

CHUNK_BYTES = 8 << 20
"""Private states and downloads of the clients that are judged in one piece of work."""

DEVICE_CHUNK_BYTES = 512 << 20
"""The same on an accelerator, which many clients at once keep busy."""

OWN_BYTES = 64 << 20
"""Downloads of single clients that are made at once for an evaluation; those of more clients are made in turn."""

POOLED_ROWS = 4096
"""Held-out examples in one piece of work where all clients predict with one model."""


@dataclass(frozen=True)
class ClientGroup:
    """Clients of one capacity to whom a round or an evaluation goes, in the order in which they are cut into chunks."""

    capacity: int
    """Its place among the capacities."""
    ids: list[int]
    cuts: Sequence[int]
    """Places in `ids` where chunks begin."""
    own: Callable[[slice], Tree]
    """Rows of the download for the clients of a chunk alone."""
    together: bool = False
    """Whether all predict with one model."""
    alike: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Clients that have model and test set of one in `ids`, by that one, which comes first among them."""

    def chunks(self) -> Iterator[slice]:
        """The places of every chunk."""
        for start, end in zip(self.cuts, [*self.cuts[1:], len(self.ids)]):
            yield slice(start, end)


class LocalTransport:
    """Brings work to the simulated clients of a federation, in this process or in workers.

    Args:
        record: holds the clients' rows and the server's state that downloads are made of.
        devices: what clients would compute with; rounds are then timed as if on them.
        accelerators: what chunks are really computed on, one for each worker; the engine's device if not given.
    """

    who = "Simulator"
    counted: tuple[Direction, ...] = tuple(d for d in Direction if d != Direction.WIRE)
    repeats = True

    def __init__(
        self,
        engine: Engine,
        record: Record,
        devices: Devices | None = None,
        *,
        rounds: int = 0,
        accelerators: Sequence[torch.device] = (),
    ) -> None:
        self.accelerators = [d for d in accelerators or [engine.device] if d.type != "cpu"]
        self.engine, self.record, self.settings, self.rounds = engine, record, record.settings, rounds
        self.ways = engine.ways(record.settings.evaluate_after)
        self.defence = record.defence
        self.data: FederatedData = engine.data
        self.capacities = record.capacities
        self.parameters = sum(p.numel() for p in engine.task.init().values())
        timed = devices is not None and devices.timed
        self.clock = Clock(devices, self._cost) if devices is not None and timed else None
        self._executor: Executor | None = None
        self._shared: dict[int, Tree] = {}  # what clients of a capacity were last sent in common
        self._down: dict[Capacity, float] = {}  # bytes that one client of a capacity last received
        self._own_told: list[tuple[list[int], Meta]] = []  # clients, and what was measured of their own models
        self._tables = list(zip(record.stores, record.tables))  # rows that workers read and write in place

    def __getstate__(self) -> dict[str, Any]:
        """What a spawned worker needs to handle chunks: all but what only this process may touch."""
        here: dict[str, Any] = {"record": None, "clock": None, "_executor": None, "_own_told": [], "_shared": {}}
        return self.__dict__ | here

    @property
    def sizes(self) -> Index:
        """Training examples of every client."""
        return self.data.sizes

    @property
    def executor(self) -> Executor:
        """Runs chunks; made when first needed."""
        if self._executor is None and self.accelerators:
            self._executor = self._on_devices()
        if self._executor is None:
            workers, method = self.settings.workers, self.settings.start_method
            if (workers or available_cores()) > 1 and self.engine.mapping == "vmap" and forks(method):
                # torch.func.grad imports this when first called, which takes seconds: once here, not in every worker.
                importlib.import_module("torch._dynamo")
            self._executor = executor_of(self._handle, workers, self.record.messages.append, method)
        return self._executor

    def _on_devices(self) -> Executor:
        """This process for one accelerator, and for several a worker for each: a fork could not use them."""
        asked, there = self.settings.workers, self.accelerators
        used = there[: asked or len(there)]
        if asked is not None and asked > len(there):
            self.record.messages.append(
                f"Train: workers={asked} is more than there are devices, and each has one process: {len(there)}."
            )
        if len(used) == 1:
            return InProcess(self._handle)
        from fedspan.simulation.spawned_workers import SpawnedPool  # imports what only this needs

        return SpawnedPool(self._handle, len(used), self.record.messages.append, devices=used)

    def advice(self) -> str:
        """What to do about divergence."""
        lr = getattr(self.engine.method, "lr", None)
        now = "" if lr is None else f" (now {lr:g})"
        return f"the state before it is kept. Use a smaller lr{now}, or train.on_divergence='halve'."

    def ready(self) -> None:
        """Clients on this machine are always there."""

    def close(self) -> None:
        """Stop the workers; those started next know the present method."""
        if self._executor is not None:
            self._executor.close()
        self._executor = None

    # ------------------------------------------------------------------------------------------------ rounds

    def train(self, t: int, sampled: Sequence[int], ledger: Ledger) -> Collected:
        """Run `client_update` of all sampled clients that are not lost; chunks come in a fixed order."""
        self.record.settle()
        lost = dropped(list(sampled), self.settings, self.engine.seed, t)
        going = [i for i in sampled if not (self.settings.drop == "before" and i in lost)]
        groups = self._groups("train", t, going, ledger, {i: len(self.data.train[i]) for i in going})
        usual = DefenceHistory(self.defence, self.record.progress.usual)
        judged = any(way.model == "own" for way in self.ways)
        last = self._last_before_evaluation(t, going) if judged else set()

        def told(ids: list[int]) -> Meta:
            answering, own = [i not in lost for i in ids], not last.isdisjoint(ids)
            return {"answering": answering, "own": own, "bounds": usual.before}

        got, self._own_told = Collected(sampled), []
        now: dict[int, Capacity] = {}
        up: Counter[Capacity] = Counter()
        waiting: list[tuple[Meta, Meta, Tree]] = []
        measured: list[Measured] = []
        cuts: dict[int, dict[str, float]] = {}
        bounds: Bounds = usual.before
        for job, meta, answer in self._finite(t, self._jobs("train", t, groups, told)):
            capacity = self.capacities[job["capacity"]]
            now |= dict.fromkeys(job["ids"], capacity)
            ledger.add_names(Direction.UP, meta["bytes"])
            up[capacity] += sum(meta["bytes"].values())
            self._stage(job, answer)
            answer = self.engine.at_home(answer)
            self._own_told.append((job["ids"], meta.get("own", {})))
            measured += [Measured(values) for values in meta["measured"]]
            cuts |= dict(meta["cut"])
            if meta["held"] or waiting:  # chunks are added up in their order, whichever must wait
                waiting.append((job, meta, answer))
            else:
                got.add(meta["answered"], meta["weights"], answer["each"], answer["total"])
        if waiting:
            bounds = usual.with_round(measured)
            for job, meta, answer in waiting:
                if meta["held"]:
                    meta, answer = self._judged_late(job, meta, answer, bounds)
                    cuts |= dict(meta["cut"])
                got.add(meta["answered"], meta["weights"], answer["each"], answer["total"])
        if self.defence.on:
            usual.note(measured)
            got.facts["defence"] = defence.said(bounds, cuts, self.data.names)
        if self.clock is not None:
            got.facts["clock"] = self._time(self.clock, now, got.weights, up)
        return got

    def _finite(self, t: int, jobs: Iterable[Job]) -> Iterator[tuple[Meta, Meta, Tree]]:
        """Results of training jobs, in order.

        Raises:
            Divergence: at the first chunk that is not finite.
        """
        for job, meta, data in self._results(jobs):
            if meta["bad"]:
                names = ", ".join(self.data.names[i] for i in meta["bad"][:5])
                raise Divergence(f"{self.who}: round {t} gave NaN or infinity on client(s) {names}; {self.advice()}")
            yield job, meta, data

    def _results(self, jobs: Iterable[Job]) -> Iterator[tuple[Meta, Meta, Tree]]:
        """What every job was to do, and what came of it, in order; what a job held is let go when it is done."""
        asked: deque[Meta] = deque()

        def noted() -> Iterator[Job]:
            for job in jobs:
                asked.append(job.meta)
                yield job

        for meta, data in self.executor.run(noted()):
            job = asked.popleft()
            if "first" in job:
                self._hold(job)
            yield job, meta, data

    def _stage(self, job: Meta, answer: Tree) -> None:
        """Stage the rows that a chunk brings, or has left in slots."""
        if "to" in job:
            self._store(job).stage_slots(job["ids"], job["to"])
        else:
            self.record.stage(job["ids"], answer.pop("rows"))

    def _hold(self, job: Meta) -> None:
        """Remember the initial rows that a chunk has computed, not to compute them again."""
        self._store(job).hold([i for i, slot in zip(job["ids"], job["slots"]) if slot < 0], job["first"])

    def _store(self, job: Meta) -> ClientStore:
        return self.record.stores[self._tables[job["table"]][0]]

    def keep(self) -> None:
        """Let the clients' new rows replace those they had."""
        self.record.accept()
        for ids, told in self._own_told:
            self._keep_own(ids, told)
        self._own_told = []

    def take_back(self) -> None:
        """Let clients have the rows again that they had before the round."""
        self.record.undo()

    def announce(self, news: Tree, ledger: Ledger) -> None:
        """Count what every client would be sent; all share the record's common state."""
        ledger.add(Direction.ANNOUNCE, tree.nbytes(news) * self.data.clients)

    # ------------------------------------------------------------------------------------------------ measures

    def measure(self, t: int, chosen: Sequence[int], ledger: Ledger, way: JudgedModel = RECEIVED) -> MeasuredClients:
        """What clients measure of one of their models; predictions of all are pooled."""
        if way.model == "own":
            return self._own_measured(chosen, way)
        part = getattr(self.data, self.settings.evaluate_part)
        load = part if way.model == "received" else self.data.train
        do = "after" if way.model == "trained" else "evaluate"
        groups = self._groups(do, t, chosen, ledger, {i: len(load[i]) for i in chosen}, way)
        sums: dict[str, dict[int, float]] = {}
        got, pool = MeasuredClients(sums), dict[int, tuple[Tensor, Tensor]]()
        for job, meta, data in self._results(self._jobs(do, t, groups, lambda _: {"way": way})):
            ids = job["ids"]
            for name, values in data["sums"].items():
                sums.setdefault(name, {}).update(zip(ids, values.tolist()))
            _add(got, ids, meta)
            for i, y, scores in zip(meta.get("gathered", ()), *_split(data, meta)):
                pool[i] = y, scores
        tables: list[dict[int, Any]] = [*sums.values(), *got.metrics.values(), *got.left_out.values()]
        if len(pool) > 1:  # otherwise any number of copies has the metrics of one
            tables.append(pool)
        for group in groups:
            _tell_alike(group.alike, tables)
        got.pooled = self._pooled([pool[i] for i in sorted(pool)])
        return got

    def _pooled(self, parts: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
        """Metrics over the predictions of all clients together, where those define them."""
        found: dict[str, float] = {}
        if not parts:
            return found
        y, scores = (torch.cat([part[k] for part in parts]).numpy() for k in (0, 1))
        for m in self.engine.gathered:
            with contextlib.suppress(UndefinedMetric):
                found[m.name] = m(y, scores)
        return found

    def _own_measured(self, chosen: Sequence[int], way: JudgedModel) -> MeasuredClients:
        """What was measured of the models that clients had after their last training; nothing is computed."""
        held = self.record.progress.own.get(way.suffix, {})

        def of(kind: str) -> dict[str, dict[int, Any]]:
            there = {str(i): i for i in chosen}
            return {k: {there[i]: v for i, v in some.items() if i in there} for k, some in held.get(kind, {}).items()}

        return MeasuredClients(of("sums") or {"n": {}}, of("metrics"), of("left_out"))

    def _judge_own(
        self, capacity: Capacity, t: int, ids: list[int], answer: Answer, rest: tuple[Tree, Tree, Tree]
    ) -> Meta:
        """Measure the models that a chunk of clients has right after this training; by the suffix of the way."""
        found: Meta = {}
        for way in self.ways:
            if way.model == "own":
                rows = {"row": answer.rows, "sent": answer.raw}
                got = self.engine.evaluate(capacity, t, ids, rows, *rest, part=self.settings.evaluate_part, way=way)
                sums = {name: values.tolist() for name, values in got.sums.items()}
                found[way.suffix] = {"sums": sums, "metrics": got.metrics, "left_out": _by_text(got.left_out)}
        return found

    def _keep_own(self, ids: list[int], told: Meta) -> None:
        """Let measures of own models replace those of an earlier training."""
        for suffix, kinds in told.items():
            held = self.record.progress.own.setdefault(suffix, {"sums": {}, "metrics": {}, "left_out": {}})
            for name, why in held["left_out"].items():
                held["left_out"][name] = {i: w for i, w in why.items() if int(i) not in ids}
            for kind in ("sums", "metrics"):
                for name, values in kinds[kind].items():
                    some = held[kind].setdefault(name, {})
                    for i, v in zip(ids, values):
                        some.pop(str(i), None)
                        if v == v:  # NaN: it does not define the metric
                            some[str(i)] = v
            for name, why in kinds["left_out"].items():
                held["left_out"].setdefault(name, {}).update(why)

    def _last_before_evaluation(self, t: int, sampled: Sequence[int]) -> set[int]:
        """Of the clients of round t those that are not sampled again before the next evaluation."""
        rest, every = set(sampled), self.settings.evaluate_every
        for later in range(t + 1, min(self.rounds, -(-t // every) * every) + 1):
            again = sample(self.data.clients, self.settings, self.engine.seed, later)
            lost = dropped(again, self.settings, self.engine.seed, later) if self.settings.drop == "before" else set()
            rest -= set(again) - lost
        return rest

    # ------------------------------------------------------------------------------------------------ chunks

    def _groups(
        self,
        do: str,
        t: int,
        ids: Sequence[int],
        ledger: Ledger,
        load: Mapping[int, int],
        way: JudgedModel | None = None,
    ) -> list[ClientGroup]:
        """Clients by capacity, the largest first so that a chunk wastes little on empty slots, with their downloads.

        Args:
            way: how they are judged; None where they train.
        """
        groups, now = [], {i: self.record.capacity(i) for i in ids}
        for c, capacity in enumerate(self.capacities):
            mine = in_order([i for i in ids if now[i] == capacity], load)
            if mine and way is None:
                groups.append(self._training(do, t, c, mine, ledger))
            elif mine and way is not None:
                groups.append(self._judging(do, t, c, mine, ledger, way))
        return groups

    def _training(self, do: str, t: int, c: int, ids: list[int], ledger: Ledger) -> ClientGroup:
        """Clients of one capacity that train; all of their downloads are made at once."""
        own, alike, single = self._download(do, t, c, ids)
        ledger.add_names(Direction.DOWN, alike, times=len(ids))
        ledger.add_names(Direction.DOWN, single)
        self._down[self.capacities[c]] = sum(alike.values()) + sum(single.values()) / len(ids)
        loads, devices = [len(self.data.train[i]) for i in ids], len(self.accelerators)
        cuts = chunk_cuts(self.engine.mapping, loads, self.parameters, self.settings.chunk, devices)
        return ClientGroup(c, ids, cuts, lambda chunk: tree.take(own, chunk))

    def _judging(self, do: str, t: int, c: int, ids: list[int], ledger: Ledger, way: JudgedModel) -> ClientGroup:
        """Clients of one capacity that are judged, by what the first of them has and receives.

        There may be many more of them than ever train at a time: what single clients receive is made for some of them
        after the other.
        """
        mine, alike, _ = self._download(do, t, c, ids[:1])
        ledger.add_names(Direction.EVALUATE, alike, times=len(ids))
        row, part = self.record.take(ids[:1]), self.settings.evaluate_part
        capacity, common = self.capacities[c], self.record.common
        if self.engine.judges_together(capacity, t, ids, row, self._shared[c], mine, common, part, way):
            same = self._alike(ids)
            cuts = self._pooled_cuts(list(same))
            return ClientGroup(c, list(same), cuts, lambda _: mine, together=True, alike=same)
        size, each = self.settings.chunk, tree.nbytes(mine)
        if size is None:
            limit = DEVICE_CHUNK_BYTES if self.accelerators else CHUNK_BYTES
            most = max(1, limit // max(1, each + tree.nbytes(row)))
            size = min(most, chunk_size(self.engine.mapping, len(ids), self.parameters, None, len(self.accelerators)))
        block = size * max(1, OWN_BYTES // max(1, each * size))
        made: dict[int, Tree] = {}

        def own(chunk: slice) -> Tree:
            first, at = divmod(chunk.start, block)
            if first not in made:
                made.clear()
                made[first], single = self._own(do, t, capacity, ids[first * block : (first + 1) * block])
                ledger.add_names(Direction.EVALUATE, single)
            rows: Tree = tree.take(made[first], slice(at, at + chunk.stop - chunk.start))
            return rows

        return ClientGroup(c, ids, range(0, len(ids), size), own if each else lambda _: mine)

    def _alike(self, ids: Sequence[int]) -> dict[int, list[int]]:
        """Clients with one model by the first that has the same test set: it alone needs to be judged."""
        part, relabel = getattr(self.data, self.settings.evaluate_part), self.data.relabel
        found: dict[tuple[bytes, bytes], list[int]] = {}
        for i in ids:
            names = b"" if relabel is None else relabel[i].numpy().tobytes()
            found.setdefault((part[i].tobytes(), names), []).append(i)
        return {same[0]: same for same in found.values()}

    def _pooled_cuts(self, ids: Sequence[int]) -> Sequence[int]:
        """Where chunks of clients with one model begin: by their examples, unless the configuration says how many."""
        if self.settings.chunk is not None:
            return range(0, len(ids), self.settings.chunk)
        part, cuts, filled = getattr(self.data, self.settings.evaluate_part), [0], 0
        for k, i in enumerate(ids):
            if filled and filled + len(part[i]) > POOLED_ROWS:
                cuts.append(k)
                filled = 0
            filled += len(part[i])
        return cuts

    def _jobs(self, do: str, t: int, groups: Sequence[ClientGroup], told: Callable[[list[int]], Meta]) -> Iterator[Job]:
        """Chunks of clients; their rows are taken from the store when a chunk is handed out."""
        for group in groups:
            for chunk in group.chunks():
                ids = group.ids[chunk]
                meta = {"do": do, "round": t, "capacity": group.capacity, "ids": ids, "together": group.together}
                where, rows = self._rows_of(do, ids)
                yield Job(meta | where | told(ids), {**rows, "own": group.own(chunk)}, f"{do}-{group.capacity}")

    def _rows_of(self, do: str, ids: list[int]) -> tuple[Meta, Tree]:
        """How a chunk has its clients' rows: by their slots in a table, or they travel with the job.

        Training leaves new rows in slots of their own (`to`); initial ones that are computed to be judged are left too.
        """
        found = self.record.in_place(ids)
        if found is None:
            return {}, {"rows": self.record.take(ids, self.executor.empty)}
        number, store = found
        slots = store.slots(ids)
        where: Meta = {"table": number, "slots": slots}
        if do == "train":
            where["to"] = store.reserve(len(ids))
        elif first := store.reserve(sum(slot < 0 for slot in slots)):
            where["first"] = first
        return where, {}

    def _taken(self, meta: Meta, data: Tree) -> Tree:
        """The rows of a chunk's clients; who has none yet begins, in the worker."""
        if "slots" not in meta:
            rows: Tree = data["rows"]
            return rows
        capacity, table = self._tables[meta["table"]]
        assert table is not None
        rows, left = table.gather(meta["slots"]), iter(meta.get("first", ()))
        for k, (i, slot) in enumerate(zip(meta["ids"], meta["slots"])):
            if slot < 0:
                state = tree.map(lambda a: a[None], self.engine.begin(capacity, i))
                tree.map(lambda row, a, k=k: row[k : k + 1].copy_(a), rows, state)
                if (to := next(left, None)) is not None:
                    table.scatter([to], state)
        return rows

    def _left(self, meta: Meta, rows: Tree) -> Tree:
        """Leave new rows in their slots; what of them must travel."""
        if "to" not in meta:
            return {"rows": rows}
        table = self._tables[meta["table"]][1]
        assert table is not None
        table.scatter(meta["to"], rows)
        return {}

    def _download(self, do: str, t: int, c: int, ids: list[int]) -> tuple[Tree, dict[str, int], dict[str, int]]:
        """Ask the method for a download, pass it through the codecs, and share what is for all with the workers.

        Returns the rows for single clients, and the bytes of what each receives in common and of those rows, by name.
        """
        capacity = self.capacities[c]
        ask = self.engine.able.download
        down = ask(self.record.server, self.engine.ids(ids, at_home=True), capacity, t, use=do == "evaluate")
        shared, coded = wire.roundtrip(down.shared, self.engine.able.coded.codecs(t))
        self._shared[c] = shared
        self.executor.share(f"{do}-{c}", {"shared": shared, "common": self.record.common})
        own, single = self._coded_own(t, down.own)
        return own, wire.count(shared, coded), single

    def _own(self, do: str, t: int, capacity: Capacity, ids: list[int]) -> tuple[Tree, dict[str, int]]:
        """What single clients receive, as it comes out of the codecs, and its bytes by name."""
        ask = self.engine.able.download
        down = ask(self.record.server, self.engine.ids(ids, at_home=True), capacity, t, use=do == "evaluate")
        return self._coded_own(t, down.own)

    def _coded_own(self, t: int, own: Tree) -> tuple[Tree, dict[str, int]]:
        codecs = self.engine.able.coded.codecs(t)
        more: dict[str, Tensor] = {}
        if codecs.keys() & own.keys():
            own, more = torch.func.vmap(lambda row: wire.roundtrip(row, codecs))(own)
        return own, wire.count(own, {k: v.sum() for k, v in more.items()})

    def _handle(self, meta: Meta, data: Tree, broadcast: Tree) -> tuple[Meta, Tree]:
        """One chunk of clients; runs in a worker process (or in this one).

        Raises:
            OutOfMemory: in one sentence, where torch, NumPy or Python had none to give.
        """
        try:
            return self._computed(meta, data, broadcast)
        except (RuntimeError, MemoryError, OSError) as e:
            if not _lacks_memory(e):
                raise
            batch = self.settings.batch_size
            raise OutOfMemory(
                f"{self.who}: memory ran out in round {meta['round']} while a chunk of {len(meta['ids'])} clients was"
                f" computed, each with a model of {self.parameters:,} parameters. Use a train.chunk below"
                f" {len(meta['ids'])}, a train.batch_size below {'all examples' if batch is None else batch}, or"
                " train.workers=1."
            ) from e

    def _computed(self, meta: Meta, data: Tree, broadcast: Tree) -> tuple[Meta, Tree]:
        """What comes of one chunk of clients."""
        capacity, ids, t = self.capacities[meta["capacity"]], meta["ids"], meta["round"]
        data, broadcast = self.engine.placed((data, broadcast))
        args = (capacity, t, ids, self._taken(meta, data), broadcast["shared"], data["own"], broadcast["common"])
        if meta["do"] in ("evaluate", "after"):
            judge = self.engine.evaluate_together if meta["together"] else self.engine.evaluate
            return _told(judge(*args, part=self.settings.evaluate_part, way=JudgedModel(*meta["way"])))
        able, answer = self.engine.able, self.engine.update(*args, keep_raw=meta["own"])
        if bad := self._not_finite(ids, answer):
            return {"bad": bad}, {}
        heard = self.engine.ids([k for k, yes in enumerate(meta["answering"]) if yes])
        sent = answer.sent if len(heard) == len(ids) else tree.take(answer.sent, heard)
        names = [ids[k] for k in heard.tolist()]
        self._check_weights(names, sent)
        sizes = wire.count(sent.parts)
        sizes |= {k: int(v[heard].sum()) for k, v in answer.coded.items()}
        facts = {"bad": [], "answered": names, "bytes": sizes, "measured": [], "cut": [], "held": False}
        if meta["own"]:
            rest = broadcast["shared"], data["own"], broadcast["common"]
            facts["own"] = self._judge_own(capacity, t, ids, answer, rest)
        own = data["own"] if len(heard) == len(ids) else tree.take(data["own"], heard)
        sent = self._arrived(t, names, sent, broadcast["shared"], own)
        if self.defence.on and names:
            downs = defence.downloads(broadcast["shared"], own, len(names))
            measured = [defence.measure(able, tree.take(sent, k), down) for k, down in enumerate(downs)]
            facts["measured"] = [one.values for one in measured]
            if not all(one.known(meta["bounds"]) for one in measured):
                return facts | {"held": True}, {**self._left(meta, answer.rows), "sent": sent._asdict(), "own": own}
            judged = defence.judge(able, names, sent, downs, measured, meta["bounds"])
            sent, facts["cut"] = judged.sent, list(judged.cut.items())
        total = partial_sum(able, sent, broadcast["shared"], capacity)
        facts["weights"] = sent.weight.tolist()
        return facts, {**self._left(meta, answer.rows), "total": total, "each": sent.each}

    def _not_finite(self, ids: list[int], answer: Answer) -> list[int]:
        """Clients of a chunk that made NaN or infinity."""
        if tree.all_finite(answer.rows) and tree.all_finite(answer.sent):
            return []
        parts = [(i, tree.take((answer.rows, answer.sent), k)) for k, i in enumerate(ids)]
        return [i for i, part in parts if not tree.all_finite(part)]

    def _check_weights(self, ids: list[int], sent: Sent) -> None:
        """Refuse weights of a chunk's uploads that are not what the method declares."""
        able = self.engine.able
        for k, (i, w) in enumerate(zip(ids, sent.weight.tolist())):
            n, who, bound = len(self.data.train[i]), f"client {i}", able.weight_bound
            wire.check_upload({}, w, who=who, declared={}, kind=able.weight, examples=n, bound=bound)
            wire.check_weights(tree.take(sent.weights, k), who=who, bound=bound)

    def _arrived(self, t: int, ids: list[int], sent: Sent, shared: Tree, own: Tree) -> Sent:
        """Uploads of a chunk as they reach the server: as they were sent, unless a study lets some clients lie."""
        return sent

    def _judged_late(self, job: Meta, meta: Meta, answer: Tree, bounds: Bounds) -> tuple[Meta, Tree]:
        """A chunk that had to wait until its whole round was in, judged and added up."""
        c, able, sent = job["capacity"], self.engine.able, Sent(**answer["sent"])
        downs = defence.downloads(self._shared[c], answer["own"], len(meta["answered"]))
        measured = [Measured(values) for values in meta["measured"]]
        judged = defence.judge(able, meta["answered"], sent, downs, measured, bounds)
        total = partial_sum(able, judged.sent, self._shared[c], self.capacities[c])
        facts = {**meta, "weights": judged.sent.weight.tolist(), "cut": list(judged.cut.items())}
        return facts, {"each": judged.sent.each, "total": total}

    # ------------------------------------------------------------------------------------------------ simulated clock

    def _time(
        self, clock: Clock, going: dict[int, Capacity], weights: dict[int, float], up: Counter[Capacity]
    ) -> dict[str, Any]:
        """The round on the clients' devices: seconds, since the start, who was last, operations of all together."""
        since = self.record.lines[-1].get("clock", {}).get("total", 0.0) if self.record.lines else 0.0
        if not going:
            return {"seconds": 0.0, "total": since, "slowest": None, "flops": 0.0}
        heard = Counter(going[i] for i in weights)
        sent = {c: self._down[c] + up[c] / max(1, heard[c]) for c in set(going.values())}
        timed = clock.round({i: len(self.data.train[i]) for i in going}, going, sent)
        return {**timed._asdict(), "total": since + timed.seconds}

    def _cost(self, client: int, capacity: Capacity) -> Cost:
        """What a round at a capacity costs, measured on the client with most examples that can afford as much."""
        who = largest(self.data, self.record.federation.capacities, client)
        level = self.record.levels[who].index(capacity)
        return measure(self.engine.method, self.engine.task, self.data, who, self.settings, level)


def _lacks_memory(e: BaseException) -> bool:
    """Whether an error says that no memory was to be had: torch has no class of its own for it on a CPU."""
    told = isinstance(e, RuntimeError) and ("can't allocate memory" in str(e) or "not enough memory" in str(e))
    return isinstance(e, MemoryError) or told or (isinstance(e, OSError) and e.errno == errno.ENOMEM)


def _told(got: EvaluatedChunk) -> tuple[Meta, Tree]:
    """What a chunk measured, to travel: numbers and reasons in one part, sums and predictions in the other."""
    meta = {"metrics": got.metrics, "left_out": _by_text(got.left_out)}
    if not got.predictions:
        return meta, {"sums": got.sums}
    meta |= {"gathered": [i for i, _, _ in got.predictions], "sizes": [len(y) for _, y, _ in got.predictions]}
    pool = {"y": torch.cat([y for _, y, _ in got.predictions]), "scores": torch.cat([p for _, _, p in got.predictions])}
    return meta, {"sums": got.sums, "pool": pool}


def _split(data: Tree, meta: Meta) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Labels and predictions of the clients of a chunk."""
    if "pool" not in data:
        return (), ()
    return data["pool"]["y"].split(meta["sizes"]), data["pool"]["scores"].split(meta["sizes"])


def _add(got: MeasuredClients, ids: list[int], meta: Meta) -> None:
    """Add the metrics of a chunk."""
    for name, values in meta["metrics"].items():
        got.metrics.setdefault(name, {}).update({i: v for i, v in zip(ids, values) if v == v})
    for name, why in meta["left_out"].items():
        got.left_out.setdefault(name, {}).update({int(i): text for i, text in why.items()})


def _tell_alike(alike: Mapping[int, Sequence[int]], tables: Sequence[dict[int, Any]]) -> None:
    """Give clients with one model and test set what was found of the first of them."""
    for first, same in alike.items():
        for table in tables:
            if len(same) > 1 and first in table:
                table.update(dict.fromkeys(same, table[first]))


def _by_text(left_out: dict[str, dict[int, str]]) -> dict[str, dict[str, str]]:
    """With clients as text, as JSON has them."""
    return {name: {str(i): why for i, why in some.items()} for name, some in left_out.items()}
