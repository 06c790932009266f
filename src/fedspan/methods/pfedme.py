"""pFedMe and L2GD: personal models on a leash to a common one, by Moreau envelopes or by a coin."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from fedspan import tree
from fedspan.errors import ConfigError
from fedspan.learn.accelerator import widest
from fedspan.learn.batches import Batch
from fedspan.learn.task import Task
from fedspan.method import (
    About,
    Announces,
    Cautions,
    ClientInfo,
    Discloses,
    Estimates,
    Federation,
    Round,
    Sent,
    Sharing,
    Visit,
)
from fedspan.method.fields import AtLeast1, Fraction, NonNegative, Positive
from fedspan.randomness import fold, key, uniform
from fedspan.tree import Params, Tree


@dataclass(frozen=True, kw_only=True)
class PFedMe(Sharing, Cautions):
    """pFedMe. T. Dinh et al., NeurIPS 2020, Algorithm 1.

    Symbols: theta = the global model w, v = the personal model θ_i, lam = λ, lr = η, beta = β. For every minibatch θ
    takes `inner_steps` steps of size `lr_inner` on f(θ) + λ/2 ‖θ − w_i‖², from where it stands, then w_i ← w_i −
    ηλ(w_i − θ). The server moves to (1 − β) w + β · mean of the w_i. Keep ηλ and lr_inner·λ below 1. Momentum, weight
    decay and optimiser are those of the inner steps. Kept: v (and h, the private head of w if `private_head`). Sent:
    theta.
    """

    about = About(
        reference="T. Dinh et al., NeurIPS 2020",
        discloses=Discloses(labels="set", model="likeness", examples=True, resembles=True),
    )

    lr: NonNegative = 0.5
    """η, the learning rate of a client's copy of the global model."""
    lam: NonNegative = 1.0
    """λ, how strongly the personal model is held to the client's copy of the global one; the paper's 15 leaves it
    little of its own."""
    inner_steps: AtLeast1 = 5
    """Steps of the personal model on every minibatch."""
    lr_inner: NonNegative = 0.1
    """Learning rate of the personal model."""
    beta: Positive = 1.0
    """β, how far the server goes from its model to the mean of a round; 1 takes the mean."""

    def proximal_steps(self) -> Mapping[str, float]:
        inner = self.optimizer.pull(self.lr_inner, self.lam)
        return {"lr·lam": self.pull, "lr_inner·lam": inner}  # w_i takes plain steps towards θ

    @property
    def pull(self) -> float:
        """ηλ, the share of the way from w_i to θ; with the safeguard not beyond it."""
        return min(1.0, self.lr * self.lam) if self.optimizer.safeguard else self.lr * self.lam

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        return {**super().init_client(task, who), "v": task.init()}

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        w: Params = down["theta"] | client["h"]
        v = w

        def envelope(v: Params, batch: Batch) -> Tensor:
            far = sum((v[k] - w[k]).square().sum() for k in task.names)
            return task.loss(v, batch) + self.lam / 2 * far

        for batch in visit["train"]:
            v = self.fit(envelope, v, [batch] * self.inner_steps, self.lr_inner)
            near = {k: w[k] - self.pull * (w[k] - v[k]) for k in task.names}  # w_i ← w_i − ηλ(w_i − θ̃)
            w = w | tree.where(batch.live, near, tree.select(w, task.names))
        theta, h = self.split(task, w)
        return {"h": h, "v": v}, Sent(weight=self.weigh(visit), mean={"theta": theta})

    def server_update(self, server: Tree, round: Round) -> Tree:
        way = tree.sub(round.mean["theta"], server["theta"])
        relaxed = tree.add(server["theta"], way, self.beta)  # (1 − β) w + β mean w_i
        return self.server.step(server, {"theta": relaxed})

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        v: Params = client["v"]
        return task.estimate_statistics(v, visit["all"]) if "all" in visit.batches else v


@dataclass(frozen=True, kw_only=True)
class L2gd(Sharing, Announces, Estimates):
    """L2GD. Hanzely and Richtárik, 2020, Algorithm 1, for (1/n) Σ f_i(θ_i) + λ/(2n) Σ ‖θ_i − θ̄‖².

    Symbols: theta = the client's model θ_i (on the server: the mean θ̄), lam = λ, p = p, lr = η/n. Every local step a
    coin that is the same for all clients decides: with probability p all move towards the mean, θ_i ← θ_i − (lr λ/p)
    (θ_i − θ̄) but not beyond it, otherwise θ_i ← θ_i − lr/(1 − p) ∇f_i(θ_i). With one step a round and all clients this
    is the algorithm itself; with more, θ̄ is the mean at the start of the round. Kept: theta (and h, the private head if
    `private_head`). Sent: theta.
    """

    about = About(
        reference="Hanzely and Richtárik, 2020",
        discloses=Discloses(labels="set", model="whole", private=("theta",), examples=True, resembles=True),
    )

    lam: NonNegative = 0.1
    """λ, how strongly the clients' models are pulled to their mean."""
    p: Fraction = 0.2
    """Probability that a step goes towards the mean and not down the loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer.momentum or self.optimizer.rule != "sgd":
            got = f"momentum {self.optimizer.momentum:g} and optimizer '{self.optimizer.rule}'"
            raise ConfigError(f"L2gd: steps must be plain SGD, as a coin stands between them. Got {got}.")

    @property
    def pull(self) -> float:
        """The share of the way to the mean."""
        return min(1.0, self.lr * self.lam / self.p) if self.p else 0.0

    def common(self, task: Task, federation: Federation) -> Tree:
        return {"key": key(federation.seed, "coin")}

    def silent(self) -> bool:
        return True

    def estimates(self) -> Collection[str]:
        return ("theta",)  # θ_i is the client's own, whatever mean it received

    def coins(self, shared: Tensor, round: Tensor, steps: int) -> Tensor:
        """Which of the local steps of a round go to the mean."""
        return uniform(fold(shared, round), (steps,), widest(shared.device)) < self.p

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        theta, h = self.split(task, task.init())
        return {"theta": theta, "h": h}

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        theta, h, mean = client["theta"], client["h"], down["theta"]
        stream = visit["train"]
        coins = self.coins(visit.common["key"], visit.round, len(stream))
        rate = self.lr / (1 - self.p) if self.p < 1 else 0.0
        for batch in stream:
            heads = coins[batch.step] & batch.live  # the step of an empty minibatch changes nothing
            step, own = self.split(task, self.fit(task.loss, theta | h, [batch], rate))
            towards = tree.add(theta, tree.sub(theta, mean), -self.pull)
            tails = ~coins[batch.step]
            theta = tree.where(heads, towards, tree.where(tails, step, theta))
            h = tree.where(tails, own, h)
        return {"theta": theta, "h": h}, Sent(weight=self.weigh(visit), mean={"theta": theta})

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        return super().personal(task, client, {"theta": client["theta"]}, visit)
