"""pFedES and pFedAFM: models of the clients' own, and something small and common beside them that carries knowledge."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedspan import tree
from fedspan.errors import ConfigError
from fedspan.learn.batches import Amount, Batch, Epochs
from fedspan.learn.class_features import class_matrix
from fedspan.learn.task import Task
from fedspan.method import (
    About,
    Adapts,
    Averaging,
    Capacity,
    ClientInfo,
    Discloses,
    Down,
    Federation,
    Round,
    Sent,
    Visit,
)
from fedspan.method.fields import AtLeast1, Fraction, NonNegative
from fedspan.randomness import torch_seed
from fedspan.tree import Params, Tree


@dataclass(frozen=True, kw_only=True)
class PFedEs(Averaging):
    """pFedES. Yi et al., 2023: a common extractor turns inputs into other ones, for models that differ.

    Symbols: theta = the client's whole model, g = the common extractor: 3×3 convolutions from the channels to `width`
    and back (linear layers where the model begins with one). First theta is trained on (1 − μ)·loss(x) + μ·loss(g(x))
    with g as received, then g on loss(g(x)) with theta fixed, for as many epochs; the server averages g.
    Kept: theta. Sent: g.
    """

    about = About(
        reference="Yi et al., 2023",
        any_model=True,
        discloses=Discloses(labels="set", model="nothing", examples=True, resembles=True),
    )

    private_head: bool = False
    """Plays no part: the whole model is private."""
    mu: Fraction = 0.1
    """μ, the share of the loss on extracted inputs in the training of a client's model; 0.5 as the paper has it."""
    width: AtLeast1 = 8
    """Channels, or units, between the two layers of the extractor."""
    lr_extractor: NonNegative | None = None
    """The extractor's learning rate; `lr` if not given."""

    def init_server(self, task: Task, federation: Federation) -> Tree:
        first = next((m for m in task.module.modules() if isinstance(m, nn.Conv2d | nn.Linear | nn.Embedding)), None)
        with torch_seed(federation.seed, "extractor"):
            if isinstance(first, nn.Conv2d):
                c = first.in_channels
                parts: list[nn.Module] = [nn.Conv2d(c, self.width, 3), nn.Conv2d(self.width, c, 3)]
            elif isinstance(first, nn.Linear):
                parts = [nn.Linear(first.in_features, self.width), nn.Linear(self.width, first.in_features)]
            else:
                raise ConfigError("PFedEs: the model must begin with a convolution or a linear layer. It does not.")
        like = next(iter(task.init().values()))
        named = {f"{k}.{n}": p for k, m in enumerate(parts) for n, p in m.named_parameters()}
        return self.server.begin({"g": {k: p.detach().to(like.dtype) for k, p in named.items()}})

    def extract(self, g: Params, x: Tensor) -> Tensor:
        """g(x), of the shape of x."""
        if g["0.weight"].ndim == 4:
            hidden = F.conv2d(x, g["0.weight"], g["0.bias"], padding=1).relu()
            return F.conv2d(hidden, g["1.weight"], g["1.bias"], padding=1)
        hidden = F.linear(x.flatten(1), g["0.weight"], g["0.bias"]).relu()
        return F.linear(hidden, g["1.weight"], g["1.bias"]).reshape(x.shape)

    def plan(self) -> Mapping[str, Amount]:
        return {"train": Epochs(), "extractor": Epochs()}

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        return {"theta": task.init()}

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        return Down(shared={"g": server["g"]})

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        def seen(g: Params, batch: Batch) -> Batch:
            return replace(batch, x=self.extract(g, batch.x))

        def both(theta: Params, batch: Batch) -> Tensor:
            other = task.loss(theta, seen(down["g"], batch))
            return (1 - self.mu) * task.loss(theta, batch) + self.mu * other

        theta = self.fit(both if self.mu else task.loss, client["theta"], visit["train"])
        lr = self.lr if self.lr_extractor is None else self.lr_extractor
        g = self.fit(lambda g, b: task.loss(theta, seen(g, b)), down["g"], visit["extractor"], lr)
        return {"theta": theta}, Sent(weight=self.weigh(visit), mean={"g": g})

    def server_update(self, server: Tree, round: Round) -> Tree:
        return self.server.step(server, {"g": round.mean["g"]})

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        theta: Tree = client["theta"]
        return theta


