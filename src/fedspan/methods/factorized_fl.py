"""Factorized-FL: every weight is u v + μ; what all clients share is u, and v tells who is like whom."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from fedspan import tree
from fedspan.errors import ConfigError, nearest
from fedspan.layers import (
    Factorized,
    Layout,
    MuStart,
    Plain,
    Which,
    choose,
    convert,
    in_head,
    matrix_dims,
    part,
    structured,
)
from fedspan.learn.aggregate import mix
from fedspan.learn.batches import Batch
from fedspan.learn.sgd import Loss, Prox, sgd_from
from fedspan.learn.task import Task
from fedspan.linalg.similarity import cosine, leading, neighbours, softmax_weights
from fedspan.method import (
    About,
    Capacity,
    ClientInfo,
    Coded,
    Converts,
    Down,
    Federation,
    Observed,
    Panel,
    Round,
    Sent,
    Sharing,
    Visit,
)
from fedspan.method.fields import AtLeast1, NonNegative, Share
from fedspan.methods.panels_matching import matching_panel
from fedspan.randomness import generator
from fedspan.tree import Params, Tree
from fedspan.wire import Codec, Sparse

Parts = Literal["nothing", "u", "uv", "um", "uvm"]
Matching = Literal["similarity", "random", "worst", "none"]

TAGS: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "u": ("u", "b"),
    "uv": ("u", "b", "v"),
    "um": ("u", "b", "mu"),
    "uvm": ("u", "b", "v", "mu"),
}
"""What is shared: biases and the affine parts of norms go with u."""


@dataclass(frozen=True, kw_only=True)
class FactorizedFL(Sharing, Converts, Coded, Observed):
    """Factorized-FL α. Jeong and Hwang, NeurIPS 2022, Section 4 and eq. (1) to (6).

    Symbols: u [rows, γ] = base filter, v [γ, columns] = coefficients, mu = sparse correction μ, b = biases and norms'
    affine parts (they go with u), z = v of the last factorised layer below the head, sigma = cosines of the z,
    gamma = rank, lam = λ. Kept: h, all that is not shared. Sent: u, b and z, each client's own; received: a personal
    average of u and b over the last uploads of clients alike. Weights that are not factorised go with v.

    Beside the paper: clients below τ are left out (a literal zero in eq. (5) would still weigh exp 0), and at least
    `m_min` clients are averaged, as in the public code. Beside that code: the penalty on μ has a gradient (there it has
    none: `penalty = "none"`), kernels are not scrambled (`layout`), and averages are of the uploads as they came in.
    `likeness_of` = "change" compares what training made of the common first v instead of v: fedspan's own.
    The server's state `seen` holds the cosines (sigma) and how often each client was averaged into each (matched).
    """

    about = About(
        family="factorized-fl",
        reference="Jeong and Hwang, NeurIPS 2022",
        secure_sum=lambda m: "with mu = false" if m.mu and "mu" in TAGS[m.shared] else "yes",
    )

    private_head: bool = True
    shared: Parts = "u"
    matching: Matching = "similarity"
    likeness_of: Literal["v", "change"] = "v"
    tau: Annotated[float, Ge(-1)] = 0.95
    epsilon: NonNegative = 20.0
    m_min: AtLeast1 = 4
    partners: AtLeast1 = 3
    newcomer: Literal["mean", "start"] = "mean"
    gamma: AtLeast1 = 1
    lam: NonNegative = 5e-4
    penalty: Literal["prox", "subgradient", "none"] = "prox"
    mu: bool = True
    mu_start: MuStart = "zeros"
    eval_prune: bool = False
    layers: Which = "all"
    layout: Layout = "space_by_channel"
    min_u_dim: AtLeast1 = 1
    likeness_layer: str | None = None
    gauge: bool = False
    keep_momentum: bool = False
    down_threshold: NonNegative = 0.0
    down_share: Share = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.matching != "none" or self.shared == "nothing":
            self.refuse_server_optimizer("no one average is made of what clients send")
        if self.keep_momentum and not self.optimizer.momentum:
            raise ConfigError(
                f"{type(self).__name__}: keep_momentum needs momentum > 0 (and sgd). Got momentum"
                f" {self.optimizer.momentum}."
            )
        if self.keep_momentum and self.gauge:
            raise ConfigError(
                f"{type(self).__name__}: gauge must be false with keep_momentum, whose velocity belongs to one gauge."
                " Got both."
            )

    # ------------------------------------------------------------------------------------------------ what is where

    @property
    def personal_average(self) -> bool:
        """Whether every client gets an average of its own, for which the server keeps all last uploads."""
        return self.matching != "none" and self.shared != "nothing"

    def model(self, task: Task, capacity: Capacity) -> Task:
        """Linear and convolutional layers in factored form; all clients start from the same u and v."""
        who = type(self).__name__
        wide = [
            k for k, m in choose(task, self.layers, who).items() if matrix_dims(m, self.layout)[0] >= self.min_u_dim
        ]
        if not wide:
            raise ConfigError(
                f"{who}: min_u_dim leaves no layer to factorise. Got {self.min_u_dim}; use a smaller one."
            )

        def factorise(layer: Plain) -> Factorized:
            return Factorized(layer, self.gamma, self.layout, self.mu, self.mu_start)  # eq. (2), (3)

        return task.converted(lambda module: convert(module, wide, factorise))

    def tags(self, task: Task) -> dict[str, str]:
        """For every parameter what it is: u, v, mu or b."""
        own = {part(k, p): p for k in structured(task.module) for p in ("u", "v", "mu")}
        sizes = {k: p.ndim for k, p in task.module.named_parameters()}
        return {k: own.get(k, "b" if sizes[k] < 2 else "v") for k in task.names}

    def apart(self, task: Task, params: Params) -> tuple[Tree, Params]:
        """What is shared, by tag, and what stays at home."""
        parts: Tree = {tag: {} for tag in TAGS[self.shared]}
        own: Params = {}
        private, tags = set(self.private(task)), self.tags(task)
        for k, p in params.items():
            tag = tags.get(k)
            (parts[tag] if tag in parts and k not in private else own)[k] = p
        return {tag: some for tag, some in parts.items() if some}, own

    def likeness(self, task: Task) -> str:
        """Name of the v that tells who is like whom: of the last factorised layer below the head."""
        known = structured(task.module)
        if self.likeness_layer is not None and self.likeness_layer not in known:
            raise ConfigError(
                f"{type(self).__name__}: likeness_layer must be a factorised layer. Got '{self.likeness_layer}'."
                f"{nearest(self.likeness_layer, known)}"
            )
        below = [k for k in known if not in_head(task, k)] if self.likeness_layer is None else [self.likeness_layer]
        if not below:
            raise ConfigError(
                f"{type(self).__name__}: there must be a factorised layer below the head to compare clients by. There"
                " is none; use a deeper model, name a likeness_layer, or set matching to 'none'."
            )
        return part(below[-1], "v")  # v^{L−1}

    def whole(self, client: Tree, down: Tree) -> Params:
        h: Params = client["h"]
        return h | tree.merge(down)

    def codecs(self, round: int) -> Mapping[str, Codec]:
        return {"mu": Sparse()}

    # ------------------------------------------------------------------------------------------------ the client

    def begin(self, task: Task) -> Params:
        """The common start, in the gauge of the uploads: a newcomer's v must fit the u of the others."""
        return self.aligned(task, task.init()) if self.gauge else task.init()

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        start = self.begin(task)
        kept: Tree = {"h": self.apart(task, start)[1]}
        if self.keep_momentum:
            kept["velocity"] = tree.zeros_like(tree.select(start, task.names))
        return kept

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        mus = [k for k, tag in self.tags(task).items() if tag == "mu"]
        start, objective, prox = self.whole(client, down), self.objective(task, mus), self.shrink(mus)
        kept: Tree = {}
        if self.keep_momentum:
            params, kept["velocity"] = sgd_from(
                objective,
                start,
                client["velocity"],
                visit["train"],
                self.lr,
                momentum=self.optimizer.momentum,
                weight_decay=self.optimizer.weight_decay,
                prox=prox,
            )
        else:
            params = self.fit(objective, start, visit["train"], prox=prox)  # eq. (6)
        if self.gauge:
            params = self.aligned(task, params)
        parts, kept["h"] = self.apart(task, params)
        if not self.personal_average:
            return kept, Sent(weight=self.weigh(visit), mean=parts)
        z = self.likeness(task)
        if z not in parts.get("v", {}):
            parts["z"] = params[z]
        return kept, Sent(weight=self.weigh(visit), each=parts)

    def objective(self, task: Task, mus: list[str]) -> Loss:
        """The loss, with the penalty on μ if that is a part of the gradient."""
        if self.penalty != "subgradient" or not mus:
            return task.loss

        def sparse(params: Params, batch: Batch) -> Tensor:
            size = sum(params[k].abs().sum() for k in mus)
            return task.loss(params, batch) + self.lam * size  # eq. (6)

        return sparse

    def shrink(self, mus: list[str]) -> Prox:
        """Soft thresholding of μ after every step, which leaves true zeros."""
        if self.penalty != "prox":
            return {}
        # With momentum a lasting gradient moves a weight by lr / (1 − momentum) a step; so must the penalty.
        t = self.lr * self.lam / (1 - self.optimizer.momentum)

        def soft(x: Tensor) -> Tensor:
            return torch.where(x.abs() > t, x - t * x.sign(), torch.zeros_like(x))

        return dict.fromkeys(mus, soft)

    def aligned(self, task: Task, params: Params) -> Params:
        """(u, v) in a common gauge: Σu ≥ 0 and ‖u‖² = its length; W does not change."""
        new = dict(params)
        for k in structured(task.module):
            u, v = part(k, "u"), part(k, "v")
            size = torch.linalg.vector_norm(params[u], dim=0) / math.sqrt(len(params[u]))
            size = torch.where(size > 0, size, torch.ones_like(size))
            s = torch.where(params[u].sum(0) < 0, -size, size)  # [γ]
            new[u], new[v] = params[u] / s, params[v] * s[:, None]
        return new

    # ------------------------------------------------------------------------------------------------ the server

    def init_server(self, task: Task, federation: Federation) -> Tree:
        start = self.begin(task)
        parts, _ = self.apart(task, start)
        if not self.personal_average:
            return self.server.begin(parts)
        z, n = self.likeness(task), federation.clients
        seen = {
            "n": torch.zeros(n, dtype=start[z].dtype),  # weight of the last upload, 0 before the first
            "sigma": torch.eye(n, dtype=start[z].dtype),
            "matched": torch.zeros(n, n, dtype=torch.int32),
            "round": torch.zeros((), dtype=torch.int64),
            "seed": torch.tensor(federation.seed),
        }
        if self.likeness_of == "change":
            seen["origin"] = start[z]
        if z in parts.get("v", {}):
            seen["layer"] = torch.tensor(sorted(parts["v"]).index(z))  # which of the uploaded v is z
        else:
            parts["z"] = start[z]
        rows: Tree = tree.map(lambda a: a.expand(n, *a.shape).clone(), parts)
        return {**rows, "seen": seen}

    def server_update(self, server: Tree, round: Round) -> Tree:
        if not self.personal_average:
            return self.server.step(server, round.mean)  # Σ n_k/n of u, v and μ: Factorized-FedAvg
        parts = tree.put({k: server[k] for k in round.each}, round.ids, round.each)
        seen = dict(server["seen"])
        seen["n"] = seen["n"].index_copy(0, round.ids, round.weights.to(seen["n"].dtype))
        z = parts["z"] if "z" in parts else parts["v"][sorted(parts["v"])[int(seen["layer"])]]
        if self.likeness_of == "change":  # all start from one v, which would make everybody alike
            z = z - seen["origin"]
        known = (seen["n"] > 0).to(z.dtype)
        seen["sigma"] = cosine(z.flatten(1) * known[:, None])  # eq. (4); 1 with oneself, 0 with who never sent
        seen["round"] = torch.tensor(round.round)
        member = self.members(seen)[round.ids].to(torch.int32)
        seen["matched"] = seen["matched"].index_add(0, round.ids, member)
        return {**parts, "seen": seen}

    def members(self, seen: Tree) -> Tensor:
        """Who is averaged into whom, [n, n]."""
        sigma: Tensor = seen["sigma"]
        known: Tensor = seen["n"] > 0
        if self.matching == "similarity":
            return neighbours(sigma, known, self.tau, self.m_min)
        own = torch.eye(len(sigma), dtype=torch.bool)
        others = known[None, :] & ~own
        if self.matching == "worst":
            score = -sigma
        else:
            rng = generator(int(seen["seed"]), "match", int(seen["round"]))
            score = torch.from_numpy(rng.random(sigma.shape))
        return (leading(score.masked_fill(~others, -torch.inf), self.partners) & others) | own

    def omega(self, seen: Tree) -> Tensor:
        """The mixing matrix: row k is the average that client k gets. Rows add up to 1."""
        sigma: Tensor = seen["sigma"]
        known: Tensor = seen["n"] > 0
        omega = softmax_weights(sigma, self.members(seen), self.epsilon)  # eq. (5)
        first: Tensor = torch.eye(len(sigma), dtype=sigma.dtype)
        if self.newcomer == "mean" and bool(known.any()):
            first = (seen["n"] / seen["n"].sum()).expand_as(first)
        return torch.where(known[:, None], omega, first)

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        if not self.personal_average:
            return Down(shared=self._thinned({k: some for k, some in server.items() if k != "optimizer"}))
        rows = {k: some for k, some in server.items() if k not in ("seen", "z")}
        return Down(own=self._thinned(mix(rows, self.omega(server["seen"])[ids]), stacked=True))

    def _thinned(self, parts: Tree, stacked: bool = False) -> Tree:
        """The download with small entries of μ left out, if that is wanted: an average of sparse μ is not sparse."""
        if "mu" not in parts or (self.down_threshold == 0 and self.down_share == 1):
            return parts

        def thin(mu: Tensor) -> Tensor:
            flat = mu.flatten(1) if stacked else mu.reshape(1, -1)
            kept = flat.abs() >= self.down_threshold
            if self.down_share < 1:
                kept &= leading(flat.abs(), math.ceil(self.down_share * flat.shape[1]))
            return torch.where(kept, flat, torch.zeros_like(flat)).reshape(mu.shape)

        return {**parts, "mu": tree.map(thin, parts["mu"])}

    # ------------------------------------------------------------------------------------------------ use

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        if self.eval_prune:
            params = self.whole(client, down)
            for k in (k for k, tag in self.tags(task).items() if tag == "mu"):
                params[k] = torch.where(params[k].abs() < self.lam, torch.zeros_like(params[k]), params[k])
            client, down = {"h": params}, {}
        return super().personal(task, client, down, visit)

    def size(self, server: Tree) -> float:
        """The norm of the uploads, without what is known about them."""
        return super().size({k: some for k, some in server.items() if k != "seen"})

    def monitor(self, server: Tree) -> dict[str, float]:
        """Likeness of v and u, how many are averaged, and the share of μ that is not zero: as sent, and as received."""
        found: dict[str, float] = {}
        if "mu" in server:
            found["mu_nonzero"] = tree.nonzero_share(server["mu"])
        if not self.personal_average:
            return found
        seen = server["seen"]
        known = (seen["n"] > 0).nonzero()[:, 0]
        if len(known) < 2:
            return found
        off = ~torch.eye(len(known), dtype=torch.bool)
        for name, sigma in self.matrices(server).items():
            among = sigma[known][:, known][off]
            found[f"likeness_{name}"] = float(among.mean())
            found[f"likeness_{name}_min"] = float(among.min())
        found["neighbours"] = float(self.members(seen)[known].sum(1).double().mean()) - 1
        if "mu" in server:  # of one client, as an average for each would cost as much as a round
            one = self.download(server, known[:1], None, int(seen["round"]) + 1).own
            found["mu_nonzero_received"] = tree.nonzero_share(one["mu"])
        return found

    def matrices(self, server: Tree) -> dict[str, Tensor]:
        """Cosines of the clients' v (those that match them) and of all their u as one vector; Figure 7(a) to (e).

        NaN for who never sent anything; none at all as long as there are no two to compare.
        """
        if not self.personal_average:
            return {}
        known = server["seen"]["n"] > 0
        if int(known.sum()) < 2:
            return {}
        both = {"v": server["seen"]["sigma"]}
        if "u" in server:  # not if all factorised layers are private
            both["u"] = cosine(torch.cat([p.flatten(1) for p in server["u"].values()], 1))
        return {k: sigma.masked_fill(~(known[:, None] & known[None, :]), torch.nan) for k, sigma in both.items()}

    def panels(self) -> Sequence[Panel]:
        """Who was matched with whom, where clients are."""
        return (matching_panel(),) if self.personal_average else ()


@dataclass(frozen=True, kw_only=True)
class FactorizedFLBeta(FactorizedFL):
    """Factorized-FL β. Jeong and Hwang, NeurIPS 2022, Section 4.2.

    As α, but v and μ are averaged as well, by the same weights. Sent: u, b, v and mu, each client's own; μ travels as
    its non-zeros. An average has the union of their positions: `down_threshold` or `down_share` thin the download out,
    at the cost of a model that is no longer the average.
    """

    shared: Parts = "uvm"


@dataclass(frozen=True, kw_only=True)
class FactorizedFedAvg(FactorizedFL):
    """Factorized-FedAvg. Jeong and Hwang, NeurIPS 2022, the ablation without matching.

    One average of u, b, v and μ over the clients of a round, weighted by examples; `mu = false` takes μ out of the
    model. Kept: h, the private head. Sent: u, b, v and mu.
    """

    shared: Parts = "uvm"
    matching: Matching = "none"


@dataclass(frozen=True, kw_only=True)
class FactorizedLocal(FactorizedFL):
    """Local training of the factorised model, the yardstick of Factorized-FL. Kept: h, everything. Sent: nothing."""

    private_head: bool = False
    shared: Parts = "nothing"
    matching: Matching = "none"
