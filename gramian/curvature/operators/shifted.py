"""An operator plus a multiple of the identity."""

from torch import Tensor

from gramian.curvature.blocks.consistency import check_number
from gramian.linalg.spectra.operator import Operator, check_operator


class ShiftedOperator(Operator):
    """M + λI for an operator M and a λ of any sign: damping, or a shift that makes the lower end of a spectrum dominant.

    ```python
    damped = ShiftedOperator(GGNOperator(model, batches), 1e-3)
    ```
    """

    def __init__(self, operator: Operator, shift: float) -> None:
        """Store the operator M and λ = `shift`; a GramianError if M is not an operator or λ not a finite number."""
        check_operator(operator)
        check_number("shift", shift)
        self.operator, self.shift = operator, shift
        self.dim, self.dtype, self.device = operator.dim, operator.dtype, operator.device
        self.space = getattr(operator, "space", None)

    def matmat(self, y_NK: Tensor) -> Tensor:
        """(M + λI) Y for Y [n, k]: [n, k]."""
        return self.operator.matmat(y_NK).add(y_NK, alpha=self.shift)
