"""FedARA: `fedara` is the round; objective, capacities, adaptive ranks and monitoring stand beside it."""

from fedspan.methods.fedara.fedara import FedAra, FedAraStar

__all__ = ["FedAra", "FedAraStar"]
