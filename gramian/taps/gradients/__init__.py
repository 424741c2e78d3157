"""Per-sample gradients of one parameter, stored as factors: sample i's gradient g_i is formed only if it is asked for.

A site (the rules for one kind of layer) returns the gradient of each parameter in one of these forms, sums over the tokens t of
a sample: `Outer` (Σ_t l_t r_tᵀ: linear layers), `Summed` (Σ_t g_t: biases), `Normed` (Σ_t g_t ⊙ x̂_t: scales of norm layers),
`Indexed` (rows of an embedding), `Convolved` (convolutions), `GroupedOuter` and `GroupedSum` (stacks of matrices or vectors,
one of which acts on each row: fused experts; a single one for the tokens of packed documents), `GroupedIndexed` (an embedding
of such tokens), and `ExplicitGradient` (a tensor per sample, for layers without a formula).
`join` sums several uses of one parameter sample by sample (`Joined`), before norms or squares are computed.
"""

from gramian.taps.gradients.convolved import Convolved
from gramian.taps.gradients.explicit import ExplicitGradient
from gramian.taps.gradients.grouped_indexed import GroupedIndexed
from gramian.taps.gradients.grouped_outer import GroupedOuter
from gramian.taps.gradients.grouped_rows import GroupedRows
from gramian.taps.gradients.grouped_sum import GroupedSum
from gramian.taps.gradients.indexed import Indexed
from gramian.taps.gradients.joined import Joined, join
from gramian.taps.gradients.normed import Normed
from gramian.taps.gradients.outer import Outer
from gramian.taps.gradients.per_sample_gradient import PerSampleGradient
from gramian.taps.gradients.summed import Summed

__all__ = [
    "Convolved",
    "ExplicitGradient",
    "GroupedIndexed",
    "GroupedOuter",
    "GroupedRows",
    "GroupedSum",
    "Indexed",
    "Joined",
    "Normed",
    "Outer",
    "PerSampleGradient",
    "Summed",
    "join",
]
