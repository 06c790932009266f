"""pFL-MF's Algorithm 1 with what the paper's experiments and theorem also set: learning rates, epochs, steps on U."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedspan import tree
from fedspan.errors import ConfigError
from fedspan.learn.batches import All, Amount, Batch, Epochs, Steps
from fedspan.learn.optimizer import Schedule
from fedspan.learn.sgd import mean_gradient
from fedspan.learn.task import Task
from fedspan.linalg import subspace
from fedspan.method import About, Adapts, Capacity, ClientInfo, Discloses, Federation, Lifts, Round, Sent, Visit
from fedspan.method.fields import AtLeast1, NonNegative, build
from fedspan.methods.pfl_mf.coefficients import InSubspace
from fedspan.methods.pfl_mf.gauge import common_v, need_rank, own_v, standard_columns
from fedspan.methods.pfl_mf.paper import PflMfAlgorithm1
from fedspan.tree import Outer, Params, Tree

ALGORITHM_1 = {"u_update": "gradient", "start": "random", "v_scale": "1/n", "safeguard": False}
"""The options with which it is Algorithm 1 to the letter."""


@dataclass(frozen=True, kw_only=True)
class PflMfPaper(PflMfAlgorithm1, InSubspace, Lifts, Adapts):
    """pFL-MF as written. Dadras, Stich and Yurtsever, TMLR 2025, Algorithm 1, with the options of its experiments.

    With `u_update = "gradient"`, `start = "random"`, `v_scale = "1/n"` it is Algorithm 1 to the letter, bit for bit as
    long as the safeguard is false or finds nothing to shorten. The defaults are what trains: clients take their epochs
    on U as in Setup 6, all v start alike as in the public code, and v takes steps of η. `p` is the rule of Theorem 1,
    `v_unit = "epoch"` is Setup 4, `server_step = "literal"` Setup 6 (K_U steps on U with v fixed). Beside U the server
    knows C = mean v_i v_iᵀ, for the size of the models. Kept: v, statistics. Sent: the two vectors of η G_i.
    """

    about = About(
        secure_sum=lambda m: "yes" if m.wire == "full" else "with wire = 'full'",
        discloses=Discloses(labels="set", model="whole", private=("v",), examples=False, resembles=True),
    )

    lr: NonNegative = 0.3
    """η, the learning rate."""
    schedule: Schedule = Schedule()
    """How η falls over the rounds."""
    start: Literal["random", "common"] = "common"
    """Whether each v starts from a random unit vector of its own, or all from one; the paper does not say."""
    v_unit: Literal["step", "epoch"] = "step"
    """Whether `v_steps` counts minibatches or passes over the client's examples."""
    v_scale: Literal["1", "1/n"] = "1"
    """What the learning rate of v is multiplied by: 1/n as ψ demands, or 1, with which v moves among many clients."""
    lr_v: NonNegative | None = None
    """The learning rate of v before `v_scale`; that of U if not given."""
    p: NonNegative | None = None
    """Theorem 1's share of clients in a round: η_v = p η/K takes the place of `lr_v`."""
    g_at: Literal["old", "new"] = "old"
    """Whether G_i is taken at the v_i that the round began with (Algorithm 1), or at the v_i after its steps."""
    u_update: Literal["gradient", "train"] = "train"
    """Whether G_i is one gradient over all examples (Algorithm 1), or the sum of a client's training steps with v
    fixed (Setup 6)."""
    u_steps: AtLeast1 | None = None
    """K_U, the training steps on U; the run's epochs if not given. Only with `u_update = "train"`."""
    server_step: Literal["plain", "literal"] = "plain"
    """Whether training steps are of η on θ_i, or of η on a copy of U as in Setup 6, which is η‖v_i‖² on θ_i."""
    wire: Literal["rank-one", "full"] = "rank-one"
    """Whether G_i is sent as its two vectors, or as a matrix (with v_i v_iᵀ) that a secure sum could add up."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.u_update == "gradient" and (self.u_steps is not None or self.server_step == "literal"):
            raise ConfigError(
                "PflMfPaper: u_update must be 'train' with u_steps or server_step='literal'. Got 'gradient'."
            )

    @property
    def trains_theta(self) -> bool:
        """Whether clients train θ_i."""
        return self.u_update == "train"

    def plan(self) -> Mapping[str, Amount]:
        v: Amount = Steps(self.v_steps) if self.v_unit == "step" else Epochs(self.v_steps)
        trained: Amount = Epochs() if self.u_steps is None else Steps(self.u_steps)
        return {"v": v, "U": All() if self.u_update == "gradient" else trained}

    def rates(self, visit: Visit) -> tuple[float, float]:
        """Return the learning rates of U and of v, as the options have them."""
        eta = self.schedule.rate(self.lr, int(visit.round))
        eta_v = eta if self.lr_v is None else self.lr_v
        if self.p is not None:
            eta_v = self.p * eta / max(1, self.v_steps)  # Theorem 1: η_v = p η_u / K
        return eta, eta_v / visit.clients if self.v_scale == "1/n" else eta_v

    def init_server(self, task: Task, federation: Federation) -> Tree:
        need_rank(self, self.rank, task, task.names)
        U = standard_columns(task, task.names, self.rank, federation.seed)
        return {"U": U, "C": torch.eye(self.rank, dtype=U.dtype) / self.rank}

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        v = own_v(task, self.rank, who) if self.start == "random" else common_v(task, self.rank)
        return {"v": v, "stats": tree.select(task.init(), task.stats)}

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        U, v_i, stats, like = down["U"], client["v"], client["stats"], tree.select(task.init(), task.names)

        def f(theta: Tensor, batch: Batch, stats: Params = stats) -> Tensor:
            return task.loss(stats | tree.unravel(theta, like), batch)

        v = self.guarded_v(f, U, v_i, visit)  # eq. (8)
        at = v_i if self.g_at == "old" else v
        if self.trains_theta:
            step, stats = self._train(task, like, at, U, stats, visit)
        else:
            step = self.rates(visit)[0] * mean_gradient(f, at @ U.T, visit["U"])
        sent: Tree = {"G": Outer(step, at)}  # η G_i = η ∇f_i(U v_i) v_iᵀ, eq. (7)
        if self.wire == "full":
            sent = {"G": torch.outer(step, at), "C": subspace.triangle(torch.outer(at, at))}
        return {"v": v, "stats": stats}, Sent(self.weigh(visit), sent)

    def guarded_v(self, f: Callable[..., Tensor], U: Tensor, v: Tensor, visit: Visit) -> Tensor:
        """Return v after its steps, which the safeguard may shorten."""
        train = lambda rate: self.train_v(f, U, v, visit, rate)
        eta_v = self.rates(visit)[1]
        return self.optimizer.guarded(train, v, lambda q, b: f(q @ U.T, b), visit["v"], eta_v, alone=True)

    def _train(
        self, task: Task, like: Params, v: Tensor, U: Tensor, stats: Params, visit: Visit
    ) -> tuple[Tensor, Params]:
        """Train θ_i with v fixed: Σ η g over the steps, and the statistics after them.

        θ = U v + s z with s = ‖v‖ for the literal step: K_U steps on U are steps of η‖v‖² on θ, exactly. Where a step
        is that of θ itself, parameters are trained as they are, and layers can take it inside their products.
        """
        literal, base = self.server_step == "literal", v @ U.T
        if not literal and not self.optimizer.weight_decay:
            begin: Tree = {"theta": tree.unravel(base, like), "stats": stats}
            new = self.fit(lambda q, b: task.loss(q["stats"] | q["theta"], b), begin, visit["U"], self.rates(visit)[0])
            return base - tree.ravel(new["theta"]), new["stats"]
        s = v.norm() if literal else 1.0
        start = {"z": torch.zeros_like(base), "stats": stats}

        def f(q: Tree, batch: Batch) -> Tensor:
            return task.loss(q["stats"] | tree.unravel(base + s * q["z"], like), batch)

        new = self.fit(f, start, visit["U"], self.rates(visit)[0])
        step = -s * new["z"]
        return step / v.square().sum() if literal else step, new["stats"]

    def lift(self, mean: Tree, shared: Tree, capacity: Capacity) -> Tree:
        """Return the two matrices whose means the server needs."""
        if self.wire == "full":
            return {"G": mean["G"], "C": subspace.from_triangle(mean["C"], shared["U"].shape[1])}
        return {"G": mean["G"], "C": Outer(mean["G"].b, mean["G"].b)}

    def server_update(self, server: Tree, round: Round) -> Tree:
        return {**super().server_update(server, round), "C": round.mean["C"]}  # eq. (9)

    def personal_plan(self, task: Task) -> Mapping[str, Amount]:
        return {"all": All()} if task.stats else {}

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        return self.compose(task, client["stats"], down["U"], client["v"], visit)


def algorithm_1(**fields: Any) -> PflMfPaper:
    """Return Algorithm 1 as printed: one gradient on U, a v for each client, steps of η/n on it, none shortened."""
    return build(PflMfPaper, {**ALGORITHM_1, **fields}, "PflMfPaper")
