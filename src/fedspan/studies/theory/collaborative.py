"""Collaborative filtering as pFL-MF: each user is a client, θ_u = U v_u are its scores of all items (Example 3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedspan.linalg.subspace import from_triangle, triangle
from fedspan.randomness import generator
from fedspan.studies.theory.ratings import Bias, Ints, Ratings, Reals


@dataclass(frozen=True)
class Rater:
    """What one user holds: the items it rated and what a base model leaves of its ratings."""

    items: Tensor
    left: Tensor

    def solve(self, U: Tensor, ridge: float) -> Tensor:
        """v_u = argmin ‖U_S v − left‖² + λ‖v‖², the v-step of eq. (8) taken to its end."""
        part = U[self.items]
        gram = part.T @ part + ridge * torch.eye(U.shape[1], dtype=U.dtype)
        v: Tensor = torch.linalg.solve(gram, part.T @ self.left)
        return v

    def upload(self, U: Tensor, v: Tensor) -> Upload:
        """What the user sends: −∇f_u(U v) on its items, v, and which items it rated."""
        return Upload(self.items, self.left - U[self.items] @ v, v)


@dataclass(frozen=True)
class Upload:
    """A rank-one statistic: G_u = −∇f_u v_uᵀ by its factors (eq. (7)); the gradient is zero off the rated items."""

    items: Tensor
    gradient: Tensor
    v: Tensor


class Sums:
    """All that the server's step uses, added up over users: M = Σ −∇f_u v_uᵀ, C = Σ v_u v_uᵀ, and raters per item."""

    def __init__(self, items: int, rank: int) -> None:
        self.M = torch.zeros(items, rank, dtype=torch.float64)
        self.C = torch.zeros(rank * (rank + 1) // 2, dtype=torch.float64)
        self.count = torch.zeros(items, dtype=torch.float64)
        self.users = 0

    def add(self, sent: Upload) -> None:
        """Add one user's upload; a secure sum would do."""
        self.M.index_add_(0, sent.items, torch.outer(sent.gradient, sent.v))
        self.C += triangle(torch.outer(sent.v, sent.v))
        self.count[sent.items] += 1
        self.users += 1


def server_step(U: Tensor, sums: Sums, ridge: float, lr: float) -> Tensor:
    """U_j ← U_j + η (M_j − λ q U_j)(n_j C̄ + λ q I)⁻¹, a scaled step of eq. (9) for every item j.

    The curvature of item j is Σ v_u v_uᵀ over its raters, r² numbers per item; the mean C̄ over all sampled users times
    its number of raters n_j stands for it. λ is scaled by the share q of users sampled, since the sums are.
    """
    r = U.shape[1]
    mean = from_triangle(sums.C, r) / max(1, sums.users)
    values, vectors = torch.linalg.eigh(mean)  # one decomposition serves all items
    turned = (sums.M - ridge * U) @ vectors / (sums.count[:, None] * values.clamp_min(0) + ridge)
    result: Tensor = U + lr * turned @ vectors.T
    return result


def clients_of(train: Ratings, base: Bias) -> list[Rater]:
    """One client per user, holding its training ratings minus the base model."""
    left = train.rating - base.predict(train)
    return [Rater(torch.from_numpy(train.item[k]), torch.from_numpy(left[k])) for k in train.by_user()]


@dataclass(frozen=True)
class Factors:
    """What training gives: U [items, r] on the server, and the v [users, r] that users solve for on it."""

    U: Tensor
    V: Tensor

    def predict(self, base: Bias, r: Ratings) -> Reals:
        """The base model plus θ_u = U v_u at each triple."""
        score: Reals = (self.U[torch.from_numpy(r.item)] * self.V[torch.from_numpy(r.user)]).sum(1).numpy()
        return base.predict(r) + score


def factorise(
    train: Ratings, base: Bias, rank: int, *, rounds: int = 40, participation: float = 0.5, ridge: float = 15.0,
    lr: float = 0.5, seed: int = 0,
) -> Factors:  # fmt: skip
    """Alternate between users who solve for v and a server that steps U on sums over the users sampled."""
    clients = clients_of(train, base)
    holders = np.array([u for u, c in enumerate(clients) if len(c.items)], np.int64)
    U = 0.1 * torch.from_numpy(generator(seed, "U", rank).normal(size=(train.items, rank)))
    for t in range(rounds):
        sums = Sums(train.items, rank)
        for u in sampled(holders, participation, seed, t):
            sums.add(clients[u].upload(U, clients[u].solve(U, ridge)))
        U = server_step(U, sums, ridge * participation, lr)
    return Factors(U, torch.stack([c.solve(U, ridge) for c in clients]))


def sampled(holders: Ints, participation: float, seed: int, t: int) -> list[int]:
    """Who takes part in a round."""
    size = max(1, round(participation * len(holders)))
    return sorted(generator(seed, "sample", t).choice(holders, size, replace=False).tolist())
