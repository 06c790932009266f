"""WAFFLe: a common dictionary of weight factors, of which every client uses some."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from annotated_types import Gt, Lt
from torch import Tensor

from fedspan import tree
from fedspan.layers import Dictionary, Plain, Which, choose, convert, part, parts, structured
from fedspan.learn.accelerator import widest
from fedspan.learn.batches import Batch
from fedspan.learn.task import Task
from fedspan.method import About, Capacity, ClientInfo, Converts, Discloses, Sent, Sharing, Visit
from fedspan.method.fields import AtLeast1, NonNegative, Positive
from fedspan.randomness import fold, uniform
from fedspan.tree import Params, Tree

_EULER = 0.5772156649015329
_EDGE = 1e-6  # probabilities and uniforms stay this far from 0 and 1


@dataclass(frozen=True, kw_only=True)
class Waffle(Sharing, Converts):
    """WAFFLe. Hao et al., IEEE Access 2022.

    Symbols: a weight of client k is W_a diag(r ∘ z_k) W_b with common dictionaries W_a [m, F], W_b [F, n] and common
    strengths r [F] (all in theta, with biases and what is not factorised); z_k ∈ {0, 1}^F says which factors client k
    uses. Its prior is the Indian buffet process: v_j ~ Beta(α, 1), π_j = v_1 ⋯ v_j, z_j ~ Bernoulli(π_j). q = the
    client's posterior: probabilities of z, and Kumaraswamy(c, d) for v. Clients minimise −log-likelihood +
    `temperature`·KL(q‖prior)/n_k by gradients, with z drawn from a relaxed Bernoulli of temperature `tau` and v by its
    inverse distribution function; theta is averaged, q stays. A model is used with the mean of z, or with its more
    probable value (`use = "mode"`). Kept: q (and h, the private head if `private_head`). Sent: theta.

    Settled by the paper's abstract: the process, and the shared dictionary of rank-one factors. Not settled, and so
    options or choices of ours: F (default: the smaller side of a weight), α (default: F), how z is relaxed, the
    starts (probabilities `start`, W as varied as plain layers') and which z predicts.
    """

    about = About(
        reference="Hao et al., IEEE Access 2022",
        discloses=Discloses(labels="set", model="part", examples=True, resembles=True),
    )

    private_head: bool = True
    """Whether the head stays on the client; the paper's is averaged with the rest."""
    factors: AtLeast1 | None = None
    """F, the number of factors in a layer's dictionary; the smaller side of its weight if not given."""
    alpha: Positive | None = None
    """α of the Indian buffet process: the larger, the more factors a client uses; F if not given."""
    tau: Positive = 0.5
    """Temperature of the relaxed Bernoulli that z is drawn from: the lower, the nearer to 0 or 1."""
    temperature: NonNegative = 1.0
    """Weight of the divergence of the posterior from the prior."""
    start: Annotated[float, Gt(0), Lt(1)] = 0.9
    """Probability that a factor is used, at the start."""
    use: Literal["mean", "mode"] = "mean"
    """Whether a model is used with the mean of z, or with its more probable value."""
    layers: Which = "body"
    """Layers made of dictionaries: all, all but the head, or those whose names start with one of these."""

    def model(self, task: Task, capacity: Capacity) -> Task:
        """Linear and convolutional layers put together from dictionaries."""

        def made(layer: Plain) -> Dictionary:
            m, n = len(layer.weight), layer.weight[0].numel()
            return Dictionary(layer, min(m, n) if self.factors is None else self.factors, self.start)

        return task.converted(lambda module: convert(module, choose(task, self.layers, "Waffle"), made))

    def private(self, task: Task) -> list[str]:
        """z is drawn from q, neither trained nor sent; the head if wanted."""
        return [*parts(task.module, "z"), *super().private(task)]

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        h: Params = super().init_client(task, who)["h"]
        start, q = task.init(), {}
        for k in structured(task.module):
            z = start[part(k, "z")]
            alpha = float(len(z)) if self.alpha is None else self.alpha
            q[part(k, "logit")] = torch.full_like(z, math.log(self.start / (1 - self.start)))
            q[part(k, "log_c")] = torch.full_like(z, math.log(alpha))  # Kumaraswamy(α, 1) is Beta(α, 1), the prior
            q[part(k, "log_d")] = torch.zeros_like(z)
        return {"h": tree.without(h, parts(task.module, "z")), "q": q}

    def divergence(self, q: Params, layer: str, k: Tensor) -> Tensor:
        """KL(q‖prior) of one layer, with one draw of v."""
        logit, c, d = q[part(layer, "logit")], q[part(layer, "log_c")].exp(), q[part(layer, "log_d")].exp()
        alpha = float(len(logit)) if self.alpha is None else self.alpha
        u = uniform(k, logit.shape, widest(k.device)).clamp(_EDGE, 1 - _EDGE).to(logit.dtype)
        v = (1 - (1 - u) ** (1 / d)).clamp(_EDGE, 1 - _EDGE) ** (1 / c)
        # Exact, as the other term of this divergence has the factor (second parameter of Beta − 1) = 0.
        kl_v = (c - alpha) / c * (-_EULER - torch.digamma(d) - 1 / d) + (c * d).log() - math.log(alpha) - (d - 1) / d
        log_pi = v.log().cumsum(0)  # π_j = v_1 ⋯ v_j
        log_none = torch.log1p(-log_pi.exp().clamp_max(1 - _EDGE))
        p = logit.sigmoid()
        kl_z = p * (F.logsigmoid(logit) - log_pi) + (1 - p) * (F.logsigmoid(-logit) - log_none)
        return kl_v.sum() + kl_z.sum()

    def drawn(self, q: Params, layer: str, k: Tensor) -> Tensor:
        """z from a relaxed Bernoulli."""
        logit = q[part(layer, "logit")]
        u = uniform(k, logit.shape, widest(k.device)).clamp(_EDGE, 1 - _EDGE).to(logit.dtype)
        return ((logit + u.log() - torch.log1p(-u)) / self.tau).sigmoid()

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        layers = structured(task.module)

        def free_energy(p: Tree, batch: Batch) -> Tensor:
            keys = [fold(batch.key, 2 * j + 1) for j in range(len(layers))]
            z = {part(k, "z"): self.drawn(p["q"], k, key) for k, key in zip(layers, keys)}
            pull = sum(self.divergence(p["q"], k, fold(key, 1)) for k, key in zip(layers, keys)) / visit.examples
            return task.loss(p["theta"] | z, batch) + self.temperature * pull

        start = {"theta": down["theta"] | client["h"], "q": client["q"]}
        both = self.fit(free_energy, start, visit["train"])
        theta, h = self.split(task, both["theta"])
        return {"h": h, "q": both["q"]}, Sent(weight=self.weigh(visit), mean={"theta": theta})

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        logits = {k: client["q"][part(k, "logit")] for k in structured(task.module)}
        mode = self.use == "mode"
        z = {part(k, "z"): (a > 0).to(a.dtype) if mode else a.sigmoid() for k, a in logits.items()}
        params = self.whole(client, down) | z
        return task.estimate_statistics(params, visit["all"]) if "all" in visit.batches else params
