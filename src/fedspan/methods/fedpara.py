"""FedPara and pFedPara: weights as element-wise products of two matrices of low rank."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from fedspan.errors import ConfigError
from fedspan.layers import Hadamard, Plain, Which, choose, convert, part, structured
from fedspan.learn.task import Task
from fedspan.method import About, Capacity, Converts, Discloses, Sent, Sharing, Visit
from fedspan.method.fields import AtLeast1, Fraction
from fedspan.tree import Tree


@dataclass(frozen=True, kw_only=True)
class HadamardForm:
    """How weights become element-wise products: which layers, of what rank, from which start."""

    KEYS: ClassVar[Mapping[str, str]] = {
        "rank": "rank",
        "gamma": "gamma",
        "ratio": "ratio",
        "layers": "layers",
        "only_smaller": "only_smaller",
        "tanh": "tanh",
        "init": "init",
    }

    rank: AtLeast1 | None = None
    """r of all layers; found from `gamma` and `ratio` if not given."""
    gamma: Fraction = 0.5
    """γ, where r of a linear layer lies: 0 the least that allows full rank, 1 the largest that saves numbers."""
    ratio: Fraction = 0.5
    """Share of a convolution's numbers that its factors are to have."""
    layers: Which = "all"
    """Layers that become products: all, all but the head, or those whose names start with one of these."""
    only_smaller: bool = False
    """Whether layers whose factors would have more numbers than their weight stay plain."""
    tanh: bool = False
    """Whether tanh is taken of each of the two matrices before they are multiplied."""
    init: Literal["matched", "kaiming"] = "matched"
    """Whether W has Kaiming's variance at the start, or each factor that for its own shape, as published."""

    def converted(self, task: Task, who: str, plus_one: bool) -> Task:
        """A task whose linear and convolutional layers are products, W₁ ∘ (W₂ + 1) with `plus_one`."""
        chosen = [
            name
            for name, layer in choose(task, self.layers, who).items()
            if not self.only_smaller or factors(layer, self.rank_of(layer)) < layer.weight.numel()
        ]
        if not chosen:
            raise ConfigError(
                f"{who}: no layer becomes smaller by its factors; use a smaller rank, or only_smaller=false."
            )

        def product(layer: Plain) -> Hadamard:
            return Hadamard(layer, self.rank_of(layer), plus_one, self.tanh, self.init)

        return task.converted(lambda module: convert(module, chosen, product))

    def rank_of(self, layer: Plain) -> int:
        """r of one layer."""
        if self.rank is not None:
            return self.rank
        o, i, *kernel = tuple(layer.weight.shape)
        if not kernel:
            low = math.ceil(math.sqrt(min(o, i)))  # r² ≥ min(m, n): W can have full rank
            high = o * i // (2 * (o + i))  # the largest r with 2r(m + n) ≤ mn
            return max(low, round((1 - self.gamma) * low + self.gamma * high))
        k2 = math.prod(kernel)
        # The root of 2r²k² + 2r(o + i) = ratio · o · i · k².
        root = math.sqrt((o + i) ** 2 / (4 * k2**2) + self.ratio * o * i / 2) - (o + i) / (2 * k2)
        return max(math.ceil(math.sqrt(o)), math.ceil(math.sqrt(i)), math.ceil(root))


@dataclass(frozen=True, kw_only=True)
class FedPara(Sharing, Converts):
    """FedPara. Hyeon-Woo, Ye-Bin and Oh, ICLR 2022.

    W = (X₁Y₁ᵀ) ∘ (X₂Y₂ᵀ) has rank up to r² with 2r(m + n) numbers; convolutions use the tensor form. Symbols: theta =
    all factors and what is not factorised, averaged factor by factor; gamma = γ of linear layers, ratio = wanted share
    of a convolution's numbers, `rank` fixes r for both. With `only_smaller` layers whose factors would be
    larger than their weight stay plain. Kept: h, the private head if `private_head`. Sent: theta.

    The published start ("kaiming") draws every factor with Kaiming's deviation for its own shape; here W itself gets
    Kaiming's variance (`init = "matched"`), without which plain linear networks start with huge outputs. The paper's
    Jacobian regularisation is left out.
    """

    about = About(
        family="fedpara",
        reference="Hyeon-Woo et al., ICLR 2022",
        discloses=Discloses(labels="set", model="whole", examples=True, resembles=True),
    )

    form: HadamardForm = HadamardForm()
    """How weights become products."""

    def model(self, task: Task, capacity: Capacity) -> Task:
        """Linear and convolutional layers as W₁ ∘ W₂."""
        return self.form.converted(task, type(self).__name__, plus_one=False)

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        return self.train_together(task, task.loss, client, down, visit)


@dataclass(frozen=True, kw_only=True)
class PFedPara(Sharing, Converts):
    """pFedPara. Hyeon-Woo, Ye-Bin and Oh, ICLR 2022, Section 2.3.

    W = W₁ ∘ (W₂ + 1), with W_j = X_j Y_jᵀ as in FedPara: the first pair of factors is shared, the second stays on the
    client and starts from common values. Kept: h, the second factors (and the head if `private_head`). Sent: theta, all
    the rest.
    """

    about = About(
        family="fedpara",
        reference="Hyeon-Woo et al., ICLR 2022",
        discloses=Discloses(labels="set", model="part", examples=True, resembles=True),
    )

    private_head: bool = True
    """Whether the head stays on the client; the paper's is averaged with the rest."""
    form: HadamardForm = HadamardForm()
    """How weights become products."""

    def model(self, task: Task, capacity: Capacity) -> Task:
        """Linear and convolutional layers as W₁ ∘ (W₂ + 1)."""
        return self.form.converted(task, type(self).__name__, plus_one=True)

    def private(self, task: Task) -> list[str]:
        """The second factors, and the head if wanted."""
        second = {part(k, f"{p}2") for k in structured(task.module) for p in "TXY"}
        second |= set(super().private(task))
        return [k for k in task.names if k in second]

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        return self.train_together(task, task.loss, client, down, visit)


def factors(layer: Plain, rank: int) -> int:
    """Numbers in the factors of one layer: 2r(m + n), and 2r²k² more for a convolution."""
    o, i, *kernel = layer.weight.shape
    return 2 * rank * (o + i) + (2 * rank**2 * math.prod(kernel) if kernel else 0)
