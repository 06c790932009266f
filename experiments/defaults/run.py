"""Run every registered method with its own defaults, and print what each reaches: `python experiments/defaults/run.py`.

    python experiments/defaults/run.py                            digits, reported seeds, kept in docs/defaults
    python experiments/defaults/run.py --seeds 0 1 2 --out FILE   other seeds, kept elsewhere
    python experiments/defaults/run.py --setting mnist --methods fedavg pfl-mf

A row is kept as soon as it is known, and is not run again while defaults and code are the same; `make docs` writes
docs/reference/defaults.md from docs/defaults.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
from pathlib import Path
from typing import Any

import torch

import fedspan
from fedspan.config import assemble, load_config
from fedspan.errors import FedspanError
from fedspan.method.fields import flat
from fedspan.methods import METHODS, make
from fedspan.simulation.simulator import Simulation
from fedspan.storage.atomic import write_atomic
from fedspan.storage.toml import plain
from fedspan.tree import digest

HERE = Path(__file__).resolve().parent
OUT = HERE.parents[1] / "docs" / "defaults"
SETTINGS = sorted(file.stem for file in HERE.glob("*.toml"))
REPORTED = [200, 201, 202]
COMPUTES = ("learn", "linalg", "layers", "method", "methods", "simulation")


def code() -> str:
    """A digest of the code that decides the figures."""
    root = Path(fedspan.__file__).parent
    found = hashlib.sha256()
    for folder in COMPUTES:
        for file in sorted((root / folder).rglob("*.py")):
            found.update(file.read_bytes())
    return found.hexdigest()[:16]


def one(setting: str, method: str, seed: int) -> dict[str, Any]:
    """One method with its defaults on one seed: accuracy and how many different models, or why it ended without."""
    more = [f"seed={seed}", f"method.name={method}", "train.workers=1"]
    try:
        config = load_config(HERE / f"{setting}.toml", more)
        built, task, data = assemble(config)
        sim = Simulation(built, task, data, rounds=config.rounds, seed=seed, settings=config.train)
        result = sim.run()
    except FedspanError as e:
        return {"accuracy": None, "models": 0, "ended": str(e)}
    models = len({digest(sim.personal(client)[1]) for client in range(data.clients)})
    return {"accuracy": round(result.accuracy["mean"], 6), "models": models, "ended": ""}


def run(setting: str, methods: list[str], seeds: list[int], out: Path) -> list[dict[str, Any]]:
    """Run what is not kept yet; every row is written when it is known."""
    kept = json.loads(out.read_text(encoding="utf-8"))["rows"] if out.is_file() else []
    version = code()
    for method in methods:
        fields = plain(flat(make(method)))
        chosen = hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()[:16]
        for seed in seeds:
            row = {"method": method, "seed": seed, "defaults": chosen, "code": version}
            if any(row.items() <= old.items() for old in kept):
                continue
            kept = [old for old in kept if (old["method"], old["seed"]) != (method, seed)]
            kept.append(row | one(setting, method, seed))
            order = list(METHODS)
            kept.sort(key=lambda r: (order.index(r["method"]), r["seed"]))
            out.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(out, json.dumps({"setting": setting, "rows": kept}, indent=1) + "\n")
        print(shown(method, [r for r in kept if r["method"] == method and r["seed"] in seeds]), flush=True)
    return kept


def shown(method: str, rows: list[dict[str, Any]]) -> str:
    """A line of the table: mean accuracy, that of every seed, how runs ended that gave none."""
    found = [100 * row["accuracy"] for row in rows if row["accuracy"] is not None]
    mean = f"{statistics.fmean(found):6.2f}" if found else "     -"
    ends = "; ".join(sorted({row["ended"] for row in rows if row["ended"]}))
    return f"{method:22s} {mean}   {' '.join(f'{v:6.2f}' for v in found)}   {ends}".rstrip()


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=SETTINGS, default="digits")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS), metavar="METHOD")
    parser.add_argument("--seeds", nargs="+", type=int, default=REPORTED)
    parser.add_argument("--out", type=Path, help="the file that outcomes are kept in; docs/defaults/SETTING.json")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    run(asked.setting, asked.methods, asked.seeds, asked.out or OUT / f"{asked.setting}.json")


if __name__ == "__main__":
    main()
