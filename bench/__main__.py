"""`make bench`: what users get, beside plain torch and, with PEERS=1, beside other projects; contestants take turns."""

from __future__ import annotations

import argparse
import os
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
    Environments,
    missing,
)
from bench.outcome import Outcome, Row, long_table, machine, wide_table
from bench.processes import run
from bench.workloads import WORKLOADS

BUSY = 0.7
"""The load from which on somebody else is computing."""
LONGEST = 600.0
"""Seconds after which a contestant's turn is given up."""


def main() -> None:
    """Measure, print every result as it comes, and the tables at the end."""
    args = _arguments()
    names = _chosen(args.workloads, [*WORKLOADS, JOB, "scale"], "workload")
    rows = _chosen(args.only, list(CONTESTANTS), "row")
    outcome = _begun(args.out, args.resume)
    wanted = [CONTESTANTS[name] for name in rows if args.peers or not CONTESTANTS[name].peer]
    environments = Environments()
    if args.peers:
        from bench.peers.environment import prepare

        environments = prepare({c.peer for c in wanted if c.peer})
    print(", ".join(f"{k}: {v}" for k, v in outcome.machine.items()), flush=True)
    if hasattr(os, "getloadavg") and os.getloadavg()[0] > BUSY:
        print(f"The machine is busy (load {os.getloadavg()[0]:.1f}): figures will be too low, and ratios uncertain.")
    try:
        for name in names:
            why = missing(name)
            if why is not None:
                print(f"{name}: skipped, as {why}.", flush=True)
            elif name != "scale":
                _take_turns(outcome, name, [c for c in wanted if c.on(name)], args.turns, environments)
    except KeyboardInterrupt:
        sys.exit(f"bench: stopped. {args.out} holds what was measured; RESUME=1 (--resume) goes on.")
    if "scale" in names:
        from bench.scale import main as scale

        outcome.scale = scale()
        outcome.save()
    _show(outcome)


def _begun(path: Path, resume: bool) -> Outcome:
    """An outcome to add to: what the file holds, or a new one."""
    outcome, here = Outcome.load(path) if resume else Outcome(path), machine()
    if outcome.machine and outcome.machine != here:
        sys.exit(f"bench: {path} was measured with {outcome.machine}, and this is {here}; start over without --resume.")
    outcome.machine = here
    outcome.save()
    return outcome


def _show(outcome: Outcome) -> None:
    """Print the tables."""
    found = outcome.rows()
    print("\n".join(["", *long_table(found), ""]))
    titles, lines = wide_table(found)
    if lines:
        print("Ratio of samples per second to the plain loop on one thread; in brackets of examples, once each:")
        for first, *cells in [titles, *lines]:
            print(f"{first:<38}" + "".join(f"{cell:>15}" for cell in cells))
    print(f"written: {outcome.path}", flush=True)


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
    outcome: Outcome, workload: str, rows: list[Contestant], turns: int, environments: Environments
) -> None:
    """A B C A B C ...: a drift of the machine's speed then hits all of them."""
    failed: set[str] = set()
    for turn in range(1, turns + 1):
        for k, c in enumerate(rows, start=1):
            if c.name in failed or outcome.has(workload, c.name, turn):
                continue
            start = time.perf_counter()
            refused = environments.refused.get(c.peer)
            found = {"error": refused} if refused else _measure(outcome, workload, c, environments)
            if "error" in found:
                failed.add(c.name)  # whatever stands in the way stands there in the next turn too
            outcome.add({"workload": workload, "contestant": c.name, "turn": turn, **found})
            now, took = time.strftime("%H:%M:%S"), time.perf_counter() - start
            where = f"{workload} turn {turn} of {turns}, {k} of {len(rows)}"
            print(f"{now} {where}: {c.name}: {_told(found)} [{took:.1f} s]", flush=True)


def _measure(outcome: Outcome, workload: str, c: Contestant, environments: Environments) -> Row:
    """One turn of one contestant."""
    found = run(c.command(workload, environments.python(c.peer)), ROOT, LONGEST)
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
