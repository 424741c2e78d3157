"""The methods of a K-FAC object that compute metrics of the Fisher's spectrum."""

from typing import Any

from torch import Tensor

from gramian.curvature.blocks.consistency import check_number
from gramian.curvature.options import check_count
from gramian.curvature.spectrum import capacity
from gramian.curvature.state import CurvatureState


class FisherSpectrum:
    """Metrics of the spectrum of the factors in a `CurvatureState`, as methods of its owner (`KFACNaturalGradient`)."""

    state: CurvatureState

    def compute_capacity_metrics(self, damping: float | None = None, n: float | None = None) -> dict[str, Any]:
        """Capacity metrics (docs/concepts/capacity.md) of every layer and of the model, from the Fisher's spectrum. Collective.

        Args:
            damping: λ of log_det, effective_dimension and condition_number, which are those of F + λI whatever `damping_mode`
                is; None: the option `damping`, or under "joint" `damping_A` if given. All else is undamped and unclipped.
            n: number of samples, for the heuristic pac_bayes = √(trace/n); None: without it.

        Returns:
            {"layers": {name: {metric: value}}, "model": {the same, and "coverage": shares of the trained parameters}}; where A
            or G is too wide for a dense matrix, metrics are estimates, and an entry "error" has {metric: error bound}.
        """
        damping = self.state.options.joint_lambda if damping is None else damping
        for name, value in {"damping": damping, "n": 1 if n is None else n}.items():
            check_number(name, value, "positive")
        self.state.require_factors()
        coverage = capacity.coverage_of(self.state.specs, self.state.blocks, self.state.parameters_outside_blocks())
        return capacity.capacity_metrics(self.state.blocks, float(damping), n, coverage, self.state.exchange)

    def top_eigenvalues(self, k: int = 20) -> Tensor:
        """The k largest eigenvalues of the estimated Fisher, undamped and unclipped: [k], descending, float64. Collective."""
        check_count("k", k)
        self.state.require_factors()
        return capacity.top_eigenvalues(self.state.blocks, k, self.state.exchange)
