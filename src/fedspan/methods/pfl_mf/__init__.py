"""pFL-MF: all client models lie in one r-dimensional subspace, θ_i = U v_i. Dadras, Stich and Yurtsever, TMLR 2025.

`paper` is Algorithm 1, to be read beside the paper, `paper_options` what else its experiments set; `joint` is what the
public code does, `default` the form that works. They share `coefficients` (v with U fixed), `gauge` and `rank`.
`adaptive_heads` has a mean and a residual beside the subspace, whose widths the federation chooses (`head_prior`).
"""

from fedspan.methods.pfl_mf.adaptive_heads import PflMfAdaptive
from fedspan.methods.pfl_mf.coefficients import CoefficientSolver, InSubspace
from fedspan.methods.pfl_mf.default import PflMf
from fedspan.methods.pfl_mf.joint import PflMfJoint
from fedspan.methods.pfl_mf.paper import PflMfAlgorithm1
from fedspan.methods.pfl_mf.paper_options import ALGORITHM_1, PflMfPaper, algorithm_1
from fedspan.methods.pfl_mf.rank import RankSearch

__all__ = [
    "ALGORITHM_1",
    "CoefficientSolver",
    "InSubspace",
    "PflMf",
    "PflMfAdaptive",
    "PflMfAlgorithm1",
    "PflMfJoint",
    "PflMfPaper",
    "RankSearch",
    "algorithm_1",
]
