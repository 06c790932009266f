"""The built-in methods: one line per method, imported when it is asked for.

`METHODS["fedavg"]` and `from fedspan.methods import FedAvg` import that one module.
"""

from __future__ import annotations

import importlib
from typing import Any

from fedspan.method.named_code import allow_code
from fedspan.method.registry import METHODS, find_method, make, name_of, register

BUILT_IN: dict[str, str] = {
    "local": "fedspan.methods.local:Local",
    "fedavg": "fedspan.methods.fedavg:FedAvg",
    "fedprox": "fedspan.methods.fedavg:FedProx",
    "fedavg-ft": "fedspan.methods.fine_tuning:FedAvgFineTuned",
    "fedavg-head": "fedspan.methods.fine_tuning:FedAvgHead",
    "fedper": "fedspan.methods.fedper:FedPer",
    "fedrep": "fedspan.methods.fedrep:FedRep",
    "fedbabu": "fedspan.methods.fedbabu:FedBabu",
    "lg-fedavg": "fedspan.methods.fedper:LgFedAvg",
    "ditto": "fedspan.methods.ditto:Ditto",
    "oracle": "fedspan.methods.oracle:Oracle",
    "cfl": "fedspan.methods.cfl:Cfl",
    "ifca": "fedspan.methods.ifca:Ifca",
    "fedcollab": "fedspan.methods.fedcollab:FedCollab",
    "per-fedavg": "fedspan.methods.per_fedavg:PerFedAvg",
    "fedfomo": "fedspan.methods.fedfomo:FedFomo",
    "apfl": "fedspan.methods.apfl:Apfl",
    "fedalt": "fedspan.methods.fedalt:FedAlt",
    "fedsim": "fedspan.methods.fedalt:FedSim",
    "pfedsim": "fedspan.methods.pfedsim:PFedSim",
    "fedproto": "fedspan.methods.fedproto:FedProto",
    "fedtgp": "fedspan.methods.fedproto:FedTgp",
    "fedala": "fedspan.methods.fedala:FedAla",
    "pfedme": "fedspan.methods.pfedme:PFedMe",
    "l2gd": "fedspan.methods.pfedme:L2gd",
    "flute": "fedspan.methods.flute:Flute",
    "fedas": "fedspan.methods.fedas:FedAs",
    "pfedfda": "fedspan.methods.pfedfda:PFedFda",
    "fedkd": "fedspan.methods.fedkd:FedKd",
    "pfedes": "fedspan.methods.pfedes:PFedEs",
    "pfedafm": "fedspan.methods.pfedes:PFedAfm",
    "pfl-mf": "fedspan.methods.pfl_mf:PflMf",
    "pfl-mf-adaptive": "fedspan.methods.pfl_mf:PflMfAdaptive",
    "pfl-mf-paper": "fedspan.methods.pfl_mf:PflMfPaper",
    "pfl-mf-joint": "fedspan.methods.pfl_mf:PflMfJoint",
    "amht-lrs": "fedspan.methods.amht_lrs:AmhtLrs",
    "lr-bpfl": "fedspan.methods.lr_bpfl:LrBpfl",
    "waffle": "fedspan.methods.waffle:Waffle",
    "factorized-fl-alpha": "fedspan.methods.factorized_fl:FactorizedFL",
    "factorized-fl-beta": "fedspan.methods.factorized_fl:FactorizedFLBeta",
    "factorized-fedavg": "fedspan.methods.factorized_fl:FactorizedFedAvg",
    "factorized-local": "fedspan.methods.factorized_fl:FactorizedLocal",
    "fedpara": "fedspan.methods.fedpara:FedPara",
    "pfedpara": "fedspan.methods.fedpara:PFedPara",
    "fedloru": "fedspan.methods.fedloru:FedLoRU",
    "fedlora": "fedspan.methods.fedloru:FedLoRA",
    "pfedloru": "fedspan.methods.fedloru:PFedLoRU",
    "mfedloru": "fedspan.methods.fedloru:MFedLoRU",
    "pfedlora1": "fedspan.methods.pfedlora:PFedLoRA",
    "pfedlora2": "fedspan.methods.pfedlora:PFedLoRAJoint",
    "fedhm": "fedspan.methods.fedhm:FedHM",
    "fedlmt": "fedspan.methods.fedhm:FedLMT",
    "feddlr": "fedspan.methods.fedhm:FedDLR",
    "prism": "fedspan.methods.prism:PriSM",
    "fedara": "fedspan.methods.fedara:FedAra",
    "fedara-star": "fedspan.methods.fedara:FedAraStar",
}
METHODS.add_table(BUILT_IN, group="fedspan.methods")

_MODULES = {place.partition(":")[2]: place.partition(":")[0] for place in BUILT_IN.values()}


def __getattr__(name: str) -> Any:
    """Import a built-in method's class by its name."""
    if name not in _MODULES:
        raise AttributeError(f"module 'fedspan.methods' has no attribute '{name}'")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})


__all__ = ["BUILT_IN", "METHODS", "allow_code", "find_method", "make", "name_of", "register"]
