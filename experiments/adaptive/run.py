"""Adaptive pFL-MF at one setting beside methods whose step size is tuned for each federation.

    python experiments/adaptive/run.py tune                      step sizes of the baselines, seeds 0 to 2
    python experiments/adaptive/run.py report                    the chosen ones and pfl-mf-adaptive, seeds 200 to 204
    python experiments/adaptive/run.py show --seeds 0 1 2        the table of some seeds

Every row clips gradients to norm 1 and has no safeguard. A baseline has four trials, lr = 0.3, 1, 2 and 3, of which the
mean accuracy over the development seeds chooses; FedPer and the oracle are also judged with a head fitted first, and
the better of the two is theirs. pfl-mf-adaptive has its defaults everywhere. A run is kept in docs/adaptive as soon
as it is known and is not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedspan.config import assemble, load_config
from fedspan.errors import FedspanError
from fedspan.method import Abilities
from fedspan.methods import make
from fedspan.simulation.protocols import EvaluationSettings
from fedspan.simulation.simulator import Simulation
from fedspan.storage.atomic import write_atomic

HERE = Path(__file__).resolve().parent
OUT = HERE.parents[1] / "docs" / "adaptive" / "outcomes.json"
DEVELOPMENT, REPORTED = [0, 1, 2], [200, 201, 202, 203, 204]
RATES = (0.3, 1.0, 2.0, 3.0)
BASELINES = ("fedavg", "fedavg-head", "fedper", "ditto", "local", "oracle", "pfl-mf")
ADAPTIVE = "pfl-mf-adaptive"
WITH_HEAD = ("fedper", "oracle")
"""What is also judged with a head fitted first."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Federation:
    """One federation: what it is called, its file, and how its partition differs from it."""

    title: str
    changes: tuple[str, ...]
    file: str = "digits.toml"

    @property
    def grouped(self) -> bool:
        """Whether there is an oracle."""
        return any(kind in change for change in self.changes for kind in ("permuted-groups", "shifted-groups"))

    @property
    def methods(self) -> list[str]:
        """The baselines it has."""
        return [m for m in BASELINES if m != "oracle" or self.grouped]


def _digits(title: str, kind: str, *options: str) -> Federation:
    return Federation(title, (f"partition.kind={kind}", *(f"partition.{option}" for option in options)))


FEDERATIONS = {
    "equal": _digits("4 equal permuted groups", "permuted-groups", "groups=4"),
    "unequal": _digits("groups of 20, 8, 4, 2, 2", "permuted-groups", "group_sizes=[20, 8, 4, 2, 2]"),
    "many": _digits("12 groups", "permuted-groups", "groups=12"),
    "rotations": _digits("4 rotations", "shifted-groups", "groups=4"),
    "own": _digits("every client its own naming", "permuted-clients"),
    "iid": _digits("IID", "iid"),
    "dirichlet05": _digits("Dirichlet 0.5", "dirichlet-clients", "alpha=0.5"),
    "dirichlet01": _digits("Dirichlet 0.1", "dirichlet-clients", "alpha=0.1"),
    "soft": _digits("soft: a naming per example, of 2 of 4", "mixed-groups", "groups=4", "mixed=2", "alpha=1000.0"),
    "heart": Federation("heart hospitals", ("rounds=40",), "../natural/heart.toml"),
}


# ------------------------------------------------------------------------------------------------ runs


class Outcomes:
    """Runs that are known, in a file that is written with every new one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []

    def of(self, federation: str, method: str, lr: float | None, seeds: Iterable[int]) -> list[Row]:
        """The rows of a method at a step size."""
        key = (federation, method, lr)
        known = [r for r in self.rows if (r["federation"], r["method"], r["lr"]) == key]
        return [r for seed in seeds for r in known if r["seed"] == seed]

    def run(self, federation: str, method: str, lr: float | None, seed: int) -> None:
        """Run what is not known yet."""
        if self.of(federation, method, lr, [seed]):
            return
        row = {"federation": federation, "method": method, "lr": lr, "seed": seed}
        row |= one(FEDERATIONS[federation], method, lr, seed)
        self.rows.append(row)
        self.rows.sort(key=lambda r: (list(FEDERATIONS).index(r["federation"]), r["method"], r["lr"] or 0, r["seed"]))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = ",\n".join(json.dumps(r) for r in self.rows)
        write_atomic(self.path, f'{{"rows": [\n{text}\n]}}\n')
        at = "" if lr is None else f" lr {lr:g}"
        said = row["ended"] or f"{row['accuracy']} {row['found'] or ''}"
        print(f"{federation} {method}{at} seed {seed}: {said} ({row['seconds']} s)", flush=True)


def one(of: Federation, method: str, lr: float | None, seed: int) -> Row:
    """One run: mean accuracy over clients, with a head fitted first too, and what the method's monitor says."""
    own = float(make(method).lr) if lr is None else lr  # type: ignore[attr-defined]
    fields = [] if lr is None else ["method.clip_norm=1.0", "method.safeguard=false"]
    more = [*of.changes, f"seed={seed}", "train.workers=1", f"method.name={method}", f"method.lr={own}", *fields]
    judged = EvaluationSettings(models=("received", "head"), head_epochs=10, head_lr=0.5)
    start = time.process_time()
    row: Row = {"accuracy": None, "head": None, "found": {}, "ended": ""}
    try:
        config = load_config(HERE / of.file, more)
        built, task, data = assemble(config)
        evaluate = judged if method in WITH_HEAD else None
        sim = Simulation(built, task, data, rounds=config.rounds, seed=seed, settings=config.train, evaluate=evaluate)
        result = sim.run()
    except FedspanError as e:
        return row | {"ended": str(e), "seconds": round(time.process_time() - start, 1)}
    row["accuracy"] = round(result.measures["accuracy"]["mean"], 6)
    if method in WITH_HEAD:
        row["head"] = round(result.measures["accuracy_head"]["mean"], 6)
    if method == ADAPTIVE:
        told = Abilities(built).observed.monitor(sim.record.server)
        row["found"] = {k: round(v, 4) for k, v in told.items()}
    return row | {"seconds": round(time.process_time() - start, 1)}


