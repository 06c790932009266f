"""FedLoRU and its kin. Park and Klabjan, 2024: Algorithms 1 (FedLoRU), 2 (pFedLoRU) and 3 (mFedLoRU), one file each.

FedLoRA, the baseline, is Algorithm 1 without accumulation. Algorithm 4, pFedLoRA, trains full weights and is a method
of its own, `fedspan.methods.pfedlora`.
"""

from fedspan.methods.fedloru.fedlora import FedLoRA
from fedspan.methods.fedloru.fedloru import FedLoRU
from fedspan.methods.fedloru.mfedloru import MFedLoRU
from fedspan.methods.fedloru.pfedloru import PFedLoRU

__all__ = ["FedLoRA", "FedLoRU", "MFedLoRU", "PFedLoRU"]
