"""Classes as a client sees them: which it has, and the mean of the head's inputs for each."""

from __future__ import annotations

import torch
from torch import Tensor

from fedspan.errors import ConfigError
from fedspan.learn.batches import Batch, Batches
from fedspan.learn.task import Task
from fedspan.tree import Params


def class_matrix(task: Task, who: str) -> str:
    """The name of the head's matrix, one row per class.

    Raises:
        ConfigError: for a task without classes, or a head without exactly one matrix; `who` needs it.
    """
    start = task.init()
    names = [k for k in task.need_head() if start[k].ndim == 2]
    if task.kind != "classification" or len(names) != 1:
        raise ConfigError(
            f"{who}: the model must be a classifier whose head has one matrix, a row per class. Got a {task.kind} task"
            f" and {len(names)} matrices in the head."
        )
    return names[0]


def members(batch: Batch, classes: int, dtype: torch.dtype) -> Tensor:
    """1 where an example of the batch is of a class, [B, C]; empty slots are of none."""
    # `one_hot` looks at its values, which a mapped derivative cannot.
    return (batch.y[:, None] == torch.arange(classes, device=batch.y.device)).to(dtype) * batch.w.to(dtype)[:, None]


def class_means(task: Task, params: Params, batches: Batches, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Mean feature of every class in a stream, zero for those it lacks, and how many examples there are.

    Args:
        matrix: the head's matrix [C, D], for its shape and type.
    """
    return class_means_and_square(task, params, batches, matrix)[:2]


def class_means_and_square(
    task: Task, params: Params, batches: Batches, matrix: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same from the same pass with the mean squared norm of the features, zero where there are no examples."""
    total, count, square = torch.zeros_like(matrix), torch.zeros_like(matrix[:, 0]), torch.zeros_like(matrix[0, 0])
    with torch.no_grad():
        for batch in batches:
            member, features = members(batch, len(matrix), matrix.dtype), task.features_of(params, batch)
            total = total + member.T @ features
            count = count + member.sum(0)
            square = square + (member.sum(1) * features.square().sum(1)).sum()
    return total / count.clamp_min(1)[:, None], count, square / count.sum().clamp_min(1)
