"""How many gradients a row takes: counted in a run, not by a formula. `python -m bench.counting WORKLOAD ROW`.

A sample counts once for every gradient that flows back through its loss while clients train. The run that counts has
the row's method, clients, rounds and minibatches, but a smaller model, and computes one client after another in one
process, where a hook on the loss hears of every backward pass. Fits in closed form on cached outputs count nothing, and
neither do phases that the safeguard takes again: whether it does depends on the values of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from bench.measurement import Measurement, main
from bench.ours import federated, simulation
from bench.rows import rounds_of
from bench.workloads import Workload
from fedspan.learn.task import Task

SMALL: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "mlp": ((1, 2, 2), {}),
    "cnn": ((3, 16, 16), {}),
    "resnet9": ((3, 11, 11), {"width": 16}),
}
"""The smallest pictures that the models take, and fewer channels: what is counted does not depend on either."""


class GradientCount:
    """Samples whose loss a gradient has come back through."""

    def __init__(self) -> None:
        self.samples = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear of the gradients of every task's loss meanwhile."""
        usual = Task.example_loss

        def heard(task: Task, output: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
            values = usual(task, output, y, mask)
            if values.requires_grad:
                values.register_hook(lambda _: self._add(len(y)))
            return values

        Task.example_loss = heard  # type: ignore[method-assign]
        try:
            yield
        finally:
            Task.example_loss = usual  # type: ignore[method-assign]

    def _add(self, samples: int) -> None:
        self.samples += samples


def count(w: Workload, row: str, rounds: int) -> int:
    """Gradients of samples in the rounds after the first, as many as are timed."""
    shape, options = SMALL[w.model]
    data = federated(w, shape)
    # One round more than is counted: the last one ends with the evaluation, which may fit something too.
    # A step too small to end in NaN, which the safeguard would have prevented: how many there are is the same.
    fields = {"safeguard": False, "lr": 1e-6}
    run = simulation(w, row, data, rounds + 2, options, mapping="loop", workers=1, fields=fields)
    counted, marks = GradientCount(), list[int]()
    with counted.listening():
        run.run(lambda _: marks.append(counted.samples))
    return marks[rounds] - marks[0]


def measure(w: Workload, row: str, rounds: str = "") -> Measurement:
    """The count of a row over the rounds that are timed."""
    return {"gradients": count(w, row, int(rounds or rounds_of(w, row)))}


if __name__ == "__main__":
    main(measure)
