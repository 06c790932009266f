"""Factorized-FL β: v and μ are averaged as well."""

from __future__ import annotations

from dataclasses import dataclass

from fedspan.method import About, Discloses
from fedspan.methods.factorized_fl.alpha import FactorizedFL
from fedspan.methods.factorized_fl.sharing import SharedParts


@dataclass(frozen=True, kw_only=True)
class FactorizedFLBeta(FactorizedFL):
    """Factorized-FL β. Jeong and Hwang, NeurIPS 2022, Section 4.2.

    As α, but v and μ are averaged as well, by the same weights. Kept: h, the private head. Sent: u, b, v and mu, each
    client's own; μ travels as its non-zeros. An average has the union of their positions: `down_threshold` or
    `down_share` thin the download out, at the cost of a model that is no longer the average.
    """

    about = About(discloses=Discloses(labels="set", model="part", examples=True, resembles=True))

    sharing: SharedParts = SharedParts(parts="uvm")
