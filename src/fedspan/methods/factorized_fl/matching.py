"""Who is averaged into whom: similarity of the clients' v, eq. (4), and the weights of a personal average, eq. (5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from fedspan.errors import ConfigError, nearest
from fedspan.layers import in_head, part, structured
from fedspan.learn.task import Task
from fedspan.linalg.similarity import cosine, leading, neighbours, softmax_weights
from fedspan.method import Round
from fedspan.method.fields import AtLeast1, NonNegative
from fedspan.randomness import generator
from fedspan.tree import Params, Tree


@dataclass(frozen=True, kw_only=True)
class SimilarityMatching:
    """How clients are compared and matched.

    What the server knows of the clients is the state `seen`: n, the weight of each client's last upload (0 before the
    first), sigma, their cosines, and matched, how often each client (column) was averaged into each (row).
    """

    KEYS: ClassVar[Mapping[str, str]] = {
        "matching": "rule",
        "tau": "tau",
        "epsilon": "epsilon",
        "m_min": "m_min",
        "partners": "partners",
        "newcomer": "newcomer",
        "likeness_of": "similarity_of",
        "likeness_layer": "similarity_layer",
    }

    rule: Literal["similarity", "random", "worst", "none"] = "similarity"
    """Who is averaged into a client's model: those similar to it, or as ablations some at random, the least similar
    ones, or everybody in one mean."""
    tau: Annotated[float, Ge(-1)] = 0.95
    """τ, the least cosine of clients that are averaged; above 1 everybody is alone, up to `m_min`."""
    epsilon: NonNegative = 20.0
    """ε, how sharply the weights of an average follow similarity; 0 weighs all matched clients alike."""
    m_min: AtLeast1 = 4
    """The fewest clients in an average, oneself included: the most similar ones where τ leaves fewer."""
    partners: AtLeast1 = 3
    """How many others are averaged where they are chosen at random or as the least similar."""
    newcomer: Literal["mean", "start"] = "mean"
    """What a client receives before its first upload: the mean of all known uploads, or the common start."""
    similarity_of: Literal["v", "change"] = "v"
    """What is compared: v, or what training made of the common first v, which all v have in common."""
    similarity_layer: str | None = None
    """The layer whose v is compared; the last factorised one below the head if not given."""

    def layer(self, task: Task, who: str) -> str:
        """The name of v^{L−1}, by which clients are compared.

        Raises:
            ConfigError: if there is no such layer.
        """
        known, named = structured(task.module), self.similarity_layer
        if named is not None and named not in known:
            raise ConfigError(
                f"{who}: likeness_layer must be a factorised layer. Got '{named}'.{nearest(named, known)}"
            )
        below = [k for k in known if not in_head(task, k)] if named is None else [named]
        if not below:
            raise ConfigError(
                f"{who}: there must be a factorised layer below the head to compare clients by. There is none; use a"
                " deeper model, name a likeness_layer, or set matching to 'none'."
            )
        return part(below[-1], "v")

    def begin(self, clients: int, seed: int, z: Tensor) -> Tree:
        """What the server knows before anybody has sent anything; `z` is the common first v^{L−1}."""
        seen = {
            "n": torch.zeros(clients, dtype=z.dtype),
            "sigma": torch.eye(clients, dtype=z.dtype),
            "matched": torch.zeros(clients, clients, dtype=torch.int32),
            "round": torch.zeros((), dtype=torch.int64),
            "seed": torch.tensor(seed),
        }
        return seen | ({"origin": z} if self.similarity_of == "change" else {})

    def compare(self, seen: Tree, z: Tensor, round: Round) -> Tree:
        """What the server knows after a round; `z` are the last v^{L−1} of all clients, stacked."""
        n = seen["n"].index_copy(0, round.ids, round.weights.to(seen["n"].dtype))
        if self.similarity_of == "change":  # all start from one v, which would make everybody similar
            z = z - seen["origin"]
        known = (n > 0).to(z.dtype)
        sigma = cosine(z.flatten(1) * known[:, None])  # eq. (4); 1 with oneself, 0 with who never sent
        new = {**seen, "n": n, "sigma": sigma, "round": torch.tensor(round.round)}
        member = self.members(new)[round.ids].to(torch.int32)
        return {**new, "matched": seen["matched"].index_add(0, round.ids, member)}

    def members(self, seen: Tree) -> Tensor:
        """Who is averaged into whom, [n, n]."""
        sigma: Tensor = seen["sigma"]
        known: Tensor = seen["n"] > 0
        if self.rule == "similarity":
            return neighbours(sigma, known, self.tau, self.m_min)  # σ ≥ τ of eq. (4)
        own = torch.eye(len(sigma), dtype=torch.bool, device=sigma.device)
        others = known[None, :] & ~own
        if self.rule == "worst":
            score = -sigma
        else:
            rng = generator(int(seen["seed"]), "match", int(seen["round"]))
            score = torch.from_numpy(rng.random(sigma.shape)).to(sigma.device)
        return (leading(score.masked_fill(~others, -torch.inf), self.partners) & others) | own

    def omega(self, seen: Tree) -> Tensor:
        """The mixing matrix: row k is the average that client k gets. Rows add up to 1."""
        sigma: Tensor = seen["sigma"]
        known: Tensor = seen["n"] > 0
        omega = softmax_weights(sigma, self.members(seen), self.epsilon)  # eq. (5)
        first: Tensor = torch.eye(len(sigma), dtype=sigma.dtype, device=sigma.device)
        if self.newcomer == "mean" and bool(known.any()):
            first = (seen["n"] / seen["n"].sum()).expand_as(first)
        return torch.where(known[:, None], omega, first)


def with_z(parts: Tree, params: Params, z: str) -> Tree:
    """An upload with v^{L−1} as `z` beside it, unless it is among the v that are shared anyway."""
    return parts if z in parts.get("v", {}) else {**parts, "z": params[z]}


def z_of(rows: Tree, seen: Tree) -> Tensor:
    """The clients' v^{L−1} among their last uploads, stacked; `layer` says which of the shared v it is."""
    found: Tensor = rows["z"] if "z" in rows else rows["v"][sorted(rows["v"])[int(seen["layer"])]]
    return found
