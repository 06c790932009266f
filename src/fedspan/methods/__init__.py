"""The registry: one line per method."""

from __future__ import annotations

from typing import Any

from fedspan.errors import ConfigError, nearest
from fedspan.method import Method
from fedspan.method.fields import build
from fedspan.methods.amht_lrs import AmhtLrs
from fedspan.methods.apfl import Apfl
from fedspan.methods.cfl import Cfl
from fedspan.methods.ditto import Ditto
from fedspan.methods.factorized_fl import FactorizedFedAvg, FactorizedFL, FactorizedFLBeta, FactorizedLocal
from fedspan.methods.fedala import FedAla
from fedspan.methods.fedalt import FedAlt, FedSim
from fedspan.methods.fedara import FedAra, FedAraStar
from fedspan.methods.fedas import FedAs
from fedspan.methods.fedavg import FedAvg, FedProx
from fedspan.methods.fedbabu import FedBabu
from fedspan.methods.fedcollab import FedCollab
from fedspan.methods.fedfomo import FedFomo
from fedspan.methods.fedhm import FedDLR, FedHM, FedLMT
from fedspan.methods.fedkd import FedKd
from fedspan.methods.fedloru import FedLoRA, FedLoRU, MFedLoRU, PFedLoRU
from fedspan.methods.fedpara import FedPara, PFedPara
from fedspan.methods.fedper import FedPer, LgFedAvg
from fedspan.methods.fedproto import FedProto, FedTgp
from fedspan.methods.fedrep import FedRep
from fedspan.methods.flute import Flute
from fedspan.methods.ifca import Ifca
from fedspan.methods.local import Local
from fedspan.methods.lr_bpfl import LrBpfl
from fedspan.methods.oracle import Oracle
from fedspan.methods.per_fedavg import PerFedAvg
from fedspan.methods.pfedes import PFedAfm, PFedEs
from fedspan.methods.pfedfda import PFedFda
from fedspan.methods.pfedlora import PFedLoRA, PFedLoRAJoint
from fedspan.methods.pfedme import L2gd, PFedMe
from fedspan.methods.pfedsim import PFedSim
from fedspan.methods.pfl_mf import PflMf, PflMfJoint, PflMfPaper
from fedspan.methods.prism import PriSM
from fedspan.methods.waffle import Waffle

METHODS: dict[str, type[Method]] = {
    "local": Local,
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "fedper": FedPer,
    "fedrep": FedRep,
    "fedbabu": FedBabu,
    "lg-fedavg": LgFedAvg,
    "ditto": Ditto,
    "oracle": Oracle,
    "cfl": Cfl,
    "ifca": Ifca,
    "fedcollab": FedCollab,
    "per-fedavg": PerFedAvg,
    "fedfomo": FedFomo,
    "apfl": Apfl,
    "fedalt": FedAlt,
    "fedsim": FedSim,
    "pfedsim": PFedSim,
    "fedproto": FedProto,
    "fedtgp": FedTgp,
    "fedala": FedAla,
    "pfedme": PFedMe,
    "l2gd": L2gd,
    "flute": Flute,
    "fedas": FedAs,
    "pfedfda": PFedFda,
    "fedkd": FedKd,
    "pfedes": PFedEs,
    "pfedafm": PFedAfm,
    "pfl-mf": PflMf,
    "pfl-mf-paper": PflMfPaper,
    "pfl-mf-joint": PflMfJoint,
    "amht-lrs": AmhtLrs,
    "lr-bpfl": LrBpfl,
    "waffle": Waffle,
    "factorized-fl-alpha": FactorizedFL,
    "factorized-fl-beta": FactorizedFLBeta,
    "factorized-fedavg": FactorizedFedAvg,
    "factorized-local": FactorizedLocal,
    "fedpara": FedPara,
    "pfedpara": PFedPara,
    "fedloru": FedLoRU,
    "fedlora": FedLoRA,
    "pfedloru": PFedLoRU,
    "mfedloru": MFedLoRU,
    "pfedlora1": PFedLoRA,
    "pfedlora2": PFedLoRAJoint,
    "fedhm": FedHM,
    "fedlmt": FedLMT,
    "feddlr": FedDLR,
    "prism": PriSM,
    "fedara": FedAra,
    "fedara-star": FedAraStar,
}


def make(name: str, **fields: Any) -> Method:
    """The method of that name with these fields.

    Raises:
        ConfigError: for an unknown name or field, or a value that does not fit.
    """
    if name not in METHODS:
        raise ConfigError(f"Method: unknown method '{name}'.{nearest(name, METHODS)}")
    return build(METHODS[name], fields, f"Method {name}")


def name_of(method: Method) -> str:
    """The registered name, or the class name of a method that is not registered."""
    return next((k for k, c in METHODS.items() if type(method) is c), type(method).__name__)


__all__ = [
    "METHODS",
    "AmhtLrs",
    "Apfl",
    "Cfl",
    "Ditto",
    "FactorizedFL",
    "FactorizedFLBeta",
    "FactorizedFedAvg",
    "FactorizedLocal",
    "FedAla",
    "FedAlt",
    "FedAra",
    "FedAraStar",
    "FedAs",
    "FedAvg",
    "FedBabu",
    "FedCollab",
    "FedDLR",
    "FedFomo",
    "FedHM",
    "FedKd",
    "FedLMT",
    "FedLoRA",
    "FedLoRU",
    "FedPara",
    "FedPer",
    "FedProto",
    "FedProx",
    "FedRep",
    "FedSim",
    "FedTgp",
    "Flute",
    "Ifca",
    "L2gd",
    "LgFedAvg",
    "Local",
    "LrBpfl",
    "MFedLoRU",
    "Oracle",
    "PFedAfm",
    "PFedEs",
    "PFedFda",
    "PFedLoRA",
    "PFedLoRAJoint",
    "PFedLoRU",
    "PFedMe",
    "PFedPara",
    "PFedSim",
    "PerFedAvg",
    "PflMf",
    "PflMfJoint",
    "PflMfPaper",
    "PriSM",
    "Waffle",
    "make",
    "name_of",
]
