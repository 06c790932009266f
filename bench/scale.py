"""Many clients that keep a model each: memory of all processes, seconds per participant, evaluation and end included.

Nothing is left out of the runs: the last round evaluates every client, and the end hashes every client's state. All
clients begin with a state on disk, as if each had taken part before.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

PARTICIPANTS, TRAIN, TEST, POOL = 100, 5, 2, 7_000
MEMORY_MB, CHUNK = 24, 8
"""What the clients' states may take of memory, so that all sizes keep them on disk; clients in one piece of work."""

SIZES = (
    ("mlp", 1_000, 1, 1_024),
    ("mlp", 10_000, 1, 1_024),
    ("mlp", 10_000, 2, 1_024),
    ("linear", 1_000, 2, 4_096),
    ("linear", 100_000, 2, 4_096),
)
"""Model, clients, workers, and the bound on memory in MB: every worker holds torch and its allocator's memory."""


@dataclass
class PeakMemory:
    """The most memory that this process and its children held together, in MB."""

    resident: int = 0
    """Sum of what each of them has in memory; pages that several share count for each."""
    proportional: int = 0
    """The same with shared pages counted once (Linux)."""
    _ended: threading.Event = field(default_factory=threading.Event)

    def look(self) -> None:
        import psutil

        held = pss = 0
        me = psutil.Process()
        for process in (me, *me.children(recursive=True)):
            try:
                info = process.memory_full_info()
            except psutil.NoSuchProcess:
                continue
            held, pss = held + info.rss, pss + getattr(info, "pss", info.rss)
        self.resident, self.proportional = max(self.resident, held >> 20), max(self.proportional, pss >> 20)

    def _watch(self) -> None:
        while not self._ended.wait(0.1):
            self.look()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look ten times a second while the block runs."""
        thread = threading.Thread(target=self._watch)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()
            self.look()


def one(kind: str, clients: int, workers: int, rounds: int) -> dict[str, Any]:
    """Ditto, 100 clients per round, each with a model of its own."""
    import numpy as np
    import torch

    from fedspan.data.federated import FederatedData
    from fedspan.learn.task import Task
    from fedspan.methods import make
    from fedspan.models import build
    from fedspan.simulation.settings import Settings
    from fedspan.simulation.simulator import Simulation

    each = TRAIN + TEST
    x = torch.randn(POOL, 784, generator=torch.Generator().manual_seed(0))
    y = torch.arange(POOL) % 10
    rows = (np.arange(clients * each) % POOL).reshape(clients, each)
    data = FederatedData(x=x, y=y, train=list(rows[:, :TRAIN]), test=list(rows[:, TRAIN:]), classes=10)
    own = {"memory_mb": MEMORY_MB, "chunk": CHUNK, "workers": workers}
    settings = Settings(participation=PARTICIPANTS / clients, evaluate_every=10**9, **own)
    sim = Simulation(
        make("ditto"), Task(lambda: build(kind, (784,), 10), seed=0), data, rounds=rounds, settings=settings
    )
    for start in range(0, clients, 10):
        ids = range(start, start + 10)
        sim.record.put(ids, sim.record.take(ids))
    (store,) = sim.record.stores.values()
    assert store.on_disk
    seconds: list[float] = []
    peak, began = PeakMemory(), time.perf_counter()
    with peak.watched():
        result = sim.run(lambda line: seconds.append(line["seconds"]))
    return {
        "workload": f"scale-{kind}-{clients}-workers-{workers}",
        "method": "ditto",
        "rows_mb": clients * store.row_bytes >> 20,
        "seconds_per_participant": float(np.median(seconds[1:])) / PARTICIPANTS,
        "seconds_per_evaluated_client": result.seconds["evaluate"] / clients,
        "seconds": time.perf_counter() - began,
        "peak_mb_shared_once": peak.proportional,
        "peak_mb": peak.resident,
        "digest": result.digest[:16],
        "rounds": rounds,
    }


def main() -> list[dict[str, Any]]:
    """All sizes, each in a process of its own; the small one of each model is what seconds are compared with."""
    rows: list[dict[str, Any]] = []
    for kind, clients, workers, bound in SIZES:
        call = f"one({kind!r}, {clients}, {workers}, 30)"
        code = f"import json; from bench.scale import one; print(json.dumps({call}))"
        out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        rows.append({**json.loads(out.splitlines()[-1]), "bound_mb": bound})
        r = rows[-1]
        print(
            f"{clients:,} clients, 100 per round, a model ({kind}) each ({r['rows_mb']:,} MB on disk),"
            f" workers {workers}:"
            f" {1000 * r['seconds_per_participant']:.2f} ms per participant,"
            f" {1000 * r['seconds_per_evaluated_client']:.2f} ms per evaluated client, {r['seconds']:.0f} s in all,"
            f" peak of all processes {r['peak_mb_shared_once']:,} MB, bound {bound:,} MB"
            f" ({r['peak_mb']:,} MB if pages they share count for each)",
            flush=True,
        )
    return rows
