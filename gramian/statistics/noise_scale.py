"""The gradient noise scale: how large a batch must be before its gradient is mostly signal."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from gramian.taps.records import ParameterRecord
from gramian.taps.roles import SAMPLES, AdditiveStatistic, Needs, ParameterInfo, Sums, zero_sums


@dataclass(frozen=True)
class NoiseScaleResult:
    """Moments of the per-sample gradient over n samples."""

    samples: int
    simple: float
    """tr Σ / |G|² from the plug-in estimate |ḡ|², which is biased: too low for small batches."""
    unbiased: float
    """tr Σ / |G|² from unbiased estimates of both (batches of 1 and of n); may be negative or inf when n is too small."""
    trace_covariance: float
    """Unbiased tr Σ = (Σ‖g_i‖² − n‖ḡ‖²)/(n−1)."""
    squared_gradient: float
    """Unbiased |G|² = ‖ḡ‖² − tr Σ/n."""


class NoiseScale(AdditiveStatistic):
    """B_noise = tr Σ / |G|², from Σ_i ‖g_i‖² and Σ_i g_i (McCandlish et al. 2018, arXiv:1812.06162).

    ```python
    noise = gramian.NoiseScale()
    with gramian.observe(model, noise) as seen:
        F.cross_entropy(model(x), y).backward()
    seen[noise].unbiased
    ```

    Two batch sizes give two unbiased equations, E‖g_b‖² = |G|² + tr Σ/b; here they are b = 1 (per-sample norms) and
    b = n (all samples seen, over any number of backward passes and processes). Cost: per-sample norms plus one more weight
    gradient; memory of one gradient.
    """

    needs: Needs = "parameter"
    per_sample = True

    def start(self, parameters: Mapping[str, ParameterInfo]) -> Sums:
        """A zero gradient and a zero sum of squares."""
        sums = zero_sums(parameters)
        return {**sums, _SQUARES: torch.zeros_like(sums[SAMPLES])}

    def update(self, sums: Sums, record: ParameterRecord) -> None:
        """Add one parameter."""
        sums[record.parameter] += record.total()
        sums[_SQUARES] += record.squared_norms().sum().to(sums[_SQUARES].device)

    def finish(self, sums: Sums) -> NoiseScaleResult:
        """Solve the two equations."""
        n = int(sums[SAMPLES])
        gradients = [value for key, value in sums.items() if key not in (_SQUARES, SAMPLES)]
        mean_square = float(sums[_SQUARES]) / n if n else 0.0
        plug_in = sum(float(g.double().square().sum()) for g in gradients) / n**2 if n else 0.0
        trace = (mean_square - plug_in) * n / (n - 1) if n > 1 else float("nan")
        squared = plug_in - trace / n if n > 1 else float("nan")
        return NoiseScaleResult(
            samples=n,
            simple=_ratio(trace, plug_in),
            unbiased=_ratio(trace, squared),
            trace_covariance=trace,
            squared_gradient=squared,
        )


_SQUARES = "(squared norms)"


def _ratio(trace: float, squared: float) -> float:
    return trace / squared if squared else (float("nan") if trace != trace else float("inf"))
