"""Products in every precision against float64: their error is that of the rounding they state."""

import pytest
import torch

from gramian.linalg.tensor_core_products import UNITS, Operand, Precision


@pytest.mark.parametrize("stacked", [(), (3,)], ids=["one", "stack"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("precision", UNITS)
def test_the_error_is_that_of_the_precision(precision: Precision, side: str, stacked: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    matrix, y = (
        torch.randn(*stacked, *shape, generator=generator, dtype=torch.float64) for shape in ((24, 32), (32, 16))
    )
    if side == "right":
        matrix, y = matrix.mT.contiguous(), y.mT.contiguous()
    found = Operand.of(matrix, precision, side).times(y if precision == "fp64" else y.float())
    exact, size = (matrix @ y, matrix.abs() @ y.abs()) if side == "left" else (y @ matrix, y.abs() @ matrix.abs())
    error = float(((found.double() - exact).abs() / size).max())
    assert found.dtype == (torch.float64 if precision == "fp64" else torch.float32)
    assert error <= 8 * UNITS[precision]  # 32 terms are added in float32, too
    if precision in ("bf16", "bf16x3"):
        assert error > UNITS[precision] / 300  # it was rounded at all
