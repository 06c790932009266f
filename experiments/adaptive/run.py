"""Adaptive pFL-MF at one setting beside methods whose step size is tuned for each federation.

    python experiments/adaptive/run.py tune                      step sizes of the baselines, seeds 0 to 2
    python experiments/adaptive/run.py report                    the chosen ones and pfl-mf-adaptive, seeds 210 to 214
    python experiments/adaptive/run.py show --seeds 0 1 2        the table of some seeds

Every row clips gradients to norm 1 and has no safeguard. A baseline has six trials, lr = 0.1, 0.3, 1, 2, 3 and 6, of
which the mean over the development seeds chooses; FedPer and the oracle are also judged with a head fitted first, and
the better of the two is theirs. IFCA is told the number of groups. pfl-mf-adaptive has its defaults everywhere. A run
is kept in docs/adaptive as soon as it is known and is not repeated; `make docs` writes the reported table from there.
Shakespeare's roles, where a run is long, take the step sizes that docs/natural chose, without clipping. Seeds 200 to
204 were reported of an earlier form; what they showed led to the present one, so they are not used again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scipy import stats

from fedspan.config import assemble, load_config
from fedspan.errors import FedspanError
from fedspan.method import Abilities
from fedspan.methods import make
from fedspan.simulation.protocols import EvaluationSettings
from fedspan.simulation.simulator import Simulation
from fedspan.storage.atomic import write_atomic

HERE = Path(__file__).resolve().parent
OUT = HERE.parents[1] / "docs" / "adaptive" / "outcomes.json"
DEVELOPMENT, REPORTED = [0, 1, 2], [210, 211, 212, 213, 214]
RATES = (0.1, 0.3, 1.0, 2.0, 3.0, 6.0)
SIMPLE = ("fedavg", "fedavg-head", "fedper", "ditto", "local", "oracle")
"""Of these the best is what the adaptive form is measured against."""
BASELINES = (*SIMPLE, "ifca", "pfl-mf")
ADAPTIVE = "pfl-mf-adaptive"
WITH_HEAD = ("fedper", "oracle")
"""What is also judged with a head fitted first."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Federation:
    """One federation: what it is called, its file, how it differs from it, and what is measured."""

    title: str
    changes: tuple[str, ...] = ()
    file: str = "digits.toml"
    groups: int = 0
    """What IFCA is told, if there are groups."""
    measure: str = "accuracy"
    higher: bool = True
    """Whether more of it is better."""
    without: tuple[str, ...] = ()
    """Baselines that make no sense on it: with one linear layer there is no body to share."""
    rates_of: str = ""
    """The file of docs/natural that has its baselines and their step sizes, in place of trials of its own."""

    @property
    def methods(self) -> list[str]:
        """The baselines it has: an oracle where every client belongs to one group, IFCA where there are groups."""
        if self.rates_of:
            return [m for m in BASELINES if m in self.given_rates()]
        single = any(k in c for c in self.changes for k in ("permuted-groups", "shifted-groups", "label-groups"))
        left_out = {*self.without, *(() if single else ("oracle",)), *(() if self.groups else ("ifca",))}
        return [m for m in BASELINES if m not in left_out]

    def given_rates(self) -> dict[str, float]:
        """The step sizes that docs/natural chose, by method."""
        given = json.loads((OUT.parents[1] / "natural" / f"{self.rates_of}.json").read_text(encoding="utf-8"))["given"]
        at = given["titles"].index("chosen")
        return {row[0]: float(row[at].removeprefix("lr = ").rstrip("*")) for row in given["rows"]}

    @property
    def percent(self) -> bool:
        """Whether it is shown in per cent."""
        return self.measure == "accuracy"

    @property
    def digits(self) -> int:
        """Digits behind the point."""
        return 1 if self.percent else 3

    def points(self, values: Sequence[float]) -> list[float]:
        """Values as they are shown."""
        return [100 * v if self.percent else v for v in values]


def _digits(title: str, kind: str, *options: str, groups: int = 0) -> Federation:
    return Federation(title, (f"partition.kind={kind}", *(f"partition.{o}" for o in options)), groups=groups)


