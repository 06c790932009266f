"""pfl-research: `FederatedAveraging` on its `SimulatedBackend`, one process with torch's threads.

https://apple.github.io/pfl-research
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import version

os.environ.setdefault("PFL_PYTORCH_DEVICE", "cpu")

import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from bench.measurement import Measurement, Rounds, main
from bench.models import build
from bench.workloads import LR, Workload


class Judged(nn.Module):
    """A model with the two functions that pfl asks for."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        out: Tensor = self.module(x)
        return out

    def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
        """Mean loss of a batch."""
        self.train(not eval)
        return F.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor, eval: bool = True) -> dict[str, Weighted]:
        """Loss and accuracy of a user's examples."""
        self.train(not eval)
        out = self(x)
        loss = F.cross_entropy(out, y, reduction="sum").item()
        right = (out.argmax(1) == y).sum().item()
        return {"loss": Weighted(loss, len(y)), "accuracy": Weighted(right, len(y))}


class Marks(TrainingProcessCallback):  # type: ignore[misc]
    """Marks the end of every central iteration."""

    def __init__(self, rounds: Rounds) -> None:
        self.rounds = rounds

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):  # type: ignore[no-untyped-def]
        """Go on until all iterations are done."""
        self.rounds.end()
        return False, Metrics()


def average(
    module: nn.Module,
    train: FederatedDataset,
    val: FederatedDataset | None = None,
    *,
    rounds: int,
    cohort: int,
    batch: int,
    every: int,
    judged: int = 0,
    callbacks: Sequence[TrainingProcessCallback] = (),
) -> None:
    """Federated averaging of `rounds` iterations, evaluated on `judged` users of `val` at every so many of them."""
    model = PyTorchModel(
        model=Judged(module),
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
    )
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=every,
            train_cohort_size=cohort,
            val_cohort_size=judged,
        ),
        backend=SimulatedBackend(training_data=train, val_data=val, postprocessors=[WeightByDatapoints()]),
        model=model,
        model_train_params=NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LR, local_batch_size=batch),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=list(callbacks),
        send_metrics_to_platform=False,
    )


def measure(w: Workload) -> Measurement:
    """Rounds without evaluation; the first, which pfl evaluates in any case, is not counted."""
    torch.manual_seed(0)
    data = w.data()
    x, y = torch.from_numpy(data.x), torch.from_numpy(data.y)
    users = {i: (x[rows], y[rows]) for i, rows in enumerate(data.train)}
    order = (i for some in w.sampled() for i in some)
    rounds = Rounds()

    def dataset(user: int) -> Dataset:
        rounds.add(len(users[user][1]))
        return Dataset(raw_data=list(users[user]), user_id=str(user))

    sampler = FederatedDataset(dataset, lambda: next(order))
    cohort = w.participants
    marks = [Marks(rounds)]
    average(build(w), sampler, rounds=w.rounds + 1, cohort=cohort, batch=w.batch, every=10**9, callbacks=marks)
    return {**rounds.measurement(), "version": f"pfl {version('pfl')}"}


if __name__ == "__main__":
    main(measure)
