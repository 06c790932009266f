"""FLUTE: heads are pulled towards neural collapse, at home and on the server."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad, vmap

from fedspan import tree
from fedspan.errors import ConfigError
from fedspan.learn.batches import All, Amount, Batch, Epochs
from fedspan.learn.class_features import class_matrix, members
from fedspan.learn.frozen_body import FrozenBody
from fedspan.learn.task import Task
from fedspan.method import (
    About,
    Capacity,
    ClientInfo,
    Discloses,
    Down,
    Federation,
    Observed,
    Round,
    Sent,
    Sharing,
    Visit,
)
from fedspan.method.fields import Count, NonNegative
from fedspan.tree import Params, Tree

_TINY = 1e-24  # under roots: a norm of 0 has slope 0, not NaN


def collapse(W: Tensor, c: Tensor) -> Tensor:
    """NC(W, c) = ‖W Wᵀ/‖W Wᵀ‖ − (I − 11ᵀ/C)∘ccᵀ/√(C − 1)‖: how far class weights are from a simplex."""
    C = len(W)
    gram = W @ W.T
    simplex = (torch.eye(C, dtype=W.dtype, device=W.device) - 1 / C) / max(1, C - 1) ** 0.5
    gap = gram / gram.square().sum().clamp_min(_TINY).sqrt() - simplex * torch.outer(c, c)
    far: Tensor = gap.square().sum().clamp_min(_TINY).sqrt()
    return far


@dataclass(frozen=True, kw_only=True)
class Flute(Sharing, Observed):
    """FLUTE. Liu, Shen and Yang, NeurIPS 2024, the form for neural networks.

    Symbols: theta = the body φ, h = the head of client k with class weights W_k, c = 1 for each class the client has.
    The head is trained for `head_epochs` on cross-entropy + λ₁ NC(W, c) + λ₂ ‖W‖², then body and head for `rep_epochs`
    (default: the run's epochs) on the same + λ₃ ‖features of the minibatch‖². The server averages the bodies and takes
    one step of size `lr_server` on the mean of NC(W_k, c_k) over the heads it received. For that heads and classes are
    shown to the server, and heads are kept there; with `lr_server` = 0 they stay on the client. Kept: h, where it is
    not on the server. Sent: theta; h and c, each client's own.
    """

    about = About(
        reference="Liu, Shen and Yang, NeurIPS 2024",
        needs_classes=True,
        discloses=Discloses(labels="set", model="whole", examples=True, resembles=True),
    )

    private_head: bool = True
    """Must be true, as every client has a head of its own."""
    head_epochs: Count = 9
    """Epochs in which the head is trained, with the body fixed."""
    rep_epochs: Count | None = None
    """Epochs in which body and head are trained together; the run's if not given."""
    lam_1: NonNegative = 0.25
    """λ₁, the weight of NC, the distance of the class weights from neural collapse."""
    lam_2: NonNegative = 0.0025
    """λ₂, the weight of the class weights' squared norm."""
    lam_3: NonNegative = 0.0005
    """λ₃, the weight of the squared norm of a minibatch's features."""
    lr_server: NonNegative = 0.5
    """η_s, the server's learning rate on the heads; with 0 heads stay on the clients."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.private_head:
            raise ConfigError("Flute: private_head must be true, as every client has a head of its own. Got false.")

    @property
    def shown(self) -> bool:
        """Whether heads are seen and kept by the server."""
        return self.lr_server > 0

    def plan(self) -> Mapping[str, Amount]:
        return {"head": Epochs(self.head_epochs), "train": Epochs(self.rep_epochs), "all": All()}

    def init_server(self, task: Task, federation: Federation) -> Tree:
        state = super().init_server(task, federation)
        class_matrix(task, "Flute")
        if self.shown:
            head, n = tree.select(task.init(), task.head), federation.clients
            state["h"] = tree.map(lambda a: a.expand(n, *a.shape).clone(), head)
        return state

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        h: Params = super().init_client(task, who)["h"]
        return {"h": tree.without(h, task.head) if self.shown else h}

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        return Down({"theta": server["theta"]}, {"h": tree.take(server["h"], ids)} if self.shown else {})

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        name, phi, stats = class_matrix(task, "Flute"), down["theta"], tree.without(client["h"], task.head)
        h: Params = down["h"] if self.shown else tree.select(client["h"], task.head)
        c = self._classes(h[name], visit)

        fixed = FrozenBody(task, phi | stats, h, visit["head"])

        def head_loss(h: Params, batch: Batch) -> Tensor:
            pull = self.lam_1 * collapse(h[name], c) + self.lam_2 * h[name].square().sum()
            return fixed.loss(h, batch) + pull

        def whole_loss(params: Params, batch: Batch) -> Tensor:
            features, output = task.features_and_output(params, batch)
            pull = self.lam_1 * collapse(params[name], c) + self.lam_2 * params[name].square().sum()
            spread = (features.square().flatten(1).sum(1) * batch.w).sum()
            loss = task.mean_loss(output, batch)
            return loss + pull + self.lam_3 * spread

        h = self.fit(head_loss, h, fixed.batches)
        both = self.fit(whole_loss, phi | stats | h, visit["train"])
        theta, kept = self.split(task, both)
        if not self.shown:
            return {"h": kept}, Sent(weight=self.weigh(visit), mean={"theta": theta})
        sent = {"h": tree.select(both, task.head), "c": c.to(torch.bool)}
        return {"h": tree.without(kept, task.head)}, Sent(self.weigh(visit), mean={"theta": theta}, each=sent)

    def _classes(self, W: Tensor, visit: Visit) -> Tensor:
        """1 for each class among a client's examples."""
        found = torch.zeros_like(W[:, 0])
        for batch in visit["all"]:
            found = found + members(batch, len(W), W.dtype).sum(0)
        return (found > 0).to(W.dtype)

    def server_update(self, server: Tree, round: Round) -> Tree:
        body = super().server_update(server, round)
        if not self.shown:
            return body
        name = next(k for k, a in round.each["h"].items() if a.ndim == 3)
        W, c = round.each["h"][name], round.each["c"]
        slope = vmap(grad(collapse))(W, c.to(W.dtype))
        h = round.each["h"] | {name: W - self.lr_server / len(W) * slope}  # W_k ← W_k − η_s ∇ (1/M) Σ NC(W_k, c_k)
        return {**body, "h": tree.put(server["h"], round.ids, h)}

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        h = client["h"] | down["h"] if self.shown else client["h"]
        return super().personal(task, {"h": h}, down, visit)

    def size(self, server: Tree) -> float:
        """The norm of the body."""
        return math.sqrt(float(tree.squared_norm(server["theta"])))
