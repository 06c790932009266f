"""FedKD: a personal mentor and a shared mentee teach each other; the mentee travels by its leading singular values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedspan import tree
from fedspan.learn.batches import Batch
from fedspan.learn.class_features import class_matrix
from fedspan.learn.sgd import gradient
from fedspan.learn.task import Task
from fedspan.method import About, ClientInfo, Coded, Discloses, Federation, Sent, Sharing, Visit
from fedspan.method.fields import AtLeast1, NonNegative, Positive, Share
from fedspan.randomness import key, uniform
from fedspan.tree import Params, Tree
from fedspan.wire import Codec, Energy


@dataclass(frozen=True, kw_only=True)
class FedKd(Sharing, Coded):
    """FedKD. Wu et al., Nature Communications 2022.

    Symbols: theta = the mentee, shared; v = the mentor, personal; W = the matrix that turns the mentee's features into
    the mentor's. Both models have the task's architecture; where clients have several, the mentee has the smallest.
    They minimise their cross-entropies, plus `distill` times the sum over both of (KL divergence to the other's
    prediction + mean squared distance of features) / Z, with Z the sum of the cross-entropies: the more both err, the
    less they listen. As in published code Z and the other's prediction pass gradients on; the divergence is per
    example, where that code also divides by the classes. Gradients of each part are clipped to norm `clip`. On the wire
    a matrix is cut to the fewest singular values that hold a share of its energy, rising from `energy_start` to
    `energy_end` over `energy_rounds`; at least one, and never more numbers than the matrix has (published code can send
    none). Kept: v and W (and h, the mentee's private head if `private_head`). Sent: theta.
    """

    about = About(
        reference="Wu et al., Nature Communications 2022",
        any_model=True,
        needs_classes=True,
        discloses=Discloses(labels="set", model="likeness", examples=False, resembles=True),
    )

    weighting: Literal["samples", "uniform"] = "uniform"
    distill: NonNegative = 0.1
    """Weight of what mentor and mentee learn from each other; 1 in the paper."""
    clip: Positive = 10.0
    """Gradients of mentor, mentee and W are each clipped to this norm."""
    energy_start: Share = 0.95
    """Share of a matrix's energy (squared singular values) that travels in the first round."""
    energy_end: Share = 0.98
    """Share of a matrix's energy that travels after `energy_rounds`."""
    energy_rounds: AtLeast1 = 100
    """Rounds in which the share goes from `energy_start` to `energy_end`."""

    def energy(self, round: int) -> float:
        """The share of a matrix's energy that travels in a round."""
        done = min(1.0, max(0, round - 1) / self.energy_rounds)
        return self.energy_start + (self.energy_end - self.energy_start) * done

    def codecs(self, round: int) -> Mapping[str, Codec]:
        return {"theta": Energy(self.energy(round))}

    def init_server(self, task: Task, federation: Federation) -> Tree:
        return super().init_server(task.smallest, federation)

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        start = task.init()
        matrix = start[class_matrix(task, "FedKd")]
        D = matrix.shape[1]
        W = (2 * uniform(key(who.seed, "W"), (D, D), matrix.dtype) - 1) / D**0.5
        return {**super().init_client(task.smallest, who), "v": start, "W": W}

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        mentee, small = down["theta"] | client["h"], task.smallest
        stats = {"mentor": tree.select(client["v"], task.stats), "mentee": tree.select(mentee, small.stats)}
        start = {
            "mentor": tree.without(client["v"], task.stats),
            "mentee": tree.without(mentee, small.stats),
            "W": {"W": client["W"]},
        }

        def objective(q: Tree, batch: Batch) -> Tensor:
            return self.loss(task, q, stats, batch)

        def linear(q: Tree, batch: Batch) -> Tensor:
            # The optimiser needs a function whose gradient is the clipped one: ⟨q, g⟩ with g held fixed.
            g = gradient(objective, tree.detach(q), batch)
            return tree.dot(q, {k: _clipped(part, self.clip) for k, part in g.items()})

        new = self.fit(linear, start, visit["train"], measured=objective)
        theta, h = self.split(small, new["mentee"] | stats["mentee"])
        kept = {"h": h, "v": new["mentor"] | stats["mentor"], "W": new["W"]["W"]}
        return kept, Sent(weight=self.weigh(visit), mean={"theta": theta})

    def loss(self, task: Task, q: Tree, stats: Tree, batch: Batch) -> Tensor:
        """What mentor and mentee minimise together."""
        f, z = task.features_and_output(q["mentor"] | stats["mentor"], batch)
        f_g, z_g = task.smallest.features_and_output(q["mentee"] | stats["mentee"], batch)
        errors = task.mean_loss(z, batch) + task.mean_loss(z_g, batch)
        if not self.distill:
            return errors
        log_p, log_g = z.log_softmax(1), z_g.log_softmax(1)
        # KL(g‖p) + KL(p‖g), the mentor's and the mentee's
        divergence = ((log_g.exp() - log_p.exp()) * (log_g - log_p)).sum(1)
        apart = (f - f_g @ q["W"]["W"].T).square().mean(1)  # counted once for each of the two
        both = batch.mean(divergence + 2 * apart)
        return errors + self.distill * both / errors.clamp_min(torch.finfo(errors.dtype).tiny)

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        v: Params = client["v"]
        return task.estimate_statistics(v, visit["all"]) if "all" in visit.batches else v


def _clipped(g: Params, most: float) -> Params:
    """A gradient of norm at most `most`."""
    norm = tree.dot(g, g).sqrt()
    shrink = (most / (norm + 1e-6)).clamp_max(1)
    return {k: a * shrink for k, a in g.items()}