# ------------------------------------------------------------------------------------------------ choice and table


def score(rows: Sequence[Row], judged: str = "accuracy") -> float:
    """The mean over seeds; a run that diverged counts as nothing learnt."""
    return statistics.fmean(r[judged] or 0.0 for r in rows) if rows else -1.0


def chosen(known: Outcomes, federation: str, method: str) -> tuple[float, str] | None:
    """The step size of a baseline and how it is judged, by the development seeds; None if it was not tuned yet."""
    ways = ("accuracy", "head") if method in WITH_HEAD else ("accuracy",)
    trials = {lr: known.of(federation, method, lr, DEVELOPMENT) for lr in RATES}
    if any(len(rows) < len(DEVELOPMENT) for rows in trials.values()):
        return None
    return max(((lr, way) for lr in RATES for way in ways), key=lambda pair: score(trials[pair[0]], pair[1]))


def tables(known: Outcomes, federations: Sequence[str], seeds: Sequence[int]) -> list[str]:
    """One line per federation: accuracies in percent, the gap to the best baseline, what was found."""
    lines = [f"| federation | adaptive | {' | '.join(BASELINES)} | to the best | κ, τ, directions |"]
    lines.append("|---" * (len(BASELINES) + 4) + "|")
    for name in federations:
        own = known.of(name, ADAPTIVE, None, seeds)
        if not own:
            continue
        spread = f" ± {100 * statistics.stdev(r['accuracy'] for r in own):.1f}" if len(own) > 1 else ""
        cells, best = [], 0.0
        for method in BASELINES:
            if method not in FEDERATIONS[name].methods:
                cells.append("–")
                continue
            found = chosen(known, name, method)
            rows = known.of(name, method, found[0], seeds) if found else []
            if found is None or not rows:
                cells.append("not run")
                continue
            lr, way = found
            value = 100 * score(rows, way)
            best = max(best, value)
            edge = "!" if lr in (RATES[0], RATES[-1]) else ""
            cells.append(f"{value:.1f} ({lr:g}{edge}{', head' if way == 'head' else ''})")
        mine = 100 * score(own)
        said = "; ".join(
            f"{r['found']['kappa']:g}, {r['found']['tau']:g}, {r['found']['rank_found']:g}" for r in own if r["found"]
        )
        title = FEDERATIONS[name].title
        lines.append(f"| {title} | **{mine:.1f}**{spread} | {' | '.join(cells)} | {mine - best:+.1f} | {said} |")
    return lines


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["tune", "report", "show"])
    parser.add_argument("--federations", nargs="+", choices=list(FEDERATIONS), default=list(FEDERATIONS))
    parser.add_argument("--methods", nargs="+", choices=BASELINES, default=list(BASELINES), metavar="BASELINE")
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    known = Outcomes(asked.out)
    seeds = asked.seeds or (DEVELOPMENT if asked.command == "tune" else REPORTED)
    for name in asked.federations if asked.command != "show" else []:
        for seed in seeds:
            known.run(name, ADAPTIVE, None, seed)
        for method in (m for m in FEDERATIONS[name].methods if m in asked.methods):
            best = chosen(known, name, method)
            if best is None and asked.command == "report":
                raise SystemExit(f"{name}, {method}: not tuned yet; run `tune` first.")
            for lr in RATES if asked.command == "tune" or best is None else best[:1]:
                for seed in seeds:
                    known.run(name, method, lr, seed)
    print("\n".join(tables(known, asked.federations, seeds)) if asked.command != "tune" else "tuned")


if __name__ == "__main__":
    main()
