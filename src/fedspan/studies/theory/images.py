"""One client's pictures, and its training epoch by epoch: what the checks of Factorized-FL share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedspan import tree
from fedspan.data import Source, load
from fedspan.errors import DataError
from fedspan.learn.batches import Batches, Epochs, draw
from fedspan.learn.optimizer import Optimizer
from fedspan.learn.sgd import sgd_from
from fedspan.learn.task import Task
from fedspan.method.fields import with_keys
from fedspan.methods.as_written import as_written
from fedspan.methods.factorized_fl import FactorizedLocal
from fedspan.methods.factorized_fl.factorization import corrections
from fedspan.models.cnn import CNN
from fedspan.randomness import generator, key
from fedspan.tree import Params

SIDE = 16
"""Pictures are SIDE × SIDE: a quarter of the work of 32 × 32, and the two convolutions of the CNN still see enough."""

_GREY = torch.tensor([0.299, 0.587, 0.114])  # luma of red, green and blue


@dataclass(frozen=True)
class Size:
    """How much is run."""

    train: int
    test: int
    epochs: int
    batch: int = 32


QUICK = Size(train=40, test=40, epochs=2, batch=20)
"""Only to see that everything works; its numbers mean nothing."""


@dataclass(frozen=True)
class Images:
    """Pictures [N, channels, SIDE, SIDE] to train on and to be tested by, with their labels."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int = 10

    def renamed(self, names: Tensor) -> Images:
        """The same pictures, class c called names[c]."""
        return replace(self, y=names[self.y], y_test=names[self.y_test])

    def halves(self) -> tuple[Images, Images]:
        """Two partitions of the training pictures; both are tested by the same ones."""
        n = len(self.y) // 2
        first, second = (replace(self, x=self.x[s], y=self.y[s]) for s in (slice(n), slice(n, 2 * n)))
        return first, second


def digits(root: str | None, train: int, test: int, seed: int = 0) -> Images:
    """MNIST, averaged to 14 × 14 and put into the middle of 16 × 16 black pixels."""
    source = load("mnist", root, size=SIDE - 2)
    black = (0.0 - source.mean[0]) / source.std[0]
    return _choose(source, torch.nn.functional.pad(source.x, (1, 1, 1, 1), value=black), train, test, seed)


def colour(root: str | None, train: int, test: int, seed: int = 0) -> Images:
    """CIFAR-10, averaged to 16 × 16."""
    source = load("cifar10", root, size=SIDE)
    return _choose(source, source.x, train, test, seed)


def grey(root: str | None, train: int, test: int, seed: int = 0) -> Images:
    """CIFAR-10 in the shape of `digits`: averaged to 16 × 16, its luma brought to mean 0 and variance 1."""
    source = load("cifar10", root, size=SIDE)
    mean, std = (torch.tensor(v).reshape(3, 1, 1) for v in (source.mean, source.std))
    luma = ((source.x * std + mean) * _GREY.reshape(3, 1, 1)).sum(1, keepdim=True)
    return _choose(source, (luma - luma.mean()) / luma.std(), train, test, seed)


def _choose(source: Source, x: Tensor, train: int, test: int, seed: int) -> Images:
    """Random pictures of the source's own two parts.

    Raises:
        DataError: if there are fewer than wanted.
    """
    own = np.setdiff1d(np.arange(len(source)), source.test_rows)
    chosen = []
    for part, rows, wanted in (("training", own, train), ("test", source.test_rows, test)):
        if len(rows) < wanted:
            raise DataError(
                f"Data: '{source.name}' must have {wanted} {part} pictures here. Got {len(rows)}; use complete files,"
                " or --quick."
            )
        chosen.append(torch.from_numpy(generator(seed, "pictures", part).permutation(rows)[:wanted]))
    a, b = chosen
    return Images(x[a], source.y[a], x[b], source.y[b], source.classes)


def network(images: Images, seed: int = 0) -> Task:
    """The CNN with group normalisation, without which models of rank one hardly start to train."""
    shape = (images.x.shape[1], images.x.shape[2], images.x.shape[3])
    return Task(lambda: CNN(shape, images.classes, padding=2, norm="group"), seed=seed)


def written(lr: float = 0.01, momentum: float = 0.9) -> FactorizedLocal:
    """A client of the paper, whose μ starts at zero: with the default's all layouts would start as one model."""
    method = FactorizedLocal(lr=lr, optimizer=Optimizer(momentum=momentum))
    return with_keys(method, **as_written("factorized-local"))


def epochs(
    method: FactorizedLocal, task: Task, start: Params, images: Images, size: Size, *, first: int = 1, seed: int = 0
) -> Iterator[Params]:
    """The parameters after every epoch, `first` being the number of the first one; momentum goes on in between.

    Plain and factorised models go through the same steps; the penalty on μ is that of the method, eq. (6).
    """
    mus, momentum = corrections(task), method.optimizer.momentum
    objective, prox = method.penalty.objective(task.loss, mus), method.penalty.prox(mus, method.lr, momentum)
    params, velocity = start, tree.zeros_like(start)
    rows, none = np.arange(len(images.y)), np.empty(0, np.int64)
    for t in range(first, first + size.epochs):
        order = draw(rows, none, {"train": Epochs(1)}, seed=seed, round=t, client=0, batch_size=size.batch, epochs=1)[
            "train"
        ]
        stream = Batches(images.x, images.y, torch.from_numpy(order), key(seed, "train", t))
        params, velocity = sgd_from(objective, params, velocity, stream, method.lr, momentum=momentum, prox=prox)
        yield params


def accuracy(task: Task, params: Params, images: Images) -> float:
    """Share of the test pictures that are recognised."""
    with torch.no_grad():
        found = torch.cat([task.predict(params, x).argmax(1) for x in torch.split(images.x_test, 500)])
    return float((found == images.y_test).double().mean())


def settled(curve: Sequence[float]) -> float:
    """Mean over the last five epochs: single ones swing by more than what is to be told apart."""
    last = curve[-5:]
    return sum(last) / len(last)


def nonzero(params: Params) -> int:
    """How many parameters are not zero."""
    return sum(int(p.count_nonzero()) for p in params.values())
