"""Weights of low rank on the wire: what methods share that cut weights, or train their factors U Vᵀ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from fedspan import tree
from fedspan.errors import ConfigError
from fedspan.layers import Chosen, LowRank, Plain, choose, convert, in_head, part
from fedspan.layers.decay import product_decay
from fedspan.learn.batches import Batches
from fedspan.learn.optimizer import Schedule
from fedspan.learn.sgd import Loss, adamw, sgd
from fedspan.learn.task import Task
from fedspan.linalg import lowrank
from fedspan.method import About, Capacity, Converts, Down, Federation, Lifts, Observed, Round, Sent, Sharing, Visit
from fedspan.method.fields import AtLeast1
from fedspan.tree import Params, Tree


@dataclass(frozen=True, kw_only=True)
class Truncating(Sharing):
    """Which layers are of low rank on the wire, and how a payload names its parts."""

    about = About(family="fedhm")

    local_stats: ClassVar[bool] = False

    schedule: Schedule = Schedule()
    layers: Chosen = "body"
    pointwise: bool = False

    def size_of(self, layer: Plain) -> int:
        """Numbers in the factors of a layer, where those are known beforehand."""
        return 0

    def chosen(self, task: Task) -> dict[str, Plain]:
        """The layers of low rank on the wire."""
        return self.among(task, self.layers)

    def among(self, task: Task, which: Chosen) -> dict[str, Plain]:
        """Of these layers no convolutions of 1×1 unless `pointwise`, and no private head."""
        who, plain = type(self).__name__, task.plain
        found = {
            k: m
            for k, m in choose(plain, which, who, self.size_of).items()
            if (self.pointwise or tuple(m.weight.shape[2:]) != (1, 1)) and not (self.private_head and in_head(plain, k))
        }
        if not found:
            raise ConfigError(f"{who}: layers must name a layer besides 1x1 convolutions and a private head. Got none.")
        return found

    def apart(self, task: Task, params: Params) -> tuple[Tree, Params]:
        """What is shared: W or its factors U and V, and the rest as theta; and what stays at home."""
        theta, h = self.split(task, params)
        of = {part(k, name): tag for k in self.chosen(task) for name, tag in (("weight", "W"), ("U", "U"), ("V", "V"))}
        parts: Tree = {"theta": {}}
        for k, p in theta.items():
            parts.setdefault(of.get(k, "theta"), {})[k] = p
        return parts, h

    def whole(self, client: Tree, down: Tree) -> Params:
        h: Params = client["h"]
        return tree.merge(down) | h

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        parts, h = self.apart(
            task,
            self.descend(task, self.whole(client, down), visit["train"], self.schedule.rate(self.lr, int(visit.round))),
        )
        return {"h": h}, Sent(weight=self.weigh(visit), mean=parts)

    def descend(self, task: Task, params: Params, stream: Batches, lr: float, loss: Loss | None = None) -> Params:
        """Train a model on the task's loss, or on another one."""
        return self.fit(task.loss if loss is None else loss, params, stream, lr)

    def init_server(self, task: Task, federation: Federation) -> Tree:
        """The shared parts of the common start."""
        return self.server.begin(self.apart(task, task.init())[0])

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        """All parts."""
        return Down(shared={k: part for k, part in server.items() if k != "optimizer"})

    def server_update(self, server: Tree, round: Round) -> Tree:
        """Their means, or a step towards them."""
        return self.server.step(server, round.mean)


@dataclass(frozen=True, kw_only=True)
class Factored(Truncating):
    """A client trains factors U and V, with a decay of their product.

    ‖U Vᵀ‖² takes r²(m + n) products, more than the layer itself for a minibatch smaller than the rank. With
    `decay_every` = k it is taken in every k-th step, k times as strong: the same decay to first order in lr.
    """

    decay_every: AtLeast1 = 1

    def decays(self) -> tuple[float, float]:
        """λ in λ/2 ‖U Vᵀ‖² of the factors, and in λ/2 ‖p‖² of all other parameters; both 0: the optimiser's own."""
        return 0.0, 0.0

    def factored(self, task: Task, ranks: dict[str, int]) -> Task:
        """The task with layers U Vᵀ of these ranks."""

        def change(module: nn.Module) -> nn.Module:
            of = {module.get_submodule(name): rank for name, rank in ranks.items()}
            return convert(module, ranks, lambda layer: LowRank(layer, of[layer]))

        return task.converted(change)

    def decayed(self, task: Task, loss: Loss) -> Loss:
        """A loss with the decay of the products, and of all other parameters."""
        return product_decay(task, loss, *self.decays(), self.decay_every)

    def descend(self, task: Task, params: Params, stream: Batches, lr: float, loss: Loss | None = None) -> Params:
        if not any(self.decays()):
            return super().descend(task, params, stream, lr, loss)
        total = self.decayed(task, task.loss if loss is None else loss)
        if self.optimizer.rule == "adamw":
            return adamw(total, params, stream, lr)
        return sgd(total, params, stream, lr, momentum=self.optimizer.momentum)


