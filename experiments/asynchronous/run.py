"""Time to accuracy of asynchronous and of synchronous rounds, on the simulated clock of devices that differ tenfold.

    python experiments/asynchronous/run.py          measure
    python experiments/asynchronous/run.py table    print the table of the page from what was measured

It runs experiments/digits-asynchronous.toml with its section [asynchronous] and without. Learning rates are chosen for
each row on validation parts of the development seeds 0 to 2, with the same number of trials; the figures are of test
parts of seeds 200 to 202. They are written to docs/asynchronous/digits.json, in about fifteen minutes on one core.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedspan.config import assemble, load_config
from fedspan.simulation.evaluation import to_target
from fedspan.simulation.result import Result
from fedspan.simulation.simulator import Simulation
from fedspan.storage.atomic import write_atomic

HERE = Path(__file__).resolve().parent
FILE = HERE.parent / "digits-asynchronous.toml"
OUT = HERE.parents[1] / "docs" / "asynchronous" / "digits.json"
TARGETS = {"fedavg": (0.8, 0.9), "fedrep": (0.6, 0.7), "pfl-mf": (0.6, 0.7)}
ROUNDS = {"synchronous": 80, "asynchronous": 400}
EVERY = {"synchronous": 1, "asynchronous": 6}  # evaluations that are about as far apart on the clock
RATES = (0.1, 0.3, 1.0)
DEVELOPMENT, REPORTED = (0, 1, 2), (200, 201, 202)


def run(method: str, mode: str, lr: float, seed: int, part: str) -> Result:
    """One run in memory."""
    changes = [f"method.name={method}", f"method.lr={lr}", f"seed={seed}", f"rounds={ROUNDS[mode]}"]
    changes += [f"train.evaluate_every={EVERY[mode]}", f"train.evaluate_part={part}", "train.workers=1"]
    config = load_config(FILE, changes)
    if mode == "synchronous":
        config = replace(config, asynchronous=None)
    how: dict[str, Any] = {"settings": config.train, "devices": config.devices, "asynchronous": config.asynchronous}
    return Simulation(*assemble(config), rounds=config.rounds, seed=seed, **how).run()


def seconds_to(result: Result, target: float) -> float | None:
    """Seconds on the devices until the mean accuracy first reaches a target."""
    found = to_target(result.curve, target)
    return None if found is None else round(found["clock"], 3)


def accuracy_at(result: Result, clock: float) -> float:
    """The last mean accuracy that was measured up to a time."""
    return [
        line["accuracy"]["mean"] for line in result.curve if "accuracy" in line and line["clock"]["total"] <= clock
    ][-1]


def mean_of(values: list[float | None]) -> float:
    """The mean; infinity if some run never came there."""
    return math.inf if None in values else statistics.fmean(v for v in values if v is not None)


def row(method: str, mode: str) -> tuple[dict[str, Any], list[Result]]:
    """A method in one mode with the learning rate by which it is soonest at the highest target."""
    targets = TARGETS[method]
    tried = {lr: [seconds_to(run(method, mode, lr, s, "validation"), targets[-1]) for s in DEVELOPMENT] for lr in RATES}
    lr = min(RATES, key=lambda rate: mean_of(tried[rate]))
    results = [run(method, mode, lr, seed, "test") for seed in REPORTED]
    told = {
        "method": method,
        "mode": mode,
        "lr": lr,
        "tried": {str(k): v for k, v in tried.items()},
        "seconds": {str(t): [seconds_to(r, t) for r in results] for t in targets},
        "staleness": [round(statistics.fmean(_staleness(r)), 3) for r in results],
        "digests": [r.digest for r in results],
    }
    return told, results


def _staleness(result: Result) -> list[float]:
    return [line["staleness"]["mean"] if "staleness" in line else 0.0 for line in result.curve]


def main() -> None:
    """Run everything and write the figures."""
    rows: list[dict[str, Any]] = []
    for method in TARGETS:
        pair = [row(method, mode) for mode in ROUNDS]
        ends = [min(r.curve[-1]["clock"]["total"] for r in same) for same in zip(*(results for _, results in pair))]
        for told, results in pair:
            told["accuracy"] = [round(accuracy_at(r, end), 4) for r, end in zip(results, ends)]
            told["at"] = [round(end, 3) for end in ends]
            rows.append(told)
            print(json.dumps(told), flush=True)
    found = {"file": FILE.name, "development": DEVELOPMENT, "reported": REPORTED, "rounds": ROUNDS, "rows": rows}
    OUT.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(OUT, json.dumps(found, indent=1) + "\n")


def table(found: dict[str, Any]) -> list[str]:
    """The table of docs/how-to/asynchronous.md."""
    lines = [
        "| method | target | synchronous | asynchronous | sooner | accuracy at the end, synchronous | asynchronous |",
        "|---|---|---|---|---|---|---|",
    ]
    for one, other in zip(found["rows"][::2], found["rows"][1::2]):
        for k, target in enumerate(one["seconds"]):
            there = [row["seconds"][target] for row in (one, other)]
            sooner = mean_of(there[0]) / mean_of(there[1])
            ends = [_spread([100 * a for a in row["accuracy"]], "%") if k == 0 else "" for row in (one, other)]
            name = f"`{one['method']}`" if k == 0 else ""
            cells = [name, f"{100 * float(target):g} %", *(_spread(s, "s") for s in there), f"{sooner:.1f} ×", *ends]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def _spread(values: list[float | None], unit: str) -> str:
    known = [v for v in values if v is not None]
    if len(known) < len(values):
        return f"{len(values) - len(known)} of {len(values)} never"
    return f"{statistics.fmean(known):.1f} ± {statistics.stdev(known):.1f} {unit}"


if __name__ == "__main__":
    if sys.argv[1:] == ["table"]:
        print("\n".join(table(json.loads(OUT.read_text(encoding="utf-8")))))
    else:
        main()
