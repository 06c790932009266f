"""What a local epoch of FedARA costs at smaller ranks, beside the dense model: `python -m bench.ranks`.

Seconds are of the processor, the least of several epochs; memory is the most that tensors held at once. The alignment
loss and the decay of the products are in them.
"""

from __future__ import annotations

import argparse
import time

import torch

from fedspan.data.federated import FederatedData
from fedspan.learn.task import Task
from fedspan.methods import make
from fedspan.models import build
from fedspan.simulation.devices import Peak
from fedspan.simulation.dry_run import dry_run_round

LAYERS = {"cnn": ("conv2", "fc1"), "cnn1": ("conv2", "fc1", "fc2")}


def main() -> None:
    """Print one line per model, rank and frequency of the decay."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--examples", type=int, default=320)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    given = parser.parse_args()
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(given.examples, 3, 32, 32, generator=g), torch.randint(0, 10, (given.examples,), generator=g)
    data = FederatedData.from_arrays([(x, y)] * 2, classes=10, test_fraction=0.0)
    print(f"{'model':6} {'ratio':>5} {'decay every':>11} {'seconds':>8} {'x dense':>8} {'MB':>7} {'x dense':>8}")
    for kind, layers in LAYERS.items():
        task = Task(lambda kind=kind: build(kind, (3, 32, 32), 10), seed=0)
        dense: tuple[float, float] | None = None
        for ratio, every in ((1.0, 1), (0.5, 1), (0.25, 1), (0.1, 1), (0.5, 10), (0.25, 10), (0.1, 10)):
            method = make("fedara", ratio=ratio, layers=layers, lam=10.0, lr=0.005, decay_every=every, warmup=1)
            times = []
            for _ in range(given.repeats):
                clock = _Timer()
                dry_run_round(method, task, data, 0, given.batch, round=2, within=(clock,))
                times.append(clock.seconds)
            peak = Peak()
            tried = dry_run_round(method, task, data, 0, given.batch, round=2, within=(peak,))
            del tried
            seconds, memory = min(times), peak.most / 1e6
            dense = dense or (seconds, memory)
            print(
                f"{kind:6} {ratio:5} {every:11} {seconds:8.2f} {seconds / dense[0]:8.2f} {memory:7.1f}"
                f" {memory / dense[1]:8.2f}",
                flush=True,
            )


class _Timer:
    """Processor seconds inside."""

    def __enter__(self) -> None:
        self.seconds = -time.process_time()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.process_time()


if __name__ == "__main__":
    main()
