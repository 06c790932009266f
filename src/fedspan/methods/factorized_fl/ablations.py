"""Factorized-FL without its matching, and without any sharing."""

from __future__ import annotations

from dataclasses import dataclass

from fedspan.method import About, Discloses
from fedspan.methods.factorized_fl.alpha import FactorizedFL
from fedspan.methods.factorized_fl.matching import SimilarityMatching
from fedspan.methods.factorized_fl.sharing import SharedParts


@dataclass(frozen=True, kw_only=True)
class FactorizedFedAvg(FactorizedFL):
    """Factorized-FedAvg. Jeong and Hwang, NeurIPS 2022, the ablation without matching.

    One average of u, b, v and μ over the clients of a round, weighted by examples; `mu = false` takes μ out of the
    model. Kept: h, the private head. Sent: u, b, v and mu.
    """

    about = About(discloses=Discloses(labels="set", model="part", examples=True, resembles=True))

    sharing: SharedParts = SharedParts(parts="uvm")
    matching: SimilarityMatching = SimilarityMatching(rule="none")


@dataclass(frozen=True, kw_only=True)
class FactorizedLocal(FactorizedFL):
    """Local training of the factorised model, the yardstick of Factorized-FL. Kept: h, everything. Sent: nothing."""

    about = About(discloses=Discloses(labels="nothing", model="nothing", examples=True, resembles=False))

    private_head: bool = False
    sharing: SharedParts = SharedParts(parts="nothing")
    matching: SimilarityMatching = SimilarityMatching(rule="none")
