"""Products with a matrix in a chosen precision, on tensor cores where that is possible, accumulated in float32.

| precision | operands | relative rounding u | time of a product on an H200 |
|---|---|---|---|
| "bf16" | rounded to bfloat16 | 2⁻⁸ | 1 |
| "tf32" | rounded to TF32 | 2⁻¹¹ | 2 |
| "bf16x3" | M = H + L with H, L in bfloat16; H Y_H + H Y_L + L Y_H as one product of three times the depth | 2⁻¹⁶ | 3 |
| "fp32" | float32, not on tensor cores | 2⁻²⁴ | 14 |
| "fp64" | float64 | 2⁻⁵³ | 14 |
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gramian.kernels.bfloat16_parts import bfloat16_parts
from gramian.linalg.wide import exact_float32, tensor_float32

Precision = Literal["bf16", "tf32", "bf16x3", "fp32", "fp64"]
UNITS: dict[Precision, float] = {
    "bf16": 2.0**-8, "tf32": 2.0**-11, "bf16x3": 2.0**-16, "fp32": 2.0**-24, "fp64": 2.0**-53,
}  # fmt: skip
"""{precision of a product: relative rounding error of its operands}, from the cheapest on."""


@dataclass(frozen=True)
class Operand:
    """A matrix M, or a stack of them, stored for products from one side in one precision.

    Example:
        >>> operand = Operand.of(torch.eye(3), "bf16x3", "left")
        >>> operand.times(torch.ones(3, 2)).tolist()
        [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
    """

    stored: Tensor
    """M in the dtype of the precision; [H | H | L] or its transpose-like [H; H; L] for "bf16x3"."""
    precision: Precision
    side: Literal["left", "right"]
    """"left": for M Y; "right": for Y M."""

    @classmethod
    def of(cls, matrix: Tensor, precision: Precision, side: Literal["left", "right"]) -> "Operand":
        """Round a matrix [..., n, k] to the precision and store it for products from this side."""
        if precision == "bf16x3":
            return cls(bfloat16_parts(matrix, "HHL", -1 if side == "left" else -2), precision, side)
        dtype = {"bf16": torch.bfloat16, "fp64": torch.float64}.get(precision, torch.float32)
        return cls(matrix.to(dtype), precision, side)

    @property
    def shape(self) -> tuple[object, ...]:
        """Shape, precision and side; operands of equal shapes can be stacked."""
        return (*self.stored.shape, self.precision, self.side)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tensor."""
        return self.stored.nbytes

    def times(self, y: Tensor) -> Tensor:
        """The product M Y ("left") or Y M ("right"), in float32, or float64 for "fp64"."""
        left = self.side == "left"
        if self.precision == "bf16x3":
            y = bfloat16_parts(y, "HLH", -2 if left else -1)
        elif self.precision == "bf16":
            y = y.bfloat16()
        a, b = (self.stored, y) if left else (y, self.stored)
        if self.precision in ("bf16", "bf16x3"):
            return _summed_wide(a, b)
        with tensor_float32() if self.precision == "tf32" else exact_float32():
            return a @ b


def _summed_wide(a: Tensor, b: Tensor) -> Tensor:
    """A B in float32 for bfloat16 matrices [.., n, k] and [.., k, m]; bfloat16 products are exact in float32."""
    if not a.is_cuda:
        with exact_float32():
            return a.float() @ b.float()
    if a.dim() == 2:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.bmm(a, b, out_dtype=torch.float32)
