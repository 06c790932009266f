"""Everything of a run that changes from round to round: kept in memory, saved, and found again."""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fedspan import tree
from fedspan.data.digest import data_digest
from fedspan.errors import ConfigError, FedspanError
from fedspan.method import Capacity, Federation
from fedspan.method.fields import flat
from fedspan.method.promises import need_tensors
from fedspan.methods import name_of
from fedspan.simulation import identity
from fedspan.simulation.defence import Defence, Values
from fedspan.simulation.engine import Engine
from fedspan.simulation.environment import Span, credit, differences_on_resume, versions
from fedspan.simulation.settings import Settings
from fedspan.storage import client_history
from fedspan.storage.atomic import fsync_directory, writing
from fedspan.storage.checkpoint import Loaded, RunDirectory
from fedspan.storage.client_history import ClientHistory
from fedspan.storage.client_store import ClientStore
from fedspan.storage.format_number import FORMAT, check_format
from fedspan.storage.row_table import Empty, RowTable, uninitialised
from fedspan.storage.tree_file import BLOCK_BYTES, Block
from fedspan.tree import Tree
from fedspan.wire import Ledger


class RowsLost(FedspanError):
    """Private states of clients are gone with the machine that had them; rounds since the last checkpoint must be
    done again."""


class RowsElsewhere(Protocol):
    """Private states that are newer than those at home, on other machines."""

    def row(self, client: int) -> Block | None:
        """The record of a client whose state is not at home; None if it is."""
        ...

    def coming_home(self) -> Iterator[tuple[list[int], Block]]:
        """Clients whose states are not at home, and their records, some at a time."""
        ...

    def at_home(self) -> None:
        """Note that all states are at home."""
        ...

    def clear(self) -> None:
        """Forget all states that are elsewhere."""
        ...


@dataclass
class Progress:
    """What has been done so far, as numbers."""

    round: int = 0
    bytes: Ledger = field(default_factory=Ledger)
    seconds: dict[str, float] = field(default_factory=lambda: {"train": 0.0, "evaluate": 0.0})
    halvings: int = 0
    start_norm: float = 0.0
    last_norm: float = 0.0
    notes: list[str] = field(default_factory=list)  # what a person should still be told after resuming
    spans: list[Span] = field(default_factory=list)  # which rounds were computed with which versions
    usual: list[Values] = field(default_factory=list)  # recent norms and weights, for the defence
    deployed: dict[str, Any] = field(default_factory=dict)  # what the server of a deployment knows of its nodes
    own: dict[str, Any] = field(default_factory=dict)  # measures of the models clients had after their last training
    timeline: dict[str, Any] = field(default_factory=dict)  # of an asynchronous run: the time, and who trains

    @property
    def totals(self) -> dict[str, int]:
        """Bytes by direction."""
        return self.bytes.totals()


@dataclass(frozen=True)
class RestartPoint:
    """The state of a run when all private states were last at home."""

    server: Tree
    common: Tree
    news: dict[str, Tree]
    progress: Progress
    lines: int
    metrics: int
    """Bytes of the file of metrics."""


