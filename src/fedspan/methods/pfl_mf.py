"""pFL-MF: all client models lie in one r-dimensional subspace, θ_i = U v_i."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt
from torch import Tensor
from torch.func import vmap

from fedspan import tree
from fedspan.errors import ConfigError
from fedspan.learn.batches import All, Amount, Batch, Batches, Epochs, Steps
from fedspan.learn.optimizer import Schedule
from fedspan.learn.sgd import gradient, mean_gradient
from fedspan.learn.task import Task
from fedspan.linalg import subspace
from fedspan.method import (
    About,
    Adapts,
    Announces,
    Averaging,
    Capacity,
    ClientInfo,
    Down,
    Federation,
    Lifts,
    Observed,
    Panel,
    Round,
    Sent,
    Visit,
)
from fedspan.method.fields import AtLeast1, Count, NonNegative, Positive
from fedspan.method.panels import Refit
from fedspan.methods.panels_subspace import subspace_panel
from fedspan.randomness import key, normal, uniform
from fedspan.tree import Outer, Params, Tree


@dataclass(frozen=True, kw_only=True)
class PflMf(Averaging, Announces, Lifts, Adapts, Observed):
    """pFL-MF. Dadras, Stich and Yurtsever, TMLR 2025, Algorithm 1 (Burer–Monteiro factorisation across clients).

    Symbols: U [d, r] = shared dictionary of r models, v [r] = coefficients of client i, theta = parameters outside the
    factorisation (averaged), delta = what training did to θ_i = U v_i. Kept: v. Sent: theta, delta and v (d' + d + r
    numbers), or the sums M = Δθ vᵀ and C = v vᵀ (`wire = "full"`), which a secure sum could add up.

    The default is not the paper's algorithm but what makes it work: only the head is factorised, all v start alike and
    are fitted on cached features, θ_i is trained like any network, the server fits U to all Δθ_i at once, and before a
    model is used its v is fitted again to the U of the day (`refresh`; costs no upload).
    `PflMf.paper()` (pfl-mf-paper) is Algorithm 1 to the letter; pfl-mf-joint is what the published code does.
    """

    about = About(
        family="pfl-mf",
        reference="Dadras, Stich and Yurtsever, TMLR 2025",
        secure_sum=lambda m: "yes" if m.wire == "full" or m.u_update == "joint" else "with wire = 'full'",
    )

    schedule: Schedule = Schedule()
    rank: AtLeast1 | Literal["auto"] = 10
    factorise: Literal["head", "all"] | tuple[str, ...] = "head"
    v_method: Literal["solve", "precondition", "gradient"] = "precondition"
    v_steps: Count = 50
    v_unit: Literal["step", "epoch"] = "step"
    v_scale: Literal["1", "1/n"] = "1"
    lr_v: NonNegative | None = None
    p: NonNegative | None = None
    v_ridge: NonNegative = 1e-6
    v_prior: NonNegative = 0.1
    g_at: Literal["old", "new"] = "new"
    u_update: Literal["train", "gradient", "joint"] = "train"
    u_steps: AtLeast1 | None = None
    server_step: Literal["scaled", "plain", "literal"] = "scaled"
    ridge: NonNegative = 0.01
    max_step: Positive | None = 0.2
    max_shared_step: Positive | None = None
    start: Literal["common", "random", "published"] = "common"
    wire: Literal["rank-one", "full"] = "rank-one"
    refresh: bool = True
    gauge_every: Count = 0
    rank_start: Annotated[int, Ge(2)] = 30
    rank_round: AtLeast1 = 10
    rank_gap: Annotated[float, Gt(1)] = 1.25

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.private_head or self.optimizer.rule != "sgd":
            raise ConfigError(
                "PflMf: private_head and adamw do not go with a shared subspace; use private_head=false, sgd."
            )
        if self.u_update != "joint":
            self.refuse_server_optimizer("server_step says what the server does")
        if self.u_update == "joint" and (self.rank == "auto" or self.gauge_every):
            raise ConfigError("PflMf: u_update='joint' goes with a fixed rank and gauge_every=0.")

    @classmethod
    def paper(cls, **fields: Any) -> PflMf:
        """Algorithm 1 as written."""
        return PflMfPaper(**fields)

    # ------------------------------------------------------------------------------------------------ what is where

    @property
    def width(self) -> int:
        """Length of v as a client keeps it."""
        return self.rank_start if self.rank == "auto" else self.rank

    @property
    def moves(self) -> bool:
        """Whether the server may change the gauge or the rank, so that clients must follow."""
        return self.rank == "auto" or self.gauge_every > 0

    def factorised(self, task: Task) -> list[str]:
        """Names of the parameters that are U v."""
        if self.factorise == "all":
            return task.names
        if self.factorise == "head":
            return task.need_head()
        names = [k for k in task.names if k.startswith(self.factorise)]
        if not names:
            raise ConfigError(f"PflMf: factorise must begin the name of a parameter. Got {list(self.factorise)}.")
        return names

    def plan(self) -> Mapping[str, Amount]:
        v: Amount = Steps(self.v_steps) if self.v_method == "gradient" else All()
        if self.v_method == "gradient" and self.v_unit == "epoch":
            v = Epochs(self.v_steps)
        u: Amount = All() if self.u_update == "gradient" else Epochs() if self.u_steps is None else Steps(self.u_steps)
        return {"v": v, "U": u}

    def init_server(self, task: Task, federation: Federation) -> Tree:
        names, start = self.factorised(task), task.init()
        d = sum(start[k].numel() for k in names)
        if self.width > d:
            raise ConfigError(
                f"PflMf: rank must be at most {d}, the number of factorised parameters. Got {self.width}."
            )
        if self.start == "published":
            shape = (d, self.width)
            U = (2 * uniform(key(federation.seed, "U"), shape, start[names[0]].dtype) - 1) / self.width**0.5
        else:
            columns = (tree.select(task.fresh(federation.seed, "U", j), names) for j in range(self.width))
            U = torch.stack([tree.ravel(c) for c in columns], 1)  # independent standard initialisations
        server = {"U": U, "theta": tree.without(start, [*names, *task.stats])}
        server = self.server.begin(server)
        eye = torch.eye(self.width, dtype=U.dtype)
        server |= {"C": eye / self.width}  # Σ w v vᵀ of the last round
        if self.moves:
            server |= {"C_mean": torch.zeros_like(eye), "map": eye, "moved": torch.zeros((), dtype=torch.int64)}
            server |= {"gaps": torch.zeros(self.width - 1, dtype=U.dtype)}
        return server

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        start = task.init()
        dtype = next(iter(start.values())).dtype
        if self.start == "common":
            v = torch.full((self.width,), self.width**-0.5, dtype=dtype)  # data, not noise, must separate the clients
        else:
            v = normal(who.key, (self.width,), dtype)
            v = v / v.norm() if self.start == "random" else v
        generation = {"generation": torch.zeros((), dtype=torch.int64)} if self.moves else {}
        return {"v": v, "stats": tree.select(start, task.stats), **generation}

    def common(self, task: Task, federation: Federation) -> Tree:
        return {"maps": {}} if self.moves else {}

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        return Down(shared={"U": server["U"], "theta": server["theta"]})

    # ------------------------------------------------------------------------------------------------ the client

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        U, rest = down["U"], down["theta"] | client["stats"]
        like = tree.select(task.init(), self.factorised(task))
        old = self._v(client, visit.common, U.shape[1])

        def f(theta: Tensor, others: Params, batch: Batch) -> Tensor:
            loss = task.loss(others | tree.unravel(theta, like), batch)
            # A Gaussian prior on θ: with few examples the fit alone would separate them and θ would grow for ever.
            shrink = self.v_prior / visit.examples
            return loss + shrink / 2 * theta.square().sum() if self.v_prior else loss

        if self.u_update == "joint":
            loss = lambda q, b: f(q["U"] @ q["v"], q["rest"], b)
            both = self.fit(
                loss, {"U": U, "v": old, "rest": rest}, visit["U"], self.schedule.rate(self.lr, int(visit.round))
            )
            theta, stats = self._apart(task, both["rest"])
            return self._keep(client, both["v"], stats, visit), Sent(
                self.weigh(visit), {"theta": theta, "U": both["U"]}
            )
        if self.v_method != "gradient":
            v = self._solve(task, U, old, rest, visit["v"])
        else:
            v, rate = old, self._lr_v(visit)
            for batch in visit["v"]:
                g = gradient(lambda q, b: f(q["t"], rest, b), {"t": v @ U.T}, batch)["t"]
                v = v - rate * (g @ U)  # v ← v − η_v Uᵀ∇f_i(U v), eq. (8)
        at = old if self.g_at == "old" else v
        if self.u_update == "gradient":
            start = {"t": at @ U.T, "rest": down["theta"]}
            g = mean_gradient(lambda q, b: f(q["t"], client["stats"] | q["rest"], b), start, visit["U"])
            lr = self.schedule.rate(self.lr, int(visit.round))
            delta, theta, stats = -lr * g["t"], tree.add(down["theta"], g["rest"], -lr), client["stats"]
        else:
            # θ = U v + s z with s = ‖v‖ for the literal step: K_U steps on U are steps of η‖v‖² on θ, exactly.
            s = at.norm() if self.server_step == "literal" else 1.0
            base = at @ U.T

            loss = lambda q, b: f(base + s * q["z"], q["rest"], b)
            new = self.fit(
                loss,
                {"z": torch.zeros_like(base), "rest": rest},
                visit["U"],
                self.schedule.rate(self.lr, int(visit.round)),
            )
            delta = s * new["z"]
            theta, stats = self._apart(task, new["rest"])
        if self.server_step == "literal":
            delta = delta / at.square().sum()
        sent: Tree = {"theta": theta, "delta": delta, "v": at}  # G_i = ∇f_i(U v_i) v_iᵀ by its factors, eq. (7)
        if self.wire == "full":
            sent = {"theta": theta, "M": torch.outer(delta, at), "C": subspace.triangle(torch.outer(at, at))}
        return self._keep(client, v, stats, visit), Sent(self.weigh(visit), sent)

    def _solve(self, task: Task, U: Tensor, v: Tensor, rest: Params, stream: Batches) -> Tensor:
        """Fit v on all examples with U fixed, in the coordinates w of θ = U v = Q w, Q orthonormal: no gauge matters.

        `precondition`: gradient descent on w, which is v ← v − η (UᵀU)⁻¹ Uᵀ∇f_i(U v), descent on θ inside span U.
        `solve`, where only the head is factorised and outputs are linear in w: steps under a bound on the curvature in
        w, each of which lowers the loss, at any scale of the features. `v_steps` of them leave v near where it was in
        directions about which the data say little; the exact minimiser does worse.
        """
        Q, L, back = subspace.gauge(U)
        like = tree.select(task.init(), self.factorised(task))
        rate = 1.0 if self.lr_v is None else self.lr_v
        start, batch = v @ L, stream.whole()
        w, shrink = start, self.v_prior / batch.w.sum().clamp_min(1)
        if self.factorise == "head":
            with torch.no_grad():
                # One pass gives the outputs for every column of Q; w needs only those.
                h = task.features(rest | tree.unravel(U @ v, like), batch.x)
                Z = vmap(lambda column: task.from_features(tree.unravel(column, like), h))(Q.T)  # [r, n, C]
                share = (batch.w / batch.w.sum().clamp_min(1)).reshape(-1, *[1] * (Z.ndim - 2))
                bound, P = task.curvature_bound(), torch.eye(len(w), dtype=w.dtype)
                if self.v_method == "solve" and bound is not None:
                    P = subspace.inverse(bound * Z.flatten(1) @ (Z * share).flatten(1).T + shrink * P, self.v_ridge)
                # A v that was never fitted, or long ago, can be worse than none: start from the better of the two.
                if self.v_method == "solve" and rate and self.v_steps:
                    at_w, at_0 = (batch.mean(task.example_loss(torch.tensordot(q, Z, 1), batch.y)) for q in (w, 0 * w))
                    w = torch.where(at_0 < at_w, torch.zeros_like(w), w)
                for _ in range(self.v_steps):
                    residual = task.output_gradient(torch.tensordot(w, Z, 1), batch.y) * share
                    w = w - rate * P @ (torch.tensordot(Z, residual, residual.ndim) + shrink * w)
        else:
            loss = lambda q, b: task.loss(rest | tree.unravel(Q @ q["w"], like), b)
            for _ in range(self.v_steps):
                w = w - rate * (mean_gradient(loss, {"w": w}, stream)["w"] + shrink * w)
        return v + back @ (w - start)

    def _lr_v(self, visit: Visit) -> float:
        rate = self.schedule.rate(self.lr, int(visit.round)) if self.lr_v is None else self.lr_v
        if self.p is not None:
            rate = (
                self.p * self.schedule.rate(self.lr, int(visit.round)) / max(1, self.v_steps)
            )  # Theorem 1: η_v = p η_u / K
        return rate / visit.clients if self.v_scale == "1/n" else rate

    def _apart(self, task: Task, rest: Params) -> tuple[Params, Params]:
        return tree.without(rest, task.stats), tree.select(rest, task.stats)

    def _v(self, client: Tree, common: Tree, rank: int) -> Tensor:
        """This client's v in the server's present gauge and rank."""
        v: Tensor = client["v"]
        for g, P in sorted(((int(k), P) for k, P in common["maps"].items()) if self.moves else ()):
            moved = torch.nn.functional.pad(P @ v[: P.shape[1]], (0, self.width - P.shape[0]))
            v = torch.where(client["generation"] < g, moved, v)
        return v[:rank]

    def _keep(self, client: Tree, v: Tensor, stats: Params, visit: Visit) -> Tree:
        kept: Tree = {"v": torch.nn.functional.pad(v, (0, self.width - len(v))), "stats": stats}
        if self.moves:
            kept["generation"] = torch.full_like(client["generation"], len(visit.common["maps"]))
        return kept

    # ------------------------------------------------------------------------------------------------ the server

    def lift(self, mean: Tree, shared: Tree, capacity: Capacity) -> Tree:
        """The two factors as the matrices whose means the server needs."""
        if self.u_update == "joint":
            return mean
        if self.wire == "full":
            return {**mean, "C": subspace.from_triangle(mean["C"], shared["U"].shape[1])}
        return {"theta": mean["theta"], "M": Outer(mean["delta"], mean["v"]), "C": Outer(mean["v"], mean["v"])}

    def server_update(self, server: Tree, round: Round) -> Tree:
        theta = round.mean["theta"]
        if self.max_shared_step is not None:
            theta = _near(server["theta"], theta, self.max_shared_step)
        if self.u_update == "joint":
            return {**server, **self.server.step(server, {"U": round.mean["U"], "theta": theta})}
        M, C = round.mean["M"], round.mean["C"]
        scaled = self.server_step == "scaled"
        U = subspace.scaled_step(server["U"], M, C, self.ridge, self.max_step) if scaled else server["U"] + M  # eq. (9)
        return {"U": U, "theta": theta, "C": C} | (self._move(server, U, C, round.round) if self.moves else {})

    def _move(self, server: Tree, U: Tensor, C: Tensor, t: int) -> Tree:
        """Change the rank or the gauge when it is time; every v follows by the map that is announced."""
        last, C = C, 0.9 * server["C_mean"] + 0.1 * C
        state = {"C_mean": C, "map": server["map"], "moved": server["moved"], "gaps": server["gaps"]}
        P = None
        if self.rank == "auto" and len(C) == self.width:
            # One round's gaps are mostly chance, each time elsewhere; their mean over rounds leaves the real one.
            state["gaps"] = 0.8 * server["gaps"] + 0.2 * subspace.gaps(subspace.spectrum(U, C))
            k = subspace.clear_gap(state["gaps"], self.rank_gap) if t >= self.rank_round else None
            if k is not None:
                U, P = subspace.cut(U, C, k)
        if P is None and self.gauge_every and t % self.gauge_every == 0:
            U, P = subspace.orthonormal_gauge(U, C)
        if P is not None:
            state |= {"C_mean": P @ C @ P.T, "map": P, "moved": torch.tensor(t)}
            last = P @ last @ P.T
        return state | {"U": U, "C": last}

    def announce(self, server: Tree, round: int) -> Tree | None:
        if not self.moves or int(server["moved"]) != round:
            return None
        return {"map": server["map"]}

    def hear(self, common: Tree, news: Tree) -> Tree:
        return {"maps": {**common["maps"], str(len(common["maps"]) + 1): news["map"]}}

    # ------------------------------------------------------------------------------------------------ use

    def trained(self, down: Tree, sent: Sent, capacity: Capacity) -> Tree:
        return {**down, **sent.mean} if self.u_update == "joint" else down

    def personal_plan(self, task: Task) -> Mapping[str, Amount]:
        return {"all": All()} if task.stats or self.refresh else {}

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        U, rest = down["U"], down["theta"] | client["stats"]
        v = self._v(client, visit.common, U.shape[1])
        if self.refresh:
            v = self._solve(task, U, v, rest, visit["all"])
        params = rest | tree.unravel(U @ v, tree.select(task.init(), self.factorised(task)))  # θ_i = U v_i
        return task.estimate_statistics(params, visit["all"]) if task.stats else params

    def size(self, server: Tree) -> float:
        """Root mean square of the θ_i and the norm of the shared part: what a change of gauge leaves alone."""
        spread = torch.trace(server["U"].T @ server["U"] @ server["C"]).clamp_min(0)
        return math.sqrt(float(spread) + float(tree.squared_norm(server["theta"])))

    def monitor(self, server: Tree) -> dict[str, float]:
        """Norm and condition of U, and its effective rank."""
        s = torch.linalg.svdvals(server["U"])
        share = s.square() / s.square().sum()
        entropy = -(share * share.clamp_min(1e-30).log()).sum()
        return {
            "U_norm": float(s.square().sum().sqrt()),
            "U_condition": float(s[0] / s[-1].clamp_min(1e-30)),
            "effective_rank": float(entropy.exp()),
            "rank": float(server["U"].shape[1]),
        }

    def panels(self) -> Sequence[Panel]:
        """Where the clients lie in the subspace."""
        again = replace(self, refresh=True)
        refit = Refit(again.personal_plan, again.personal)
        return (subspace_panel(self, self.coefficients, self.factorised, refit),)

    def coefficients(self, client: Tree, server: Tree, common: Tree) -> Tensor:
        """A client's v in the gauge and rank of a server's state."""
        return self._v(client, common, server["U"].shape[1])


def _near(old: Params, new: Params, most: float) -> Params:
    """The new parameters, or the point on the way to them that is this part of the old ones' norm away."""
    step, size = (tree.squared_norm(t).sqrt() for t in (tree.sub(new, old), old))
    part = subspace.allowed(step, size, most) if size else 1.0  # all zero, it has no size to go by
    return new if part == 1.0 else {k: old[k] + part * (v - old[k]) for k, v in new.items()}


