"""The options with which methods are what their papers or published code write, where the defaults are others.

Defaults are chosen so that a method trains when nothing is said; whoever repeats a paper begins with these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedspan.methods.pfl_mf import ALGORITHM_1

_OWN_PAIR: Mapping[str, Any] = {"alpha": 1.0, "private_head": False}
_FACTORIZED: Mapping[str, Any] = {"mu_start": "zeros"}

AS_WRITTEN: Mapping[str, Mapping[str, Any]] = {
    "cfl": {"start_round": 20},
    "ditto": {"lam": 1.0},
    "factorized-fedavg": _FACTORIZED,
    "factorized-fl-alpha": _FACTORIZED,
    "factorized-fl-beta": _FACTORIZED,
    "factorized-local": _FACTORIZED,
    "fedala": {"lr_a": 1.0},
    "fedbabu": {"finetune_epochs": 5},
    "fedcollab": {"distance_rounds": 10, "lr_distance": 0.1, "private_head": False, "weight_of_samples": 8.0},
    "fedkd": {"distill": 1.0},
    "fedtgp": {"lam": 1.0},
    "l2gd": {"lam": 1.0},
    "lr-bpfl": {"private_head": False},
    "per-fedavg": {"adapt": 1, "adapt_unit": "step"},
    "pfedes": {"mu": 0.5},
    "pfedlora1": _OWN_PAIR,
    "pfedlora2": _OWN_PAIR,
    "pfedloru": {"alpha_own": 1.0, "private_head": False},
    "pfedme": {"lam": 15.0, "lr_inner": 0.05},
    "pfedpara": {"private_head": False},
    "pfedsim": {"warmup_rounds": 30},
    "pfl-mf-joint": {"start": "published", "safeguard": False},
    "pfl-mf-paper": ALGORITHM_1,
    "waffle": {"private_head": False},
}
"""By name of the method; step sizes are not among them."""


def as_written(method: str) -> dict[str, Any]:
    """Return the options of a method as its paper has it: none where its defaults are those."""
    return dict(AS_WRITTEN.get(method, {}))
