"""AMHT-LRS: what clients share is a subspace, what is their own is sparse."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedspan import tree
from fedspan.errors import ConfigError
from fedspan.learn.batches import All, Amount, Batch, Batches
from fedspan.learn.task import Task
from fedspan.linalg import subspace
from fedspan.method import (
    About,
    Adapts,
    Averaging,
    Capacity,
    Cautions,
    ClientInfo,
    Discloses,
    Down,
    Federation,
    Observed,
    Round,
    Sent,
    Visit,
)
from fedspan.method.fields import AtLeast1, Count, NonNegative, Positive
from fedspan.tree import Outer, Params, Tree


@dataclass(frozen=True, kw_only=True)
class AmhtLrs(Averaging, Adapts, Observed, Cautions):
    """AMHT-LRS. Pal et al., AISTATS 2024, Algorithm 1, without its private variant.

    Symbols: U [d, r] orthonormal = the shared subspace, w [r] = coefficients, b [d] = at most `sparsity` entries of a
    client's own; the head of client i is U w_i + b_i, and theta = the body, which the paper's linear models lack, is
    averaged after training for the run's epochs. A round: b takes `b_steps` gradient steps, after each of which entries
    below a threshold, or not among the `sparsity` largest, become zero; the threshold starts at `threshold` and falls
    by `shrink` with every step; then w is solved for. The server solves for U (`u_update = "solve"`), or takes a
    gradient step of size `lr_u`, and makes it orthonormal again. Outputs are linear in b, w and U; steps are those of
    Newton's method under a bound on the loss's curvature: for the squared error one such step is the least squares of
    the paper (up to `ridge`, a share of the mean curvature), for cross-entropy `w_steps` lead there. Before use w is
    solved for anew, as U has moved. Kept: w and b. Sent: theta, and the normal equations of U, K and G (r²D² numbers
    for D features), or the factors of its gradient.

    Settled with public code of the algorithm: the order b, w, U; Δ ← Δ/2 with every step; U by its normal equations,
    then QR. The constants of its threshold are bounds on unknown quantities: here they are one number, and the cap on
    the entries holds whatever it is.
    """

    about = About(
        family="pfl-mf",
        reference="Pal et al., AISTATS 2024",
        discloses=Discloses(labels="set", model="nothing", private=("w",), examples=False, resembles=True),
    )

    weighting: Literal["samples", "uniform"] = "uniform"
    private_head: bool = False
    """Must be false, as the head is U w + b."""
    rank: AtLeast1 = 4
    """r, the dimension of the shared subspace."""
    sparsity: Count = 10
    """The most entries of b, which are a client's own."""
    b_steps: Count = 5
    """Gradient steps on b in a round."""
    threshold: NonNegative = 0.1
    """Δ, the size that an entry of b must exceed after the first step of a round."""
    shrink: Positive = 0.5
    """What the threshold is multiplied by with every step."""
    w_steps: Count = 10
    """Newton steps on w in a round and before use; one solves for the squared error."""
    u_update: Literal["solve", "gradient"] = "solve"
    """Whether the server solves for U, or takes a gradient step."""
    lr_w: NonNegative = 1.0
    """Size of a step on w; 1 is Newton's."""
    lr_b: NonNegative = 1.0
    """Size of a step on b; 1 is the inverse of the largest curvature."""
    lr_u: NonNegative = 1.0
    """Size of the server's step on U; 1 goes all the way where it solves."""
    ridge: Positive = 1e-3
    """What is added to a curvature before it is inverted, as a share of its mean."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_server_optimizer("the server solves for U")
        if self.private_head:
            raise ConfigError("AmhtLrs: private_head must be false, as the head is U w + b. Got true.")

    def directions(self) -> int:
        return self.rank

    def plan(self) -> Mapping[str, Amount]:
        return {**super().plan(), "all": All()}

    def personal_plan(self, task: Task) -> Mapping[str, Amount]:
        return {"all": All()}

    # ------------------------------------------------------------------------------------------------ the start

    def init_server(self, task: Task, federation: Federation) -> Tree:
        start, names = task.init(), _head(task)
        if task.curvature_bound() is None:
            raise ConfigError("AmhtLrs: the loss must be cross-entropy or the squared error. Got another one.")
        # The common start is the first column, so that every client can start there.
        draws = [start, *(task.fresh(federation.seed, "U", j) for j in range(1, self.rank))]
        columns = torch.stack([_vector(draw, names) for draw in draws], 1)
        if self.rank > len(columns):
            most = f"{len(columns)}, the parameters of the head"
            raise ConfigError(f"AmhtLrs: rank must be at most {most}. Got {self.rank}.")
        return {"U": _orthonormal(columns), "theta": tree.without(start, [*names, *task.stats])}

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        start = task.init()
        head = _vector(start, _head(task))
        w = torch.cat([head.norm()[None], head.new_zeros(self.rank - 1)])
        return {"w": w, "b": torch.zeros_like(head), "stats": tree.select(start, task.stats)}

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        return Down(shared={"U": server["U"], "theta": server["theta"]})

    # ------------------------------------------------------------------------------------------------ the client

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        U, body, stats, names = down["U"], down["theta"], client["stats"], _head(task)
        w, b = client["w"], client["b"]
        fit = self._fit(task, body | stats | _params(U @ w + b, names, task), visit["all"])
        for j in range(self.b_steps if self.sparsity else 0):
            c = b - self.lr_b * fit.slope(U @ w + b) / fit.steepest
            b = _sparse(c, self.threshold * self.shrink**j, self.sparsity)  # b ← HT(c, Δ)
        w = self._solved(fit, U, w, b)
        head = U @ w + b
        if body:
            fixed = _params(head, names, task)
            both = self.fit(lambda p, q: task.loss(p | fixed, q), body | stats, visit["train"])
            body, stats = tree.without(both, task.stats), tree.select(both, task.stats)
        g = fit.slope(head)  # ∇_U f_i = ∇f_i(U w_i + b_i) w_iᵀ
        sent: Tree = {"theta": body, "G": Outer(g, w)}
        if self.u_update == "solve":
            K = torch.kron(torch.outer(w, w), fit.gram)
            sent = {"theta": body, "G": torch.outer(g, w), "K": subspace.triangle(K)}
        return {"w": w, "b": b, "stats": stats}, Sent(self.weigh(visit), sent)

    def _fit(self, task: Task, params: Params, stream: Batches) -> _Head:
        """The loss as a function of the head alone, on a client's examples."""
        batch = stream.whole()
        with torch.no_grad():
            X = task.features(params, batch.x)
        if len(_head(task)) == 2:
            X = torch.cat([X, torch.ones_like(X[:, :1])], 1)
        outputs = len(params[_head(task)[0]])
        bound = task.curvature_bound() or 0.0
        return _Head(task, batch, X, bound / outputs if task.kind == "regression" else bound)

    def _solved(self, fit: _Head, U: Tensor, w: Tensor, b: Tensor) -> Tensor:
        """argmin_w f(U w + b): after one step for the squared error."""
        columns = U.T.reshape(len(w), -1, fit.X.shape[1])  # [r, C, D]
        H = torch.einsum("acd,de,bce->ab", columns, fit.gram, columns)
        inverse = subspace.inverse(H, self.ridge)
        for _ in range(self.w_steps):
            w = w - self.lr_w * inverse @ (U.T @ fit.slope(U @ w + b))
        return w

    # ------------------------------------------------------------------------------------------------ the server

    def server_update(self, server: Tree, round: Round) -> Tree:
        U, G = server["U"], round.mean["G"]
        if self.u_update == "solve":
            r, size = self.rank, (math.isqrt(8 * len(round.mean["K"]) + 1) - 1) // 2
            D = size // r
            inverse = subspace.inverse(subspace.from_triangle(round.mean["K"].to(torch.float64), size), self.ridge)
            # One system for each output: its rows of U, in the order of K, coefficients before features.
            rows = G.to(torch.float64).reshape(-1, D, r).permute(0, 2, 1).reshape(-1, size) @ inverse
            G = rows.reshape(-1, r, D).permute(0, 2, 1).reshape(G.shape).to(U.dtype)
        return {"U": _orthonormal(U - self.lr_u * G), "theta": round.mean["theta"]}

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        U, names = down["U"], _head(task)
        params: Params = down["theta"] | client["stats"] | _params(U @ client["w"] + client["b"], names, task)
        if task.stats:
            params = task.estimate_statistics(params, visit["all"])
        w = self._solved(self._fit(task, params, visit["all"]), U, client["w"], client["b"])
        return params | _params(U @ w + client["b"], names, task)

    def size(self, server: Tree) -> float:
        """The norm of the body; U is orthonormal."""
        return math.sqrt(self.rank + float(tree.squared_norm(server["theta"])))


