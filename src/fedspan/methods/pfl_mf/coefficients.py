"""The coefficients v of θ = U v: fitted with U fixed, read in the present gauge, and solved for by a newcomer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.func import vmap

from fedspan import tree
from fedspan.learn.batches import All, Amount, Batch, Batches
from fedspan.learn.folded import stacked
from fedspan.learn.optimizer import Optimizer
from fedspan.learn.safeguard import shortened
from fedspan.learn.sgd import mean_gradient
from fedspan.learn.task import Task
from fedspan.linalg import subspace
from fedspan.method import Method, Newcomer, Observed, Onboards, Panel, Visit
from fedspan.method.fields import Count, NonNegative
from fedspan.method.panels import Refit
from fedspan.methods.pfl_mf.subspace_panel import subspace_panel
from fedspan.tree import Params, Tree

COLD_STEPS = 200
"""A newcomer's steps on cached features, which cost little; clients of a run start from their last v and need fewer."""

COLD_RATES = (0.03, 0.1, 0.3, 1.0)
"""Learning rates that a newcomer tries where nothing bounds the curvature."""


@dataclass(frozen=True, kw_only=True)
class CoefficientSolver:
    """How v is fitted on all of a client's examples with U fixed, in the coordinates w of θ = U v = Q w.

    Q is orthonormal, so that no gauge matters. `precondition` is gradient descent on w, which is
    v ← v − η (UᵀU)⁻¹ Uᵀ∇f_i(U v), descent on θ inside span U. `solve`, where only the head is factorised and outputs
    are linear in w, takes steps under a bound on the curvature in w, each of which lowers the loss, at any scale of the
    features. `steps` of them leave v near where it was in directions about which the data say little; the exact
    minimiser does worse.
    """

    KEYS: ClassVar[Mapping[str, str]] = {
        "v_method": "rule",
        "v_steps": "steps",
        "lr_v": "lr",
        "v_ridge": "ridge",
        "v_prior": "prior",
        "v_safeguard": "safeguard",
    }

    rule: Literal["solve", "precondition"] = "precondition"
    """How v is fitted with U fixed: gradient steps inside span U, or steps under a bound on the curvature."""
    steps: Count = 50
    """Steps on v per fit."""
    lr: NonNegative | None = None
    """The learning rate of v; 1 if not given."""
    ridge: NonNegative = 1e-6
    """What is added to the curvature of v before it is inverted (`solve`), relative to its mean eigenvalue."""
    prior: NonNegative = 0.1
    """The precision of a Gaussian prior on θ: with few examples a fit alone would let θ grow for ever."""
    safeguard: bool = True
    """Whether a fit of v that raised the loss is taken again with shorter steps."""

    def fit(
        self, task: Task, U: Tensor, v: Tensor, rest: Params, stream: Batches, names: list[str], head: bool
    ) -> Tensor:
        """Fit v on all examples: `names` are U v, `rest` is the model's rest, `head` says that U v is the head."""
        Q, L, back = subspace.gauge(U)
        like, start = tree.select(task.init(), names), v @ L
        shrink = self.prior / stream.examples.clamp_min(1).to(v.dtype)
        if head:
            params = rest | tree.unravel(v @ U.T, like)
            w = self._fit_head(task, Q, start, params, stream, like, shrink)
        else:
            loss = lambda q, b: task.loss(rest | tree.unravel(Q @ q, like), b)

            def descend(rate: float) -> Tensor:
                w = start
                for _ in range(self.steps):
                    w = w - rate * (mean_gradient(loss, w, stream) + shrink * w)
                return w

            w = Optimizer(safeguard=self.safeguard).guarded(descend, start, loss, stream, self._rate)
        return v + back @ (w - start)

    @property
    def _rate(self) -> float:
        return 1.0 if self.lr is None else self.lr

    def _fit_head(
        self, task: Task, Q: Tensor, w: Tensor, params: Params, stream: Batches, like: Params, shrink: Tensor
    ) -> Tensor:
        """Fit w on cached features: one pass gives the outputs for every column of Q, and w needs only those."""
        batch, rate = stream.whole(), self._rate
        with torch.no_grad():
            heads = vmap(lambda column: tree.unravel(column, like))(Q.T.contiguous())
            Z = task.outputs_of_heads(heads, task.features_of(params, batch))  # [r, classes, n]: examples last
            share = batch.w / batch.w.sum().clamp_min(1)
            columns = Z.flatten(1)
            bound, P = task.curvature_bound(), None
            if self.rule == "solve" and bound is not None:
                A = bound * columns @ (Z * share).flatten(1).T
                P = subspace.inverse(A + shrink * torch.eye(len(w), dtype=w.dtype, device=w.device), self.ridge)

            def outputs(u: Tensor) -> Tensor:
                return (u @ columns).reshape(Z.shape[1:]).movedim(-1, 0)

            # A v that was never fitted, or long ago, can be worse than none: start from the better of the two.
            if self.rule == "solve" and rate and self.steps:
                at_w, at_0 = (task.mean_loss(outputs(q), batch) for q in (w, 0 * w))
                w = torch.where(at_0 < at_w, torch.zeros_like(w), w)
            descend = self._descent(task, Z, w, P, batch, share, shrink)
            if not self.safeguard or not rate:
                return descend(rate)
            return shortened(descend, w, lambda u: task.mean_loss(outputs(u), batch), rate)

    def _descent(
        self, task: Task, Z: Tensor, w: Tensor, P: Tensor | None, batch: Batch, share: Tensor, shrink: Tensor
    ) -> Callable[[float], Tensor]:
        """Return the steps from w at a learning rate, preconditioned by P if there is one."""
        columns = Z.flatten(1)
        if not task.responds:
            live = share.reshape(-1, *[1] * (Z.ndim - 2))

            def descend(rate: float) -> Tensor:
                u = w
                for _ in range(self.steps):
                    output = (u @ columns).reshape(Z.shape[1:]).movedim(-1, 0)
                    residual = (task.output_gradient(output, batch.y, batch.mask) * live).movedim(0, -1)
                    g = columns @ residual.flatten() + shrink * u
                    u = u - rate * (g if P is None else P @ g)
                return u

            return descend
        labels = task.target(Z[0].T, batch.y).T * share
        # Each product reads the outputs in the order that suits it: with columns last a vector times a matrix is quick.
        rows = columns.T.contiguous()
        asked = labels.flatten() @ rows  # by the labels, the same in every step
        given = (Z, rows, w, asked, share, shrink) if P is None else (Z, rows, w, asked, share, shrink, P)
        return lambda rate: stacked(partial(_softmax_steps, self.steps, rate), *given)

    def cold(self, task: Task, head: bool) -> list[CoefficientSolver]:
        """Return the solvers a newcomer tries: one where the curvature is bounded, or one for every learning rate."""
        patient = replace(self, steps=max(COLD_STEPS if head else 50, self.steps))
        if head and task.curvature_bound() is not None:
            return [replace(patient, rule="solve", lr=None)]
        return [replace(patient, rule="precondition", lr=rate) for rate in COLD_RATES]


