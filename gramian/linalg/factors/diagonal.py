"""A factor M = diag(d), such as token counts of an embedding, or a matrix whose other entries are not stored."""

from collections.abc import Callable

import torch
from torch import Tensor

from gramian.linalg.factors.factor import FactorWork, Spectral, raised


class Diagonal(Spectral):
    """A factor M = diag(d) with d [n] ≥ 0, stored as n numbers. All results are exact."""

    kind = "diagonal"

    def __init__(self, values_N: Tensor) -> None:
        """Reference the diagonal d [n]; nothing is copied or computed."""
        self.values_N, self.dim, self.rank = values_N, len(values_N), len(values_N)
        self.dtype = self.storage_dtype = values_N.dtype
        self.device = values_N.device
        self.work = FactorWork()

    @property
    def nbytes(self) -> int:
        """Bytes of the stored diagonal d."""
        return self.values_N.nbytes

    @property
    def quantisation_error(self) -> Tensor:
        """0, the relative error from being stored: a diagonal is stored in full precision."""
        return torch.zeros((), device=self.device)

    @property
    def spectrum(self) -> Tensor:
        """The eigenvalues, which are d: the eigenbasis is the standard basis."""
        return self.values_N

    def to_basis(self, y_NK: Tensor) -> Tensor:
        """Y itself, its coordinates in the eigenbasis, which is the standard basis."""
        return y_NK

    def from_basis(self, c_RK: Tensor) -> Tensor:
        """C itself: the eigenbasis, in which C are coordinates, is the standard basis."""
        return c_RK

    def working_dtype(self, damping: float, p: float = -1.0) -> torch.dtype:
        """The dtype of d, for every damping and power: nothing cancels in products with a diagonal."""
        return self.dtype

    def power(self, y_NK: Tensor, p: float, damping: float, max_condition: float | None = None) -> Tensor:
        """(d + λ)^p ⊙ Y for Y [n, k], λ = `damping`; with `max_condition` κ, d + λ is raised to at least (max d + λ)/κ."""
        shifted = raised(self.values_N + damping, self._floor(damping, max_condition))
        return shifted.pow(p).to(y_NK.device)[:, None] * y_NK.to(torch.promote_types(self.dtype, y_NK.dtype))

    def matvec(self, y_NK: Tensor) -> Tensor:
        """M Y = d ⊙ Y for Y [n, k]."""
        return self.values_N.to(y_NK.device)[:, None] * y_NK.to(self.dtype)

    def trace(self) -> Tensor:
        """Trace of M, Σ d, 0-dim float64."""
        return self.values_N.sum(dtype=torch.float64)

    def frobenius(self) -> Tensor:
        """‖M‖_F = ‖d‖, 0-dim float64."""
        norm: Tensor = torch.linalg.vector_norm(self.values_N, dtype=torch.float64)
        return norm

    def largest_bound(self) -> Tensor:
        """The largest eigenvalue, max d, 0-dim float64."""
        return self.values_N.max().double()

    def extremes(self) -> tuple[float, float] | None:
        """Smallest and largest eigenvalue: min d and max d."""
        return float(self.values_N.min()), float(self.values_N.max())

    def diagonal(self) -> Tensor:
        """The diagonal d of M, [n]."""
        return self.values_N

    def prepare_solve(self, damping: float, first_jitter: float, dtype: torch.dtype = torch.float32) -> None:
        """Do nothing: a diagonal needs no factorisation."""

    def solve(self, y_NK: Tensor, damping: float, first_jitter: float = 1e-6) -> Tensor:
        """(M + λI)⁻¹ Y = Y / (d + λ) for Y [n, k], λ = `damping`."""
        return self.power(y_NK, -1.0, damping)

    def logdet(self, damping: float) -> Tensor:
        """log det(M + λI) = Σ log(d + λ), λ = `damping`, 0-dim float64."""
        return (self.values_N.double() + damping).log().sum()

    def moved(self, move: Callable[[Tensor], Tensor], home: torch.device | None = None) -> "Diagonal":
        """The same factor with d passed through `move`; `home` is not used."""
        return Diagonal(move(self.values_N))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "Diagonal":
        """The same factor on another device or in another dtype, float32 in place of half; None leaves either as it is."""
        wide = None if dtype is None else torch.float64 if dtype == torch.float64 else torch.float32
        return Diagonal(self.values_N.to(device=device, dtype=wide))

    def dense(self) -> Tensor:
        """The matrix diag(d), [n, n]."""
        return torch.diag(self.values_N)
