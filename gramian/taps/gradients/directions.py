"""Random directions in the space of a parameter; two gradients of it are compared by their projections on these."""

import torch
from torch import Tensor

from gramian.core.dtypes import wide_dtype
from gramian.linalg.wide import wide_mm

COUNT = 8
"""Number K of random directions per parameter. A product with 8 columns reads as much memory as one with a single column."""


class Directions:
    """K random matrices u_k v_kᵀ of normal entries, for a parameter seen as a matrix [M, N]: its first axis, and the rest.

    For a difference Δ of two gradients, ⟨u_k v_kᵀ, Δ⟩ has mean 0 and variance ‖Δ‖². The entries are the same for all parameters
    of one shape, and are rounded to 1/32, so that every dtype represents them exactly. If N is 1, v_k is 1.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        """Draw the factors u [M, K] and v [N, K] for a parameter's shape, seen as [M, N], on `device`."""
        rows, columns = shape[0] if shape else 1, torch.Size(shape[1:]).numel()
        generator = torch.Generator().manual_seed(rows * 1_000_003 + columns)
        left_MK, right_NK = ((32 * torch.randn(n, COUNT, generator=generator)).round() / 32 for n in (rows, columns))
        right_NK = right_NK if columns > 1 else torch.ones(1, COUNT)
        self._sides = left_MK.to(device), right_NK.to(device)
        self._cast: dict[torch.dtype, tuple[Tensor, Tensor]] = {}

    def sides(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The factors u [M, K] and v [N, K] of the directions u_k v_kᵀ of a parameter [M, N], cast to `dtype`."""
        if dtype not in self._cast:
            left_MK, right_NK = (side.to(dtype) for side in self._sides)
            self._cast[dtype] = left_MK, right_NK
        return self._cast[dtype]

    def along_rows(self, gradient: Tensor) -> Tensor:
        """G v_k of a gradient G, seen as [M, N], for K vectors v_k: [M, K] in float32, or float64 if G is. One pass over G."""
        right_NK = self.sides(gradient.dtype)[1]
        return wide_mm(gradient.reshape(-1, len(right_NK)), right_NK)

    def project(self, gradient: Tensor) -> Tensor:
        """u_kᵀ G v_k of a gradient G, seen as [M, N], for K directions: [K] in float32, or float64 if G is. One pass over G."""
        return (self.along_rows(gradient) * self.sides(wide_dtype(gradient))[0]).sum(0)
