"""Training a head on a fixed body: features of a client's examples are computed once and used in every epoch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from fedspan.learn.batches import Batch, Batches, pad, rows_of
from fedspan.learn.folded import mapped_by_hand, unwrapped, wrapped
from fedspan.learn.task import LossBeside, Task
from fedspan.tree import Params


class FrozenBody:
    """A body that stays as it is while a head is trained on a stream of minibatches.

    `batches` are the stream's minibatches and `loss` the task's mean loss of a head on one of them, 0 for an empty one.
    Where the body does the same to an example in every epoch, minibatches hold its features in the place of inputs;
    with dropout, batch normalisation, transforms of the inputs, or a head that is not the end of the model, they are
    those of the stream.

    Args:
        body: the parameters that stay as they are.
        trained: names of the others; if they are not the head's, nothing is stored.
        stream: the minibatches to train on.
    """

    def __init__(self, task: Task, body: Params, trained: Iterable[str], stream: Iterable[Batch]) -> None:
        self._task, self._body = task, body
        self.loss = LossBeside(task, body)
        self.batches: Iterable[Batch] = stream
        if isinstance(stream, Batches) and stream.transform is None and set(trained) == set(task.head):
            found = _distinct(stream)
            head = None if found is None else task.head_alone(stream.x, stream.mapped)
            if found is not None and head is not None:
                self.batches = self._with_features(stream, *found)
                self.loss = LossBeside(head, prefix=f"{task.head_layer}.")

    def _with_features(self, stream: Batches, own: Tensor, places: Tensor) -> Batches:
        """The stream over a client's features: each of its examples passes through the body once."""
        once = Batches(stream.x, stream.y, own, stream.key, mapped=stream.mapped)
        with torch.no_grad():
            seen = [(self._task.features(self._body, batch.x, train=True), batch.y) for batch in once]
        return replace(stream, x=torch.cat([x for x, _ in seen]), y=torch.cat([y for _, y in seen]), rows=places)


def _distinct(stream: Batches) -> tuple[Tensor, Tensor] | None:
    """The examples of a stream, each once, in rows as wide as its own, and their places in the stream's rows.

    None if no example comes twice.
    """
    if not stream.mapped:
        found = _each_once(stream.rows[None])
        return None if found is None else (found[0][0], found[1][0])
    rows, batched = unwrapped(stream.rows)
    if not batched:
        return None
    with mapped_by_hand():
        found = _each_once(rows)
    return None if found is None else (wrapped(found[0]), wrapped(found[1]))


def _each_once(rows: Tensor) -> tuple[Tensor, Tensor] | None:
    """`_distinct` of rows [C, K, B] of several clients."""
    each = [row[row >= 0].unique(return_inverse=True) for row in rows]
    if all(len(own) == len(at) for own, at in each):
        return None
    own = pad([rows_of(mine.cpu().numpy(), rows.shape[2]) for mine, _ in each]).to(rows.device)
    places = torch.full_like(rows, -1)
    for k, (_, at) in enumerate(each):
        places[k, rows[k] >= 0] = at
    return own, places
