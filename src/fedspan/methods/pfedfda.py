"""pFedFDA: the head is a Gaussian discriminant whose statistics lie between the client's own and everybody's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from annotated_types import Gt, Lt
from torch import Tensor
from torch.func import vmap

from fedspan import tree
from fedspan.errors import ConfigError
from fedspan.learn.batches import All, Amount, Batches, Epochs
from fedspan.learn.class_features import class_matrix, members
from fedspan.learn.task import LossBeside, Task
from fedspan.linalg import subspace
from fedspan.method import (
    About,
    Capacity,
    ClientInfo,
    Discloses,
    Down,
    Estimates,
    Federation,
    Round,
    Sent,
    Sharing,
    Visit,
)
from fedspan.method.fields import Fraction, NonNegative
from fedspan.randomness import key, uniform
from fedspan.tree import Params, Tree


class Gaussians(NamedTuple):
    """Class means [C, D] and the covariance [D, D] that all classes share."""

    mu: Tensor
    S: Tensor


@dataclass(frozen=True, kw_only=True)
class PFedFda(Sharing, Estimates):
    """pFedFDA. McLaughlin and Su, NeurIPS 2024.

    Symbols: theta = the body φ, mu = class means μ_c, S = the common covariance Σ (its upper triangle), beta = (β_μ,
    β_Σ). The head is the discriminant of N(μ_c, Σ) with the client's own label frequencies. The body is trained under
    the head of the global statistics, which stays fixed and can be steep: steps must be small. Then the client
    estimates its own from its features and sends β·own + (1 − β)·global with the β in [0, 1]² that has the least
    cross-entropy in two-fold stratified validation: found on a grid, then a finer one, instead of ten steps of L-BFGS,
    so that clients can be computed at once. A class of at most two examples takes its global mean. The covariance gets
    `ridge`·I (published code adds I itself) and is shrunk by `epsilon`. Before use statistics, β and head are found
    anew under the newest body. Kept: beta. Sent: theta, mu and S.
    """

    about = About(
        reference="McLaughlin and Su, NeurIPS 2024",
        needs_classes=True,
        discloses=Discloses(labels="set", model="part", examples=True, class_means=True, resembles=True),
    )

    lr: NonNegative = 0.01
    private_head: bool = False
    """Plays no part: the head is computed from statistics and never sent."""
    beta: Fraction | None = None
    """β, the share of the client's own statistics; found by two-fold validation if not given."""
    single_beta: bool = False
    """Whether means and covariance have one β in common."""
    epsilon: Annotated[float, Gt(0), Lt(1)] = 1e-4
    """How far the covariance is shrunk towards a multiple of the identity, before it is inverted."""
    ridge: NonNegative = 1e-4
    """What is added to the diagonal of a client's covariance."""

    def private(self, task: Task) -> list[str]:
        """The head is computed, never sent."""
        return task.need_head()

    def plan(self) -> Mapping[str, Amount]:
        return {"train": Epochs(), "all": All()}

    def personal_plan(self, task: Task) -> Mapping[str, Amount]:
        return {"all": All()}

    def init_server(self, task: Task, federation: Federation) -> Tree:
        W = task.init()[_names(task)[0]]
        mu = uniform(key(federation.seed, "mu"), W.shape, W.dtype)
        S = subspace.triangle(torch.eye(W.shape[1], dtype=W.dtype))
        return {**super().init_server(task, federation), "mu": mu, "S": S}

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        start = task.init()
        return {
            "stats": tree.select(start, task.stats),
            "beta": torch.full_like(next(iter(start.values())).reshape(-1)[:2], 0.5),
        }

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        return Down(shared={k: server[k] for k in ("theta", "mu", "S")})

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        common, prior = self._common(down), self._prior(down["mu"], visit["all"])
        head = self._head(task, common, prior)
        both = self.fit(LossBeside(task, head), down["theta"] | client["stats"], visit["train"])
        theta, stats = tree.without(both, task.stats), tree.select(both, task.stats)
        mine, beta = self._adapt(task, both | head, visit["all"], common, prior)
        sent = {"theta": theta, "mu": mine.mu, "S": subspace.triangle(mine.S)}
        return {"stats": stats, "beta": beta}, Sent(weight=self.weigh(visit), mean=sent)

    def estimates(self) -> Collection[str]:
        return ("mu", "S")

    def server_update(self, server: Tree, round: Round) -> Tree:
        body = self.server.step(server, {"theta": round.mean["theta"]})
        return {**body, "mu": round.mean["mu"], "S": round.mean["S"]}  # statistics are means, not steps

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        common, prior = self._common(down), self._prior(down["mu"], visit["all"])
        params: Params = down["theta"] | client["stats"] | self._head(task, common, prior)
        if task.stats:
            params = task.estimate_statistics(params, visit["all"])
        mine, _ = self._adapt(task, params, visit["all"], common, prior)
        return params | self._head(task, mine, prior)

    # ------------------------------------------------------------------------------------------------ discriminants

    def discriminant(self, g: Gaussians, prior: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [C, D] and biases [C] of the linear discriminant: Σ⁻¹μ_c and log π_c − ½ μ_cᵀΣ⁻¹μ_c."""
        D = g.S.shape[-1]
        eye = torch.eye(D, dtype=g.S.dtype, device=g.S.device)
        level = g.S.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None] / D
        coef = torch.linalg.solve((1 - self.epsilon) * g.S + self.epsilon * level * eye, g.mu.mT).mT
        return coef, prior.log() - 0.5 * (g.mu * coef).sum(-1)

    def estimate(self, f: Tensor, member: Tensor, common: Gaussians) -> Gaussians:
        """Means and covariance of features [n, D], of which `member` [n, C] says the class; 0 rows do not count."""
        count = member.sum(0)[:, None]
        mu = torch.where(count > 2, member.T @ f / count.clamp_min(1), common.mu)
        centred = (f - member @ mu) * member.sum(1, keepdim=True)
        eye = torch.eye(f.shape[1], dtype=f.dtype, device=f.device)
        return Gaussians(mu, centred.T @ centred / (count.sum() - 1).clamp_min(1) + self.ridge * eye)

    def _adapt(
        self, task: Task, params: Params, stream: Batches, common: Gaussians, prior: Tensor
    ) -> tuple[Gaussians, Tensor]:
        """The statistics between the client's own and the common ones that predict best, and where they lie."""
        with torch.no_grad():
            parts = [(task.features(params, b.x), members(b, len(prior), prior.dtype)) for b in stream]
            if not parts:  # a lone example, which batch normalisation cannot use
                return common, torch.zeros_like(prior[:1].expand(2))
            f, member = (torch.cat(part) for part in zip(*parts))
            own = self.estimate(f, member, common)
            if self.beta is not None:
                beta = torch.full_like(prior[:1].expand(2), self.beta)
            else:
                beta = self._choose(f, member, common, prior)
            return _between(own, common, beta), beta

    def _choose(self, f: Tensor, member: Tensor, common: Gaussians, prior: Tensor) -> Tensor:
        """β with the least cross-entropy on halves of the data that were not used for the estimate."""
        # Every other example of a class goes to the second half.
        second = ((member.cumsum(0) * member).sum(1) % 2 == 0).to(f.dtype)[:, None]
        halves = (member * (1 - second), member * second)
        fits = [self.estimate(f, half, common) for half in halves]

        def badness(beta: Tensor) -> Tensor:
            total = torch.zeros_like(prior[0])
            for fit, held in zip(fits, reversed(halves)):
                coef, bias = self.discriminant(_between(fit, common, beta), prior)
                total = total - (torch.log_softmax(f @ coef.T + bias, 1) * held).sum()
            return torch.nan_to_num(total, nan=torch.inf)

        ticks = torch.linspace(0, 1, 5, dtype=f.dtype, device=f.device)
        grid = torch.cartesian_prod(ticks, ticks) if not self.single_beta else torch.stack([ticks, ticks], 1)
        best = grid[vmap(badness)(grid).argmin()]  # the first of equals: the common statistics
        near = (best + (grid - 0.5) / 4).clamp(0, 1)
        near = torch.cat([best[None], near])
        return near[vmap(badness)(near).argmin()]

    def _head(self, task: Task, g: Gaussians, prior: Tensor) -> Params:
        """The discriminant as parameters of the model's own head."""
        coef, bias = self.discriminant(g, prior)
        return dict(zip(_names(task), (coef, bias)))

    def _common(self, down: Tree) -> Gaussians:
        return Gaussians(down["mu"], subspace.from_triangle(down["S"], down["mu"].shape[1]))

    def _prior(self, mu: Tensor, stream: Batches) -> Tensor:
        """Label frequencies π_k, none of them zero."""
        count = torch.zeros_like(mu[:, 0])
        for batch in stream:
            count = count + members(batch, len(mu), mu.dtype).sum(0)
        share = count / count.sum().clamp_min(1) + 1e-4
        return share / share.sum()


def _between(own: Gaussians, common: Gaussians, beta: Tensor) -> Gaussians:
    """β·own + (1 − β)·common."""
    mu, S = (b * a + (1 - b) * c for a, c, b in zip(own, common, beta.unbind(-1)))
    return Gaussians(mu, S)


def _names(task: Task) -> tuple[str, str]:
    """Names of the head's matrix and bias."""
    weight = class_matrix(task, "PFedFda")
    rest = [k for k in task.head if k != weight]
    if len(rest) != 1:
        raise ConfigError("PFedFda: the head must have a matrix and a bias. Got no bias; use nn.Linear with one.")
    return weight, rest[0]
