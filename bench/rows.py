"""fedspan's rows: which methods are measured, with which fields."""

from __future__ import annotations

import math
from typing import Any

from bench.workloads import Workload

METHODS: dict[str, tuple[str, dict[str, Any], float]] = {
    "fedavg": ("fedavg", {}, 1.0),
    "pfl-mf": ("pfl-mf", {}, 2.0),
    "pfl-mf-paper": ("pfl-mf-paper", {"rank": 10, "v_steps": 1}, 1.5),
    "ditto": ("ditto", {}, 3.0),
    "fedrep": ("fedrep", {"head_epochs": 10}, 4.0),
    "fedloru": ("fedloru", {}, 1.5),
    "fedara": ("fedara", {}, 4.0),
    "factorized-fl": ("factorized-fl-alpha", {}, 5.0),
}
"""Rows: the method, its fields beside the learning rate, and what its round costs in rounds of FedAvg, roughly."""


def rounds_of(w: Workload, row: str) -> int:
    """Rounds that are timed, so that every row takes about as long."""
    return max(1 if w.convolutional else 3, math.ceil(w.rounds / METHODS[row][2]))
