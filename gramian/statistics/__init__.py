"""Statistics that observe backward passes: sums over samples with a count, or one result for each sample."""

from gramian.statistics.diagonal_estimate import DiagonalFisherEstimate
from gramian.statistics.diagonal_fisher import DiagonalFisher
from gramian.statistics.diagonal_groups import by_column, by_head, by_row
from gramian.statistics.fisher_traces import RowTraces, TokenTraces
from gramian.statistics.layer_health import Health, LayerHealth
from gramian.statistics.moving_average import MovingAverage
from gramian.statistics.noise_scale import NoiseScale, NoiseScaleResult
from gramian.statistics.norms import Norms, PerSampleNorms, per_sample_norms
from gramian.statistics.weighted_moments import WeightedMoments

__all__ = [
    "DiagonalFisher", "DiagonalFisherEstimate", "Health", "LayerHealth", "MovingAverage", "NoiseScale",
    "NoiseScaleResult", "Norms", "PerSampleNorms", "RowTraces", "TokenTraces", "WeightedMoments", "by_column",
    "by_head", "by_row", "per_sample_norms",
]  # fmt: skip
