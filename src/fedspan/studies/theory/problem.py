"""Problems with linear models: quadratic and logistic f_i as data of a `Task`, and ψ of eq. (6) written out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from fedspan.data.federated import FederatedData
from fedspan.learn.task import Task
from fedspan.models.simple import Linear
from fedspan.randomness import generator


@dataclass(frozen=True)
class Problem:
    """Clients with m examples each of a linear model without bias: its parameters are θ_i itself."""

    x: Tensor  # [n, m, d]
    y: Tensor  # [n, m]
    task: Task

    @property
    def data(self) -> FederatedData:
        """The same examples as a federation's data, all of them for training."""
        n, m, d = self.x.shape
        rows = [np.arange(i * m, (i + 1) * m, dtype=np.int64) for i in range(n)]
        none = [np.empty(0, np.int64) for _ in rows]
        return FederatedData(x=self.x.reshape(n * m, d), y=self.y.reshape(-1), train=rows, test=none)

    def psi(self, U: Tensor, V: Tensor) -> Tensor:
        """ψ(U, V) = (1/n) Σ f_i(U v_i), eq. (6): not by the method's code, so that it can judge it."""
        z = torch.einsum("imd,dr,ir->im", self.x, U, V)
        return self.task.example_loss(z.reshape(-1), self.y.reshape(-1)).mean()

    def losses(self, U: Tensor, V: Tensor) -> Tensor:
        """ψ along a path of U [T, d, r] and V [T, n, r]."""
        result: Tensor = vmap(self.psi)(U, V)
        return result

    def client_gradients(self, U: Tensor, V: Tensor) -> Tensor:
        """∇f_i(U v_i) of every client along a path [T, n, d]."""
        m = self.x.shape[1]
        theta = V @ U.transpose(1, 2)  # [T, n, d]
        z = (self.x @ theta[..., None]).squeeze(-1)  # [T, n, m]
        slopes = self.task.output_gradient(z.reshape(-1), self.y.expand_as(z).reshape(-1)).reshape(z.shape)
        return (slopes[..., None, :] @ self.x).squeeze(-2) / m

    def gradients(self, U: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
        """∇_U ψ = (1/n) Σ ∇f_i(U v_i) v_iᵀ and ∇_V ψ = (1/n) [∇f_i(U v_i)ᵀ U]_i along a path, eq. (7)."""
        g = self.client_gradients(U, V) / len(self.x)
        return g.transpose(1, 2) @ V, g @ U


def task_of(d: int, logistic: bool = False) -> Task:
    """A linear model of d numbers without bias in float64, with squared or logistic loss."""
    loss = (lambda z, y: F.softplus(-y * z.reshape(y.shape))) if logistic else None
    return Task(Linear((d,), 1, bias=False), "regression", loss=loss, dtype=torch.float64, seed=0)


def quadratic(A: Tensor, H: Tensor | None = None) -> Problem:
    """f_i(θ) = ½ (θ − a_i)ᵀ H_i (θ − a_i), with a_i the columns of A [d, n] and H [n, d, d] (the identity if None).

    As data: d examples X = (d/2)^{1/2} H^{1/2} with targets X a_i, whose mean squared error is f_i.
    """
    d, n = A.shape
    H = torch.eye(d, dtype=A.dtype).expand(n, d, d) if H is None else H
    values, vectors = torch.linalg.eigh(H)
    root = vectors * values.clamp_min(0).sqrt()[:, None, :] @ vectors.transpose(1, 2)
    x = (d / 2) ** 0.5 * root
    return Problem(x, torch.einsum("imd,di->im", x, A), task_of(d))


def drawn_quadratic(d: int, n: int, r: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Draw H [n, d, d] with curvature between ½ and 2, and minimisers A [d, n] that lie near a subspace of rank r."""
    A = rng.normal(size=(d, r)) @ rng.normal(size=(r, n)) / r**0.5 + 0.2 * rng.normal(size=(d, n))
    Q = torch.linalg.qr(torch.from_numpy(rng.normal(size=(n, d, d))))[0]
    H = Q * torch.from_numpy(rng.uniform(0.5, 2.0, size=(n, 1, d))) @ Q.transpose(1, 2)
    return H, torch.from_numpy(A)


def random_quadratic(d: int = 8, n: int = 12, r: int = 2, seed: int = 0) -> Problem:
    """Quadratics with curvature between ½ and 2, whose minimisers lie near a subspace of rank r."""
    H, A = drawn_quadratic(d, n, r, generator(seed, "quadratic"))
    return quadratic(A, H)


def random_logistic(d: int = 8, n: int = 12, r: int = 2, m: int = 40, seed: int = 0) -> Problem:
    """Logistic regression on m noisy labels per client, so that no client's data can be separated perfectly."""
    rng = generator(seed, "logistic")
    theta = 2 * rng.normal(size=(n, r)) @ rng.normal(size=(r, d)) / (r * d) ** 0.5
    x = rng.normal(size=(n, m, d))
    chance = 1 / (1 + np.exp(-2 * np.einsum("imd,id->im", x, theta)))
    y = np.where(rng.random((n, m)) < chance, 1.0, -1.0)
    return Problem(torch.from_numpy(x), torch.from_numpy(y), task_of(d, logistic=True))
