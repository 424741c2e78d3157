"""M = diag(d): token counts, and whatever is kept of a matrix that may not be held otherwise."""

from collections.abc import Callable

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.linalg.factors.dense import Dense
from gramian.linalg.factors.factor import WIDEST_DENSE, Compressed, Factor, FactorWork, Spectral, kept_rank, raised
from gramian.linalg.factors.low_rank import LowRank


class Diagonal(Spectral):
    """M = diag(d), d ≥ 0. Bytes: n. Everything is exact."""

    kind = "diagonal"

    def __init__(self, values_N: Tensor) -> None:
        """Keep d."""
        self.values_N = values_N
        self.dim = len(values_N)
        self.work = FactorWork()

    @property
    def rank(self) -> int:
        """All directions."""
        return self.dim

    @property
    def dtype(self) -> torch.dtype:
        """Of d."""
        return self.values_N.dtype

    @property
    def storage_dtype(self) -> torch.dtype:
        """Of d."""
        return self.values_N.dtype

    @property
    def device(self) -> torch.device:
        """Of d."""
        return self.values_N.device

    @property
    def nbytes(self) -> int:
        """Of d."""
        return self.values_N.nbytes

    @property
    def quantisation_error(self) -> Tensor:
        """None: a diagonal is kept in full."""
        return torch.zeros((), device=self.device)

    @property
    def spectrum(self) -> Tensor:
        """d itself: the basis is the standard one."""
        return self.values_N

    def to_basis(self, y_NK: Tensor) -> Tensor:
        """Y."""
        return y_NK

    def from_basis(self, c_RK: Tensor) -> Tensor:
        """C."""
        return c_RK

    def working_dtype(self, damping: float, p: float = -1.0) -> torch.dtype:
        """Nothing cancels."""
        return self.dtype

    def power(self, y_NK: Tensor, p: float, damping: float, max_condition: float | None = None) -> Tensor:
        """(d + λ)^p ⊙ Y."""
        shifted = raised(self.values_N + damping, self._floor(damping, max_condition))
        return shifted.pow(p).to(y_NK.device)[:, None] * y_NK.to(torch.promote_types(self.dtype, y_NK.dtype))

    def matvec(self, y_NK: Tensor) -> Tensor:
        """d ⊙ Y."""
        return self.values_N.to(y_NK.device)[:, None] * y_NK.to(self.dtype)

    def trace(self) -> Tensor:
        """Σ d."""
        return self.values_N.double().sum()

    def frobenius(self) -> Tensor:
        """‖d‖."""
        norm: Tensor = torch.linalg.vector_norm(self.values_N, dtype=torch.float64)
        return norm

    def largest_bound(self) -> Tensor:
        """max d."""
        return self.values_N.max().double()

    def extremes(self) -> tuple[float, float] | None:
        """Of d."""
        return float(self.values_N.min()), float(self.values_N.max())

    def diagonal(self) -> Tensor:
        """The diagonal d."""
        return self.values_N

    def prepare_solve(self, damping: float, first_jitter: float, dtype: torch.dtype = torch.float32) -> None:
        """Nothing to prepare."""

    def solve(self, y_NK: Tensor, damping: float, first_jitter: float = 1e-6) -> Tensor:
        """Y / (d + λ)."""
        return self.power(y_NK, -1.0, damping)

    def logdet(self, damping: float) -> Tensor:
        """Σ log(d + λ)."""
        return (self.values_N.double() + damping).log().sum()

    def merge(self, other: Factor, mine: float, theirs: float) -> Factor:
        """Diagonals add; anything else takes this one in."""
        from gramian.linalg.factors.diagonal_low_rank import DiagonalLowRank

        if other.dim != self.dim:
            raise GramianError(f"merge: sides of {self.dim} and {other.dim}; expected equal ones")
        if isinstance(other, Diagonal):
            return Diagonal(mine * self.values_N + theirs * other.values_N.to(self.values_N))
        if isinstance(other, DiagonalLowRank):
            return other.merge(self, theirs, mine)
        if isinstance(other, LowRank) and (other.rank < self.dim or self.dim > WIDEST_DENSE):
            return DiagonalLowRank(mine * self.values_N.to(other.device), other.columns.scaled(theirs**0.5), +1)
        return Dense.summed(other, self, theirs, mine, other.storage_dtype)

    def compress(self, rank: int | None = None, energy: float | None = None) -> Compressed:
        """A diagonal is as small as it gets."""
        kept_rank(self.values_N.sort(descending=True).values, rank, energy)
        return Compressed(self, 0.0)

    def moved(self, move: Callable[[Tensor], Tensor], home: torch.device | None = None) -> "Diagonal":
        """d moved."""
        return Diagonal(move(self.values_N))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "Diagonal":
        """Moved; kept in float32 at least."""
        wide = None if dtype is None else torch.float64 if dtype == torch.float64 else torch.float32
        return Diagonal(self.values_N.to(device=device, dtype=wide))

    def dense(self) -> Tensor:
        """diag(d)."""
        return torch.diag(self.values_N)
