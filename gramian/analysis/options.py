"""Options of an analysis."""

import math
from dataclasses import dataclass
from typing import Literal

from gramian.core.errors import GramianError

DAMPING = 0.03
"""The default of `KFACNaturalGradient`."""
TOLERANCE = 1e-3
"""Largest residual of Lanczos relative to the largest eigenvalue; the error of an eigenvalue is about its square."""
FISHERS = ("empirical", "mc", "true")


@dataclass(frozen=True)
class Settings:
    """Options of an analysis, as in `Settings(fisher="empirical", probes=0)`."""

    fisher: Literal["empirical", "mc", "true"] = "mc"
    """Labels of K-FAC: the data's own, drawn from the model, or drawn with the head's Fisher exact."""
    damping: float = DAMPING
    """λ of log_det, effective_dimension and condition_number."""
    eigenvalues: int = 5
    """k: largest eigenvalues of K-FAC and of the Gauss-Newton matrix."""
    probes: int = 4
    """Random vectors of the density of the Gauss-Newton matrix; 0: no product with it is made at all."""
    steps: int = 16
    """Lanczos steps of each probe."""
    hessian: bool = False
    """Also compute both ends of the Hessian's spectrum."""
    ekfac: bool = False
    """Correct K-FAC's eigenvalues to EK-FAC's."""
    samples: float | None = None
    """n of the heuristic pac_bayes = √(trace/n): how many samples the model was trained on; None: without it."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse an option that does not fit, naming it."""
        if self.fisher not in FISHERS:
            raise GramianError(f"fisher: {self.fisher!r}; expected one of {', '.join(FISHERS)}")
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
        """Number of vectors in the basis of Lanczos."""
        return 2 * self.eigenvalues + 20

    @property
    def lanczos_limit(self) -> int:
        """Number of products after which Lanczos ends, converged or not."""
        return 3 * self.lanczos_basis
