"""LR-BPFL: a common network whose weights every client scales by a random mask of low rank of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedspan import tree
from fedspan.layers import Which, choose, in_head, part
from fedspan.learn.batches import Amount, Batch, Epochs
from fedspan.learn.task import Task
from fedspan.method import About, ClientInfo, Discloses, Sent, Sharing, Visit
from fedspan.method.fields import AtLeast1, Count, NonNegative, Positive
from fedspan.randomness import fold, key, normal
from fedspan.tree import Params, Tree


@dataclass(frozen=True, kw_only=True)
class LrBpfl(Sharing):
    """LR-BPFL. Zhang et al., AISTATS 2025.

    Symbols: theta = the common deterministic model W; q = a client's posterior: Gaussian factors alpha [r, inputs] and
    gamma [r, outputs] of every layer, by their means (mu) and deviations softplus(rho), and gates g. Client k computes
    with W ∘ M_k, M_k = Σ_j γ_j α_jᵀ (for a convolution over channels). First q is trained for `personal_epochs` with W
    fixed, on the negative log-likelihood of the average over `members` draws + `temperature`·KL(q‖prior)/n_k, then W
    for `global_epochs` (default: the run's) with q fixed, on the likelihood alone; with `joint` both together. The
    prior of α and γ is N(1/√r, `prior_scale`²): M = 1 on average. With `adaptive_rank` the means of component j > 1
    carry a gate g_j ∈ [0, 1], stretched and clipped as hard-concrete gates are. Predictions are averages over `members`
    draws; with `members` = 0 means are used throughout and nothing is drawn. Kept: q (and h, the private head if
    `private_head`). Sent: theta.

    Settled with the published code: the mask (not a sum with W), prior, starts, learning rate of q and gates; there the
    bias is scaled with the mask, here it is not. By what rule the paper removes ranks was not: gates follow the loss
    alone.
    """

    about = About(
        reference="Zhang et al., AISTATS 2025",
        discloses=Discloses(labels="set", model="part", examples=True, resembles=True),
    )

    private_head: bool = True
    """Whether the head stays on the client; the paper's is averaged with the rest."""
    rank: AtLeast1 = 4
    """r, the rank of a client's mask."""
    members: Count = 4
    """Draws over which outputs are averaged; 0 uses the means and draws nothing."""
    temperature: NonNegative = 1.0
    """Weight of the divergence of the posterior from the prior."""
    prior_scale: Positive = 0.1
    """Standard deviation of the prior of the mask's factors."""
    start_spread: NonNegative = 0.1
    """Standard deviation with which the posterior's parameters are drawn at the start."""
    personal_epochs: Count = 1
    """Epochs in which the posterior is trained, with the common model fixed."""
    global_epochs: Count | None = None
    """Epochs in which the common model is trained, with the posterior fixed; the run's if not given."""
    lr_personal: NonNegative = 0.01
    """Learning rate of the posterior."""
    joint: bool = False
    """Whether posterior and common model are trained together."""
    adaptive_rank: bool = False
    """Whether every component of a mask but the first has a gate that can close."""
    layers: Which = "all"
    """Layers that have a mask: all, all but the head, or those whose names start with one of these."""

    def plan(self) -> Mapping[str, Amount]:
        return {"own": Epochs(self.personal_epochs), "train": Epochs(self.global_epochs)}

    def masked(self, task: Task) -> dict[str, Tensor]:
        """The layers whose weight has a mask, and those weights as they start."""
        start = task.init()
        names = [k for k in choose(task, self.layers, "LrBpfl") if not (self.private_head and in_head(task, k))]
        return {k: start[part(k, "weight")] for k in names}

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        q: Tree = {}
        for j, (k, W) in enumerate(self.masked(task).items()):
            middle = self.rank**-0.5
            starts = [("alpha_mu", 1, middle), ("alpha_rho", 1, -3.0), ("gamma_mu", 0, middle), ("gamma_rho", 0, -3.0)]
            for n, (name, axis, centre) in enumerate(starts):
                # One draw for all, as the model that clients are given is one.
                noise = normal(key(who.seed, "mask", j, n), (self.rank, W.shape[axis]), W.dtype)
                q[f"{k}.{name}"] = centre + self.start_spread * noise
            if self.adaptive_rank:
                q[f"{k}.gate"] = torch.full((self.rank - 1,), 2.3, dtype=W.dtype)
        return {**super().init_client(task, who), "q": q}

    # ------------------------------------------------------------------------------------------------ the posterior

    def drawn(self, task: Task, theta: Params, q: Params, k: Tensor | None) -> Params:
        """Parameters with masks drawn from q by a key, or with their means."""
        new, layers = dict(theta), list(self.masked(task))
        parts = [f"{name}.{f}" for name in layers for f in ("alpha", "gamma")]
        sizes = [q[f"{f}_mu"].numel() for f in parts]
        noise: dict[str, Tensor] = {}
        if k is not None:
            # One draw for all factors: many small ones would take longer than the layers themselves.
            whole = normal(k, (sum(sizes),), q[f"{parts[0]}_mu"].dtype)
            noise = dict(zip(parts, torch.split(whole, sizes)))
        for name in layers:
            factors = []
            for f in ("alpha", "gamma"):
                mu, rho = q[f"{name}.{f}_mu"], q[f"{name}.{f}_rho"]
                if self.adaptive_rank:
                    gate = (1.2 * q[f"{name}.gate"].sigmoid() - 0.1).clamp(0, 1)
                    mu = torch.cat([torch.ones_like(mu[:1, 0]), gate])[:, None] * mu
                factors.append(mu + F.softplus(rho) * noise[f"{name}.{f}"].reshape(mu.shape) if noise else mu)
            alpha, gamma = factors
            W = theta[part(name, "weight")]
            M = (gamma.T @ alpha).reshape(W.shape[0], W.shape[1], *[1] * (W.ndim - 2))  # M = Σ_j γ_j α_jᵀ
            new[part(name, "weight")] = W * M
        return new

    def divergence(self, q: Params) -> Tensor:
        """KL(q‖prior), summed over all factors."""
        total = []
        for name, mu in q.items():
            if name.endswith("_mu"):
                s = F.softplus(q[name.removesuffix("mu") + "rho"])
                ratio = (s / self.prior_scale).square()
                far = ((mu - self.rank**-0.5) / self.prior_scale).square()
                total.append(0.5 * (ratio + far - 1 - ratio.log()).sum())
        return torch.stack(total).sum()

    def likelihood(self, task: Task, theta: Params, q: Params, batch: Batch) -> Tensor:
        """The loss of the average prediction over draws."""
        keys: list[Tensor | None] = [fold(batch.key, 1 + s) for s in range(self.members)]
        outputs = [task.output(self.drawn(task, theta, q, k), batch) for k in keys or [None]]
        return task.mean_loss(_average(task, outputs), batch)

    # ------------------------------------------------------------------------------------------------ rounds and use

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        theta, q = down["theta"] | client["h"], client["q"]

        def free_energy(q: Params, theta: Params, batch: Batch) -> Tensor:
            pull = self.temperature * self.divergence(q) / visit.examples
            return self.likelihood(task, theta, q, batch) + pull

        if self.joint and self.lr and self.lr_personal:
            s = math.sqrt(self.lr_personal / self.lr)  # steps of lr on q/s are steps of lr_personal on q
            start = {"theta": theta, "q": tree.map(lambda a: a / s, q)}
            energy = lambda p, b: free_energy(tree.map(lambda a: a * s, p["q"]), p["theta"], b)
            both = self.fit(energy, start, visit["train"])
            theta, q = both["theta"], tree.map(lambda a: a * s, both["q"])
        else:
            q = self.fit(lambda p, b: free_energy(p, theta, b), q, visit["own"], self.lr_personal)
            theta = self.fit(lambda p, b: self.likelihood(task, p, q, b), theta, visit["train"])
        shared, h = self.split(task, theta)
        return {"h": h, "q": q}, Sent(weight=self.weigh(visit), mean={"theta": shared})

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        theta, q = self.whole(client, down), client["q"]
        keys: list[Tensor | None] = [fold(visit.key, s) for s in range(self.members)]
        models = [self.drawn(task, theta, q, k) for k in keys or [None]]
        if "all" in visit.batches:
            models = [task.estimate_statistics(m, visit["all"]) for m in models]
        return models[0] if not self.members else {str(s): m for s, m in enumerate(models)}

    def predict(self, task: Task, personal: Tree, x: Tensor) -> Tensor:
        if not self.members:
            return task.predict(personal, x)
        return _average(task, [task.predict(m, x) for m in personal.values()])


def _average(task: Task, outputs: list[Tensor]) -> Tensor:
    """The outputs of an ensemble: logarithms of mean probabilities, or means."""
    if len(outputs) == 1:
        return outputs[0]
    stacked = torch.stack(outputs)
    if task.kind not in ("classification", "language"):
        return stacked.mean(0)
    return stacked.log_softmax(-1).logsumexp(0) - math.log(len(outputs))
