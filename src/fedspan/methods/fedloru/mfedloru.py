"""mFedLoRU: FedLoRU for clients that can afford different ranks."""

from __future__ import annotations

from dataclasses import dataclass

from fedspan.learn.task import Task
from fedspan.linalg import lowrank
from fedspan.method import About, Capacity, Discloses, Ranked, Sent, Visit
from fedspan.methods.fedloru.fedloru import FedLoRU
from fedspan.methods.fedloru.nesting import Nesting, secure_sum
from fedspan.tree import Params, Tree


@dataclass(frozen=True, kw_only=True)
class MFedLoRU(FedLoRU, Ranked):
    """mFedLoRU: FedLoRU for clients of different ranks. Park and Klabjan, 2024, Algorithm 3.

    Client k trains A + α_A A_d A_u and B + α_B B_d B_u with A and B fixed, in its own rank r_k, and sends the inner
    factors; the server makes A and B of them and averages. Clients take the `ranks` in turn; one whose rank is r (if
    `opt_out`) trains A and B themselves. Inner products start at zero in every round: A_u and B_d are Gaussian (or the
    identity), A_d and B_u zero. Kept: h, if any. Sent: theta and A_d, A_u, B_d, B_u (or A, B).

    α_A/r_A = 1/2, as the paper sets it, is taken for the factor on the product, as LoRA counts α; `alpha_inner_by_rank`
    reads it word for word, α_A = r_A/2. The algorithm box sends products; the text and its costs send factors, as here.
    """

    about = About(
        secure_sum=secure_sum, discloses=Discloses(labels="set", model="whole", examples=True, resembles=True)
    )

    nesting: Nesting = Nesting(ranks=(2, 4, 8, 16))
    """The clients' ranks, and their inner factors."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.nesting.check(self)

    def capacity_of(self, client: int) -> Capacity:
        """A client's rank, if clients differ in them."""
        ranks = self.nesting.ranks
        return lowrank.turn(ranks, client) if len(set(ranks)) > 1 else None

    def rank_of(self, capacity: Capacity) -> int:
        """r_k, the rank that clients of one capacity train with."""
        return capacity if isinstance(capacity, int) else (self.nesting.ranks or (self.rank,))[0]

    def learn(self, task: Task, free: Params, fixed: Params, visit: Visit) -> tuple[Tree, Params]:
        r_k = self.rank_of(visit.capacity)
        if not self.nesting.used(r_k, self.rank):
            return super().learn(task, free, fixed, visit)  # the client opts out: A and B, as in FedLoRU
        return self.nesting.solve(self, task, free, fixed, visit, r_k)  # A_d, A_u, B_d, B_u, eq. (9)

    def lift(self, mean: Tree, shared: Tree, capacity: Capacity) -> Tree:
        """A^(k) = A + α_A A_d A_u, and B likewise, before they are averaged."""
        return self.nesting.lift(mean, shared, self.rank_of(capacity))  # eq. (33)

    def trained(self, down: Tree, sent: Sent, capacity: Capacity) -> Tree:
        return self.lift(sent.mean, down, capacity)
