"""Factorized-FL. Jeong and Hwang, NeurIPS 2022: α is the paper's eqs. (1) to (6), β and the ablations stand beside it.

The form of a weight, the penalty on μ, what is shared and who is matched with whom are values that a method holds.
"""

from fedspan.methods.factorized_fl.ablations import FactorizedFedAvg, FactorizedLocal
from fedspan.methods.factorized_fl.alpha import FactorizedFL
from fedspan.methods.factorized_fl.beta import FactorizedFLBeta

__all__ = ["FactorizedFL", "FactorizedFLBeta", "FactorizedFedAvg", "FactorizedLocal"]
