"""Memory that runs out while a chunk computes is told in one sentence, and no number comes of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("resource")

RUN = """
import resource, sys
import torch
from fedspan.data.federated import FederatedData
from fedspan.errors import OutOfMemory
from fedspan.learn.task import Task
from fedspan.methods import make
from fedspan.simulation.settings import Settings
from fedspan.simulation.simulator import Simulation
from torch import nn
import numpy as np

mapping, workers = sys.argv[1], int(sys.argv[2])
clients, each, width = 8, 4, 4_000
x, y = torch.randn(clients * each, width), torch.arange(clients * each) % 3
rows = list(np.arange(clients * each).reshape(clients, each))
data = FederatedData(x=x, y=y, train=rows, test=rows, classes=3)
model = lambda: nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))
settings = Settings(mapping=mapping, workers=workers, chunk=4, batch_size=4)
run = Simulation(make("fedavg"), Task(model, seed=0), data, rounds=1, settings=settings)
run.transport.executor  # what it imports must not be what fails
import torch._dynamo
held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit = held + ((60 if workers == 1 else 140) << 20)  # a client needs 64 MB for its weights, workers what they read
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    run.run()
except OutOfMemory as e:
    print(e)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits on memory are the kernel's")
@pytest.mark.long
@pytest.mark.parametrize(
    ("mapping", "workers"),
    [
        ("folded", 1),
        ("vmap", 1),
        ("loop", 1),
        ("folded", 2),
    ],
)
def test_a_chunk_that_does_not_fit_is_told_so(mapping: str, workers: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN, mapping, str(workers)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.startswith("Simulator: memory ran out in round 1 while a chunk of 4 clients"), done.stderr[
        -2000:
    ]
    assert "16,016,003 parameters" in done.stdout and "train.chunk" in done.stdout and "train.batch_size" in done.stdout
    assert done.stdout.count("\n") == 1
