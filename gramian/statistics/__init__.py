"""Statistics that observe a backward pass: each is a sum over samples and a count."""

from gramian.statistics.diagonal_estimate import DiagonalFisherEstimate
from gramian.statistics.ema import MovingAverage
from gramian.statistics.fisher import DiagonalFisher
from gramian.statistics.groups import by_column, by_head, by_row
from gramian.statistics.health import Health, LayerHealth
from gramian.statistics.moments import WeightedMoments
from gramian.statistics.noise import NoiseScale, NoiseScaleResult
from gramian.statistics.norms import Norms, PerSampleNorms, per_sample_norms
from gramian.statistics.traces import RowTraces, TokenTraces

__all__ = [
    "DiagonalFisher",
    "DiagonalFisherEstimate",
    "Health",
    "LayerHealth",
    "MovingAverage",
    "NoiseScale",
    "NoiseScaleResult",
    "Norms",
    "PerSampleNorms",
    "RowTraces",
    "TokenTraces",
    "WeightedMoments",
    "by_column",
    "by_head",
    "by_row",
    "per_sample_norms",
]
