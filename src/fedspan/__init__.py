"""Personalised federated learning with low-rank structure.

>>> import fedspan
>>> method = fedspan.make("fedavg", lr=0.1)

The names of `__all__` are the stable surface: what experiments, and methods of one's own, are written with. They are
imported when they are first used, so `import fedspan` itself is quick and does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fedspan import testing, tree
    from fedspan.data.client_objects import federate
    from fedspan.data.federated import FederatedData
    from fedspan.errors import ConfigError, DataError, Divergence, FedspanError, PromiseError
    from fedspan.learn.batches import All, Batch, Batches, Epochs, Portion, Steps, Validation
    from fedspan.learn.metrics import Metric
    from fedspan.learn.optimizer import Optimizer, Schedule
    from fedspan.learn.server_optimizer import ServerOptimizer
    from fedspan.learn.sgd import adamw, gradient, gradient_and_value, hessian_product, mean_gradient, sgd
    from fedspan.learn.task import Task
    from fedspan.learn.transforms import Transforms
    from fedspan.method import fields
    from fedspan.method.bases import Averaging, Sharing, Training
    from fedspan.method.capabilities import (
        Adapts,
        Announces,
        Begins,
        Cautions,
        Coded,
        Converts,
        Estimates,
        Judged,
        Lifts,
        MeasuredStep,
        Observed,
        Ranked,
    )
    from fedspan.method.disclosure import Discloses
    from fedspan.method.protocol import About, ClientInfo, Down, Federation, Method, Round, Sent, Visit
    from fedspan.methods import METHODS, allow_code, make, register
    from fedspan.randomness import normal, uniform
    from fedspan.report.figures import plot
    from fedspan.simulation.asynchronous import Asynchronous
    from fedspan.simulation.defence import Defence
    from fedspan.simulation.devices import Devices
    from fedspan.simulation.protocols import EvaluationSettings
    from fedspan.simulation.result import Result
    from fedspan.simulation.settings import Settings
    from fedspan.simulation.simulator import simulate
    from fedspan.tree import Outer

__all__ = [
    "METHODS",
    "About",
    "Adapts",
    "All",
    "Announces",
    "Asynchronous",
    "Averaging",
    "Batch",
    "Batches",
    "Begins",
    "Cautions",
    "ClientInfo",
    "Coded",
    "ConfigError",
    "Converts",
    "DataError",
    "Defence",
    "Devices",
    "Discloses",
    "Divergence",
    "Down",
    "Epochs",
    "Estimates",
    "EvaluationSettings",
    "FederatedData",
    "Federation",
    "FedspanError",
    "Judged",
    "Lifts",
    "MeasuredStep",
    "Method",
    "Metric",
    "Observed",
    "Optimizer",
    "Outer",
    "Portion",
    "PromiseError",
    "Ranked",
    "Result",
    "Round",
    "Schedule",
    "Sent",
    "ServerOptimizer",
    "Settings",
    "Sharing",
    "Steps",
    "Task",
    "Training",
    "Transforms",
    "Validation",
    "Visit",
    "__version__",
    "adamw",
    "allow_code",
    "federate",
    "fields",
    "gradient",
    "gradient_and_value",
    "hessian_product",
    "make",
    "mean_gradient",
    "normal",
    "plot",
    "register",
    "sgd",
    "simulate",
    "testing",
    "tree",
    "uniform",
]

_PLACES: dict[str, str] = {
    "fedspan.data.client_objects": "federate",
    "fedspan.data.federated": "FederatedData",
    "fedspan.errors": "ConfigError DataError Divergence FedspanError PromiseError",
    "fedspan.learn.batches": "All Batch Batches Epochs Portion Steps Validation",
    "fedspan.learn.metrics": "Metric",
    "fedspan.learn.optimizer": "Optimizer Schedule",
    "fedspan.learn.server_optimizer": "ServerOptimizer",
    "fedspan.learn.sgd": "adamw gradient gradient_and_value hessian_product mean_gradient sgd",
    "fedspan.learn.task": "Task",
    "fedspan.learn.transforms": "Transforms",
    "fedspan.method.bases": "Averaging Sharing Training",
    "fedspan.method.capabilities": (
        "Adapts Announces Begins Cautions Coded Converts Estimates Judged Lifts MeasuredStep Observed Ranked"
    ),
    "fedspan.method.disclosure": "Discloses",
    "fedspan.method.protocol": "About ClientInfo Down Federation Method Round Sent Visit",
    "fedspan.methods": "METHODS allow_code make register",
    "fedspan.randomness": "normal uniform",
    "fedspan.report.figures": "plot",
    "fedspan.simulation.protocols": "EvaluationSettings",
    "fedspan.simulation.result": "Result",
    "fedspan.simulation.asynchronous": "Asynchronous",
    "fedspan.simulation.defence": "Defence",
    "fedspan.simulation.devices": "Devices",
    "fedspan.simulation.settings": "Settings",
    "fedspan.simulation.simulator": "simulate",
    "fedspan.tree": "Outer",
}
_WHERE = {name: module for module, names in _PLACES.items() for name in names.split()}
_MODULES = {
    module.rpartition(".")[2]: module for module in ("fedspan.method.fields", "fedspan.testing", "fedspan.tree")
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `fedspan --help` need not load torch."""
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _WHERE:
        raise AttributeError(f"module 'fedspan' has no attribute '{name}'")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
