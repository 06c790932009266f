"""The same job by pfl-research: `python -m bench.job.pfl JOB [first]`."""

from __future__ import annotations

import json
import sys

import torch
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler

from bench.job.pictures import BATCH, EVERY, ROUNDS, load, perceptron
from bench.job.plain import accuracy
from bench.peers.pfl_rounds import average
from bench.workloads import PARTICIPATION


def main() -> None:
    """A hundred rounds, evaluated every tenth on the held-out part of every client."""
    torch.manual_seed(0)
    data = load(first="first" in sys.argv)
    parts = {}
    for part, rows in (("train", data.train), ("test", data.test)):
        users = {i: Dataset([data.x[r], data.y[r]], user_id=str(i)) for i, r in enumerate(rows)}
        kind = "random" if part == "train" else "minimize_reuse"
        parts[part] = FederatedDataset(users.__getitem__, get_user_sampler(kind, list(users)))
    clients, module = len(data.train), perceptron()
    average(
        module,
        parts["train"],
        parts["test"],
        rounds=ROUNDS,
        cohort=round(PARTICIPATION * clients),
        judged=clients,
        batch=BATCH,
        every=EVERY,
    )
    print(json.dumps({"accuracy": accuracy(module, data)}))


if __name__ == "__main__":
    main()
