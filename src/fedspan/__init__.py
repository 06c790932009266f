"""Personalised federated learning with low-rank structure.

>>> import fedspan
>>> method = fedspan.make("fedavg", lr=0.1)
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fedspan.data.federated import FederatedData
    from fedspan.methods import make
    from fedspan.result import Result
    from fedspan.settings import Settings
    from fedspan.simulate import simulate
    from fedspan.task import Task

__all__ = ["FederatedData", "Result", "Settings", "Task", "__version__", "make", "simulate"]

_WHERE = {
    "FederatedData": "fedspan.data.federated",
    "Result": "fedspan.result",
    "Settings": "fedspan.settings",
    "Task": "fedspan.task",
    "make": "fedspan.methods",
}


class _Package(types.ModuleType):
    """Imports torch only when a name is used, so that `fedspan --help` is quick.

    `fedspan.simulate` is the function. The import system would put the module of the same name there, so it is a
    property that cannot be overwritten; `from fedspan.simulate import Simulation` works as ever.
    """

    @property
    def simulate(self) -> Any:
        """The function `simulate`."""
        return importlib.import_module("fedspan.simulate").simulate

    @simulate.setter
    def simulate(self, _: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name not in _WHERE:
            raise AttributeError(f"module 'fedspan' has no attribute '{name}'")
        return getattr(importlib.import_module(_WHERE[name]), name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
