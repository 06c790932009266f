"""pFL-MF in the form that works: v is fitted, θ_i is trained like any network, and the server fits U to all changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedspan import tree
from fedspan.errors import ConfigError
from fedspan.learn.batches import All, Amount, Batch, Epochs, Steps
from fedspan.learn.optimizer import Schedule
from fedspan.learn.task import Task
from fedspan.linalg import subspace
from fedspan.method import (
    About,
    Adapts,
    Announces,
    Averaging,
    Capacity,
    Cautions,
    ClientInfo,
    Discloses,
    Down,
    Federation,
    Lifts,
    Round,
    Sent,
    Visit,
)
from fedspan.method.fields import AtLeast1, Count, NonNegative, Positive
from fedspan.methods.pfl_mf.coefficients import CoefficientSolver, InSubspace
from fedspan.methods.pfl_mf.gauge import announced, common_v, follow, need_rank, need_sgd, own_v, standard_columns
from fedspan.methods.pfl_mf.rank import RankSearch, no_gaps
from fedspan.tree import Outer, Params, Tree


@dataclass(frozen=True, kw_only=True)
class PflMf(Averaging, InSubspace, Announces, Lifts, Adapts, Cautions):
    """pFL-MF. Dadras, Stich and Yurtsever, TMLR 2025 (Burer–Monteiro factorisation across clients), made to work.

    Symbols: U [d, r] = shared dictionary of r models, v [r] = coefficients of client i, theta = parameters outside the
    factorisation (averaged), delta = what training did to θ_i = U v_i. Kept: v. Sent: theta, delta and v (d' + d + r
    numbers), or the sums M = Δθ vᵀ and C = v vᵀ (`wire = "full"`), which a secure sum could add up.

    It is not the paper's algorithm (that is pfl-mf-paper) but what makes it work: only the head is factorised, all v
    start alike and are fitted on cached features, θ_i is trained like any network, the server fits U to all Δθ_i at
    once, and before a model is used its v is fitted again to the U of the day (`refresh`; costs no upload).
    """

    about = About(
        family="pfl-mf",
        reference="Dadras, Stich and Yurtsever, TMLR 2025",
        secure_sum=lambda m: "yes" if m.wire == "full" else "with wire = 'full'",
        discloses=Discloses(labels="set", model="whole", private=("v",), examples=True, resembles=True),
    )

    lr: NonNegative = 1.0
    """The learning rate of θ_i; steps that would overshoot are shortened (`safeguard`)."""
    schedule: Schedule = Schedule()
    """How the learning rate falls over the rounds."""
    rank: AtLeast1 | Literal["auto"] = 10
    """r, the dimension of the subspace in which all client models lie; `auto` begins with more and cuts."""
    search: RankSearch = RankSearch()
    """When and where `rank = "auto"` cuts."""
    factorise: Literal["head", "all"] | tuple[str, ...] = "head"
    """Which parameters are U v: the head, all, or those whose names begin with one of these; the rest is averaged."""
    start: Literal["common", "random"] = "common"
    """Whether all v start from one unit vector, or each from a random one of its own."""
    solver: CoefficientSolver = CoefficientSolver()
    """How v is fitted with U fixed."""
    u_steps: AtLeast1 | None = None
    """Training steps on θ_i per round; the run's epochs if not given."""
    server_step: Literal["scaled", "plain"] = "scaled"
    """Whether the server fits U to all Δθ_i by least squares, or adds the mean of Δθ_i v_iᵀ."""
    ridge: NonNegative = 0.01
    """λ of the scaled step: how much directions with little evidence are held back; 0 takes a pseudo-inverse."""
    max_step: Positive | None = 0.2
    """The most that a scaled step may move the models, as a part of their root mean square; none: no limit."""
    max_shared_step: Positive | None = None
    """The most that a round may move the parameters outside U v, as a part of their norm; none: no limit."""
    wire: Literal["rank-one", "full"] = "rank-one"
    """Whether Δθ_i and v_i are sent, or the matrices Δθ_i v_iᵀ and v_i v_iᵀ, which a secure sum could add up."""
    refresh: bool = True
    """Whether v is fitted again to the U of the day before a model is used."""
    gauge_every: Count = 0
    """Rounds between changes to an orthonormal gauge, which keep all models; 0: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        need_sgd(self)
        self.refuse_server_optimizer("server_step says what the server does")

    # ------------------------------------------------------------------------------------------------ what is where

    @property
    def width(self) -> int:
        """Length of v as a client keeps it."""
        return self.search.start if self.rank == "auto" else self.rank

    @property
    def moves(self) -> bool:
        """Whether the server may change the gauge or the rank, so that clients must follow."""
        return self.rank == "auto" or self.gauge_every > 0

    @property
    def head_only(self) -> bool:
        """Whether U v is the head and nothing else."""
        return self.factorise == "head"

    def factorised(self, task: Task) -> list[str]:
        """Return the names of the parameters that are U v."""
        if self.factorise == "all":
            return task.names
        if self.factorise == "head":
            return task.need_head()
        names = [k for k in task.names if k.startswith(self.factorise)]
        if not names:
            raise ConfigError(f"PflMf: factorise must begin the name of a parameter. Got {list(self.factorise)}.")
        return names

    def directions(self) -> int | None:
        return None if self.rank == "auto" else self.rank  # a search begins with more than it keeps

    def plan(self) -> Mapping[str, Amount]:
        return {"v": All(), "U": Epochs() if self.u_steps is None else Steps(self.u_steps)}

    def init_server(self, task: Task, federation: Federation) -> Tree:
        names = self.factorised(task)
        need_rank(self, self.width, task, names)
        U = standard_columns(task, names, self.width, federation.seed)
        eye = torch.eye(self.width, dtype=U.dtype)
        server = {"U": U, "theta": tree.without(task.init(), [*names, *task.stats])}
        server |= {"C": eye / self.width}  # Σ w v vᵀ of the last round
        if self.moves:
            server |= {"C_mean": torch.zeros_like(eye), "map": eye, "moved": torch.zeros((), dtype=torch.int64)}
            server |= {"gaps": no_gaps(U)}
        return server

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        v = common_v(task, self.width) if self.start == "common" else own_v(task, self.width, who)
        generation = {"generation": torch.zeros((), dtype=torch.int64)} if self.moves else {}
        return {"v": v, "stats": tree.select(task.init(), task.stats), **generation}

    def common(self, task: Task, federation: Federation) -> Tree:
        """Return the maps of the gauge so far."""
        return {"maps": {}} if self.moves else {}

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        return Down(shared={"U": server["U"], "theta": server["theta"]})

    def coefficients(self, client: Tree, down: Tree, common: Tree) -> Tensor:
        """Return this client's v in the server's present gauge and rank."""
        v: Tensor = client["v"]
        if self.moves:
            v = follow(v, client["generation"], common["maps"], self.width)
        return v[: down["U"].shape[1]]

    # ------------------------------------------------------------------------------------------------ the client

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        U, rest, names = down["U"], self.rest(client, down), self.factorised(task)
        like = tree.select(task.init(), names)
        v = self.coefficients(client, down, visit.common)
        v = self.solver.fit(task, U, v, rest, visit["v"], names, self.head_only)  # eq. (8), with many steps and scaled
        base, shrink = v @ U.T, self.solver.prior / visit.examples

        def f(q: Tree, batch: Batch) -> Tensor:
            theta = base + q["z"]
            loss = task.loss(q["rest"] | tree.unravel(theta, like), batch)
            return loss + shrink / 2 * theta.square().sum() if self.solver.prior else loss

        start, rate = {"z": torch.zeros_like(base), "rest": rest}, self.schedule.rate(self.lr, int(visit.round))
        new = self.fit(f, start, visit["U"], rate)
        theta, stats = tree.without(new["rest"], task.stats), tree.select(new["rest"], task.stats)
        sent: Tree = {"theta": theta, "delta": new["z"], "v": v}  # Δθ_i v_iᵀ, after one step −η G_i of eq. (7)
        if self.wire == "full":
            sent = {"theta": theta, "M": torch.outer(new["z"], v), "C": subspace.triangle(torch.outer(v, v))}
        return self._keep(v, stats, client, visit), Sent(self.weigh(visit), sent)

    def _keep(self, v: Tensor, stats: Params, client: Tree, visit: Visit) -> Tree:
        kept: Tree = {"v": torch.nn.functional.pad(v, (0, self.width - len(v))), "stats": stats}
        if self.moves:
            kept["generation"] = torch.full_like(client["generation"], len(visit.common["maps"]))
        return kept

    # ------------------------------------------------------------------------------------------------ the server

    def lift(self, mean: Tree, shared: Tree, capacity: Capacity) -> Tree:
        """Return the matrices whose means the server needs."""
        if self.wire == "full":
            return {**mean, "C": subspace.from_triangle(mean["C"], shared["U"].shape[1])}
        return {"theta": mean["theta"], "M": Outer(mean["delta"], mean["v"]), "C": Outer(mean["v"], mean["v"])}

    def server_update(self, server: Tree, round: Round) -> Tree:
        theta, M, C = (round.mean[k] for k in ("theta", "M", "C"))
        if self.max_shared_step is not None:
            theta = _near(server["theta"], theta, self.max_shared_step)
        if self.server_step == "scaled":
            U = subspace.scaled_step(server["U"], M, C, self.ridge, self.max_step)
        else:
            U = server["U"] + M  # eq. (9)
        return {"U": U, "theta": theta, "C": C} | (self._move(server, U, C, round.round) if self.moves else {})

    def _move(self, server: Tree, U: Tensor, C: Tensor, t: int) -> Tree:
        """Change the rank or the gauge when it is time; every v follows by the map that is announced."""
        last, C = C, 0.9 * server["C_mean"] + 0.1 * C
        state = {"C_mean": C, "map": server["map"], "moved": server["moved"], "gaps": server["gaps"]}
        P = None
        if self.rank == "auto" and len(C) == self.width:
            state["gaps"] = self.search.seen(server["gaps"], U, C)
            k = self.search.found(state["gaps"], t)
            if k is not None:
                U, P = subspace.cut(U, C, k)
        if P is None and self.gauge_every and t % self.gauge_every == 0:
            U, P = subspace.orthonormal_gauge(U, C)
        if P is not None:
            state |= {"C_mean": P @ C @ P.T, "map": P, "moved": torch.tensor(t)}
            last = P @ last @ P.T
        return state | {"U": U, "C": last}

    def announce(self, server: Tree, round: int) -> Tree | None:
        """Announce the map of this round, if there is one."""
        if not self.moves or int(server["moved"]) != round:
            return None
        return {"map": server["map"]}

    def silent(self) -> bool:
        return not self.moves

    def hear(self, common: Tree, news: Tree) -> Tree:
        """Add the map to those so far."""
        return {"maps": announced(common["maps"], news["map"])}

    # ------------------------------------------------------------------------------------------------ use

    def personal_plan(self, task: Task) -> Mapping[str, Amount]:
        return {"all": All()} if task.stats or self.refresh else {}

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        if self.refresh:
            return self.refit(task, client, down, visit)
        v = self.coefficients(client, down, visit.common)
        return self.compose(task, self.rest(client, down), down["U"], v, visit)


def _near(old: Params, new: Params, most: float) -> Params:
    """Return the new parameters, or the point on the way to them that is this part of the old ones' norm away."""
    step, size = (tree.squared_norm(t).sqrt() for t in (tree.sub(new, old), old))
    part = subspace.allowed(step, size, most) if size else 1.0  # all zero, it has no size to go by
    return new if part == 1.0 else {k: old[k] + part * (v - old[k]) for k, v in new.items()}
