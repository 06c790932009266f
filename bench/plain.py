"""Plain torch without federation: the SGD loop that ratios are taken to, and the products that bound a perceptron.

`python -m bench.plain WORKLOAD loop|limit THREADS`. The loop is the fastest of those tried: gradients by
`torch.autograd.grad` and one in-place step, batches by `index_select`. `torch.optim.SGD` is 5 to 15 % slower; and its
first use imports `torch._dynamo`, which takes more than a second, so whatever is timed here has run before.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.measurement import Measurement, main
from bench.models import build
from bench.workloads import LR, Data, Workload

SECONDS = 2.0
CONVOLUTION_SECONDS = 4.0


class PlainLoop:
    """Minibatch SGD on one client's rows after another's, all on one model."""

    def __init__(self, data: Data, module: nn.Module, batch: int, format: torch.memory_format) -> None:
        self.x = torch.from_numpy(data.x).contiguous(memory_format=format)
        self.y, self.train, self.batch = torch.from_numpy(data.y), data.train, batch
        self.module = module.to(memory_format=format)
        self.params = list(module.parameters())

    def epoch(self, client: int) -> int:
        """One pass over a client's examples; returns how many there are."""
        own = torch.from_numpy(self.train[client])
        for at in own[torch.randperm(len(own))].split(self.batch):
            loss = F.cross_entropy(self.module(self.x.index_select(0, at)), self.y.index_select(0, at))
            self._step(torch.autograd.grad(loss, self.params))
        return len(own)

    @torch.no_grad()
    def _step(self, slopes: tuple[Tensor, ...]) -> None:
        torch._foreach_sub_(self.params, slopes, alpha=LR)


def loop(w: Workload, threads: int, channels_last: bool = False) -> Measurement:
    """Samples per second of a plain SGD loop on the same clients."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    plain = PlainLoop(w.data(), build(w), w.batch, torch.channels_last if channels_last else torch.contiguous_format)
    rounds = w.sampled()
    for i in next(rounds)[: 3 if w.convolutional else None]:
        plain.epoch(i)  # warm
    seen, start = 0, time.perf_counter()
    longest = CONVOLUTION_SECONDS if w.convolutional else SECONDS
    while True:
        for i in next(rounds):
            seen += plain.epoch(i)
            seconds = time.perf_counter() - start
            if seconds > longest:
                return {"examples": seen, "gradients": seen, "seconds": seconds}


def limit(w: Workload, threads: int) -> Measurement:
    """Samples per second if the batched matrix products of a perceptron were all there is to do."""
    torch.set_num_threads(threads)
    clients = w.participants
    batch = min(w.batch, w.examples * 3 // 4 // w.clients)
    sizes = [(784, 200), (200, 200), (200, 10)]
    weights = [torch.randn(clients, i, o) for i, o in sizes]
    inputs = [torch.randn(clients, batch, i) for i, _ in sizes]
    grads = [torch.randn(clients, batch, o) for _, o in sizes]

    def step() -> int:
        for k, (a, g, weight) in enumerate(zip(inputs, grads, weights)):
            torch.bmm(a, weight)
            weight.baddbmm_(a.transpose(1, 2), g, alpha=-1e-9)
            if k:
                torch.bmm(g, weight.transpose(1, 2))
        return clients * batch

    step()
    seen, start = 0, time.perf_counter()
    while (seconds := time.perf_counter() - start) < SECONDS:
        seen += step()
    return {"examples": seen, "gradients": seen, "seconds": seconds}


def _measure(w: Workload, what: str, threads: str) -> Measurement:
    if what == "limit":
        return limit(w, int(threads))
    return loop(w, int(threads), channels_last=what == "channels-last")


if __name__ == "__main__":
    main(_measure)
