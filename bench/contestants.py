"""Who takes part: names, titles, and the command that measures one of them on one workload."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench.rows import METHODS
from bench.workloads import WORKLOADS

ROOT = Path(__file__).parent.parent
JOB = "mnist-job"
JOB_TITLE = "experiments/mnist-dirichlet.toml, start to end"
EXPERIMENT = ROOT / "experiments" / "mnist-dirichlet.toml"
BF16 = ("fedavg", "pfl-mf")
"""Rows that are measured in bf16 too, where there are convolutions."""


@dataclass(frozen=True)
class Contestant:
    """One row of the table."""

    name: str
    title: str
    module: str
    words: tuple[str, ...] = ()
    on: Callable[[str], bool] = WORKLOADS.__contains__
    """Whether it takes part in the workload of that name."""
    peer: str = ""
    """The environment of another project that it runs in; fedspan's own if empty."""
    row: str = ""
    """The method whose gradients are counted, if it is fedspan's."""
    precision: str = "float32"

    def command(self, workload: str, python: str) -> list[str]:
        """What is run."""
        return [python, "-m", self.module, workload, *self.words]


def _perceptron(workload: str) -> bool:
    return workload in WORKLOADS and not WORKLOADS[workload].convolutional


def _convolutional(workload: str) -> bool:
    return workload in WORKLOADS and WORKLOADS[workload].convolutional


def _job(workload: str) -> bool:
    return workload == JOB


def _ours() -> list[Contestant]:
    made = []
    for row in METHODS:
        made.append(Contestant(row, f"fedspan {row}", "bench.ours", (row,), row=row))
        if row in BF16:
            words = (row, "bf16")
            title = f"fedspan {row}, bf16"
            more = {"row": row, "precision": "bf16", "on": _convolutional}
            made.append(Contestant(f"{row}-bf16", title, "bench.ours", words, **more))  # type: ignore[arg-type]
    return made


def _peers() -> list[Contestant]:
    return [
        Contestant("fedjax", "FedJAX", "bench.peers.fedjax_rounds", peer="jax"),
        Contestant("pfl-research", "pfl-research", "bench.peers.pfl_rounds", peer="torch"),
        Contestant("flower-ray", "Flower + Ray, 2 actors", "bench.peers.flower_rounds", peer="torch"),
    ]


def _jobs() -> list[Contestant]:
    made = []
    for name, title, module, peer in (
        ("fedspan", "fedspan run", "bench.job.ours", ""),
        ("plain", "plain torch, 2 threads", "bench.job.plain", ""),
        ("pfl", "pfl-research", "bench.job.pfl", "torch"),
    ):
        made.append(Contestant(f"job-{name}", title, module, on=_job, peer=peer))
        again = f"{title}, the first time"
        made.append(Contestant(f"job-{name}-first", again, module, ("first",), on=_job, peer=peer))
    return made


CONTESTANTS = {
    c.name: c
    for c in (
        Contestant("plain-1", "plain loop, 1 thread", "bench.plain", ("loop", "1")),
        Contestant("plain-2", "plain loop, 2 threads", "bench.plain", ("loop", "2")),
        Contestant(
            "plain-1-nhwc", "plain loop, 1 thread, channels_last", "bench.plain", ("channels-last", "1"), _convolutional
        ),
        Contestant("limit-1", "batched-GEMM limit, 1 thread", "bench.plain", ("limit", "1"), _perceptron),
        Contestant("limit-2", "batched-GEMM limit, 2 threads", "bench.plain", ("limit", "2"), _perceptron),
        *_ours(),
        *_peers(),
        *_jobs(),
    )
}
FLOOR = "plain-1"
"""The row that ratios are taken to."""
QUICK_ROWS = ("plain-1", "plain-2", "limit-2", "fedavg", "pfl-mf", "ditto", "fedjax", "pfl-research", "flower-ray")
QUICK_WORKLOADS = ("mlp-100-b256", "mlp-1000-b32", "cnn-100-b32")


def title_of(workload: str) -> str:
    """What a workload is called in tables."""
    return JOB_TITLE if workload == JOB else WORKLOADS[workload].title


def missing(workload: str) -> str | None:
    """Why a workload cannot be run here; None if it can."""
    if workload != JOB:
        return None
    folder = os.environ.get("FEDSPAN_DATA")
    if not folder:
        return "FEDSPAN_DATA is not set; it must name the folder that holds mnist/train.parquet and mnist/test.parquet"
    if not all((Path(folder) / "mnist" / f"{part}.parquet").is_file() for part in ("train", "test")):
        return f"{folder}/mnist holds no train.parquet and test.parquet"
    return None


@dataclass
class Environments:
    """The interpreters of other projects, and why some could not be made."""

    made: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def python(self, peer: str) -> str:
        """The interpreter of a peer's environment; fedspan's own where none is named."""
        return self.made[peer] if peer else sys.executable
