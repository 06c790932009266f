"""FedProto and FedTGP: no parameters travel, only what a class looks like to a client on average."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from fedspan.learn.batches import All, Amount, Batch, Batches, Epochs, rows_of
from fedspan.learn.class_features import class_matrix, class_means
from fedspan.learn.task import Task
from fedspan.method import (
    About,
    Adapts,
    Capacity,
    ClientInfo,
    Coded,
    Discloses,
    Down,
    Federation,
    Round,
    Sent,
    Training,
    Visit,
)
from fedspan.method.fields import AtLeast1, NonNegative, with_keys
from fedspan.randomness import fold, generator, key, torch_seed
from fedspan.tree import Params, Tree
from fedspan.wire import Codec, Rows


@dataclass(frozen=True, kw_only=True)
class FedProto(Training, Coded, Adapts):
    """FedProto. Tan et al., AAAI 2022, Algorithm 1.

    Symbols: theta = the client's whole model, p = prototypes: means of the head's inputs, one row per class, zero for
    classes nobody has; n = how much a client's row counts: its examples of the class (`weighting = "samples"`, as in
    the paper) or 1 (`uniform`, as public code does). Clients minimise cross-entropy + λ·(mean squared distance between
    features and the global prototype of their class); prototypes are taken after training, in evaluation mode (some
    public code collects them on the way). A class nobody reported in a round keeps its prototype. Prediction by the
    head, or by the nearest global prototype (`predict_by`; the head decides while there are none). Kept: theta. Sent:
    p, with n as the weights of its rows.
    """

    about = About(
        reference="Tan et al., AAAI 2022",
        any_model=True,
        needs_classes=True,
        weight="one",  # rows carry their own weights
        discloses=Discloses(labels="set", model="nothing", examples=True, class_means=True, resembles=True),
    )

    lam: NonNegative = 1.0
    """λ, the weight of the distance between features and the global prototype of their class."""
    weighting: Literal["samples", "uniform"] = "samples"
    """Whether a client's prototype of a class counts by its examples of that class, or all clients count alike."""
    predict_by: Literal["head", "prototype"] = "head"
    """Whether the head predicts, or the nearest global prototype."""

    def codecs(self, round: int) -> Mapping[str, Codec]:
        return {"p": Rows()}

    def plan(self) -> Mapping[str, Amount]:
        return {"train": Epochs(), "all": All()}

    def init_server(self, task: Task, federation: Federation) -> Tree:
        return {"p": torch.zeros_like(task.init()[class_matrix(task, type(self).__name__)])}

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        return {"theta": task.init()}

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        return Down(shared={"p": server["p"]})

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        p = down["p"]

        def near(theta: Params, batch: Batch) -> Tensor:
            features, output = task.features_and_output(theta, batch)
            far = (features - p[batch.y]).square().mean(1) * _known(p)[batch.y]
            return batch.mean(task.example_loss(output, batch.y, batch.mask) + self.lam * far)  # L_S + λ L_R

        theta = self.fit(near if self.lam else task.loss, client["theta"], visit["train"])
        own, n = class_means(task, theta, visit["all"], p)
        one = torch.ones_like(visit.examples)
        if self.weighting == "uniform":
            n = (n > 0).to(n.dtype)
        return {"theta": theta}, self._sent(one, own, n)

    def _sent(self, weight: Tensor, p: Tensor, n: Tensor) -> Sent:
        return Sent(weight, mean={"p": p}, weights={"p": n})

    def server_update(self, server: Tree, round: Round) -> Tree:
        n = round.totals["p"]
        return {"p": torch.where(n[:, None] > 0, round.mean["p"], server["p"])}  # Σ n p / Σ n

    def personal_plan(self, task: Task) -> Mapping[str, Amount]:
        return {}

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        theta: Tree = client["theta"]
        return theta if self.predict_by == "head" else {"theta": theta, "p": down["p"]}

    def prediction_rule(self) -> str:
        return self.predict_by

    def predicting_by(self, rule: str) -> Self:
        return with_keys(self, predict_by=rule)

    def predict(self, task: Task, personal: Tree, x: Tensor) -> Tensor:
        if self.predict_by == "head":
            return task.predict(personal, x)
        p, known = personal["p"], _known(personal["p"]) > 0
        near = -(task.features(personal["theta"], x)[:, None] - p).square().mean(2)
        # A class without a prototype is never chosen, but stays possible, so that the loss stays finite.
        near = torch.where(known, near, near.amin(1, keepdim=True) - 1)
        return torch.where(known.any(), near, task.predict(personal["theta"], x))


