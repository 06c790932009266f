"""Repeat what docs/explanation/natural-federations.md reports, from the tables under $FEDSPAN_DATA.

    python experiments/natural/run.py flamby          FLamby's own rows on its own splits and models
    python experiments/natural/run.py keep RUNS...    what is kept of finished comparisons

Outcomes are written to docs/natural; `make docs` writes the page from them. The comparisons themselves are commands of
fedspan, which each kept outcome names.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fedspan
from fedspan.config import assemble_data, load_config
from fedspan.data import FederatedData
from fedspan.learn.batches import Amount, Steps, draw
from fedspan.learn.losses import cox_loss
from fedspan.learn.metrics import METRICS
from fedspan.learn.server_optimizer import ServerOptimizer
from fedspan.methods.fedavg import FedAvg
from fedspan.randomness import torch_seed
from fedspan.storage.atomic import write_atomic

HERE = Path(__file__).resolve().parent
OUT = HERE.parents[1] / "docs" / "natural"
SEEDS = range(200, 205)


@dataclass(frozen=True, kw_only=True)
class FedAvgUpdates(FedAvg):
    """FedAvg whose clients take 100 minibatch steps a round, however many examples they have."""

    def plan(self) -> dict[str, Amount]:
        """What a client trains on in a round."""
        return {"train": Steps(100)}


@dataclass(frozen=True)
class Federation:
    """One of FLamby's federations: the table, the model's inputs, what its labels mean, how it is measured."""

    file: str
    kind: str
    inputs: int
    metric: str
    rounds: int
    changes: tuple[str, ...] = ()

    def data(self, seed: int) -> FederatedData:
        """The table as the experiment file has it; of a split that is given the seed changes nothing."""
        return assemble_data(load_config(HERE / self.file, [*self.changes, f"seed={seed}"]))

    def task(self, seed: int) -> fedspan.Task:
        """The linear model with its loss; its start is drawn by the seed."""
        return fedspan.Task(lambda: nn.Linear(self.inputs, 1), self.kind, ties="breslow", seed=seed)


HEART = Federation("heart.toml", "multi-label", 13, "accuracy", 15, ("task.kind=multi-label",))
TCGA = Federation("tcga-brca.toml", "survival", 39, "concordance", 5)


@dataclass(frozen=True)
class PublishedRow:
    """A row of FLamby: its settings, its figure, and the deviation over its seeds where it is known."""

    federation: Federation
    name: str
    batch: int
    figure: float
    spread: float | None = None
    epochs: int = 0  # of the pooled model
    lr: float = 0.0
    server: tuple[float, float] | None = None  # learning rate and ε of FedAdam

    @property
    def settings(self) -> str:
        """The settings in words."""
        if self.epochs:
            return f"Adam {self.lr:g}, {self.epochs} epochs, batch {self.batch}"
        server = f", server {self.server[0]:g}, ε {self.server[1]:g}" if self.server else ""
        return f"SGD {self.lr:g}{server}, 100 updates, {self.federation.rounds} rounds, batch {self.batch}"

    def value(self, seed: int) -> float:
        """The mean over clients of the metric on the test parts."""
        return self.pooled(seed) if self.epochs else self.federated(seed)

    def federated(self, seed: int) -> float:
        """FedAvg, or FedAdam without correction of its moments, as FLamby has it."""
        server = ServerOptimizer()
        if self.server:
            server = ServerOptimizer(rule="adam", lr=self.server[0], epsilon=self.server[1], beta2=0.999)
        of = self.federation
        result = fedspan.simulate(
            FedAvgUpdates(lr=self.lr, server=server), of.task(seed), of.data(seed), rounds=of.rounds, seed=seed,
            batch_size=self.batch, evaluate_every=of.rounds, workers=1, evaluate={"metrics": [of.metric]},
        )  # fmt: skip
        return float(result.measures[of.metric]["mean"])

    def pooled(self, seed: int) -> float:
        """One model trained on the examples of all clients together, judged on each client's test part."""
        of, data = self.federation, self.federation.data(seed)
        with torch_seed(seed):
            model = nn.Linear(of.inputs, 1)
        optimizer = torch.optim.Adam(model.parameters(), self.lr)
        rows = torch.cat([torch.from_numpy(part) for part in data.train]).numpy()
        for epoch in range(1, self.epochs + 1):
            drawn = draw(
                rows, rows[:0], {"train": Steps(-(-len(rows) // self.batch))}, seed=seed, round=epoch, client=0,
                batch_size=self.batch, epochs=1,
            )  # fmt: skip
            for row in drawn["train"]:
                at = torch.from_numpy(row[row >= 0])
                optimizer.zero_grad()
                self._loss(model(data.x[at]), data.y[at]).backward()
                optimizer.step()
        return statistics.fmean(self._judged(model, data, torch.from_numpy(part)) for part in data.test)

    def _loss(self, output: Tensor, y: Tensor) -> Tensor:
        if self.federation.kind == "survival":
            return cox_loss(output, y, None, "breslow").mean()
        return nn.functional.binary_cross_entropy_with_logits(output.reshape(y.shape), y)

    def _judged(self, model: nn.Module, data: FederatedData, rows: Tensor) -> float:
        with torch.no_grad():
            y, predicted = self.federation.task(0).scores(model(data.x[rows]), data.y[rows])
        return METRICS[self.federation.metric](y.numpy(), predicted.numpy())


ROWS = [
    PublishedRow(HEART, "FedAvg", 4, 0.685, 0.025, lr=1e-4),
    PublishedRow(HEART, "FedAvg, earlier step size", 4, 0.685, 0.025, lr=1e-3),
    PublishedRow(HEART, "pooled", 4, 0.735, epochs=50, lr=1e-3),
    PublishedRow(TCGA, "FedAvg", 8, 0.732, 0.162, lr=0.1),
    PublishedRow(TCGA, "FedAvg, earlier batches", 16, 0.732, 0.162, lr=0.1),
    PublishedRow(TCGA, "FedAdam", 8, 0.815, lr=0.01, server=(0.1, 1e-3)),
    PublishedRow(TCGA, "FedAdam, ε 1e-8", 8, 0.815, lr=0.01, server=(0.1, 1e-8)),
    PublishedRow(TCGA, "pooled", 8, 0.676, epochs=30, lr=0.1),
    PublishedRow(TCGA, "pooled, earlier file", 16, 0.676, epochs=10, lr=0.1),
]


def flamby() -> None:
    """FLamby's rows, each for every seed; rows that are kept already, with the same settings, are not repeated."""
    path = OUT / "flamby.json"
    before = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    kept: list[dict[str, Any]] = []
    for row in ROWS:
        stem = Path(row.federation.file).stem
        done = [r for r in before if (r["federation"], r["settings"]) == (stem, row.settings)]
        if done:
            kept += done
            continue
        values = [row.value(seed) for seed in SEEDS]
        found = {"federation": stem, "row": row.name, "settings": row.settings}
        found |= {"measure": row.federation.metric, "seeds": list(SEEDS), "values": values}
        kept.append({**found, "published": row.figure, "published_spread": row.spread})
        mean, spread = statistics.fmean(values), statistics.stdev(values)
        print(f"{stem}, {row.name}: {mean:.4f} ± {spread:.4f}; published {row.figure}", flush=True)
        _write("flamby", {"rows": kept})


def keep(directory: Path) -> None:
    """What the page shows of a finished comparison: means and spreads, paired tests, what each row was given."""
    from fedspan import report
    from fedspan.report import paired, side_by_side
    from fedspan.report.given import TITLES, given
    from fedspan.report.measures import measures_of, value
    from fedspan.report.runs import group

    runs = report.load_runs([directory])
    measures, groups = measures_of(runs), group(runs)
    order = [row.label for row in report.summary_rows(runs)]
    groups = sorted(groups, key=lambda g: order.index(g.label))
    rows = [
        {
            "label": g.label,
            "rounds": g.runs[0].rounds,
            "values": {m.name: [value(run, m) for run in g.runs] for m in measures},
            "pooled": {m.name: [value(run, m, "pooled") for run in g.runs] for m in measures},
        }
        for g in groups
    ]
    tests = [
        {
            "measure": measure.name,
            "against": pair.against,
            "label": pair.label,
            "clients": len(pair.gains),
            "gain": float(pair.gains.mean()),
            "better": pair.better,
            "worse": pair.worse,
            "p_sign": pair.sign,
            "p_wilcoxon": pair.wilcoxon,
        }
        for measure in measures
        for against in ("local", "fedavg")
        for pair in paired.pairs(runs, against, measure)
    ]
    told = [(g.label, given(g)) for g in groups]
    kept = {
        "seeds": sorted({run.seed for run in runs}),
        "measures": [{"name": m.name, "percent": m.percent, "higher": m.higher} for m in measures],
        "rows": rows,
        "paired": tests,
        "given": {"titles": list(TITLES), "rows": [[label, *row.cells()] for label, row in told if row is not None]},
        "left_out": list(side_by_side.left_out(groups)),
    }
    _write(directory.name, kept)


def _write(name: str, kept: dict[str, Any]) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    write_atomic(OUT / f"{name}.json", json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    print(f"Written: docs/natural/{name}.json")


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("flamby")
    commands.add_parser("keep").add_argument("runs", type=Path, nargs="+")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.command == "flamby":
        flamby()
    else:
        for directory in asked.runs:
            keep(directory)


if __name__ == "__main__":
    main()
