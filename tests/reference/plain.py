"""What the pages share: a perceptron, its loss, gradient steps, weighted means, and the list of pages. torch alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

Weights: TypeAlias = dict[str, Tensor]
Batch: TypeAlias = tuple[Tensor, Tensor]
Fields: TypeAlias = Mapping[str, Any]
Found: TypeAlias = dict[str, Tensor]

BODY, HEAD = ("0.weight", "0.bias", "2.weight", "2.bias"), ("4.weight", "4.bias")
NAMES = (*BODY, *HEAD)
LAYERS = ("0", "2", "4")


@dataclass(frozen=True)
class Problem:
    """A federation as plain tensors: no random number is left to draw.

    `passes[t, i]` are shuffled passes over client i's examples in round t, each cut into minibatches of row numbers; a
    phase of e epochs takes the first e of them. `server`, `clients` and `common` hold what a method starts from, by
    path; `drawn` what the paper calls random later on.
    """

    x: Tensor
    y: Tensor
    classes: int
    train: Sequence[Tensor]
    groups: Tensor
    start: Weights
    rounds: int
    epochs: int
    asked: Mapping[int, Sequence[int]]
    passes: Mapping[tuple[int, int], Sequence[Sequence[Tensor]]]
    server: Weights
    clients: Sequence[Weights]
    common: Weights
    drawn: Mapping[str, Any]

    @property
    def ids(self) -> range:
        """All clients."""
        return range(len(self.train))

    @property
    def times(self) -> range:
        """All rounds, the first is 1."""
        return range(1, self.rounds + 1)

    def at(self, rows: Tensor) -> Batch:
        """Examples by row numbers."""
        return self.x[rows], self.y[rows]

    def all(self, client: int) -> Batch:
        """All training examples of a client."""
        return self.at(self.train[client])

    def batches(self, t: int, client: int, epochs: int | None = None) -> list[Batch]:
        """The minibatches of a phase of so many epochs; the run's number of them if not given."""
        many = self.epochs if epochs is None else epochs
        return [self.at(rows) for one in self.passes[t, client][:many] for rows in one]

    def n(self, clients: Iterable[int]) -> list[float]:
        """Numbers of training examples."""
        return [float(len(self.train[i])) for i in clients]


@dataclass(frozen=True)
class Page:
    """One method's reference: the function, what it was written from, and the fields it is compared with.

    `seen` names what the writer had seen of this library's own code for the method before the page was done; there the
    page checks the arithmetic and not the reading.
    """

    run: Callable[[Problem, Fields], Found]
    source: str
    cases: Sequence[dict[str, Any]]
    seen: str


PAGES: dict[str, Page] = {}


def reference(name: str, source: str, *cases: dict[str, Any], seen: str = "") -> Callable[[Any], Any]:
    """Enter a function into the list; without cases it is compared with the method's default fields."""

    def enter(run: Callable[[Problem, Fields], Found]) -> Callable[[Problem, Fields], Found]:
        assert name not in PAGES, name
        PAGES[name] = Page(run, source, cases or ({},), seen)
        return run

    return enter


# ------------------------------------------------------------------------------------------------ network and steps


def features(w: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """What the head of the perceptron gets."""
    h = torch.relu(x @ w["0.weight"].T + w["0.bias"])
    return torch.relu(h @ w["2.weight"].T + w["2.bias"])


def forward(w: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The perceptron's outputs."""
    return features(w, x) @ w["4.weight"].T + w["4.bias"]


def loss(w: Mapping[str, Tensor], batch: Batch) -> Tensor:
    """Mean cross-entropy."""
    return cross_entropy(forward(w, batch[0]), batch[1])


def gradient(f: Callable[[Any], Tensor], at: Weights) -> Weights:
    """∂f/∂at."""
    leaf = {k: v.detach().clone().requires_grad_() for k, v in at.items()}
    found = torch.autograd.grad(f(leaf), list(leaf.values()), allow_unused=True)
    return {k: torch.zeros_like(at[k]) if g is None else g.detach() for k, g in zip(leaf, found)}


def slope(f: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """∂f/∂at for one tensor."""
    return gradient(lambda w: f(w["at"]), {"at": at})["at"]


def step(w: Mapping[str, Tensor], g: Mapping[str, Tensor], lr: float) -> Weights:
    """w − lr·g for what g names."""
    return {k: v - lr * g[k] if k in g else v for k, v in w.items()}


def fit(
    f: Fields,
    objective: Callable[[Any, Batch], Tensor],
    w: Weights,
    batches: Iterable[Batch],
    lr: float | None = None,
    after: Callable[[Weights], Weights] = lambda w: w,
) -> Weights:
    """SGD with momentum and weight decay as in torch, one step per minibatch; `after` follows every step."""
    speed = {k: torch.zeros_like(v) for k, v in w.items()}
    for batch in batches:
        slopes = gradient(lambda at: objective(at, batch), w)
        for k in w:
            speed[k] = f["momentum"] * speed[k] + slopes[k] + f["weight_decay"] * w[k]
        w = after(step(w, speed, f["lr"] if lr is None else lr))
    return w


def mean(trees: Sequence[Mapping[str, Tensor]], weights: Sequence[float] | None = None) -> Weights:
    """Σ w x / Σ w; all alike without weights."""
    some = [1.0] * len(trees) if weights is None else weights
    return {k: sum(w * t[k] for w, t in zip(some, trees)) / sum(some) for k in trees[0]}  # type: ignore[misc]


def weigh(p: Problem, f: Fields, clients: Sequence[int]) -> list[float]:
    """Weights in a mean, as the field `weighting` says."""
    return p.n(clients) if f["weighting"] == "samples" else [1.0] * len(clients)


def only(w: Mapping[str, Tensor], names: Iterable[str]) -> Weights:
    """The parameters of these names."""
    return {k: w[k] for k in names}


def square(a: Mapping[str, Tensor], b: Mapping[str, Tensor] | None = None) -> Tensor:
    """‖a − b‖², or ‖a‖²."""
    return sum(((v if b is None else v - b[k]) ** 2).sum() for k, v in a.items())  # type: ignore[return-value]


def shortened(w: Tensor, energy: float) -> Tensor:
    """The fewest singular triples of a matrix that hold this share of Σσ²; itself where they are no shorter."""
    if w.ndim < 2:
        return w
    left, s, right = torch.linalg.svd(w, full_matrices=False)
    rank = int(((s**2).cumsum(0) / (s**2).sum() < energy - 1e-12).sum()) + 1
    return w if rank * (sum(w.shape) + 1) >= w.numel() else left[:, :rank] * s[:rank] @ right[:rank]


# ------------------------------------------------------------------------------------------------ paths


def under(prefix: str, w: Mapping[str, Tensor]) -> Found:
    """Put a prefix before every name."""
    return {f"{prefix}/{k}": v for k, v in w.items()}


def within(w: Mapping[str, Tensor], prefix: str) -> Weights:
    """What stands under a prefix, without it."""
    return {k[len(prefix) + 1 :]: v for k, v in w.items() if k.startswith(prefix + "/")}


def models(each: Sequence[Mapping[str, Tensor]]) -> Found:
    """Every client's model, under its name."""
    return {path: v for i, w in enumerate(each) for path, v in under(f"model {i}", w).items()}
