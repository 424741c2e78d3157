"""Statistics that observe a backward pass: each is a sum over samples and a count."""

from gramian.statistics.ema import MovingAverage
from gramian.statistics.fisher import DiagonalFisher
from gramian.statistics.health import Health, LayerHealth
from gramian.statistics.moments import WeightedMoments
from gramian.statistics.noise import NoiseScale, NoiseScaleResult
from gramian.statistics.norms import Norms, PerSampleNorms, per_sample_norms

__all__ = [
    "DiagonalFisher",
    "Health",
    "LayerHealth",
    "MovingAverage",
    "NoiseScale",
    "NoiseScaleResult",
    "Norms",
    "PerSampleNorms",
    "WeightedMoments",
    "per_sample_norms",
]
