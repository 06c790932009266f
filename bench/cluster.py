"""What a Ray cluster costs and gains, on two nodes of one CPU each on loopback: `python -m bench.cluster`.

Writes docs/cluster.json, from which docs/generate.py writes the figures of docs/how-to/cluster.md. On one machine two
nodes have the cores that two local workers have: what is seen is Ray's own cost, not that of a network. Bytes are those
that passed through the loopback interface of a namespace in which there is nothing else, besides what the run counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from bench.loopback_cluster import ADDRESS, inside, loopback_cluster, usable
from bench.ours import federated
from bench.workloads import CLASSES, LR, WORKLOADS, Workload
from fedspan.learn.task import Task
from fedspan.methods import make
from fedspan.models import build
from fedspan.simulation.cluster.ray_connection import joined
from fedspan.simulation.cluster.ray_workers import RayPool
from fedspan.simulation.engine import chunk_size
from fedspan.simulation.environment import cpu
from fedspan.simulation.settings import Settings
from fedspan.simulation.simulator import Simulation
from fedspan.simulation.workers import Job, Pool
from fedspan.tree import Tree

KEPT = Path(__file__).resolve().parent.parent / "docs" / "cluster.json"
SPEED = {"cnn-100-b32": 3, "mlp-100-b32": 12, "mlp-1000-b32": 12}
"""Workloads, and rounds of them that are timed."""
CALLS = 200
COMPARED = """name = "eight"\nrounds = 200\n[data]\nsource = "digits"\n[partition]\nkind = "dirichlet"\nclients = 20
[method]\nname = "fedavg"\n[train]\nevaluate_every = 50\n"""


def echo(meta: dict[str, Any], data: Tree, shared: Tree) -> tuple[dict[str, Any], Tree]:
    """A chunk without work, which gives back what it is given."""
    return {}, data


def simulation(w: Workload, method: str, data: Any, rounds: int, cluster: str | None, **settings: Any) -> Simulation:
    """A run of a workload, evaluated once, at the end."""
    task = Task(lambda: build(w.model, tuple(data.x.shape[1:]), CLASSES), seed=0)
    chosen = Settings(**{"participation": 0.1, "batch_size": w.batch, "evaluate_every": 10**9, **settings})
    return Simulation(make(method, lr=LR), task, data, rounds=rounds, settings=chosen, cluster=cluster)


def overhead(turns: int) -> list[dict[str, Any]]:
    """Milliseconds for a chunk without work, sent and answered with trees of some sizes."""
    found = []
    with loopback_cluster(), joined(ADDRESS):
        pools: dict[str, Any] = {"local": Pool(echo, 2), "ray": RayPool(echo)}
        for size in (1_000, 800_000, 8_000_000):
            tree = {"x": torch.zeros(size // 4)}
            number = CALLS if size < 1_000_000 else 40
            taken: dict[str, list[float]] = {name: [] for name in pools}
            for turn in range(turns + 1):
                for name, pool in pools.items():
                    start = time.perf_counter()
                    for _ in pool.run(Job({}, tree) for _ in range(number)):
                        pass
                    if turn:  # the first is for starting
                        taken[name].append(1e3 * (time.perf_counter() - start) / number)
            found.append({"bytes": size, **{name: statistics.median(v) for name, v in taken.items()}})
        for pool in pools.values():
            pool.close()
    return found


def speed(turns: int) -> list[dict[str, Any]]:
    """Seconds per round of FedAvg with two local workers and with two nodes, in turns."""
    found = []
    with loopback_cluster(), joined(ADDRESS):
        for name, rounds in SPEED.items():
            w = WORKLOADS[name]
            data = federated(w)
            taken: dict[str, list[float]] = {"local": [], "ray": []}
            digests = set()
            for _ in range(turns):
                for kind, where in (("local", None), ("ray", ADDRESS)):
                    run = simulation(w, "fedavg", data, rounds + 2, where, workers=2)
                    result = run.run()
                    taken[kind].append(statistics.fmean(line["seconds"] for line in result.curve[2:]))
                    digests.add(result.digest)
            parameters = sum(p.numel() for p in run.task.init().values())
            chunks = -(-w.participants // chunk_size(run.mapping, w.participants, parameters, None))
            row = {"title": w.title, "same": len(digests) == 1, "participants": w.participants}
            row |= {"chunks": chunks, "bytes": 4 * parameters}
            found.append(row | {kind: statistics.median(v) for kind, v in taken.items()})
    return found


def passed() -> int:
    """Bytes that have passed through loopback."""
    line = next(x for x in Path("/proc/net/dev").read_text().splitlines() if x.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


def private(clients: int, rounds: int = 6) -> dict[str, Any]:
    """Bytes per round of a method with a model for each client, all of whom take part."""
    w = Workload("private", "private", "mlp", clients, 32, 20 * clients, rounds)
    with loopback_cluster(store_mb=4000), joined(ADDRESS):
        seen: list[tuple[int, dict[str, int]]] = []
        run = simulation(w, "ditto", federated(w), rounds, ADDRESS, participation=1.0)
        facts = run.transport.facts  # type: ignore[attr-defined]
        result = run.run(lambda _: seen.append((passed(), dict(facts.traffic))))
        local = simulation(w, "ditto", federated(w), rounds, None, participation=1.0, workers=2).run()
    store = next(iter(run.record.stores.values()))
    first, last = seen[1], seen[-2]  # the first round starts actors, the last one evaluates
    each = len(seen) - 3
    names = sorted({*first[1], *last[1]})
    counted = {k: (last[1].get(k, 0) - first[1].get(k, 0)) / each for k in names}
    return {
        "clients": clients,
        "row_bytes": store.row_bytes,
        "rows_bytes": clients * store.row_bytes,
        "loopback_per_round": (last[0] - first[0]) / each,
        "counted_per_round": counted,
        "rows_for_evaluation": result.cluster["bytes"].get("rows between nodes", 0)
        - last[1].get("rows between nodes", 0),
        "rows_at_the_end": result.cluster["bytes"].get("rows for checkpoints", 0),
        "seconds_per_round": {
            "ray": statistics.fmean(x["seconds"] for x in result.curve[2:-1]),
            "local": statistics.fmean(x["seconds"] for x in local.curve[2:-1]),
        },
        "same": result.digest == local.digest,
    }


def compared(nodes: int) -> float:
    """Seconds of `compare` with eight runs on so many nodes."""
    from typer.testing import CliRunner

    from fedspan.cli.app import app

    with loopback_cluster((1,) * nodes), tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "exp.toml"
        file.write_text(COMPARED, encoding="utf-8")
        what = ["compare", str(file), "-m", "fedavg,ditto,local,fedprox", "-q", "--cluster", ADDRESS]
        start = time.perf_counter()
        done = CliRunner().invoke(app, [*what, "--seeds", "2", "--out", str(Path(folder) / "runs")])
        if done.exit_code:
            raise SystemExit(done.output)
        return time.perf_counter() - start


PARTS: dict[str, Callable[[int, int], Any]] = {
    "overhead": lambda turns, clients: overhead(turns),
    "speed": lambda turns, clients: speed(turns),
    "private": lambda turns, clients: private(clients),
    "compare-1": lambda turns, clients: compared(1),
    "compare-2": lambda turns, clients: compared(2),
}


def measured(turns: int, clients: int, parts: list[str]) -> Iterator[tuple[str, Any]]:
    """Every part, each in namespaces of its own."""
    for name in parts:
        done = inside(Path(__file__), name, str(turns), str(clients), seconds=1800)
        if done.returncode:
            raise SystemExit(f"{name}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        yield name, json.loads(done.stdout.splitlines()[-1])
        print(f"{name}: done", flush=True)


def main() -> None:
    """Measure what is asked for, and keep it beside what was kept before."""
    if len(sys.argv) == 4 and sys.argv[1] in PARTS:
        print("\n" + json.dumps(PARTS[sys.argv[1]](int(sys.argv[2]), int(sys.argv[3]))), flush=True)
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--clients", type=int, default=1000, help="with private models")
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    asked = parser.parse_args()
    if why := usable():
        raise SystemExit(f"bench.cluster: {why}.")
    import ray

    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.is_file() else {}
    kept["machine"] = {"cpu": cpu(), "cores": os.cpu_count(), "torch": torch.__version__, "ray": ray.__version__}
    kept["turns"] = asked.turns
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    for name, found in measured(asked.turns, asked.clients, asked.parts):
        kept[name] = found
        kept.setdefault("busy", {})[name] = round(load / cores, 1)  # what else ran for each core when all began
        KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
