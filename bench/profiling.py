"""Where the time of a round goes: `python -m bench.profiling [WORKLOADS [ROWS]]` writes docs/speed-profile.json.

One process computes all chunks of a round, as a worker does. Rounds are timed in three ways in turn, so that a drift
of the machine hits all: as they are, under Python's profiler, and as many examples by the plain loop. Calls into torch
are taken from the profiler, which does not slow them down; what is left of the round as it is, is Python.
"""

from __future__ import annotations

import cProfile
import gc
import json
import pstats
import statistics
import sys
import time
from typing import Any

import torch

from bench.contestants import ROOT
from bench.models import build
from bench.ours import SEED, federated, simulation
from bench.outcome import machine
from bench.plain import PlainLoop, limit
from bench.workloads import PARTICIPATION, WORKLOADS, Workload
from fedspan.simulation.settings import Settings, sample
from fedspan.storage.malloc import keep_freed_memory

KEPT = ROOT / "docs" / "speed-profile.json"
ROWS = ("fedavg", "ditto", "fedrep")
ROUNDS = 24
"""Rounds after the first two; every other one is profiled."""

KINDS: dict[str, tuple[str, ...]] = {
    "products": ("_linear_pointwise", "torch.bmm", "baddbmm", "addmm", "torch.mm", "_nn.linear"),
    "gathering rows": ("index_select",),
    "passes over weights": ("torch.sub", "sub_", "copy_", "lerp", "clone", "torch.add", "torch.stack"),
    "sums, finiteness": ("tensordot", "'sum'", "isfinite"),
    "private rows": ("row_table.py",),
}
"""What a call counts as, by a part of its name; the first that fits."""


class Enough(Exception):
    """All rounds that were wanted are done."""


def profile(w: Workload, row: str) -> dict[str, Any]:
    """Milliseconds of a round by kind, and how fast it is beside the plain loop, all of CPU time."""
    data = federated(w)
    sim = simulation(w, row, data, 10**6, workers=1)
    plain = PlainLoop(w.data(), build(w), w.batch, torch.contiguous_format)
    others, sizes, chosen = w.sampled(), data.sizes, Settings(participation=PARTICIPATION)
    told, start, done = cProfile.Profile(time.thread_time), 0.0, 0
    seconds: list[tuple[float, int]] = []
    ratios: list[float] = []

    def ended(_: object) -> None:
        nonlocal start, done
        took, done = time.thread_time() - start, done + 1
        told.disable()
        examples = int(sizes[sample(data.clients, chosen, SEED, done)].sum())
        if done > 2 and done % 2:
            again = time.thread_time()
            seen = sum(plain.epoch(i) for i in next(others))
            ratios.append(examples / took / (seen / (time.thread_time() - again)))
            seconds.append((took, examples))
        if done == ROUNDS + 2:
            raise Enough
        if done >= 2 and done % 2:
            told.enable()
        start = time.thread_time()

    try:
        sim.run(ended)
    except Enough:
        pass
    finally:
        told.disable()
    whole = 1e3 * statistics.median(t for t, _ in seconds)
    parts = _by_kind(told)
    return {
        "workload": w.title,
        "row": row,
        "ms": whole,
        "parts": parts | {"Python, small calls": max(0.0, whole - sum(parts.values()))},
        "examples_per_s": sum(n for _, n in seconds) / sum(t for t, _ in seconds),
        "ratio": statistics.median(ratios),
    }


def _by_kind(told: cProfile.Profile) -> dict[str, float]:
    """Milliseconds of a profiled round by kind."""
    found = dict.fromkeys(KINDS, 0.0)
    for (file, _, name), (_, _, own, *_) in pstats.Stats(told).stats.items():  # type: ignore[attr-defined]
        kind = next((k for k, parts in KINDS.items() if any(p in f"{file} {name}" for p in parts)), None)
        if kind is not None:
            found[kind] += 1e3 * own / (ROUNDS // 2)
    return found


def main() -> None:
    """Profile all rows on the perceptron's workloads, one after another."""
    wanted = sys.argv[1].split(",") if len(sys.argv) > 1 else [n for n, w in WORKLOADS.items() if not w.convolutional]
    rows = sys.argv[2].split(",") if len(sys.argv) > 2 else ROWS
    keep_freed_memory()
    gc.freeze()
    torch.set_num_threads(1)
    found, limits = [], {}
    for name in wanted:
        w = WORKLOADS[name]
        most = limit(w, 1)
        limits[w.title] = most["examples"] / most["seconds"]
        for row in rows:
            found.append(profile(w, row))
            ms, ratio, parts = (found[-1][k] for k in ("ms", "ratio", "parts"))
            shares = ", ".join(f"{k} {v:.1f}" for k, v in parts.items())
            print(f"{name} {row}: {ms:.1f} ms, {ratio:.2f} of the plain loop: {shares}", flush=True)
    kept = {"machine": machine(), "rounds": ROUNDS // 2, "limits": limits, "profiles": found}
    KEPT.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"written: {KEPT}; `make docs` writes the page")


if __name__ == "__main__":
    main()
