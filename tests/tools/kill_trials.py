"""Kill a simulation at random times, resume it until it is done, compare it with one nobody disturbed.

    python tests/tools/kill_trials.py --trials 20 --kills 3

Prints a line per trial and at the end "20/20 equal". The exit code is 0 only if all were, and no worker was left over.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from runs import Child, Spec, outcome, rounds_done, warm_up

KINDS: list[Spec] = [
    {"method": "local"},
    {"method": "fedper"},
    {"method": "pfl-mf", "fields": {"lr": 0.05, "rank": 3}},
    {"method": "ditto"},
    {"method": "local", "hidden": 2048, "chains": True, "settings": {"memory_mb": 1}},
    {"method": "fedper", "settings": {"drop_rate": 0.3, "chunk": 2, "checkpoint_every": 3}},
]


def undisturbed(out: Path, spec: Spec, fresh: bool, limit: float) -> tuple[dict[str, Any], float]:
    """The outcome of an uninterrupted run and how long it took."""
    start = time.monotonic()
    child = Child(out, spec, fresh)
    if child.wait(limit) != 0:
        child.kill()
        raise SystemExit(f"The undisturbed run failed: {(out / 'stderr').read_text()[-2000:]}")
    return outcome(out), time.monotonic() - start


def trial(
    out: Path, spec: Spec, whole: dict[str, Any], took: float, kills: int, draw: random.Random, args: argparse.Namespace
) -> dict[str, Any]:
    """One run, killed `kills` times; a run that was done before its last kill is run again from nothing."""
    for attempt in range(20):
        path = out / str(attempt)
        orphans: list[int] = []
        landed, at = 0, []
        while landed < kills:
            before = rounds_done(path)
            child = Child(path, spec, args.fresh)
            left = took * (1 - before / spec["rounds"]) + (args.start if args.fresh else 0.0)
            if child.wait(draw.uniform(0, left)) is not None:
                break
            orphans += child.kill(args.signal)
            landed += 1
            at.append(rounds_done(path))
            if at[-1] < before:
                return {"equal": False, "why": f"went back from round {before} to {at[-1]}"}
        if landed == kills:
            break
        took *= 0.7  # the undisturbed run was measured on a busier machine
    end = Child(path, spec, args.fresh)
    code = end.wait(args.limit)
    orphans += end.kill()
    if code != 0:
        return {"equal": False, "why": f"ended with {code}: {(path / 'stderr').read_text()[-2000:]}"}
    found = outcome(path)
    differ = [k for k in whole if found[k] != whole[k]]
    equal = not differ and not orphans and landed == kills
    return {"equal": equal, "differ": differ, "orphans": orphans, "kills": landed, "at": at}


def main() -> int:
    """Parse the arguments, run all trials, print the score."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for any one process")
    parser.add_argument("--signal", type=lambda name: getattr(signal, name), default=signal.SIGKILL)
    parser.add_argument("--fresh", action="store_true", help="a new interpreter each time instead of a fork")
    parser.add_argument("--no-sync", action="store_true", help="do not wait for the disk (a kill needs no sync)")
    args = parser.parse_args()
    if args.no_sync:
        os.fsync = lambda fd: None
    args.start = 3.0  # seconds an interpreter needs before the first round
    torch.set_num_threads(1)
    warm_up()
    draw = random.Random(args.seed)
    good = 0
    with tempfile.TemporaryDirectory() as directory:
        known: dict[int, tuple[dict[str, Any], float]] = {}
        for n in range(args.trials):
            kind = n % len(KINDS)
            spec = {**KINDS[kind], "rounds": args.rounds}
            if kind not in known:
                known[kind] = undisturbed(Path(directory) / f"whole{kind}", spec, False, args.limit)
            done = trial(Path(directory) / f"trial{n}", spec, *known[kind], args.kills, draw, args)
            good += done["equal"]
            print(json.dumps({"trial": n, "method": spec["method"], **done}), flush=True)
    print(f"{good}/{args.trials} equal")
    return 0 if good == args.trials else 1


if __name__ == "__main__":
    sys.exit(main())
