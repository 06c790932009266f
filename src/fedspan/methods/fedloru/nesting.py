"""Nested factors for clients of smaller rank: A + α_A A_d A_u and B + α_B B_d B_u, trained with A and B fixed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from fedspan.errors import ConfigError
from fedspan.layers import AdapterStart
from fedspan.learn.batches import Batch
from fedspan.learn.task import Task
from fedspan.linalg import lowrank
from fedspan.method import Visit
from fedspan.method.fields import AtLeast1, Positive
from fedspan.randomness import fold
from fedspan.tree import Params, Tree

if TYPE_CHECKING:
    from fedspan.methods.fedloru.fedloru import FedLoRU

INNER = ("A_d", "A_u", "B_d", "B_u")
TRAINED_ALWAYS = ("A_d", "B_u")
"""Those that start at zero; with the others they make products of zero."""


@dataclass(frozen=True, kw_only=True)
class Nesting:
    """The ranks that clients can afford, and how their inner factors start and count."""

    KEYS: ClassVar[Mapping[str, str]] = {
        "ranks": "ranks",
        "alpha_inner": "alpha",
        "alpha_inner_by_rank": "by_rank",
        "inner_start": "start",
        "inner_frozen": "frozen",
        "opt_out": "opt_out",
    }

    ranks: tuple[AtLeast1, ...] = ()
    """The ranks r_k that clients train with, in turn; none: all train A and B themselves."""
    alpha: Positive = 0.5
    """α_A = α_B, what inner products are multiplied by."""
    by_rank: bool = False
    """Whether inner products are multiplied by that times r_k instead, as the paper writes it word for word."""
    start: AdapterStart = "gaussian"
    """How A_u and B_d start in every round: Gaussian, or as the identity; A_d and B_u start at zero."""
    frozen: bool = False
    """Whether A_u and B_d stay as they start."""
    opt_out: bool = True
    """Whether a client that can afford the full rank r trains A and B themselves."""

    def check(self, method: FedLoRU) -> None:
        """Check the ranks against the method's own.

        Raises:
            ConfigError: if a rank is larger, or the factors cannot be nested.
        """
        who = type(method).__name__
        if any(r > method.rank for r in self.ranks):
            raise ConfigError(
                f"{who}: ranks must be integers in 1..{method.rank}, the global rank. Got {list(self.ranks)}."
            )
        if self.ranks and (method.freeze_A or method.adapter != "lora"):
            raise ConfigError(
                f"{who}: ranks go with adapter 'lora' and freeze_A=false only. Got {method.adapter!r} and"
                f" {method.freeze_A}."
            )

    def used(self, r_k: int, r: int) -> bool:
        """Whether a client of rank r_k trains inner factors."""
        return bool(self.ranks) and not (r_k == r and self.opt_out)

    def alpha_of(self, r_k: int) -> float:
        """α_A = α_B of a client."""
        return self.alpha * r_k if self.by_rank else self.alpha

    def draw(self, A: Params, B: Params, r_k: int, key: Tensor) -> Tree:
        """Inner factors as a round starts: A_d A_u = 0 and B_d B_u = 0."""
        found: Tree = {}
        for at, factor in enumerate(INNER):
            found[factor] = {}
            for j, (name, p) in enumerate((A if factor.startswith("A") else B).items()):
                shape = (p.shape[0], r_k) if factor.endswith("d") else (r_k, p.shape[1])
                found[factor][name] = lowrank.draw(factor, p.new_zeros(shape), fold(fold(key, at), j), self.start)
        return found

    def recover(self, A: Params, B: Params, inner: Tree, r_k: int) -> dict[str, Params]:
        """A + α_A A_d A_u and B + α_B B_d B_u."""
        alpha = self.alpha_of(r_k)
        return {
            "A": {k: p + alpha * inner["A_d"][k] @ inner["A_u"][k] for k, p in A.items()},  # eq. (33)
            "B": {k: p + alpha * inner["B_d"][k] @ inner["B_u"][k] for k, p in B.items()},
        }

    def lift(self, mean: Tree, shared: Tree, r_k: int) -> Tree:
        """An upload with A^(k) and B^(k) in the place of its inner factors, if it has any."""
        if "A_d" not in mean:
            return mean
        return {"theta": mean["theta"], **self.recover(shared["A"], shared["B"], mean, r_k)}

    def solve(
        self, method: FedLoRU, task: Task, free: Params, fixed: Params, visit: Visit, r_k: int
    ) -> tuple[Tree, Params]:
        """Train inner factors and the rest of `free`, with A, B and what is fixed as they are.

        What is sent, and what of it stays at home.
        """
        parts, h = method.apart(task, free)
        A, B = parts["A"], parts["B"]
        inner = self.draw(A, B, r_k, visit.key)
        trained = {k: inner[k] for k in (TRAINED_ALWAYS if self.frozen else INNER)}

        def f(p: Tree, batch: Batch) -> Tensor:
            made = self.recover(A, B, inner | p, r_k)
            return task.loss(fixed | p["rest"] | made["A"] | made["B"], batch)  # eq. (9)

        lr = method.schedule.rate(method.lr, int(visit.round))
        new = inner | method.fit(f, {"rest": parts["theta"] | h, **trained}, visit["train"], lr)
        theta, h = method.split(task, new.pop("rest"))
        return {"theta": theta, **new}, h


def secure_sum(method: Any) -> str:
    """Whether uploads could be added up unseen: not where the server multiplies each client's inner factors."""
    return "no" if method.nesting.ranks else "yes"
