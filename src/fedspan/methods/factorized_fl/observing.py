"""What can be told about a run of Factorized-FL: similarity of v and u, how many are averaged, how sparse μ is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedspan import tree
from fedspan.linalg.similarity import cosine
from fedspan.method import Capacity, Down, Observed, Panel
from fedspan.methods.factorized_fl.matching import SimilarityMatching
from fedspan.methods.factorized_fl.matching_panel import matching_panel
from fedspan.tree import Tree


class ObservedMatching(Observed):
    """Numbers and matrices about the last uploads, where the server keeps them (`seen`)."""

    matching: SimilarityMatching

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        """What clients receive; the method's own."""
        raise TypeError(f"{type(self).__name__}: download must be defined.")

    def size(self, server: Tree) -> float:
        """The norm of the uploads, without what is known about them."""
        return super().size({k: some for k, some in server.items() if k != "seen"})

    def monitor(self, server: Tree) -> dict[str, float]:
        """Similarity of v and u, how many are averaged, and the share of μ that is not zero: as sent, as received."""
        found = {"mu_nonzero": tree.nonzero_share(server["mu"])} if "mu" in server else {}
        if not (similar := self.matrices(server)):
            return found
        seen = server["seen"]
        known = (seen["n"] > 0).nonzero()[:, 0]
        off = ~torch.eye(len(known), dtype=torch.bool, device=known.device)
        for name, sigma in similar.items():
            among = sigma[known][:, known][off]
            found[f"similarity_{name}"] = float(among.mean())
            found[f"similarity_{name}_min"] = float(among.min())
        found["neighbours"] = float(self.matching.members(seen)[known].sum(1).double().mean()) - 1
        if "mu" in server:  # of one client, as an average for each would cost as much as a round
            one = self.download(server, known[:1], None, int(seen["round"]) + 1).own
            found["mu_nonzero_received"] = tree.nonzero_share(one["mu"])
        return found

    def matrices(self, server: Tree) -> dict[str, Tensor]:
        """Cosines of the clients' v (those that match them) and of all their u as one vector; Figure 7(a) to (e).

        NaN for who never sent anything; none at all as long as there are no two to compare.
        """
        if "seen" not in server or int((known := server["seen"]["n"] > 0).sum()) < 2:
            return {}
        both = {"v": server["seen"]["sigma"]}
        if "u" in server:  # not if all factorised layers are private
            both["u"] = cosine(torch.cat([p.flatten(1) for p in server["u"].values()], 1))
        return {k: sigma.masked_fill(~(known[:, None] & known[None, :]), torch.nan) for k, sigma in both.items()}

    def panels(self) -> Sequence[Panel]:
        """Who was matched with whom, where clients are."""
        return () if self.matching.rule == "none" else (matching_panel(),)
