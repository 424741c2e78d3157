"""What an analysis computes."""

import math
from dataclasses import dataclass
from typing import Literal

from gramian.core.errors import GramianError

DAMPING = 0.03
"""The default of `KFACNaturalGradient`."""
TOLERANCE = 1e-3
"""Of the residuals of Lanczos, relative to the largest eigenvalue; eigenvalues are about its square exact."""
FISHERS = ("empirical", "mc", "true")


@dataclass(frozen=True)
class Settings:
    """Options of an analysis, checked by name."""

    fisher: Literal["empirical", "mc", "true"] = "mc"
    """Labels of K-FAC: the data's own, drawn from the model, or drawn with the head's Fisher exact."""
    damping: float = DAMPING
    """λ of log_det, effective_dimension and condition_number."""
    eigenvalues: int = 5
    """k: largest eigenvalues of K-FAC and of the Gauss-Newton matrix."""
    probes: int = 4
    """Random vectors of the density of the Gauss-Newton matrix; 0: no product with it is made at all."""
    steps: int = 16
    """Lanczos steps of each."""
    hessian: bool = False
    """Both ends of the Hessian's spectrum, too."""
    ekfac: bool = False
    """EK-FAC's eigenvalues beside K-FAC's."""
    samples: float | None = None
    """n of the heuristic pac_bayes = √(trace/n): how many samples the model was trained on; None: without it."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what makes no sense.

        Raises:
            GramianError: naming the option.
        """
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
            raise GramianError("probes: 1; expected 0, or at least 2, which tell an error")
        if not self.seed < 2**63:
            raise GramianError(f"seed: {self.seed}; expected at most 2^63 - 1")

    @property
    def lanczos_basis(self) -> int:
        """Vectors that Lanczos keeps."""
        return 2 * self.eigenvalues + 20

    @property
    def lanczos_limit(self) -> int:
        """Products after which it ends, converged or not."""
        return 3 * self.lanczos_basis
