"""pFedLoRU: FedLoRU with a pair of factors of every client's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from annotated_types import MinLen

from fedspan import tree
from fedspan.layers import parts
from fedspan.learn.batches import Amount, Epochs
from fedspan.learn.task import Task
from fedspan.linalg import lowrank
from fedspan.method import About, Capacity, Discloses, Ranked, Sent, Visit
from fedspan.method.fields import AtLeast1, Count, NonNegative
from fedspan.methods.fedloru.adapted import PersonalPair
from fedspan.methods.fedloru.fedloru import FedLoRU
from fedspan.methods.fedloru.nesting import Nesting, secure_sum
from fedspan.tree import Params, Tree


@dataclass(frozen=True, kw_only=True)
class PFedLoRU(FedLoRU, Ranked):
    """pFedLoRU: FedLoRU with a pair of factors of every client's own. Park and Klabjan, 2024, Algorithm 2.

    W + α A B + α_p L U: a client trains L and U for `personal_epochs` with A and B fixed, then A and B for
    `global_epochs` (the run's epochs if not given) with L and U fixed. Clients take `own_ranks` in turn, and `ranks` as
    in mFedLoRU if those are given. What is not factorised is trained with A and B and averaged; a private head or
    `personal_layers` are trained with L and U. Kept: h = L, U and what else is private. Sent: theta and the factors.

    The paper leaves open the ranks and epochs of the two phases, and prints its result without the α, which belong
    there. Line numbers are those in the paper's margin.
    """

    about = About(secure_sum=secure_sum, discloses=Discloses(labels="set", model="part", examples=True, resembles=True))

    private_head: bool = True
    """Whether the head stays on the client; the paper's is averaged with the rest."""
    nesting: Nesting = Nesting()
    """The clients' ranks of A and B, and their inner factors, where they differ."""
    own_ranks: Annotated[tuple[AtLeast1, ...], MinLen(1)] = (2,)
    """The ranks of L and U, which clients take in turn."""
    alpha_own: NonNegative = 0.1
    """α_p, what L U is multiplied by; with 1 steps on U are as many times longer as L has rows per column."""
    personal_epochs: Count = 1
    """Passes over a client's data on L and U in a round."""
    global_epochs: Count | None = None
    """Passes over a client's data on A and B in a round; the run's `epochs` if not given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.nesting.check(self)

    def plan(self) -> Mapping[str, Amount]:
        return {"own": Epochs(self.personal_epochs), "train": Epochs(self.global_epochs)}

    def capacity_of(self, client: int) -> Capacity:
        """Both ranks of a client, if clients differ in them."""
        ranks = self.nesting.ranks or (self.rank,)
        alike = len(set(ranks)) == 1 and len(set(self.own_ranks)) == 1
        return None if alike else (lowrank.turn(ranks, client), lowrank.turn(self.own_ranks, client))

    def ranks_of(self, capacity: Capacity) -> tuple[int, int]:
        """The rank that clients of one capacity train A and B with, and that of L and U."""
        if isinstance(capacity, tuple):
            return capacity[0], capacity[1]
        return (self.nesting.ranks or (self.rank,))[0], self.own_ranks[0]

    def own_pair(self, capacity: Capacity) -> PersonalPair:
        return PersonalPair(self.ranks_of(capacity)[1], self.alpha_own)

    def private(self, task: Task) -> list[str]:
        return [*parts(task.module, "L", "U"), *super().private(task)]

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        fixed, shared = self.constants(visit), tree.merge(down)
        lr = self.schedule.rate(self.lr, int(visit.round))
        loss = lambda h, b: task.loss(fixed | shared | h, b)  # f(W + α A B + α_p L U)
        h = self.fit(loss, client["h"], visit["own"], lr)  # eq. (7), line 1064
        mean, _ = self.learn(task, shared, fixed | h, visit)  # eq. (8), line 1065
        return {"h": h}, Sent(weight=self.weigh(visit), mean=mean)  # line 1066

    def learn(self, task: Task, free: Params, fixed: Params, visit: Visit) -> tuple[Tree, Params]:
        r_k = self.ranks_of(visit.capacity)[0]
        if not self.nesting.used(r_k, self.rank):
            return super().learn(task, free, fixed, visit)
        return self.nesting.solve(self, task, free, fixed, visit, r_k)  # as mFedLoRU, eq. (9)

    def lift(self, mean: Tree, shared: Tree, capacity: Capacity) -> Tree:
        """A^(k) and B^(k) of inner factors, before they are averaged."""
        return self.nesting.lift(mean, shared, self.ranks_of(capacity)[0])  # eq. (33)

    def trained(self, down: Tree, sent: Sent, capacity: Capacity) -> Tree:
        return self.lift(sent.mean, down, capacity)