@dataclass(frozen=True, kw_only=True)
class PFedAfm(Averaging, Adapts):
    """pFedAFM. Yi et al., 2024: features of the client's own model and of a small common one, mixed per dimension.

    Symbols: theta = the client's whole model, w = the common body, of the smallest kind of model, alpha = α ∈ [0, 1]^D.
    The head gets α ∘ R(theta) + (1 − α) ∘ R(w). First theta and α (learning rate `lr_alpha`, starting at 1, cut to [0,
    1] after every step) are trained with w as received, then w alone with α = 0 and the head fixed, for as many epochs;
    the server averages w. Kept: theta, alpha (and stats, w's running statistics). Sent: w.
    """

    about = About(
        reference="Yi et al., 2024",
        any_model=True,
        needs_classes=True,
        discloses=Discloses(labels="set", model="part", examples=True, resembles=True),
    )

    private_head: bool = False
    """Plays no part: the whole model is private."""
    lr_alpha: NonNegative = 0.1
    """Learning rate of α, the mixture of features."""
    lr_common: NonNegative | None = None
    """Learning rate of the common body; `lr` if not given."""

    def init_server(self, task: Task, federation: Federation) -> Tree:
        return self.server.begin({"w": tree.select(task.smallest.init(), task.smallest.body)})

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        start, small = task.init(), task.smallest
        alpha = torch.ones_like(start[class_matrix(task, "PFedAfm")][0])
        return {"theta": start, "alpha": alpha, "stats": tree.select(small.init(), small.stats)}

    def plan(self) -> Mapping[str, Amount]:
        return {"train": Epochs(), "common": Epochs()}

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        return Down(shared={"w": server["w"]})

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        small, start = task.smallest, client["alpha"]
        received = down["w"] | client["stats"]
        # One learning rate for both: α = α_0 + s·b moves by s² times the step that b takes.
        s = math.sqrt(self.lr_alpha / self.lr) if self.lr else 0.0
        bound = {"b": lambda b: ((start + s * b).clamp(0, 1) - start) / s} if s else {}

        def mixed(p: Tree, batch: Batch) -> Tensor:
            own, other = task.features_and_output(p["theta"], batch)[0], small.features_and_output(received, batch)[0]
            alpha = start + s * p["b"]
            output = task.from_features(p["theta"], alpha * own + (1 - alpha) * other)
            return task.mean_loss(output, batch)

        new = self.fit(mixed, {"theta": client["theta"], "b": torch.zeros_like(start)}, visit["train"], prox=bound)

        def alone(w: Params, batch: Batch) -> Tensor:
            output = task.from_features(new["theta"], small.features_and_output(w, batch)[0])
            return task.mean_loss(output, batch)

        w = self.fit(alone, received, visit["common"], self.lr if self.lr_common is None else self.lr_common)
        kept = {"theta": new["theta"], "alpha": start + s * new["b"], "stats": tree.select(w, small.stats)}
        return kept, Sent(weight=self.weigh(visit), mean={"w": tree.without(w, small.stats)})

    def server_update(self, server: Tree, round: Round) -> Tree:
        return self.server.step(server, {"w": round.mean["w"]})

    def trained(self, down: Tree, sent: Sent, capacity: Capacity) -> Tree:
        return {**down, **sent.mean}

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        return {"theta": client["theta"], "w": down["w"] | client["stats"], "alpha": client["alpha"]}

    def predict(self, task: Task, personal: Tree, x: Tensor) -> Tensor:
        theta, alpha = personal["theta"], personal["alpha"]
        own, other = task.features(theta, x), task.smallest.features(personal["w"], x)
        return task.from_features(theta, alpha * own + (1 - alpha) * other)
