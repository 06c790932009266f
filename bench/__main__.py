"""`make bench`: what users get, beside plain torch and, with PEERS=1, beside other projects; contestants take turns."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from bench.contestants import (
    CONTESTANTS,
    JOB,
    QUICK_ROWS,
    QUICK_WORKLOADS,
    ROOT,
    Contestant,
    missing,
    python_of,
)
from bench.outcome import Outcome, Row, long_table, machine, wide_table
from bench.processes import run
from bench.workloads import WORKLOADS

LONGEST = 600.0
"""Seconds after which a contestant's turn is given up."""


def main() -> None:
    """Measure, print every result as it comes, and the tables at the end."""
    args = _arguments()
    names = _chosen(args.workloads, [*WORKLOADS, JOB, "scale"], "workload")
    rows = _chosen(args.only, list(CONTESTANTS), "row")
    if args.out.exists() and not args.resume:
        args.out.unlink()
    outcome = Outcome.load(args.out)
    outcome.machine = machine()
    peers: dict[str, str] = {}
    refused: dict[str, str] = {}
    wanted = [CONTESTANTS[name] for name in rows if args.peers or not CONTESTANTS[name].peer]
    if args.peers:
        from bench.peers.environment import prepare

        peers, refused = prepare({c.peer for c in wanted if c.peer})
    print(", ".join(f"{k}: {v}" for k, v in outcome.machine.items()), flush=True)
    for name in names:
        why = missing(name)
        if why is not None:
            print(f"{name}: skipped, as {why}.", flush=True)
        elif name != "scale":
            _take_turns(outcome, name, [c for c in wanted if c.on(name)], args.turns, peers, refused)
    found = outcome.rows()
    print("\n".join(["", *long_table(found), ""]))
    titles, lines = wide_table(found)
    if lines:
        print("Ratio of samples per second to the plain loop on one thread; in brackets of examples, once each:")
        print(
            "\n".join("".join(f"{c:<38}" if k == 0 else f"{c:>15}" for k, c in enumerate(r)) for r in [titles, *lines])
        )
    outcome.save()
    print(f"written: {args.out}")
    if "scale" in names:
        from bench.scale import main as scale

        scale()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench")
    add = parser.add_argument
    add("--workloads", default="all", help=f"comma-separated, from {', '.join([*WORKLOADS, JOB, 'scale'])}")
    add("--only", default="all", help=f"rows, comma-separated, from {', '.join(CONTESTANTS)}")
    add("--turns", type=int, default=3, help="how often every row is measured; medians are printed")
    add("--peers", action="store_true", help="measure other projects too, in environments made in .venv-peers")
    add("--quick", action="store_true", help="one turn of a few rows on three workloads: some minutes")
    add("--resume", action="store_true", help="keep what the file holds, and measure only what is missing")
    add("--out", type=Path, default=Path("bench.json"))
    args = parser.parse_args()
    if args.turns < 1:
        sys.exit(f"bench: turns must be at least 1. Got {args.turns}.")
    if args.quick:
        args.turns = 1
        args.workloads = ",".join(QUICK_WORKLOADS) if args.workloads == "all" else args.workloads
        args.only = ",".join(QUICK_ROWS) if args.only == "all" else args.only
    return args


def _chosen(text: str, allowed: list[str], what: str) -> list[str]:
    """Names from a comma-separated list; `all` leaves out what is asked for by name alone."""
    names = [n for part in text.split(",") for n in ([a for a in allowed if a != "scale"] if part == "all" else [part])]
    unknown = [n for n in names if n not in allowed]
    if unknown:
        sys.exit(f"bench: unknown {what} {unknown[0]!r}. Allowed: all, {', '.join(allowed)}.")
    return names


def _take_turns(
    outcome: Outcome, workload: str, rows: list[Contestant], turns: int, peers: dict[str, str], refused: dict[str, str]
) -> None:
    """A B C A B C ...: a drift of the machine's speed then hits all of them."""
    failed: set[str] = set()
    for turn in range(1, turns + 1):
        for c in rows:
            if c.name in failed or outcome.has(workload, c.name, turn):
                continue
            start = time.perf_counter()
            found = {"error": refused[c.peer]} if c.peer in refused else _measure(outcome, workload, c, peers)
            if "error" in found:
                failed.add(c.name)  # whatever stands in the way stands there in the next turn too
            outcome.add({"workload": workload, "contestant": c.name, "turn": turn, **found})
            now, took = time.strftime("%H:%M:%S"), time.perf_counter() - start
            print(f"{now} {workload} turn {turn}/{turns} {c.name}: {_told(found)} [{took:.1f} s]", flush=True)


def _measure(outcome: Outcome, workload: str, c: Contestant, peers: dict[str, str]) -> Row:
    """One turn of one contestant."""
    found = run(c.command(workload, python_of(c, peers)), ROOT, LONGEST)
    if c.row and "error" not in found:
        counted = _gradients(outcome, workload, c.row, found["rounds"])
        if isinstance(counted, str):
            return {"error": f"its gradients could not be counted: {counted}"}
        found["gradients"] = counted
    if c.precision == "bf16" and not outcome.machine["amx"]:
        found["note"] = "this CPU has no AMX"
    return found


def _gradients(outcome: Outcome, workload: str, row: str, rounds: int) -> int | str:
    """Gradients of samples in the timed rounds of a row, counted once; or why they could not be."""
    key = f"{workload} {row} {rounds}"
    if key not in outcome.counts:
        found = run([sys.executable, "-m", "bench.counting", workload, row, str(rounds)], ROOT, LONGEST)
        if "error" in found:
            return str(found["error"])
        outcome.counts[key] = found["gradients"]
    return outcome.counts[key]


def _told(found: Row) -> str:
    if "error" in found:
        return f"not run: {found['error']}"
    if "gradients" not in found:
        return f"{found['wall_seconds']:.1f} s, {found['peak_mb']:,} MB"
    return f"{found['gradients'] / found['seconds']:,.0f} samples/s, {found['peak_mb']:,} MB"


if __name__ == "__main__":
    main()
