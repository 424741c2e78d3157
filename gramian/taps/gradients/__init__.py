"""Per-sample gradients of one parameter that are never written down unless somebody asks.

Every layer that gramian knows explains the gradient of each of its parameters as one of four forms:
`Outer` (Σ_t l_t r_tᵀ: linear layers), `Summed` (Σ_t g_t: biases and norm layers), `Indexed` (rows of an embedding) and
`ExplicitGradient` (a tensor per sample: convolutions and the generic fallback). Several uses of one parameter are `Joined` per
sample before anything is squared.
"""

from gramian.taps.gradients.convolved import Convolved
from gramian.taps.gradients.explicit import ExplicitGradient
from gramian.taps.gradients.indexed import Indexed
from gramian.taps.gradients.joined import join
from gramian.taps.gradients.normed import Normed
from gramian.taps.gradients.outer import Outer
from gramian.taps.gradients.per_sample_gradient import PerSampleGradient
from gramian.taps.gradients.summed import Summed

__all__ = ["Convolved", "ExplicitGradient", "Indexed", "Normed", "Outer", "PerSampleGradient", "Summed", "join"]
