"""Score `fedspan diagnose`: its first advice, as it proposes it, beside the best of a common set of methods.

    python experiments/diagnose/score.py                       seeds 200 to 202; written to docs/diagnose/score.json
    python experiments/diagnose/score.py --seeds 1-3 --out dev.json --cases 'own labelling,iid'

Every row chooses its learning rate from the same three (a method that clips by default: from its own three) by the
validation parts of seed 0; figures are the test parts of
the seeds. Natural federations take the rows that docs/natural keeps. Runs that are in the file are not repeated, but
an advice that has changed is.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedspan.config import RunConfig, assemble, load_config
from fedspan.errors import Divergence
from fedspan.method import Training
from fedspan.methods import make
from fedspan.simulation.simulator import Simulation
from fedspan.storage.atomic import write_atomic
from fedspan.studies.diagnosis import Diagnosis, diagnose
from fedspan.studies.diagnosis.score import case_from, totals

HERE = Path(__file__).resolve().parent
DOCS = HERE.parents[1] / "docs"
RATES = (0.05, 0.2, 0.8)
CLIPPED = (0.5, 1.0, 2.0)  # as many for methods that clip gradients by default, whose own rate lies there
VALIDATION = 0.2
HEADS = {"finetune_epochs": 10}  # passes of the fitted heads and of fine-tuning: 20 to 30 steps

ROWS: dict[str, dict[str, Any]] = {
    "local": {},
    "fedavg": {},
    "fedavg-ft": HEADS,
    "fedavg-head": HEADS,
    "ditto": {},
    "fedper": {},
    "fedrep": {},
    "apfl": {},
    "ifca": {},
    "pfl-mf": {},
    "pfl-mf-adaptive": {},
    "fedara": {},
}
"""The common set: methods with their own defaults, but for HEADS."""


@dataclass(frozen=True)
class Case:
    """A federation whose kind, and number of directions, is known; or a natural one, of which rows are kept."""

    name: str
    file: str
    changes: tuple[str, ...] = ()
    kind: str | None = None
    rank: int | None = None

    @property
    def natural(self) -> bool:
        """Whether its rows come from docs/natural."""
        return self.file.startswith("../natural")

    def config(self, seed: int, *changes: str) -> RunConfig:
        """The experiment of a seed."""
        return load_config(HERE / self.file, [*self.changes, f"seed={seed}", *changes])


def _digits(name: str, partition: str, clients: int, kind: str, rank: int | None, **options: object) -> Case:
    changes = [f"partition.kind={partition}", f"partition.clients={clients}"]
    changes += [f"partition.{k}={v}" for k, v in options.items()]
    return Case(name, "digits.toml", tuple(changes), kind, rank)


CASES = [
    _digits("equal groups", "permuted-groups", 20, "clusters", 4, groups=4),
    _digits("unequal groups", "permuted-groups", 36, "clusters", 5, group_sizes="20:8:4:2:2"),
    _digits("many groups", "permuted-groups", 36, "clusters", 12, groups=12),
    _digits("rotations", "shifted-groups", 20, "domain shift", 4, groups=4),
    _digits("own labelling", "permuted-clients", 20, "permuted labels", None),
    _digits("iid", "iid", 20, "none", 1),
    _digits("dirichlet 0.3", "dirichlet", 20, "label skew", None, alpha=0.3),
    Case("cifar-10 classes", "cifar10.toml", (), "label skew", 5),
    *(Case(f, f"../natural/{f}.toml") for f in ("heart", "parkinsons", "school", "shakespeare", "tcga-brca")),
]


def rates_of(method: str) -> tuple[float, ...]:
    """The learning rates a row chooses among."""
    made = make(method)
    return CLIPPED if isinstance(made, Training) and made.optimizer.clip is not None else RATES


def measured(config: RunConfig) -> float | None:
    """The accuracy of a run, mean over clients; None if it diverged."""
    method, task, data = assemble(config)
    try:
        run = Simulation(method, task, data, rounds=config.rounds, seed=config.seed, settings=config.train).run()
    except Divergence:
        return None
    return round(float(run.accuracy["mean"]), 6)


@dataclass
class Book:
    """What has been run of a case, by row and fields: validation by learning rate, values by seed."""

    case: Case
    kept: dict[str, Any]
    save: Callable[[], None]

    def value(self, method: str, fields: Mapping[str, Any], seed: int) -> float | None:
        """What a row reached at a seed, with the learning rate it chose."""
        name = _named(method, fields)
        row = self.kept.setdefault(name, {"validation": {}, "values": {}})
        for lr in rates_of(method):
            if f"{lr:g}" not in row["validation"]:
                trial = self._config(method, fields, lr, 0)
                trial = replace(
                    trial,
                    partition=replace(trial.partition, validation=VALIDATION),
                    train=replace(trial.train, evaluate_part="validation"),
                )
                row["validation"][f"{lr:g}"] = measured(trial)
        tried = {lr: v for lr, v in row["validation"].items() if v is not None}
        if not tried:
            return None
        row["lr"] = float(max(tried, key=lambda lr: tried[lr]))
        if str(seed) not in row["values"]:
            row["values"][str(seed)] = measured(self._config(method, fields, row["lr"], seed))
            self.save()
            print(f"{self.case.name}, {name}, lr {row['lr']:g}, seed {seed}: {row['values'][str(seed)]}", flush=True)
        value: float | None = row["values"][str(seed)]
        return value

    def _config(self, method: str, fields: Mapping[str, Any], lr: float, seed: int) -> RunConfig:
        given = [f"method.{k}={json.dumps(v)}" for k, v in fields.items()]
        return self.case.config(seed, f"method.name={method}", f"method.lr={lr}", *given)


def _named(method: str, fields: Mapping[str, Any]) -> str:
    return " ".join([method, *(f"{k}={v}" for k, v in fields.items())])


def look(case: Case, seed: int) -> Diagnosis:
    """What `fedspan diagnose` says of the case at a seed."""
    _, task, data = assemble(case.config(seed))
    return diagnose(task, data)


def proposed(found: Diagnosis) -> tuple[str, dict[str, Any]]:
    """The first recommendation with what it proposes to set, beside what the common row has."""
    first = found.methods[0]
    return first, {**ROWS.get(first, {}), **found.settings(first)}


def score(case: Case, seeds: list[int], runs: dict[str, Any], save: Callable[[], None]) -> dict[str, Any]:
    """A case as it is stored; `save` is called when a run is done."""
    said = [look(case, seed) for seed in seeds]
    entry: dict[str, Any] = {
        "name": case.name,
        "kind": case.kind,
        "rank": case.rank,
        "kinds": [d.kind for d in said],
        "ranks": [d.rank for d in said],
    }
    if case.natural:
        return entry | _kept(case, said, seeds)
    book = Book(case, runs, save)
    first = [proposed(d) for d in said]
    return entry | {
        "first": [_named(*pair) for pair in first],
        "advised": [book.value(m, fields, seed) for (m, fields), seed in zip(first, seeds)],
        "rows": {m: [book.value(m, fields, seed) for seed in seeds] for m, fields in ROWS.items()},
    }


def _kept(case: Case, said: list[Diagnosis], seeds: list[int]) -> dict[str, Any]:
    """The rows of a natural federation, as docs/natural keeps them; an advice that has no row there has no value."""
    stored = json.loads((DOCS / "natural" / f"{case.name}.json").read_text(encoding="utf-8"))
    measure = stored["measures"][0]
    at = [stored["seeds"].index(seed) for seed in seeds]
    rows = {row["label"]: [row["values"][measure["name"]][k] for k in at] for row in stored["rows"]}
    first = [d.methods[0] for d in said]
    return {
        "measure": measure["name"],
        "higher": measure["higher"],
        "first": first,
        "advised": [rows[m][k] if m in rows else None for k, m in enumerate(first)],
        "rows": rows,
    }


def main() -> None:
    """Score the cases asked for, and write after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="200-202", help="first-last")
    parser.add_argument("--out", type=Path, default=DOCS / "diagnose" / "score.json")
    parser.add_argument("--cases", default="", help="only these, with commas")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    first, last = (int(s) for s in chosen.seeds.split("-"))
    kept = json.loads(chosen.out.read_text(encoding="utf-8")) if chosen.out.is_file() else {"cases": [], "runs": {}}
    wanted = [c.strip() for c in chosen.cases.split(",") if c.strip()] or [c.name for c in CASES]
    done = {c["name"]: c for c in kept["cases"]}
    chosen.out.parent.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        order = [done[c.name] for c in CASES if c.name in done]
        left = [c.name for c in CASES if c.name not in done]
        told = {
            "seeds": [first, last],
            "rates": list(RATES),
            "clipped": list(CLIPPED),
            "cases": order,
            "not_run": left,
            "runs": kept["runs"],
        }
        write_atomic(chosen.out, json.dumps(told, indent=1, ensure_ascii=False) + "\n")

    for case in CASES:
        if case.name in wanted:
            runs = kept["runs"].setdefault(case.name, {})
            done[case.name] = score(case, list(range(first, last + 1)), runs, save)
            save()
            found = case_from(done[case.name])
            print(
                f"== {case.name}: {found.first} {found.reached}, best {found.best}, behind {found.behind}", flush=True
            )
    print(totals([case_from(c) for c in done.values()]))


if __name__ == "__main__":
    main()
