"""Adaptive pFL-MF: a mean head, r directions and a private residual, their widths chosen by the federation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Lt, MinLen
from torch import Tensor

from fedspan import tree
from fedspan.errors import ConfigError
from fedspan.learn.batches import All, Amount, Batches, Epochs, Validation
from fedspan.learn.optimizer import Optimizer
from fedspan.learn.task import Task
from fedspan.method import (
    About,
    Adapts,
    Averaging,
    Capacity,
    ClientInfo,
    Discloses,
    Down,
    Federation,
    Lifts,
    Newcomer,
    Observed,
    Onboards,
    Panel,
    Round,
    Sent,
    Visit,
)
from fedspan.method.fields import AtLeast1, Decay, NonNegative, Share
from fedspan.methods.pfl_mf.head_prior import (
    HeadExamples,
    as_head,
    clear_directions,
    covariance_step,
    first_directions,
    fit_heads,
    linear_head,
    loadings,
    losses_of,
    seen_by_head,
)
from fedspan.methods.pfl_mf.shared_panel import shared_panel
from fedspan.tree import Outer, Params, Tree

TEMPER = 4.0
"""What summed losses are divided by before they are believed: examples of one client are not independent."""
NONE_AS = (-2.0, -1.0)
"""log₁₀ of the κ and τ as which 0 is read by the hyperprior."""
CENTRE = 0.5
"""log₁₀ of the κ and τ that are likeliest before any loss is seen."""
NEGLIGIBLE = 1e-13
"""Pairs (κ, τ) with less weight than this are not fitted when a model is used."""


@dataclass(frozen=True, kw_only=True)
class PflMfAdaptive(Averaging, Lifts, Adapts, Observed, Onboards):
    """Adaptive pFL-MF: θ_i = μ + √κ Bᵀz_i + √τ u δ_i. This library's own form, after Dadras, Stich and Yurtsever.

    Symbols: phi = the body φ, mu [d] = the mean head, Q [d, r + 1] and s = directions V of the heads' covariance and
    their deviations (B is computed of them), S = held-out losses of all clients summed for every pair (κ, τ), held =
    their examples, outputs = of how many a squared error is the mean (0: no squared errors), e = θ_i − μ after
    training, E = e (Qᵀe)ᵀ. z_i and δ_i are fitted anew on every visit and before use, so nothing gets stale and a
    newcomer needs no history. Kept: the last held-out losses. Sent: phi, e, losses (the change of them), and E with
    `wire = "full"`; all of it is only summed up.

    A client fits its head on half of its examples and then trains body and head on all, so that a flexible head
    cannot take the gradient away; where fitted heads gain little, it begins with the mean head. Some examples are
    held out; their losses under heads of every pair, pooled over all clients, choose how wide the span of B (κ) and
    the residual (τ) may be. κ = τ = 0 is FedAvg, κ = 0 and τ large a common body with free heads, τ = 0 a subspace of
    heads.
    """

    about = About(
        family="pfl-mf",
        reference="after Dadras, Stich and Yurtsever, TMLR 2025",
        secure_sum=lambda m: "yes" if m.wire == "full" else "with wire = 'full'",
        discloses=Discloses(labels="set", model="part", examples=True, resembles=True),
    )

    lr: NonNegative = 2.0
    """The clients' learning rate; gradients are clipped (`clip_norm`), which makes it safe without a safeguard."""
    optimizer: Optimizer = Optimizer(clip=1.0, safeguard=False)
    """The clients' optimiser."""
    rank: AtLeast1 = 10
    """r, the most directions in which heads may differ; those that are not needed do no harm."""
    kappa: Annotated[tuple[NonNegative, ...], MinLen(1)] = (0.0, 0.1, 1.0, 10.0, 100.0)
    """Prior variances κ of a head along the directions, of which the federation chooses."""
    tau: Annotated[tuple[NonNegative, ...], MinLen(1)] = (0.0, 1.0, 10.0, 100.0)
    """Prior variances τ that the private residual of a head gives to an output, of which the federation chooses; of
    regression in units of its noise."""
    held_out: Annotated[float, Gt(0), Lt(1)] = 0.12
    """The part of its examples that a client with four or more holds out to score pairs (κ, τ), until they are chosen
    for good; none if there is one pair only."""
    score_every: AtLeast1 = 4
    """Rounds from one scoring to the next; the first is after as many."""
    settle: AtLeast1 = 20
    """Rounds without another choice after which it is final and what was held out is trained on, too."""
    freeze: AtLeast1 | None = None
    """The round after which that happens in any case and not before; three quarters of a planned run, say."""
    gain: Annotated[float, Ge(0), Lt(1)] = 0.1
    """By what part fitted heads must lower the held-out loss of the mean head, which trains faster, for the body to be
    trained under them."""
    cross_fit: Share = 0.5
    """The part of its examples that a client fits its head on before it trains body and head on all."""
    fit_steps: AtLeast1 = 60
    """Steps of a head's fit."""
    score_steps: AtLeast1 = 40
    """Steps of each head's fit in a scoring."""
    memory: Decay = 0.8
    """β, how much of the heads' covariance is that of earlier rounds."""
    wire: Literal["rank-one", "full"] = "rank-one"
    """Whether e is sent alone, or with the matrix e (Qᵀe)ᵀ, which a secure sum could add up."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_server_optimizer("the server estimates the covariance of the heads")
        if self.private_head:
            raise ConfigError(
                "PflMfAdaptive: private_head must be false, as every head is fitted anew. Got true; for free heads set"
                " kappa = [0] and a large tau."
            )
        for name, values in (("kappa", self.kappa), ("tau", self.tau)):
            if len(set(values)) < len(values):
                raise ConfigError(f"PflMfAdaptive: {name} must not have a value twice. Got {list(values)}.")

    # ------------------------------------------------------------------------------------------------ the choice

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """All pairs (κ, τ)."""
        return list(product(self.kappa, self.tau))

    @property
    def chooses(self) -> bool:
        """Whether there is anything to choose."""
        return len(self.pairs) > 1

    def penalties(self) -> Tensor:
        """−log of a weak hyperprior on the pairs: a few dozen held-out examples shall not send them to a corner."""
        logs = [[math.log10(x) if x else NONE_AS[k] for k, x in enumerate(pair)] for pair in self.pairs]
        return (torch.tensor(logs, dtype=torch.float64) - CENTRE).square().sum(1) / 2

    def precision(self, server: Tree) -> Tensor:
        """−log-likelihoods per unit of loss: 1, and of squared errors ½ of their outputs over the noise's variance.

        The noise is what is left of held-out examples under the best pair, so targets may have any unit.
        """
        S, held, outputs = server["S"], server["held"], server["outputs"]
        noise = S.min() / held.clamp_min(1)
        squared = outputs / (2 * noise.clamp_min(torch.finfo(S.dtype).tiny ** 0.5))
        return torch.where((outputs > 0) & (held > 0), squared, torch.ones_like(squared))

    def scores(self, server: Tree) -> Tensor:
        """S/4 (of squared errors over the noise) + penalty of every pair: the smaller, the better; on the host."""
        likely: Tensor = server["S"].cpu().double() * self.precision(server).cpu().double()
        return likely / TEMPER + self.penalties()

    def choice(self, server: Tree) -> int:
        """The best pair's place; of equals the first."""
        found = self.scores(server).tolist()
        return found.index(min(found))

    def trained_pair(self, server: Tree) -> tuple[float, float]:
        """The pair under which body and head are trained: the best one, or the mean head where little is gained."""
        k, pairs = self.choice(server), self.pairs
        if (0.0, 0.0) in pairs:
            S = server["S"].tolist()
            if S[k] > (1 - self.gain) * S[pairs.index((0.0, 0.0))]:
                return (0.0, 0.0)
        return pairs[k]

    # ------------------------------------------------------------------------------------------------ what is where

    def plan(self) -> Mapping[str, Amount]:
        if not self.chooses:
            return {"train": Epochs(), "half": All(self.cross_fit), "all": All()}
        later: dict[str, Amount] = {"train whole": Epochs(whole=True), "half whole": All(self.cross_fit, whole=True)}
        held: dict[str, Amount] = {"kept": All(), "held": Validation(self.held_out, least=4)}
        return {"train": Epochs(), "half": All(self.cross_fit), "all": All(whole=True), **later, **held}

    def init_server(self, task: Task, federation: Federation) -> Tree:
        shape, start = linear_head(type(self).__name__, task), task.init()
        if self.rank >= shape.size:
            raise ConfigError(
                f"PflMfAdaptive: rank must be below {shape.size}, the number of the head's parameters. Got {self.rank}."
            )
        mu = tree.ravel(tree.select(start, task.head))
        server: Tree = {"phi": tree.without(start, task.head), "mu": mu}
        server |= {"Q": first_directions(shape.size, self.rank + 1, federation.seed, mu.dtype)}
        server |= {"s": mu.new_zeros(self.rank + 1), "S": mu.new_zeros(len(self.pairs)), "held": mu.new_zeros(())}
        server["outputs"] = mu.new_tensor(shape.rows if task.kind == "regression" else 0)
        return server | {name: torch.zeros((), dtype=torch.int64) for name in ("since", "frozen")}

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        like = next(iter(task.init().values()))
        return {"losses": like.new_zeros(len(self.pairs) + 1)} if self.chooses else {}

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        return Down(shared={k: server[k] for k in ("phi", "mu", "Q", "s", "S", "held", "outputs", "frozen")})

    # ------------------------------------------------------------------------------------------------ the client

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        heads, final = HeadFits(self, task, down, visit["all"]), bool(down["frozen"])
        score = self.chooses and not final and int(visit.round) % self.score_every == 0
        losses = self._losses(heads, client, visit) if score else client.get("losses")
        phase = " whole" if final else ""
        theta = heads.fit(heads.seen(visit[f"half{phase}"]), [self.trained_pair(down)], self.fit_steps)[0]
        new = self.fit(task.loss, heads.model(theta), visit[f"train{phase}"])
        e = tree.ravel(tree.select(new, task.head)) - down["mu"]
        sent: Tree = {"phi": tree.without(new, task.head), "e": e}
        if self.wire == "full":
            sent["E"] = torch.outer(e, e @ down["Q"])
        if losses is None:
            return {}, Sent(self.weigh(visit), sent)
        sent["losses"] = losses - client["losses"]  # so that the server's sum is that of everybody's latest
        return {"losses": losses}, Sent(self.weigh(visit), sent, weights={"losses": torch.ones_like(losses[0])})

    def _losses(self, heads: HeadFits, client: Tree, visit: Visit) -> Tensor:
        """Held-out losses of heads fitted to the other examples, for every pair, and how many examples these are."""
        if visit["held"].rows.numel() == 0:
            return torch.zeros_like(client["losses"])
        theta = heads.fit(heads.seen(visit["kept"]), self.pairs, self.score_steps)
        held = heads.seen(visit["held"])
        return torch.cat([losses_of(heads.task, held, theta), held.w.sum()[None]])

    # ------------------------------------------------------------------------------------------------ the server

    def lift(self, mean: Tree, shared: Tree, capacity: Capacity) -> Tree:
        """Return the matrices whose mean the server needs."""
        return mean if self.wire == "full" else {**mean, "E": Outer(mean["e"], mean["e"] @ shared["Q"])}

    def server_update(self, server: Tree, round: Round) -> Tree:
        m = round.mean["e"]
        Q, s = covariance_step(server["Q"], server["s"], m, round.mean["E"], self.memory)
        new = {**server, "phi": round.mean["phi"], "mu": server["mu"] + m, "Q": Q, "s": s}
        return new | (self._score(server, round) if self.chooses else {})

    def _score(self, server: Tree, round: Round) -> Tree:
        """Add the changes of held-out losses, and see whether the choice is final."""
        if bool(server["frozen"]):
            return {}
        total = round.mean["losses"] * round.totals["losses"]
        S, held, t, since = server["S"] + total[:-1], server["held"] + total[-1], round.round, int(server["since"])
        if (not since and bool(held > 0)) or self.choice({**server, "S": S, "held": held}) != self.choice(server):
            since = t
        over = 0 < since <= t - self.settle if self.freeze is None else t >= self.freeze
        return {"S": S, "held": held, "since": torch.tensor(since), "frozen": torch.tensor(int(over))}

    # ------------------------------------------------------------------------------------------------ use

    def personal_plan(self, task: Task) -> Mapping[str, Amount]:
        return {"all": All(whole=True)}

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        heads = HeadFits(self, task, down, visit["all"])
        weights = (-self.scores(down)).softmax(0)
        some = [k for k, w in enumerate(weights.tolist()) if w > NEGLIGIBLE]
        theta = heads.fit(heads.all, [self.pairs[k] for k in some], self.fit_steps)
        # Outputs are linear in θ: the mean of the heads predicts the mean of their outputs.
        return heads.model(torch.tensordot(weights[some].to(theta.device, theta.dtype), theta, 1))

    def onboard_plan(self, task: Task) -> Mapping[str, Amount]:
        return self.personal_plan(task)

    def onboard(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Newcomer:
        weights = self.personal(task, client, down, visit)
        own = tree.ravel(tree.select(weights, task.head)) - down["mu"]
        return Newcomer(weights, own @ down["Q"])

    def trained(self, down: Tree, sent: Sent, capacity: Capacity) -> Tree:
        return {**down, "phi": sent.mean["phi"], "mu": down["mu"] + sent.mean["e"]}

    # ------------------------------------------------------------------------------------------------ curves

    def size(self, server: Tree) -> float:
        """Return the root mean square of the models: body, mean head and the heads' deviations."""
        return math.sqrt(float(tree.squared_norm({k: server[k] for k in ("phi", "mu", "s")})))

    def monitor(self, server: Tree) -> dict[str, float]:
        """Return the widths chosen, how many directions stand clear, and the held-out loss."""
        k = self.choice(server)
        kappa, tau = self.pairs[k]
        told = {"kappa": kappa, "tau": tau, "rank_found": float(clear_directions(server["s"]))}
        told |= {"spread": float(server["s"].norm())}
        if float(server["held"]) > 0:
            told |= {"held_out_loss": float(server["S"][k] / server["held"]), "final": float(server["frozen"])}
        return told

    def panels(self) -> Sequence[Panel]:
        """Return what is shared and how much is personal."""
        return (shared_panel(self.pairs, self.choice),)


class HeadFits:
    """The heads of one client under the prior that it was sent, fitted on features of the received body."""

    def __init__(self, method: PflMfAdaptive, task: Task, down: Tree, stream: Batches) -> None:
        self.task, self.phi = task, down["phi"]
        self.shape = linear_head(type(method).__name__, task)
        self.mu, self.B = self.shape.matrix(down["mu"]), self.shape.matrix(loadings(down["Q"], down["s"]))
        self.all = self.seen(stream)
        self.scale, self.precision = self.all.inverse_scale, method.precision(down)

    def seen(self, stream: Batches) -> HeadExamples:
        """A stream's examples as heads see them."""
        return seen_by_head(self.task, self.shape, self.model(self.mu), stream)

    def fit(self, part: HeadExamples, pairs: Sequence[tuple[float, float]], steps: int) -> Tensor:
        """The most probable heads for some pairs (κ, τ)."""
        return fit_heads(self.task, part, self.mu, self.B, self.scale, pairs, steps, self.precision)

    def model(self, theta: Tensor) -> Params:
        """The received body with a head."""
        params: Params = self.phi | as_head(self.task, self.shape, theta)
        return params
