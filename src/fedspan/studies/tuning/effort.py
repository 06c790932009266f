"""What a method is given: how many minibatch steps a client takes in a round, and before its model is used."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from fedspan.config import RunConfig, assemble
from fedspan.learn.batches import Amount, Epochs, Portion, Steps
from fedspan.method import Abilities


def steps_of(config: RunConfig) -> tuple[float, float]:
    """Minibatch steps of a client in a round and before use, mean over clients: what the method's plans ask for.

    Passes that only look at examples (statistics, validation) are no steps.
    """
    method, task, data = assemble(config)
    size = config.train.batch_size
    sizes = data.sizes

    def count(plan: Mapping[str, Amount]) -> float:
        return sum(_steps(amount, sizes, size, config.train.epochs) for amount in plan.values())

    return count(method.plan()), count(Abilities(method).adapts.personal_plan(task))


def _steps(amount: Amount, sizes: np.ndarray[tuple[int], np.dtype[np.int64]], size: int | str, epochs: int) -> float:
    def passes(share: float) -> float:
        return float(np.mean([math.ceil(max(1, share * n) / (n if isinstance(size, str) else size)) for n in sizes]))

    match amount:
        case Epochs(number, whole) if not whole:  # over the whole it is trained later, in the place of the other
            return (epochs if number is None else number) * passes(1.0)
        case Steps(number):
            return float(number)
        case Portion(share):
            return passes(share)
    return 0.0
