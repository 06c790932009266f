"""pFL-MF, Algorithm 1 and nothing else: the paper's letters, and at the margin the lines of its box (1: "set U⁰")."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedspan import tree
from fedspan.learn.batches import All, Amount, Batch, Steps
from fedspan.learn.sgd import Loss, gradient, mean_gradient
from fedspan.learn.task import Task
from fedspan.method import About, Averaging, Capacity, Cautions, ClientInfo, Down, Federation, Round, Sent, Visit
from fedspan.method.fields import AtLeast1, Count
from fedspan.methods.pfl_mf.gauge import need_no_statistics, need_rank, need_sgd, own_v, standard_columns
from fedspan.tree import Outer, Tree


@dataclass(frozen=True, kw_only=True)
class PflMfAlgorithm1(Averaging, Cautions):
    """pFL-MF. Dadras, Stich and Yurtsever, TMLR 2025, Algorithm 1.

    Symbols: U [d, r] = dictionary of r models, v [r] = coefficients of client i, θ_i = U v_i, K = `v_steps`, η = `lr`,
    ψ = (1/n) Σ f_i(U v_i). Kept: v. Sent: the two vectors of η G_i, with η inside the sum as in eq. (9). Left open by
    the paper: columns of U are standard initialisations, v_i is a random unit vector, G_i is over all examples.
    """

    about = About(family="pfl-mf", reference="Dadras, Stich and Yurtsever, TMLR 2025", secure_sum="no")

    rank: AtLeast1 = 10
    """r, the dimension of the subspace in which all client models lie."""
    v_steps: Count = 1
    """K, a client's steps on v in a round."""
    weighting: Literal["samples", "uniform"] = "uniform"
    """Whether the G_i weigh by their clients' numbers of examples, or all alike as in the paper."""

    def __post_init__(self) -> None:
        super().__post_init__()
        need_sgd(self, plain=not self.trains_theta)
        self.refuse_server_optimizer("the server takes gradient steps on U")

    @property
    def trains_theta(self) -> bool:
        """Whether clients train θ_i, so that momentum and weight decay have a meaning."""
        return False

    def directions(self) -> int:
        return self.rank

    def plan(self) -> Mapping[str, Amount]:
        return {"v": Steps(self.v_steps), "U": All()}

    def rates(self, visit: Visit) -> tuple[float, float]:
        """Return the learning rates of U and of v: η, and η/n for the 1/n in ψ."""
        return self.lr, self.lr / visit.clients

    def init_server(self, task: Task, federation: Federation) -> Tree:
        need_rank(self, self.rank, task, task.names)
        need_no_statistics(self, task)
        return {"U": standard_columns(task, task.names, self.rank, federation.seed)}  # line 1: U⁰

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        return {"v": own_v(task, self.rank, who)}  # line 1: v_i⁰

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        return Down(shared={"U": server["U"]})  # line 13: U^t to the clients of S_t

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        U, v_i, like, eta = down["U"], client["v"], task.init(), self.rates(visit)[0]

        def f(theta: Tensor, batch: Batch) -> Tensor:
            return task.loss(tree.unravel(theta, like), batch)  # f_i(θ), eq. (6)

        v = self.train_v(f, U, v_i, visit, self.rates(visit)[1])
        g = mean_gradient(f, v_i @ U.T, visit["U"])  # ∇f_i(U v_i), at the v_i that the round began with
        return {"v": v}, Sent(self.weigh(visit), {"G": Outer(eta * g, v_i)})  # lines 9, 10: η G_i = η g v_iᵀ, eq. (7)

    def train_v(self, f: Loss, U: Tensor, v: Tensor, visit: Visit, eta_v: float) -> Tensor:
        """Take the K local steps on v: lines 4 to 8."""
        for batch in visit["v"]:  # line 5: for k = 0, …, K − 1
            v = v - eta_v * (gradient(f, v @ U.T, batch) @ U)  # line 6: v ← v − (η/n) Uᵀ∇f_i(U v), eq. (8)
        return v

    def server_update(self, server: Tree, round: Round) -> Tree:
        return {"U": server["U"] - round.mean["G"]}  # line 12: U ← U − (1/|S|) Σ η G_i, eq. (9)

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        return tree.unravel(client["v"] @ down["U"].T, task.init())  # θ_i = U v_i
