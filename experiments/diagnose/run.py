"""Check `fedspan diagnose` against full runs: `python experiments/diagnose/run.py [--seeds 100-109] [--out table.csv]`.

Every scenario is diagnosed without being told its kind; then every candidate is run with its defaults, at most 60
seconds each. Rows are added to the table as they are done, and what is in it is not run again.
"""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path
from typing import Any

from scenarios import scenario

from fedspan.data.federated import FederatedData
from fedspan.studies.diagnosis import diagnose
from fedspan.errors import FedspanError
from fedspan.methods import METHODS, make
from fedspan.models import build
from fedspan.simulation.settings import Settings
from fedspan.simulation.simulator import Simulation
from fedspan.learn.task import Task

CANDIDATES = ("local", "fedavg", "fedper", "fedrep", "ditto", "pfl-mf", "factorized-fl-beta", "ifca", "fedala")
TITLES = ["seed", "kind", "named", "rank", "recommended", "candidate", "accuracy", "rounds", "seconds", "note"]
ROUNDS = 60
SECONDS = 60.0
SETTINGS = Settings(batch_size=16, epochs=2, evaluate_every=10, workers=1, on_divergence="halve")


class TimeUp(Exception):
    """The candidate has had its seconds."""


def task_of(data: FederatedData, seed: int) -> Task:
    return Task(lambda: build("mlp", tuple(data.x.shape[1:]), 10, hidden=[64]), seed=seed)


def run(name: str, data: FederatedData, seed: int) -> dict[str, Any]:
    """The accuracy of a candidate with its defaults: at the end, or at the last evaluation before its time was up."""
    start = time.monotonic()
    last: dict[str, Any] = {}

    def on_round(line: dict[str, Any]) -> None:
        last.update(line)
        if time.monotonic() - start > SECONDS and line["round"] < ROUNDS:
            raise TimeUp

    note = ""
    try:
        sim = Simulation(make(name), task_of(data, seed), data, rounds=ROUNDS, seed=seed, settings=SETTINGS)
        accuracy: float | None = sim.run(on_round).accuracy["mean"]
    except TimeUp:
        accuracy, note = last.get("accuracy", {}).get("mean"), "stopped after 60 s"
    except FedspanError as e:
        accuracy, note = None, str(e)[:120]
    seconds = round(time.monotonic() - start, 1)
    return {"candidate": name, "accuracy": accuracy, "rounds": last.get("round", 0), "seconds": seconds, "note": note}


def summary(rows: list[dict[str, str]]) -> str:
    """How often the kind was named rightly, and how far the first recommendation was from the best candidate."""
    seeds = sorted({int(r["seed"]) for r in rows})
    named = near = judged = 0
    lines = []
    for seed in seeds:
        mine = [r for r in rows if int(r["seed"]) == seed]
        found = {r["candidate"]: float(r["accuracy"]) for r in mine if r["accuracy"]}
        right = mine[0]["kind"] == mine[0]["named"]
        named += right
        text = f"{seed}: {mine[0]['kind']}, named {mine[0]['named']}"
        first = mine[0]["recommended"].split()[0]
        if first in found:
            judged += 1
            best = max(found, key=lambda k: found[k])
            gap = 100 * (found[best] - found[first])
            near += gap <= 2.0
            text += (
                f"; {first} {100 * found[first]:.1f} %, best {best} {100 * found[best]:.1f} %, {gap:.1f} points away"
            )
        lines.append(text)
    lines.append(f"Named rightly: {named} of {len(seeds)}. First recommendation within 2 points: {near} of {judged}.")
    return "\n".join(lines)


def main() -> None:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="100-109", help="first-last")
    parser.add_argument("--out", type=Path, default=here / "table.csv")
    parser.add_argument("--candidates", default=",".join(CANDIDATES))
    chosen = parser.parse_args()
    first, last = (int(s) for s in chosen.seeds.split("-"))
    rows: list[dict[str, str]] = []
    if chosen.out.exists():
        with chosen.out.open(newline="") as f:
            rows = list(csv.DictReader(f))
    done = {(int(r["seed"]), r["candidate"]) for r in rows}
    for seed in range(first, last + 1):
        left = [c for c in chosen.candidates.split(",") if (seed, c) not in done]
        if not left:
            continue
        made = scenario(seed)
        found = diagnose(task_of(made.data, seed), made.data)
        known = {"seed": seed, "kind": made.kind, "named": found.kind, "rank": found.rank}
        known["recommended"] = " ".join(found.methods)
        for name in left:
            if name not in METHODS:
                print(f"{name} is not a method of this version; left out.")
                continue
            row = known | run(name, made.data, seed)
            new = not chosen.out.exists()
            with chosen.out.open("a", newline="") as f:
                writer = csv.DictWriter(f, TITLES, lineterminator="\n")
                if new:
                    writer.writeheader()
                writer.writerow({k: "" if v is None else v for k, v in row.items()})
            rows.append({k: "" if v is None else str(v) for k, v in row.items()})
            print(row, flush=True)
    print(summary(rows))


if __name__ == "__main__":
    main()