class Record:
    """The state of a run: server, common and client state, progress and metrics; on disk if there is a directory.

    Args:
        config: the configuration as it is kept with the results, with what else decides the numbers.
        clients: whether the clients' private states are here too; in a deployment they never are.
        defence: how uploads are judged; not at all if not given.
        when: what decides in an asynchronous run when clients train; nothing in synchronous rounds.

    Attributes:
        levels: of every client the capacities it may have in some round, what it can afford first.
        capacities: all of them, once each.
        news: announcements that some client may still have to hear, by number; only in a deployment.
        flights: what clients that train have made of it, by client, until it arrives; only in an asynchronous run.
    """

    def __init__(
        self,
        engine: Engine,
        federation: Federation,
        settings: Settings,
        *,
        config: dict[str, Any],
        out: Path | None,
        fresh: bool,
        read_only: bool = False,
        clients: bool = True,
        defence: Defence | None = None,
        when: Mapping[str, Any] | None = None,
    ) -> None:
        self.defence = defence or Defence()
        self.news: dict[str, Tree] = {}
        self.flights: dict[str, Tree] = {}
        self.settings, self.out, self.federation, self.read_only = settings, out, federation, read_only
        self._level = engine.able.ranked.level
        self.levels: list[Sequence[Capacity]] = [
            (c,) if engine.task.kinds else engine.able.ranked.levels(i) for i, c in enumerate(federation.capacities)
        ]
        self.capacities: list[Capacity] = sorted({c for some in self.levels for c in some}, key=str)
        self.messages: list[str] = []
        self._versions = versions(engine.device)
        self.lines: list[dict[str, Any]] = []
        self.history = ClientHistory(federation.clients) if engine.judging.asked else None
        self.elsewhere: RowsElsewhere | None = None
        self.point: RestartPoint | None = None
        self.directory: RunDirectory | None = None
        loaded = None
        if out is not None:
            decides = identity.of_run(
                config,
                settings,
                method={"name": name_of(engine.method), **flat(engine.method)},
                seed=engine.seed,
                mapping=engine.mapping,
                data=data_digest(engine.data),
                model={"fingerprint": engine.task.fingerprint()},
                **({"defence": asdict(self.defence)} if self.defence.on else {}),
                **(when or {}),
            )
            self.directory = RunDirectory(out / "checkpoints", decides, read_only=read_only)
            try:
                loaded = self.directory.load(fresh=fresh)
            except BaseException:
                self.directory.close()
                raise
            self.messages += self.directory.warnings
        try:
            self._begin(engine, loaded, clients)
        except BaseException:
            self.close()
            raise
        self.messages += self.progress.notes
        self._saved_at = time.monotonic()
        self._written = len(self.lines)

    def _begin(self, engine: Engine, loaded: Loaded | None, clients: bool) -> None:
        """Start from nothing, or from a checkpoint."""
        out, read_only = self.out, self.read_only
        kinds = self.federation.kinds
        self.stores = {c: self._store(engine, c) for c in kinds} if clients else {}
        if loaded is None:
            first = engine.model(kinds[0])
            made = engine.method.init_server(first, self.federation)
            need_tensors(engine.method, "init_server", made)
            self.server: Tree = tree.contiguous(engine.at_home(made))
            self.common: Tree = tree.contiguous(engine.at_home(engine.able.announces.common(first, self.federation)))
            norm = engine.able.observed.size(self.server)
            self.progress = Progress(start_norm=norm, last_norm=norm)
            if out is not None and not read_only:
                with writing(out / "metrics.jsonl"):
                    (out / "metrics.jsonl").write_text("", encoding="utf-8")
                    (out / "result.json").unlink(missing_ok=True)
                    (out / client_history.NAME).unlink(missing_ok=True)
                    fsync_directory(out)
        else:
            for c, rows in zip(self.stores, loaded.rows):
                self.stores[c].restore(rows)
            self.server, self.common = engine.at_home((loaded.server["server"], loaded.server["common"]))
            self.news = engine.at_home(loaded.server.get("news", {}))
            self.flights = loaded.server.get("flights", {})
            e = {**loaded.extra, "bytes": Ledger.from_json(loaded.extra["bytes"])}
            self.progress = Progress(round=loaded.round, **e)
            self.lines = self._cut_metrics(loaded.metrics_length)
            self._load_history()
            self._compare_versions()

    @property
    def resumed(self) -> bool:
        """Whether rounds of an earlier process were found."""
        return self.directory is not None and self.progress.round > 0

    def save(self, force: bool = False) -> None:
        """Append metrics; write a checkpoint every `checkpoint_every` rounds, `checkpoint_seconds` apart at least.

        Raises:
            WriteError: if the metrics cannot be written.
            CheckpointError: if the checkpoint cannot be; in both cases the one before remains.
        """
        self.progress.spans = credit(self.progress.spans, self.progress.round, self._versions)
        if self.directory is None or self.out is None or self.read_only:
            return
        early = time.monotonic() - self._saved_at < self.settings.checkpoint_seconds
        due = force or not (early or self.progress.round % self.settings.checkpoint_every)
        length = self._append_metrics(sync=due)
        if not due:
            return
        self.bring_home()
        if self.history is not None:
            self.history.save(self.out)
        p = {**vars(self.progress), "bytes": self.progress.bytes.to_json()}
        for some in ("own", "timeline"):
            if not p[some]:
                del p[some]
        done = p.pop("round")
        few = {"news": self.news, "flights": self.flights}
        state = {"server": self.server, "common": self.common, **{k: v for k, v in few.items() if v}}
        self.directory.save(done, state, list(self.stores.values()), p, length)
        self._saved_at = time.monotonic()

    def bring_home(self) -> None:
        """Fetch private states that are elsewhere, all or none, and remember this state as one to go back to.

        Raises:
            RowsLost: if some cannot be had any more.
        """
        if self.elsewhere is None:
            return
        self.settle()
        try:
            for ids, records in self.elsewhere.coming_home():
                for c, at in self._grouped(ids).items():
                    self.stores[c].stage_records([ids[k] for k in at], records[at])
        except BaseException:
            self.settle()
            raise
        self.accept()
        self.settle()
        self.elsewhere.at_home()
        size = 0
        if self.out is not None and (self.out / "metrics.jsonl").exists():
            size = (self.out / "metrics.jsonl").stat().st_size
        progress = copy.deepcopy(self.progress)
        self.point = RestartPoint(self.server, self.common, dict(self.news), progress, len(self.lines), size)

    def go_back(self) -> None:
        """Be in the state again in which all private states were last at home; the rounds since will be repeated."""
        point = self.point
        assert point is not None and self.elsewhere is not None
        self.settle()
        self.elsewhere.clear()
        self.server, self.common, self.news = point.server, point.common, dict(point.news)
        self.progress = copy.deepcopy(point.progress)
        del self.lines[point.lines :]
        self._written = min(self._written, point.lines)
        if self.history is not None:
            self.history.forget(self.progress.round)
        if self.out is not None and not self.read_only:
            path = self.out / "metrics.jsonl"
            with writing(path), open(path, "r+b") as f:
                f.truncate(point.metrics)

    def _append_metrics(self, sync: bool) -> int:
        """Write the lines that are new, and return the file's length in bytes."""
        assert self.out is not None
        path = self.out / "metrics.jsonl"
        with writing(path), open(path, "a", encoding="utf-8", newline="\n") as f:
            for line in self.lines[self._written :]:
                f.write(json.dumps({"format": FORMAT, **line}, allow_nan=False) + "\n")
            f.flush()
            if sync:
                os.fsync(f.fileno())
            length = f.tell()
        self._written = len(self.lines)
        return length

    def _load_history(self) -> None:
        """Find the values of single clients again; without them the run goes on, and says so."""
        if self.history is None or self.out is None:
            return
        try:
            self.history.load(self.out, self.progress.round)
        except FedspanError as e:
            self.messages.append(str(e))

    def _compare_versions(self) -> None:
        """Say it if the rounds to come are computed with other versions than the last ones."""
        notes, warnings = differences_on_resume(self.progress.spans, self._versions)
        if not self.read_only:
            self.messages += notes
            self.progress.notes += [w for w in warnings if w not in self.progress.notes]

    def close(self) -> None:
        """Let go of the directory."""
        if self.directory is not None:
            self.directory.close()

    def capacity(self, client: int) -> Capacity:
        """What a client trains and predicts with at the server's present state."""
        return self.levels[client][self._level(self.server, client)]

    def row(self, client: int) -> Tree:
        """One client's private state."""
        store = self.stores[self.federation.capacities[client]]
        record = None if self.elsewhere is None else self.elsewhere.row(client)
        return store.row(client) if record is None else store.layout.row(record)

    def take(self, ids: Sequence[int], empty: Empty = uninitialised) -> Tree:
        """The private states of some clients, stacked in that order, in tensors that `empty` gives."""
        groups = self._grouped(ids)
        if len(groups) == 1 and self.elsewhere is None:
            return self.stores[next(iter(groups))].take(ids, empty)
        rows: Tree = tree.stack([self.row(i) for i in ids])
        return rows

    def put(self, ids: Sequence[int], rows: Tree) -> None:
        """Replace their private states by the rows of a stacked tree."""
        for store, mine, part in self._parts(ids, rows):
            store.put(mine, part)

    def stage(self, ids: Sequence[int], rows: Tree) -> None:
        """Hold new private states until the round they come from is accepted."""
        for store, mine, part in self._parts(ids, rows):
            store.stage(mine, part)

    def accept(self) -> None:
        """Let the states that were staged replace those clients had."""
        for store in self.stores.values():
            store.accept()

    def undo(self) -> None:
        """Go back to the private states before the last round, accepted or not."""
        for store in self.stores.values():
            store.undo()

    def settle(self) -> None:
        """Give up the way back."""
        for store in self.stores.values():
            store.settle()

    def _parts(self, ids: Sequence[int], rows: Tree) -> Iterator[tuple[ClientStore, list[int], Tree]]:
        """Stacked rows by the stores they belong to."""
        for c, at in self._grouped(ids).items():
            part = rows if len(at) == len(ids) else tree.take(rows, torch.tensor(at))
            yield self.stores[c], [ids[k] for k in at], part

    def in_place(self, ids: Sequence[int]) -> tuple[int, ClientStore] | None:
        """The store whose table has the rows of all these clients, and its number; None if they must travel."""
        kinds = list(self.stores)
        found = [kinds.index(c) for c in self._grouped(ids)]
        return (found[0], self.stores[kinds[found[0]]]) if len(found) == 1 and self.tables[found[0]] else None

    @property
    def tables(self) -> list[RowTable | None]:
        """Of every store the rows that workers can read and write in place."""
        return [store.table for store in self.stores.values()]

    def _grouped(self, ids: Sequence[int]) -> dict[Capacity, list[int]]:
        """Places in `ids` by store: what clients can afford may differ where what they have now does not."""
        found: dict[Capacity, list[int]] = {}
        for k, i in enumerate(ids):
            found.setdefault(self.federation.capacities[i], []).append(k)
        return found

    def digest(self) -> str:
        """SHA-256 of the server's state and, where they are here, every client's: `tree.digest` of all of them."""
        self.bring_home()
        rest = sorted(tree.items({"server": self.server, "common": self.common}))
        return tree.digest_of(chain(self._client_items(), rest))

    def _client_items(self) -> Iterator[tuple[str, Tensor]]:
        """Every client's private state by paths in their order, read from the store a few MiB at a time."""
        if not self.stores:
            return
        ids = sorted(range(self.federation.clients), key="{}/".format)  # as the paths are sorted
        widest = max(store.row_bytes for store in self.stores.values())
        step = max(1, BLOCK_BYTES // max(1, widest))
        for start in range(0, len(ids), step):
            some = ids[start : start + step]
            held: dict[int, Tree] = {}
            for c, at in self._grouped(some).items():
                mine = [some[k] for k in at]
                rows = self.stores[c].take(mine)
                held |= {i: tree.take(rows, k) for k, i in enumerate(mine)}
            for i in some:
                yield from sorted(tree.items({"clients": {str(i): held[i]}}))

    def _store(self, engine: Engine, capacity: Capacity) -> ClientStore:
        members = [i for i, c in enumerate(self.federation.capacities) if c == capacity]
        directory = None if self.directory is None or self.read_only else self.directory.path
        memory = self.settings.memory_mb << 20
        share = memory * len(members) // self.federation.clients  # it is for the clients of all capacities together
        store = ClientStore(partial(engine.begin, capacity), members, share, directory)
        if store.row_bytes > memory:
            least = -(-store.row_bytes >> 20)
            raise ConfigError(
                f"Train: memory_mb must hold the state of one client, which is {store.row_bytes / 2**20:.1f} MB; set it"
                f" to {least} at least. Got {self.settings.memory_mb}."
            )
        return store

    def _cut_metrics(self, length: int) -> list[dict[str, Any]]:
        """The metrics of the rounds that are in the checkpoint; later lines belong to rounds that will be repeated."""
        assert self.out is not None
        path = self.out / "metrics.jsonl"
        data = path.read_bytes() if path.exists() else b""
        lines = []
        for line in data[:length].decode(errors="replace").splitlines():
            try:
                found = json.loads(line)
            except json.JSONDecodeError:
                break
            if not isinstance(found, dict):
                break
            check_format(found, str(path))
            lines.append({k: v for k, v in found.items() if k != "format"})
        if len(data) < length or len(lines) < self.progress.round:
            self.messages.append(
                f"Metrics: {path} holds {len(lines)} of {self.progress.round} rounds; the curve is incomplete."
            )
        if not self.read_only and len(data) != length:
            with writing(path), open(path, "r+b" if path.exists() else "wb") as f:
                f.truncate(min(length, len(data)))
        return lines
