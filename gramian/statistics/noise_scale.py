"""The gradient noise scale: how large a batch must be before its gradient is mostly signal."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from gramian.taps.records import ParameterRecord
from gramian.taps.roles import SAMPLES, AdditiveStatistic, Needs, ParameterInfo, Sums, zero_sums


@dataclass(frozen=True)
class NoiseScaleResult:
    """The gradient noise scale and its parts: covariance Σ and expectation G of the per-sample gradient, from n samples."""

    samples: int
    simple: float
    """tr Σ / |G|² with |G|² estimated by |ḡ|² of the mean gradient ḡ, which is too large for few samples, so that the result is
    too low."""
    unbiased: float
    """tr Σ / |G|² from unbiased estimates of tr Σ and |G|²; may be negative or inf when there are too few samples, nan for one.
    """
    trace_covariance: float
    """Unbiased estimate of tr Σ: (Σ‖g_i‖² − n‖ḡ‖²)/(n−1), with per-sample gradients g_i and their mean ḡ; nan for one sample.
    """
    squared_gradient: float
    """Unbiased estimate of |G|²: ‖ḡ‖² − tr Σ/n, with the mean gradient ḡ of n samples; nan for one sample."""


class NoiseScale(AdditiveStatistic):
    """The noise scale B_noise = tr Σ / |G|², Σ and G the covariance and mean of per-sample gradients g_i.

    ```python
    noise = gramian.NoiseScale()
    with gramian.observe(model, noise) as seen:
        F.cross_entropy(model(x), y).backward()
    seen[noise].unbiased
    ```

    The mean gradient g_b of b samples has E‖g_b‖² = |G|² + tr Σ/b. Two batch sizes give two such equations; here they are b = 1
    (per-sample norms) and b = n (all samples seen, over any number of backward passes and processes). Cost: per-sample norms
    plus one more weight gradient; memory of one gradient. See McCandlish et al. 2018, arXiv:1812.06162.
    """

    needs: Needs = "parameter"
    per_sample = True

    def start(self, parameters: Mapping[str, ParameterInfo]) -> Sums:
        """{parameter: zeros}, a zero sum of squared norms and a sample count of 0."""
        sums = zero_sums(parameters)
        return {**sums, _SQUARES: torch.zeros_like(sums[SAMPLES])}

    def update(self, sums: Sums, record: ParameterRecord) -> None:
        """Add the summed gradient and the squared per-sample norms of one parameter in one pass."""
        sums[record.parameter] += record.total()
        sums[_SQUARES] += record.squared_norms().sum().to(sums[_SQUARES].device)

    def finish(self, sums: Sums) -> NoiseScaleResult:
        """The `NoiseScaleResult` of all n samples, from E‖g_b‖² = |G|² + tr Σ/b at batch sizes b = 1 and b = n."""
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
