"""APFL: a personal model is a mixture of the global one and a local one, in a share that is learnt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedspan import tree
from fedspan.errors import ConfigError
from fedspan.learn.batches import Batch
from fedspan.learn.sgd import gradient, is_statistic
from fedspan.learn.task import Task
from fedspan.method import About, ClientInfo, Discloses, Sent, Sharing, Visit
from fedspan.method.fields import Fraction, NonNegative
from fedspan.tree import Params, Tree


@dataclass(frozen=True, kw_only=True)
class Apfl(Sharing):
    """APFL. Deng et al., 2020, Algorithm 1.

    Symbols: theta = the global model w, v = the local model, alpha = α; the personal model is v̄ = α v + (1 − α) w.
    In every step w descends on f(w) and v on f(v̄), at the v̄ before the step. An adaptive α takes a step on f(v̄) and is
    clipped to [0, 1]: once a round on the first minibatch, or with every step (`alpha_every`). `mix = "logits"` mixes
    outputs instead of parameters, as some public code does; other public code trains v at v, not at v̄, and replaces v
    by v̄: not offered. `alpha_decay` = 0.02 adds public code's 0.02 α to the slope.
    Kept: v and alpha (and h, the private head of w if `private_head`). Sent: theta.
    """

    about = About(
        reference="Deng et al., 2020",
        discloses=Discloses(labels="set", model="likeness", examples=True, resembles=True),
    )

    alpha: Fraction = 0.5
    """α at the start, the share of the local model in the personal one."""
    adaptive: bool = True
    """Whether α is learnt; if not, it stays at `alpha`."""
    alpha_every: Literal["round", "step"] = "round"
    """How often α takes a step: once a round on the first minibatch, or with every minibatch."""
    alpha_decay: NonNegative = 0.0
    """Weight decay of α: so many times α is added to its gradient."""
    lr_alpha: NonNegative | None = None
    """Learning rate of α; `lr` if not given."""
    mix: Literal["params", "logits"] = "params"
    """Whether the parameters of the two models are mixed, or their outputs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adaptive and self.alpha_every == "step" and (self.optimizer.momentum or self.optimizer.rule != "sgd"):
            raise ConfigError(
                "Apfl: alpha_every must be 'round' with momentum or 'adamw', which carry state from step to step."
                f" Got 'step' with momentum {self.optimizer.momentum:g} and optimizer '{self.optimizer.rule}'."
            )

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        v = task.init()
        alpha = torch.tensor(self.alpha, dtype=next(iter(v.values())).dtype)
        return {**super().init_client(task, who), "v": v, "alpha": alpha}

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        both, alpha = {"w": down["theta"] | client["h"], "v": client["v"]}, client["alpha"]
        every_step = self.adaptive and self.alpha_every == "step"
        if self.adaptive and not every_step:
            for batch in visit["train"].first(1):
                alpha = self._step(task, both, alpha, batch)

        def f(q: Tree, batch: Batch) -> Tensor:
            # w does not see f(v̄): its way is that of FedAvg, whatever α.
            return task.loss(q["w"], batch) + self.mixed_loss(task, q["v"], tree.detach(q["w"]), alpha, batch)

        if every_step:
            for batch in visit["train"]:
                new = self._step(task, both, alpha, batch)
                both = self.fit(f, both, [batch])
                alpha = new
        else:
            both = self.fit(f, both, visit["train"])
        theta, h = self.split(task, both["w"])
        return {"h": h, "v": both["v"], "alpha": alpha}, Sent(weight=self.weigh(visit), mean={"theta": theta})

    def mixed_loss(self, task: Task, v: Params, w: Params, alpha: Tensor, batch: Batch) -> Tensor:
        """The loss of the personal model on a batch: f(v̄)."""
        if self.mix == "params":
            return task.loss(_between(v, w, alpha), batch)
        output = alpha * task.output(v, batch) + (1 - alpha) * task.output(w, batch)
        return task.mean_loss(output, batch)

    def _step(self, task: Task, both: Tree, alpha: Tensor, batch: Batch) -> Tensor:
        """α ← clip(α − η ⟨v − w, ∇f(v̄)⟩, 0, 1); an empty minibatch is no step."""
        slope = gradient(
            lambda q, b: self.mixed_loss(task, both["v"], both["w"], q["alpha"], b), {"alpha": alpha}, batch
        )
        rate = self.lr if self.lr_alpha is None else self.lr_alpha
        new = (alpha - rate * (slope["alpha"] + self.alpha_decay * alpha)).clamp(0, 1)
        return torch.where(batch.live, new, alpha)

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        w, alpha = down["theta"] | client["h"], client["alpha"]
        models = {"v": client["v"], "w": w} if self.mix == "logits" else {"v": _between(client["v"], w, alpha)}
        if "all" in visit.batches:
            models = {k: task.estimate_statistics(p, visit["all"]) for k, p in models.items()}
        return {**models, "alpha": alpha} if self.mix == "logits" else models["v"]

    def predict(self, task: Task, personal: Tree, x: Tensor) -> Tensor:
        if self.mix == "params":
            return task.predict(personal, x)
        alpha: Tensor = personal["alpha"]
        return alpha * task.predict(personal["v"], x) + (1 - alpha) * task.predict(personal["w"], x)


def _between(v: Params, w: Params, alpha: Tensor) -> Params:
    """v̄ = α v + (1 − α) w; running statistics, which are estimated anew before use, stay those of v."""
    return {k: a if is_statistic(k) else alpha * a + (1 - alpha) * w[k] for k, a in v.items()}
