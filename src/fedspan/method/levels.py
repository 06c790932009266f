"""Rank ratios for clients of different capacity, by name; clients take them in turn."""

from __future__ import annotations

LEVELS: dict[str, tuple[float, ...]] = {
    # FedARA's five levels of CNN1: about as many parameters as CNN1 to CNN5 once fc1 and fc2 are decomposed.
    "fedara_cnn1": (1.0, 0.5, 0.375, 0.3, 0.2),
}