@dataclass(frozen=True, kw_only=True)
class FedTgp(FedProto):
    """FedTGP. Zhang et al., AAAI 2024, Algorithm 1.

    FedProto with prototypes that the server learns: a generator (one embedding per class, a hidden layer, an output
    layer) gives G_c, trained for `server_epochs` on the uploads P of the round by cross-entropy over −(‖P − G_j‖ +
    δ·1[j = c]), so that classes stand apart by a margin δ = min(largest distance of a class to its nearest, τ), taken
    between the classes' mean uploads. Symbols: p = G, sent down for classes that were ever trained; g = the generator;
    tau = τ. Kept: theta. Sent: p and n, each client's own. Every upload counts alike. The authors'
    script has λ = 10 (their code's default is 1), 100 server epochs and τ = 100.
    """

    about = About(
        reference="Zhang et al., AAAI 2024",
        discloses=Discloses(labels="set", model="nothing", examples=False, class_means=True, resembles=True),
    )

    lam: NonNegative = 0.3
    """λ, the weight of the distance to the server's prototypes; the authors' script has 10."""
    weighting: Literal["samples", "uniform"] = "samples"
    """Plays no part: every upload counts alike."""
    server_epochs: AtLeast1 = 100
    """Epochs in which the server trains its generator on the prototypes of a round."""
    server_batch: AtLeast1 = 10
    """Prototypes in one of the server's minibatches."""
    lr_server: NonNegative | None = None
    """The generator's learning rate; `lr` if not given."""
    tau: NonNegative = 100.0
    """τ, the largest margin by which classes are to stand apart."""

    def init_server(self, task: Task, federation: Federation) -> Tree:
        p = super().init_server(task, federation)["p"]
        classes, d = p.shape
        with torch_seed(federation.seed, "generator"):
            parts = {"e": nn.Embedding(classes, d), "1": nn.Linear(d, d), "2": nn.Linear(d, d)}
        g = {f"{k}.{n}": w.detach().to(p.dtype) for k, m in parts.items() for n, w in m.named_parameters()}
        return {
            "p": p,
            "g": g,
            "seen": torch.zeros(classes, dtype=torch.bool),
            "key": key(federation.seed, "generator"),
        }

    def _sent(self, weight: Tensor, p: Tensor, n: Tensor) -> Sent:
        return Sent(weight, each={"p": p, "n": n})

    def generate(self, g: Params) -> Tensor:
        """G_c of every class, [C, D]."""
        hidden = nn.functional.linear(g["e.weight"], g["1.weight"], g["1.bias"]).relu()
        return nn.functional.linear(hidden, g["2.weight"], g["2.bias"])

    def margin(self, P: Tensor, y: Tensor) -> float:
        """δ: the largest distance between the mean uploads of a class and of its nearest one, at most τ."""
        present = sorted(set(y.tolist()))
        centre = torch.stack([P[y == c].mean(0) for c in present])
        far = torch.cdist(centre, centre).fill_diagonal_(torch.inf)
        return min(float(far.amin(1).max()), self.tau) if len(present) > 1 else 0.0

    def server_update(self, server: Tree, round: Round) -> Tree:
        who, y = (round.each["n"] > 0).nonzero(as_tuple=True)
        if len(y) == 0:  # nobody had a minibatch to look at
            return server
        P = round.each["p"][who, y]
        delta = self.margin(P, y)

        def contrast(g: Params, batch: Batch) -> Tensor:
            gap = (batch.x[:, None] - self.generate(g)).square().sum(2).clamp_min(1e-12).sqrt()  # √0 has no slope
            own = nn.functional.one_hot(batch.y, gap.shape[1])
            return nn.functional.cross_entropy(-(gap + delta * own), batch.y)

        order = generator(int(fold(server["key"], round.round)), "prototypes")
        passes = [rows_of(order.permutation(len(P)), self.server_batch) for _ in range(self.server_epochs)]
        batches = Batches(P, y, torch.from_numpy(np.concatenate(passes)).to(P.device), server["key"])
        g = self.descend(contrast, server["g"], batches, self.lr if self.lr_server is None else self.lr_server)
        seen = server["seen"].index_fill(0, y, True)
        return {**server, "g": g, "seen": seen, "p": self.generate(g) * seen[:, None]}


def _known(p: Tensor) -> Tensor:
    """1 for classes that have a prototype."""
    return (p != 0).any(1).to(p.dtype)
