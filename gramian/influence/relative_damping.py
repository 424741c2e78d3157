"""Damping of each block relative to its own mean eigenvalue: λ_b = δ · tr F_b / (number of parameters of block b).

Blocks of a language model differ in scale by orders of magnitude, so that one λ for all would leave some undamped and reduce
others to the plain gradient. δ = 0.1 is what is commonly used for influence functions.
"""

from gramian.curvature.blocks.block import Block
from gramian.curvature.blocks.damping import Damping
from gramian.curvature.kfac import KFACNaturalGradient
from gramian.curvature.uses.fisher_parameters import blocks_of


def set_relative_damping(kfac: KFACNaturalGradient, share: float) -> dict[str, float]:
    """Damp every block by `share` of its mean eigenvalue until the next refresh; returns {block: λ}.

    λ is added to the product G ⊗ A. A block whose Fisher is zero gets λ = 1: its natural gradient is the gradient.
    """
    found = {}
    for name, block in blocks_of(kfac).items():
        value = share * mean_eigenvalue(block)
        found[name] = value if value > 0 else 1.0
        block.damping = Damping("joint", found[name], found[name], 1.0, None)
        block.clips = {}
    return found


def mean_eigenvalue(block: Block) -> float:
    """tr F / (o·m) of a block, from EK-FAC's eigenvalues where it has them."""
    entries = block.spec.outputs * block.spec.inputs
    if block.correction is not None:
        return float(block.correction.values_RS.double().sum()) / entries
    return float(block.G.trace()) * (1.0 if block.A is None else float(block.A.trace())) / entries