@dataclass(frozen=True, kw_only=True)
class PflMfPaper(PflMf):
    """pFL-MF as written. Dadras, Stich and Yurtsever, TMLR 2025, Algorithm 1.

    All parameters are factorised. A client takes K = `v_steps` plain steps on v, scaled by 1/n as ψ = (1/n) Σ f_i
    demands, and sends G_i = ∇f_i(U v_i) v_iᵀ at the v it started from; the server takes the uniform mean. What the
    paper leaves open: columns of U are independent standard initialisations, v_i is a random unit vector, G_i uses all
    of a client's examples. `p` sets η_v = p η_u / K, the rule of Theorem 1. Kept: v. Sent: the factors of G_i.
    """

    lr: NonNegative = 0.1
    factorise: Literal["head", "all"] | tuple[str, ...] = "all"
    v_method: Literal["solve", "precondition", "gradient"] = "gradient"
    v_steps: Count = 1
    v_scale: Literal["1", "1/n"] = "1/n"
    v_prior: float = 0.0
    g_at: Literal["old", "new"] = "old"
    u_update: Literal["train", "gradient", "joint"] = "gradient"
    server_step: Literal["scaled", "plain", "literal"] = "plain"
    start: Literal["common", "random", "published"] = "random"
    weighting: Literal["samples", "uniform"] = "uniform"
    refresh: bool = False


@dataclass(frozen=True, kw_only=True)
class PflMfJoint(PflMf):
    """pFL-MF as the published code runs it: U and v are trained together for the run's epochs, U is averaged.

    The published training function stands outside its class and is never called; what runs is FedPer on (U, v), with
    entries of U uniform in ±1/√r and v normal. Kept: v. Sent: U, d·r numbers.
    """

    lr: NonNegative = 0.1
    factorise: Literal["head", "all"] | tuple[str, ...] = "all"
    v_prior: float = 0.0
    u_update: Literal["train", "gradient", "joint"] = "joint"
    start: Literal["common", "random", "published"] = "published"
    refresh: bool = False
