"""An operator plus a multiple of the identity."""

from torch import Tensor

from gramian.curvature.blocks.consistency import check_number
from gramian.linalg.spectra.operator import Operator, check_operator


class ShiftedOperator(Operator):
    """M + λI with a λ of any sign: damping, or a shift that moves the other end of a spectrum to the front.

    ```python
    damped = ShiftedOperator(GGNOperator(model, batches), 1e-3)
    ```
    """

    def __init__(self, operator: Operator, shift: float) -> None:
        """Add λ = `shift` to the diagonal of an operator."""
        check_operator(operator)
        check_number("shift", shift)
        self.operator, self.shift = operator, shift
        self.dim, self.dtype, self.device = operator.dim, operator.dtype, operator.device
        self.space = getattr(operator, "space", None)

    def matmat(self, y_NK: Tensor) -> Tensor:
        """M Y + λY."""
        return self.operator.matmat(y_NK).add(y_NK, alpha=self.shift)
