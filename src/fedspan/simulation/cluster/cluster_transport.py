"""The transport of a simulation on a cluster: chunks go to Ray's actors, and private rows stay on their nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fedspan import tree
from fedspan.simulation.cluster.ray_workers import ClusterFacts, RayPool
from fedspan.simulation.cluster.remote_rows import RemoteRows, packs
from fedspan.simulation.devices import Devices
from fedspan.simulation.engine import Engine
from fedspan.simulation.local_transport import ClientGroup, LocalTransport
from fedspan.simulation.record import Record
from fedspan.simulation.transport import Collected
from fedspan.simulation.workers import Job, Meta
from fedspan.tree import Tree
from fedspan.wire import Ledger


class ClusterTransport(LocalTransport):
    """Brings work to simulated clients on the cluster that this process has joined.

    Chunks are those of one machine, and are added up in the same order, so that the numbers are too.
    """

    def __init__(self, engine: Engine, record: Record, devices: Devices | None = None, *, rounds: int = 0) -> None:
        super().__init__(engine, record, devices, rounds=rounds)
        self._tables = [(capacity, None) for capacity in record.stores]  # memory of this machine: nobody else has it
        self._layouts = [store.layout for store in record.stores.values()]
        self.facts = ClusterFacts()
        self.remote = RemoteRows(self.facts.traffic)
        if any(layout.width for layout in self._layouts):
            record.elsewhere = self.remote
            record.bring_home()

    def __getstate__(self) -> dict[str, Any]:
        """What an actor needs to handle chunks."""
        return super().__getstate__() | {"facts": None, "remote": None}

    @property
    def executor(self) -> RayPool:
        """Runs chunks; made when first needed."""
        if self._executor is None:
            self._executor = RayPool(self._handle, self.settings.workers, self.record.messages.append, self.facts)
        assert isinstance(self._executor, RayPool)
        return self._executor

    def train(self, t: int, sampled: Sequence[int], ledger: Ledger) -> Collected:
        """Run `client_update` of all sampled clients that are not lost; chunks come in a fixed order."""
        self.remote.settle()
        return super().train(t, sampled, ledger)

    def keep(self) -> None:
        """Let the clients' new rows replace those they had."""
        self.remote.accept()
        super().keep()

    def take_back(self) -> None:
        """Let clients have the rows again that they had before the round."""
        self.remote.undo()
        super().take_back()

    def _jobs(self, do: str, t: int, groups: Sequence[ClientGroup], told: Callable[[list[int]], Meta]) -> Iterator[Job]:
        """Chunks of clients, with the places of their rows."""
        return map(self._placed, super()._jobs(do, t, groups, told))

    def _placed(self, job: Job) -> Job:
        """A job with the places of its clients' rows; those that only the store here has are sent, once."""
        if "stores" not in job.meta:
            return job
        ids, numbers, stores = job.meta["ids"], job.meta["stores"], list(self.record.stores.values())
        for n in set(numbers):
            mine = [i for i, number in zip(ids, numbers) if number == n and self.remote.place(i) is None]
            if home := [i for i, yes in zip(mine, stores[n].replaced(mine)) if yes]:
                self.remote.send(home, stores[n].records(home), self.executor.home)
        places = [self.remote.place(i) for i in ids]
        kept = packs(len(ids), stores[numbers[0]].row_bytes) if job.meta["do"] == "train" else []
        return Job(job.meta, job.data, job.shared, places, kept)

    def _rows_of(self, do: str, ids: list[int]) -> tuple[Meta, Tree]:
        """Rows do not travel with the job, unless they are empty: it names the stores they belong to."""
        kinds, capacities = list(self.record.stores), self.record.federation.capacities
        numbers = [kinds.index(capacities[i]) for i in ids]
        if not any(self._layouts[n].width for n in set(numbers)):
            return {}, {"rows": self.record.take(ids)}
        return {"stores": numbers}, {}

    def _taken(self, meta: Meta, data: Tree) -> Tree:
        """The rows of a chunk's clients; who has none yet begins, on the node."""
        if "stores" not in meta:
            rows: Tree = data["rows"]
            return rows
        records, numbers = data["kept"], meta["stores"]
        if len(set(numbers)) > 1:
            mixed: Tree = tree.stack([self._row(n, i, r) for n, i, r in zip(numbers, meta["ids"], records)])
            return mixed
        rows = self._layouts[numbers[0]].rows(records)
        for k, (i, record) in enumerate(zip(meta["ids"], records)):
            if record is None:
                state = self.engine.begin(self._tables[numbers[0]][0], i)
                tree.map(lambda row, a, k=k: row[k].copy_(a), rows, state)
        return rows

    def _row(self, number: int, client: int, record: Any) -> Tree:
        if record is not None:
            return self._layouts[number].row(record)
        return self.engine.begin(self._tables[number][0], client)

    def _left(self, meta: Meta, rows: Tree) -> Tree:
        """New rows as records, which stay on the node."""
        if "stores" not in meta:
            return {"rows": rows}
        return {"rows": self._layouts[meta["stores"][0]].block(rows, len(meta["ids"]))}

    def _stage(self, job: Meta, answer: Tree) -> None:
        """Stage the rows that a chunk has left on its node."""
        if "stores" in job:
            self.remote.stage(job["ids"], answer.pop("rows"))
        else:
            self.record.stage(job["ids"], answer.pop("rows"))
