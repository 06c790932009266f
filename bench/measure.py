"""What is timed: fedspan's rounds, the plain loop without federation, the batched product that bounds a small model."""

from __future__ import annotations

import resource
import time

import numpy as np
import torch
import torch.nn.functional as F

from bench.workloads import Workload
from fedspan.learn.task import Task
from fedspan.methods import make
from fedspan.simulation.driver import Evaluated
from fedspan.simulation.settings import Settings, sample
from fedspan.simulation.simulator import Simulation


def fedspan_speed(w: Workload, method: str, fields: dict[str, object]) -> tuple[float, float]:
    """Training samples per second in whole rounds (evaluation and loading left out), and peak memory in MB.

    A sample counts once for every gradient taken on it: FedAvg takes one per epoch, the paper's pFL-MF one for each
    v-step and one for G.
    """
    data = w.data()
    settings = Settings(participation=0.1, batch_size=w.batch, evaluate_every=10**9)
    sim = Simulation(make(method, **fields), Task(w.module, seed=0), data, rounds=w.rounds + 1, settings=settings)
    marks: list[float] = []
    sim._evaluate = lambda t, ledger: Evaluated({}, {})  # type: ignore[method-assign]  # only training is timed here
    sim.run(lambda line: marks.append(time.perf_counter()))
    seen = 0
    for t in range(2, w.rounds + 2):
        sizes = data.sizes[sample(data.clients, settings, 0, t)]
        seen += int(sizes.sum())
        if "v_steps" in fields:
            seen += int(fields["v_steps"] * np.minimum(sizes, w.batch).sum())  # type: ignore[operator]
    usage = [resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return seen / (marks[-1] - marks[0]), max(usage)


def floor(w: Workload, seconds: float) -> float:
    """Samples per second of a plain PyTorch SGD loop on the same clients, one thread, no federation at all."""
    data, module = w.data(), w.module()
    torch.set_num_threads(1)
    seen, rounds = 0, 0
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        rounds += 1
        for i in sample(data.clients, Settings(participation=0.1), 0, rounds):
            optimizer = torch.optim.SGD(module.parameters(), 0.1)
            rows = torch.from_numpy(data.train[i])[torch.randperm(len(data.train[i]))]
            for at in rows.split(w.batch):
                optimizer.zero_grad()
                F.cross_entropy(module(data.x[at]), data.y[at]).backward()
                optimizer.step()
                seen += len(at)
    return seen / (time.perf_counter() - start)


def limit(w: Workload, seconds: float) -> float | None:
    """Samples per second if the batched matrix products of a perceptron were all there is to do, on all cores."""
    if w.model != "mlp":
        return None
    torch.set_num_threads(torch.get_num_interop_threads() or 1)
    clients = max(1, w.clients // 10)
    per_client = w.examples // w.clients
    batch = min(w.batch, per_client)
    sizes = [(784, 200), (200, 200), (200, 10)]
    weights = [torch.randn(clients, i, o) for i, o in sizes]
    inputs = [torch.randn(clients, batch, i) for i, _ in sizes]
    grads = [torch.randn(clients, batch, o) for _, o in sizes]
    seen, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        for k, (a, g, weight) in enumerate(zip(inputs, grads, weights)):
            torch.bmm(a, weight)
            weight.baddbmm_(a.transpose(1, 2), g, alpha=-1e-9)
            if k:
                torch.bmm(g, weight.transpose(1, 2))
        seen += clients * batch
    return seen / (time.perf_counter() - start)
