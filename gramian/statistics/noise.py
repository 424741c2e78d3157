"""The gradient noise scale: how large a batch must be before its gradient is mostly signal."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from gramian.taps.record import ParameterRecord
from gramian.taps.statistic import AdditiveStatistic, ParameterInfo, Sums


@dataclass(frozen=True)
class NoiseScaleResult:
    """Moments of the per-sample gradient over n samples."""

    samples: int
    simple: float
    """tr Σ / |G|² from the biased plug-in |ḡ|²: what the batch itself suggests; biased low for small batches."""
    unbiased: float
    """tr Σ / |G|² from unbiased estimates of both (batches of 1 and of n); may be negative or inf when n is too small."""
    trace_covariance: float
    """Unbiased tr Σ = (Σ‖g_i‖² − n‖ḡ‖²)/(n−1)."""
    squared_gradient: float
    """Unbiased |G|² = ‖ḡ‖² − tr Σ/n."""


class NoiseScale(AdditiveStatistic):
    """B_noise = tr Σ / |G|², from Σ_i ‖g_i‖² and Σ_i g_i.

    Two batch sizes give two unbiased equations, E‖g_b‖² = |G|² + tr Σ/b; here they are b = 1 (per-sample norms) and
    b = n (all samples seen, over any number of backward passes and processes). Cost: per-sample norms plus one more weight
    gradient; memory of one gradient.
    """

    needs: Literal["parameter"] = "parameter"
    per_sample = True

    def start(self, parameters: Mapping[str, ParameterInfo]) -> Sums:
        """A zero gradient, a zero sum of squares, no samples."""
        sums: Sums = {}
        for name, info in parameters.items():
            dtype = torch.float64 if info.dtype == torch.float64 else torch.float32
            sums[name] = torch.zeros(info.shape, dtype=dtype, device=info.device)
        device = next(iter(parameters.values())).device
        sums[_SQUARES] = torch.zeros((), dtype=torch.float64, device=device)
        sums[_SAMPLES] = torch.zeros((), dtype=torch.float64, device=device)
        self._passes: set[int] = set()
        return sums

    def update(self, sums: Sums, record: ParameterRecord) -> None:
        """Add one parameter."""
        sums[record.parameter] += record.total()
        sums[_SQUARES] += record.squared_norms().sum()
        if record.info.number not in self._passes:
            self._passes.add(record.info.number)
            sums[_SAMPLES] += record.info.count

    def finish(self, sums: Sums) -> NoiseScaleResult:
        """Solve the two equations."""
        n = int(sums[_SAMPLES])
        gradients = [value for key, value in sums.items() if key not in (_SQUARES, _SAMPLES)]
        mean_square = float(sums[_SQUARES]) / n if n else 0.0
        plug_in = sum(float(g.double().square().sum()) for g in gradients) / n**2 if n else 0.0
        trace = (mean_square - plug_in) * n / (n - 1) if n > 1 else float("nan")
        squared = plug_in - trace / n if n > 1 else float("nan")
        return NoiseScaleResult(
            samples=n,
            simple=trace / plug_in if plug_in else float("inf"),
            unbiased=trace / squared if squared else float("inf"),
            trace_covariance=trace,
            squared_gradient=squared,
        )


_SQUARES, _SAMPLES = "(squared norms)", "(samples)"
