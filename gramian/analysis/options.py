"""Options of a curvature analysis."""

import math
from dataclasses import dataclass
from typing import Literal

from gramian.core.byte_amounts import parse_bytes
from gramian.core.errors import GramianError
from gramian.curvature.options import POLICIES

DAMPING = 0.03
"""Default damping of an analysis; it is also the default of `KFACNaturalGradient`."""
TOLERANCE = 1e-3
"""Lanczos stops when residuals are below this, relative to the largest eigenvalue; an eigenvalue's error is about its square.
"""
FISHERS = ("empirical", "mc", "true")


@dataclass(frozen=True)
class Settings:
    """Options of a curvature analysis, as in `Settings(fisher="empirical", probes=0)`."""

    fisher: Literal["empirical", "mc", "true"] = "mc"
    """Labels behind K-FAC's gradients: "empirical" the data's, "mc" drawn from the model, "true" as "mc" with an exact head."""
    damping: float = DAMPING
    """Damping λ, which is added to the eigenvalues for log_det, effective_dimension and condition_number."""
    eigenvalues: int = 5
    """Number of largest eigenvalues that are computed, of K-FAC and of the Gauss-Newton matrix."""
    probes: int = 4
    """Number of random vectors that estimate the spectral density of the Gauss-Newton matrix; 0: that matrix is left out."""
    steps: int = 16
    """Number of Lanczos steps, and so of quadrature nodes, for each random vector."""
    hessian: bool = False
    """Also compute the smallest and the largest eigenvalues of the Hessian."""
    ekfac: bool = False
    """Replace K-FAC's eigenvalues by those of EK-FAC."""
    samples: float | None = None
    """Number of samples the model was trained on, n of the heuristic pac_bayes = √(trace/n); None: pac_bayes is left out."""
    seed: int = 0
    policy: str = "all"
    """K-FAC's `kfac_policy`, which decides what factors are low rank: "all", "auto", "hybrid" or "small_only"."""
    memory_budget: int | str | None = None
    """K-FAC's `memory_budget`, the bytes of its factors on a device, such as "2GB"; None: no limit."""

    def __post_init__(self) -> None:
        """Raise a GramianError that names the first option whose value is not allowed."""
        if self.fisher not in FISHERS:
            raise GramianError(f"fisher: {self.fisher!r}; expected one of {', '.join(FISHERS)}")
        if self.policy not in POLICIES:
            raise GramianError(f"policy: {self.policy!r}; expected one of {', '.join(POLICIES)}")
        if parse_bytes("memory_budget", self.memory_budget) == 0:
            raise GramianError(f"memory_budget: {self.memory_budget!r}; expected more than 0 bytes")
        for name, value in (("damping", self.damping), ("samples", 1.0 if self.samples is None else self.samples)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise GramianError(f"{name}: {value!r}; expected a number above 0")
        for name, least in (("eigenvalues", 1), ("probes", 0), ("steps", 2), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise GramianError(f"{name}: {value!r}; expected an integer of at least {least}")
        if self.probes == 1:
            raise GramianError("probes: 1; expected 0, or at least 2, which give a standard error")
        if not self.seed < 2**63:
            raise GramianError(f"seed: {self.seed}; expected at most 2^63 - 1")

    @property
    def lanczos_basis(self) -> int:
        """Number of vectors that Lanczos stores as its basis."""
        return 2 * self.eigenvalues + 20

    @property
    def lanczos_limit(self) -> int:
        """Number of matrix-vector products after which Lanczos ends, whether it has converged or not."""
        return 3 * self.lanczos_basis