@dataclass(frozen=True)
class _Head:
    """The mean loss of a client as a function of its head [C, D] (as one vector), features X [n, D] being fixed."""

    task: Task
    batch: Batch
    X: Tensor
    bound: float

    @property
    def share(self) -> Tensor:
        """How much each example counts."""
        w = self.batch.w.to(self.X.dtype)
        return (w / w.sum().clamp_min(1))[:, None]

    @property
    def gram(self) -> Tensor:
        """A bound on the second derivative in the weights of one output, [D, D]; exact for the squared error."""
        return self.bound * (self.X * self.share).T @ self.X

    @property
    def steepest(self) -> Tensor:
        """The largest curvature."""
        largest: Tensor = torch.linalg.eigvalsh(self.gram)[-1]
        return largest.clamp_min(torch.finfo(self.X.dtype).tiny)

    def slope(self, head: Tensor) -> Tensor:
        """The gradient at a head."""
        output = self.X @ head.reshape(-1, self.X.shape[1]).T
        return ((self.task.output_gradient(output, self.batch.y, self.batch.mask) * self.share).T @ self.X).reshape(-1)


def _sparse(c: Tensor, threshold: float, most: int) -> Tensor:
    """c with entries not above the threshold, or not among the `most` largest, set to zero."""
    size = c.abs()
    least = size.topk(min(most, len(c))).values[-1]
    return torch.where((size >= least) & (size > threshold), c, torch.zeros_like(c))


def _orthonormal(U: Tensor) -> Tensor:
    """Orthonormal columns that span the same, the first of them along the first."""
    Q, R = torch.linalg.qr(U)
    d = R.diagonal()
    turned: Tensor = Q * torch.where(d < 0, -torch.ones_like(d), torch.ones_like(d))
    return turned


def _head(task: Task) -> list[str]:
    """Names of the head's matrix and, if there is one, its bias."""
    start = task.init()
    names = sorted(task.need_head(), key=lambda k: -start[k].ndim)
    if [start[k].ndim for k in names] not in ([2], [2, 1]):
        raise ConfigError("AmhtLrs: the head must be a linear layer. Got another one; name a layer with model.head.")
    return names


def _vector(params: Params, names: list[str]) -> Tensor:
    """The head as one vector, row by row, the bias as its last feature."""
    return torch.cat([params[k].reshape(len(params[k]), -1) for k in names], 1).reshape(-1)


def _params(vector: Tensor, names: list[str], task: Task) -> Params:
    """The inverse of `_vector`."""
    matrix = vector.reshape(len(task.init()[names[0]]), -1)
    return {names[0]: matrix} if len(names) == 1 else {names[0]: matrix[:, :-1], names[1]: matrix[:, -1]}