def _linear(title: str, file: str, measure: str, higher: bool) -> Federation:
    return Federation(title, (), f"../natural/{file}", 0, measure, higher, ("fedavg-head", "fedper"))


FEDERATIONS = {
    "equal": _digits("4 equal permuted groups", "permuted-groups", "groups=4", groups=4),
    "unequal": _digits("groups of 20, 8, 4, 2, 2", "permuted-groups", "group_sizes=[20, 8, 4, 2, 2]", groups=5),
    "many": _digits("12 groups", "permuted-groups", "groups=12", groups=12),
    "rotations": _digits("4 rotations", "shifted-groups", "groups=4", groups=4),
    "own": _digits("every client its own naming", "permuted-clients"),
    "iid": _digits("IID", "iid"),
    "dirichlet05": _digits("Dirichlet 0.5", "dirichlet-clients", "alpha=0.5"),
    "dirichlet01": _digits("Dirichlet 0.1", "dirichlet-clients", "alpha=0.1"),
    "soft": _digits(
        "soft: a naming per example, of 2 of 4", "mixed-groups", "groups=4", "mixed=2", "alpha=1000.0", groups=4
    ),
    "cifar10": Federation(
        "CIFAR-10, 5 groups of two classes",
        ("rounds=40", "partition.kind=label-groups", "train.evaluate_every=40", "train.mapping=auto"),
        "../diagnose/cifar10.toml",
        groups=5,
    ),
    "heart": Federation("heart hospitals", ("rounds=40",), "../natural/heart.toml"),
    "parkinsons": _linear("Parkinson's patients, rmse", "parkinsons.toml", "rmse", False),
    "shakespeare": Federation(
        "Shakespeare's roles, no clipping", file="../natural/shakespeare.toml", rates_of="shakespeare"
    ),
    "school": _linear("schools, explained variance", "school.toml", "explained_variance", True),
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
        said = row["ended"] or f"{row['value']} {row['found'] or ''}"
        print(f"{federation} {method}{at} seed {seed}: {said} ({row['seconds']} s)", flush=True)


def one(of: Federation, method: str, lr: float | None, seed: int) -> Row:
    """One run: the mean of the measure over clients, with a head fitted first too, and what the monitor says."""
    own = float(make(method).lr) if lr is None else lr  # type: ignore[attr-defined]
    fields = [] if lr is None or of.rates_of else ["method.clip_norm=1.0", "method.safeguard=false"]
    if method == "ifca":
        fields.append(f"method.clusters={of.groups}")
    more = [*of.changes, f"seed={seed}", "train.workers=1", f"method.name={method}", f"method.lr={own}", *fields]
    judged = EvaluationSettings(models=("received", "head"), head_epochs=10, head_lr=0.5)
    start = time.process_time()
    row: Row = {"value": None, "head": None, "found": {}, "ended": ""}
    try:
        config = load_config(HERE / of.file, more)
        built, task, data = assemble(config)
        evaluate = judged if method in WITH_HEAD else config.evaluate
        sim = Simulation(built, task, data, rounds=config.rounds, seed=seed, settings=config.train, evaluate=evaluate)
        result = sim.run()
    except FedspanError as e:
        return row | {"ended": str(e), "seconds": round(time.process_time() - start, 1)}
    row["value"] = round(result.measures[of.measure]["mean"], 6)
    if method in WITH_HEAD:
        row["head"] = round(result.measures[f"{of.measure}_head"]["mean"], 6)
    if method == ADAPTIVE:
        told = Abilities(built).observed.monitor(sim.record.server)
        row["found"] = {k: round(v, 4) for k, v in told.items()}
    return row | {"seconds": round(time.process_time() - start, 1)}


# ------------------------------------------------------------------------------------------------ choice and table


def score(of: Federation, rows: Sequence[Row], judged: str = "value") -> float:
    """The mean over seeds, the more the better; no run counts for nothing, one that diverged as worst of all."""
    if not rows or any(r[judged] is None for r in rows):
        return -math.inf
    return (1 if of.higher else -1) * statistics.fmean(r[judged] for r in rows)


def chosen(known: Outcomes, federation: str, method: str) -> tuple[float, str] | None:
    """The step size of a baseline and how it is judged, by the development seeds; None if it was not tuned yet."""
    of, ways = FEDERATIONS[federation], ("value", "head") if method in WITH_HEAD else ("value",)
    if of.rates_of:
        return of.given_rates()[method], "value"
    trials = {lr: known.of(federation, method, lr, DEVELOPMENT) for lr in RATES}
    if any(len(rows) < len(DEVELOPMENT) for rows in trials.values()):
        return None
    return max(((lr, way) for lr in RATES for way in ways), key=lambda pair: score(of, trials[pair[0]], pair[1]))


def gap(of: Federation, mine: Sequence[float], theirs: Sequence[float]) -> str:
    """How much better the first are, seed by seed, with the half-width of Student's 95 % interval."""
    each = [(a - b) * (1 if of.higher else -1) for a, b in zip(mine, theirs, strict=True)]
    if len(each) < 2:
        return f"{statistics.fmean(each):+.{of.digits}f}"
    half = float(stats.t.ppf(0.975, len(each) - 1)) * statistics.stdev(each) / math.sqrt(len(each))
    return f"{statistics.fmean(each):+.{of.digits}f} ± {half:.{of.digits}f}"


def tables(known: Outcomes, federations: Sequence[str], asked: Sequence[int]) -> list[str]:
    """One line per federation: means over seeds, the gap to the best simple baseline, what was found."""
    lines = [f"| federation | adaptive | {' | '.join(BASELINES)} | over the best of the first six | κ, τ, directions |"]
    lines.append("|---" * (len(BASELINES) + 4) + "|")
    for name in federations:
        of, seeds = FEDERATIONS[name], asked
        own = known.of(name, ADAPTIVE, None, seeds)
        if len(own) < len(seeds) or any(r["value"] is None for r in own):
            continue
        mine = of.points([r["value"] for r in own])
        cells, best = [], None
        for method in BASELINES:
            found = chosen(known, name, method) if method in of.methods else None
            rows = known.of(name, method, found[0], seeds) if found else []
            if method not in of.methods or found is None or len(rows) < len(seeds):
                cells.append("not run" if method in of.methods else "–")
                continue
            lr, way = found
            edge = not of.rates_of and lr in (RATES[0], RATES[-1])
            at = f"{lr:g}{'!' if edge else ''}{', head' if way == 'head' else ''}"
            if any(r[way] is None for r in rows):
                cells.append(f"diverged ({at})")
                continue
            values = of.points([r[way] for r in rows])
            cells.append(f"{statistics.fmean(values):.{of.digits}f} ({at})")
            if method in SIMPLE and (best is None or score(of, rows, way) > best[0]):
                best = score(of, rows, way), values
        said = "; ".join(
            f"{r['found']['kappa']:g}, {r['found']['tau']:g}, {r['found']['rank_found']:g}" for r in own if r["found"]
        )
        shown = f"**{statistics.fmean(mine):.{of.digits}f}**"
        over = gap(of, mine, best[1]) if best else ""
        lines.append(f"| {of.title} | {shown} | {' | '.join(cells)} | {over} | {said} |")
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
    tune = asked.command == "tune"
    for name in asked.federations if asked.command != "show" else []:
        of = FEDERATIONS[name]
        for seed in seeds:
            known.run(name, ADAPTIVE, None, seed)
        for method in (m for m in of.methods if m in asked.methods and not (tune and of.rates_of)):
            best = None if tune else chosen(known, name, method)
            if best is None and not tune:
                raise SystemExit(f"{name}, {method}: not tuned yet; run `tune` first.")
            for lr in RATES if best is None else best[:1]:
                for seed in seeds:
                    known.run(name, method, lr, seed)
    print("\n".join(tables(known, asked.federations, seeds)) if asked.command != "tune" else "tuned")


if __name__ == "__main__":
    main()
