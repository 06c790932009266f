"""Flower's simulation runtime: its `FedAvg` strategy over client apps on Ray actors. https://flower.ai/docs/framework"""

from __future__ import annotations

import os

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")

import json
import logging
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from bench.measurement import Measurement, Rounds, main
from bench.models import build
from bench.peers.flower_client import client_app
from bench.workloads import PARTICIPATION, Workload


class Timed(FedAvg):  # type: ignore[misc]
    """Flower's FedAvg, with a mark at the end of every round."""

    def __init__(self, rounds: Rounds) -> None:
        super().__init__(fraction_train=PARTICIPATION, fraction_evaluate=0.0, min_train_nodes=1)
        self.rounds = rounds

    def aggregate_train(self, server_round, replies):  # type: ignore[no-untyped-def]
        """Aggregate, and count the examples of those who answered."""
        replies = list(replies)
        failed = [r.error for r in replies if r.has_error()]
        if failed:
            raise RuntimeError(f"{len(failed)} clients of round {server_round} failed: {failed[0]}")
        made = super().aggregate_train(server_round, replies)
        self.rounds.add(sum(int(r.content["metrics"]["num-examples"]) for r in replies))
        self.rounds.end()
        return made


def measure(w: Workload) -> Measurement:
    """Rounds without evaluation on two actors of one core each; the first, which starts them, is not counted."""
    warnings.simplefilter("ignore")
    logging.getLogger("flwr").setLevel(logging.ERROR)
    server = ServerApp()
    kept = Path(tempfile.mkdtemp(prefix="flower-bench-")) / "rounds.json"
    timed = min(w.rounds, 6)  # a round takes seconds with many clients

    @server.main()
    def run(grid: Grid, context: Context) -> None:
        torch.manual_seed(0)
        rounds = Rounds()
        Timed(rounds).start(grid, ArrayRecord(build(w).state_dict()), num_rounds=timed + 1)
        kept.write_text(json.dumps(rounds.measurement()), encoding="utf-8")

    run_simulation(
        server_app=server,
        client_app=client_app(w.name),
        num_supernodes=w.clients,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 2}},
    )
    found: Measurement = json.loads(kept.read_text(encoding="utf-8"))
    return {**found, "version": f"flwr {version('flwr')}, ray {version('ray')}"}


if __name__ == "__main__":
    main(measure)
