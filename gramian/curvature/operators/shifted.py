"""An operator with a multiple of the identity added."""

from torch import Tensor

from gramian.curvature.blocks.consistency import check_number
from gramian.linalg.spectra.operator import Operator, check_operator


class ShiftedOperator(Operator):
    """M + λI: damping, or the other end of a spectrum brought to the front."""

    def __init__(self, operator: Operator, shift: float) -> None:
        """Add to an operator.

        Args:
            operator: M.
            shift: λ, of any sign.

        Raises:
            GramianError: for what is no operator, or a shift that is no finite number.
        """
        check_operator(operator)
        check_number("shift", shift)
        self.operator, self.shift = operator, shift
        self.dim, self.dtype, self.device = operator.dim, operator.dtype, operator.device
        self.space = getattr(operator, "space", None)

    def matmat(self, y_NK: Tensor) -> Tensor:
        """M Y + λY."""
        return self.operator.matmat(y_NK).add(y_NK, alpha=self.shift)
