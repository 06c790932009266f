"""Federated averaging in plain torch, as a script without a framework would do it: `python -m bench.job.plain JOB`."""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.job.pictures import BATCH, EVERY, ROUNDS, Pictures, load, perceptron
from bench.workloads import LR, PARTICIPATION

Weights = dict[str, Tensor]


def local_epoch(module: nn.Module, data: Pictures, rows: Tensor) -> None:
    """One pass of minibatch SGD over a client's examples, in place."""
    params = list(module.parameters())
    for at in rows[torch.randperm(len(rows))].split(BATCH):
        loss = F.cross_entropy(module(data.x.index_select(0, at)), data.y.index_select(0, at))
        slopes = torch.autograd.grad(loss, params)
        with torch.no_grad():
            torch._foreach_sub_(params, slopes, alpha=LR)


@torch.no_grad()
def accuracy(module: nn.Module, data: Pictures) -> float:
    """The mean over clients of the accuracy on their held-out examples."""
    found = []
    for rows in data.test:
        out = module(data.x.index_select(0, rows))
        found.append(float((out.argmax(1) == data.y.index_select(0, rows)).float().mean()))
    return float(np.mean(found))


def main() -> None:
    """A hundred rounds, evaluated every tenth."""
    data = load(first="first" in sys.argv)
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    module = perceptron()
    common: Weights = {k: v.clone() for k, v in module.state_dict().items()}
    clients = len(data.train)
    reached = 0.0
    for t in range(1, ROUNDS + 1):
        ids = rng.choice(clients, round(PARTICIPATION * clients), replace=False)
        total = {k: torch.zeros_like(v) for k, v in common.items()}
        weight = sum(len(data.train[i]) for i in ids)
        for i in ids:
            module.load_state_dict(common)
            local_epoch(module, data, data.train[i])
            for k, v in module.state_dict().items():
                total[k].add_(v, alpha=len(data.train[i]) / weight)
        common = total
        if t % EVERY == 0:
            module.load_state_dict(common)
            reached = accuracy(module, data)
    print(json.dumps({"accuracy": reached}))


if __name__ == "__main__":
    main()