@dataclass(frozen=True, kw_only=True)
class Reconstructing(Factored, Converts, Lifts, Observed):
    """The server holds full weights W, and every client trains the best factors of the ranks it can afford.

    Sent down: the leading factors U = P √Σ and V = Q √Σ, or W where a client's layer is dense. What comes back is
    multiplied out and averaged.
    """

    about = About(
        secure_sum="no",  # the server multiplies each client's factors
    )

    moves: ClassVar[bool] = True
    """Whether factors may change where the weights do not: the server factorises anew after every round."""

    def capacities(self) -> Sequence[Capacity]:
        """Every capacity that a client may have, once each."""
        return [None]

    def rank_at(self, layer: str, shape: Sequence[int], capacity: Capacity) -> int | None:
        """The rank at which clients of one capacity train a layer; None where it is dense."""
        raise TypeError(f"{type(self).__name__}: rank_at must be defined.")

    def ranks(self, task: Task, capacity: Capacity) -> dict[str, int]:
        """The layers that clients of one capacity train as factors, and their ranks."""
        found = {k: self.rank_at(k, m.weight.shape, capacity) for k, m in self.chosen(task).items()}
        return {k: r for k, r in found.items() if r is not None}

    def model(self, task: Task, capacity: Capacity) -> Task:
        """Layers U Vᵀ, or the plain ones for a client that can hold them."""
        ranks = self.ranks(task, capacity)
        return self.factored(task, ranks) if ranks else task

    def init_server(self, task: Task, federation: Federation) -> Tree:
        parts, _ = self.apart(task.plain, task.plain.init())
        return self.decomposed(self.server.begin(parts))

    def decomposed(self, server: Tree) -> Tree:
        """The server's weights with their leading factors, of which every client gets as many columns as it can use."""
        factors: Tree = {"U": {}, "V": {}}
        for name, W in server.get("W", {}).items():
            ranks = [self.rank_at(layer_of(name), W.shape, c) for c in self.capacities()]
            most = max((r for r in ranks if r is not None), default=None)
            if most is not None:
                k = name.removesuffix("weight")
                factors["U"][k + "U"], factors["V"][k + "V"] = lowrank.leading(W, most)
        return {**server, **factors} if factors["U"] else server

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        shared: Tree = {"theta": server["theta"], "W": {}, "U": {}, "V": {}}
        for name, W in server.get("W", {}).items():
            k, r = name.removesuffix("weight"), self.rank_at(layer_of(name), W.shape, capacity)
            if r is None:
                shared["W"][name] = W
                continue
            for f in "UV":
                shared[f][k + f] = server[f][k + f][..., :r].contiguous()
        return Down(shared={k: v for k, v in shared.items() if v or k == "theta"})

    def lift(self, mean: Tree, shared: Tree, capacity: Capacity) -> Tree:
        """W_k = U_k V_kᵀ, before they are averaged."""
        if "U" not in mean:
            return mean
        names = [k.removesuffix("U") for k in mean["U"]]
        W: Params = {k + "weight": lowrank.fold(mean["U"][k + "U"], mean["V"][k + "V"]) for k in names}
        return {"theta": mean["theta"], "W": W | mean.get("W", {})}

    def server_update(self, server: Tree, round: Round) -> Tree:
        """The mean of the full weights, or a step towards it, factorised anew."""
        return self.decomposed(self.server.step(server, round.mean))

    def size(self, server: Tree) -> float:
        """The norm of the model."""
        return super().size({k: v for k, v in server.items() if k in ("theta", "W")})


def layer_of(weight: str) -> str:
    """The layer a weight belongs to."""
    return weight.removesuffix("weight").removesuffix(".")


def factors(layer: Plain, rank: int) -> int:
    """Numbers in U and V of a layer: r k (i + o)."""
    o, i, h, w = *layer.weight.shape, *(1, 1)[layer.weight.ndim - 2 :]
    return rank * (o * h + i * w)