def _softmax_steps(steps: int, rate: float, *given: Tensor) -> Tensor:
    """Gradient steps of softmax regressions in few unknowns w [C, r], whose outputs are w Z of Z [C, r, classes, n].

    `rows` are Z as [C, classes · n, r], `asked` the part of the gradient that only labels enter. Examples are last, so
    that a softmax over few classes is as fast as the products.
    """
    Z, rows, w, asked, share, shrink, *P = given
    columns, w = Z.flatten(2), w[:, None]
    minus, share, shrink = -asked[:, None], share[:, None], shrink[:, None, None]
    for _ in range(steps):
        slope = torch.bmm(w, columns).view(Z.shape[0], *Z.shape[2:]).softmax(1).mul_(share)
        g = torch.baddbmm(minus, slope.view(len(Z), 1, -1), rows).add_(shrink * w)
        w = torch.sub(w, g @ P[0].mT if P else g, alpha=rate)
    return w[:, 0]


class InSubspace(Observed, Onboards):
    """What all forms share: a client's model is U v, with v kept at home. It has no fields.

    The server's state and the download hold U, and `theta` where some parameters are outside U v; a client's state
    holds v, and `stats` of batch normalisation.
    """

    solver = CoefficientSolver(prior=0.0)

    @property
    def head_only(self) -> bool:
        """Whether U v is the head and nothing else, so that v can be fitted on cached features."""
        return False

    def factorised(self, task: Task) -> list[str]:
        """Return the names of the parameters that are U v."""
        return task.names

    def coefficients(self, client: Tree, down: Tree, common: Tree) -> Tensor:
        """Return this client's v in the gauge and rank of the U in `down` (a download, or the server's state)."""
        v: Tensor = client["v"]
        return v

    def rest(self, client: Tree, down: Tree) -> Params:
        """Return the parameters and statistics outside U v."""
        outside: Params = down.get("theta", {}) | client["stats"]
        return outside

    def compose(self, task: Task, rest: Params, U: Tensor, v: Tensor, visit: Visit) -> Params:
        """Return the model of a client, with statistics re-estimated on its own examples."""
        params = rest | tree.unravel(v @ U.T, tree.select(task.init(), self.factorised(task)))  # θ_i = U v_i
        return task.estimate_statistics(params, visit["all"]) if task.stats else params

    def refit(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Params:
        """Return the model with v fitted again to the U of the day, on the stream `all`; nothing is kept."""
        rest, v = self.rest(client, down), self.coefficients(client, down, visit.common)
        v = self._fit_v(self.solver, task, down["U"], v, rest, visit)
        return self.compose(task, rest, down["U"], v, visit)

    def _fit_v(self, solver: CoefficientSolver, task: Task, U: Tensor, v: Tensor, rest: Params, visit: Visit) -> Tensor:
        return solver.fit(task, U, v, rest, visit["all"], self.factorised(task), self.head_only)

    # ------------------------------------------------------------------------------------------------ newcomers

    def onboard_plan(self, task: Task) -> Mapping[str, Amount]:
        """Ask for all training examples."""
        return {"all": All()}

    def onboard(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Newcomer:
        """Solve for v on the final U; without a bound on the curvature, at the learning rate that fits best."""
        U, v, rest = down["U"], self.coefficients(client, down, visit.common), self.rest(client, down)
        if task.stats:  # a newcomer's running statistics are those of nobody: features need its own first
            rest = rest | tree.select(self.compose(task, rest, U, v, visit), task.stats)
        solvers = self.solver.cold(task, self.head_only)
        if len(solvers) == 1:
            # The first v belongs to the first U: on the final one its outputs can be huge and wrong; 0 is much nearer.
            v = torch.zeros_like(v)
        fits = [self._fit_v(solver, task, U, v, rest, visit) for solver in solvers]
        models = [self.compose(task, rest, U, fit, visit) for fit in fits]
        batch = visit["all"].whole()
        with torch.no_grad():
            losses = [task.mean_loss(task.predict(m, batch.x), batch) for m in models]
        best = int(torch.stack(losses).nan_to_num(nan=math.inf).argmin())
        return Newcomer(models[best], fits[best])

    # ------------------------------------------------------------------------------------------------ curves

    def size(self, server: Tree) -> float:
        """Return the root mean square of the θ_i and the norm of the rest: what a change of gauge leaves alone."""
        spread = torch.trace(server["U"].T @ server["U"] @ server["C"]).clamp_min(0)
        return math.sqrt(float(spread) + float(tree.squared_norm(server.get("theta", {}))))

    def monitor(self, server: Tree) -> dict[str, float]:
        """Return norm and condition of U, and its effective rank."""
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
        """Return where the clients lie in the subspace."""
        assert isinstance(self, Method)
        return (subspace_panel(self, self.coefficients, self.factorised, Refit(self.onboard_plan, self.refit)),)
