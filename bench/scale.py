"""10,000 clients: memory and seconds per participant beside the same with 1,000."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def one(clients: int, rounds: int) -> dict[str, Any]:
    """Ditto on an MLP, 100 clients per round, each with a model of its own; kept on disk beyond 1 GB."""
    import resource
    import time

    import numpy as np
    import psutil
    import torch

    from fedspan.data.federated import FederatedData
    from fedspan.learn.task import Task
    from fedspan.methods import make
    from fedspan.models import build
    from fedspan.simulation.driver import Evaluated
    from fedspan.simulation.settings import Settings
    from fedspan.simulation.simulator import Simulation

    n = clients * 7
    x = torch.randn(7_000, 784, generator=torch.Generator().manual_seed(0))
    y = torch.arange(7_000) % 10
    rows = np.arange(n) % 7_000
    train = [rows[7 * i : 7 * i + 5] for i in range(clients)]
    data = FederatedData(x=x, y=y, train=train, test=[rows[7 * i + 5 : 7 * i + 7] for i in range(clients)], classes=10)
    settings = Settings(participation=100 / clients, batch_size=32, evaluate_every=10**9, memory_mb=1024)
    task = Task(lambda: build("mlp", (784,), 10), seed=0)
    sim = Simulation(make("ditto"), task, data, rounds=rounds, settings=settings)
    sim._evaluate = lambda t, ledger: Evaluated({}, {})  # type: ignore[method-assign]
    sim.record.digest = lambda: ""  # type: ignore[method-assign]  # reads every client's state; not part of a round
    marks, memory = [time.perf_counter()], []

    def seen(line: dict[str, Any]) -> None:
        marks.append(time.perf_counter())
        memory.append(psutil.Process().memory_info().rss >> 20)

    sim.run(seen)
    return {
        "workload": f"scale-{clients}",
        "method": "ditto",
        "seconds_per_participant": (marks[-1] - marks[2]) / (100 * (len(marks) - 3)),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        "peak_rss_mb_worker": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10,
        "rss_mb_round_10": memory[min(9, len(memory) - 1)],
        "rss_mb_last_round": memory[-1],
        "rounds": rounds,
    }


def main() -> list[dict[str, Any]]:
    """Both sizes, each in a process of its own."""
    rows = []
    for clients in (1_000, 10_000):
        out = subprocess.run(
            [sys.executable, "-c", f"import json; from bench.scale import one; print(json.dumps(one({clients}, 30)))"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        rows.append(json.loads(out.splitlines()[-1]))
        r = rows[-1]
        print(
            f"{clients:,} clients, 100 per round, own model each: {1000 * r['seconds_per_participant']:.2f} ms per"
            f" participant, peak {r['peak_rss_mb']:,} MB, {r['rss_mb_round_10']:,} MB after round 10,"
            f" {r['rss_mb_last_round']:,} MB after round {r['rounds']}",
            flush=True,
        )
    return rows
