"""Personalised federated learning with low-rank structure.

>>> import fedspan
>>> method = fedspan.make("fedavg", lr=0.1)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fedspan.data.federated import FederatedData
    from fedspan.learn.task import Task
    from fedspan.methods import make
    from fedspan.report.figures import plot
    from fedspan.simulation.result import Result
    from fedspan.simulation.settings import Settings
    from fedspan.simulation.simulator import simulate

__all__ = ["FederatedData", "Result", "Settings", "Task", "__version__", "make", "plot", "simulate"]

_WHERE = {
    "FederatedData": "fedspan.data.federated",
    "Result": "fedspan.simulation.result",
    "Settings": "fedspan.simulation.settings",
    "Task": "fedspan.learn.task",
    "make": "fedspan.methods",
    "plot": "fedspan.report.figures",
    "simulate": "fedspan.simulation.simulator",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `fedspan --help` need not load torch."""
    if name not in _WHERE:
        raise AttributeError(f"module 'fedspan' has no attribute '{name}'")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
