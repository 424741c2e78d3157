"""Compress a factor to its leading eigenpairs, and report the trace of those that were left out."""

from dataclasses import dataclass

from torch import Tensor

from gramian.core.errors import GramianError
from gramian.linalg.factors.dense import Dense
from gramian.linalg.factors.diagonal import Diagonal
from gramian.linalg.factors.diagonal_low_rank import DiagonalLowRank, within_diagonal
from gramian.linalg.factors.factor import Factor
from gramian.linalg.factors.low_rank import LowRank


@dataclass(frozen=True)
class Compressed:
    """A factor of lower rank, and the trace of the eigenpairs that were left out."""

    factor: Factor
    discarded_trace: float


def compress(factor: Factor, rank: int | None = None, energy: float | None = None) -> Compressed:
    """Reduce a factor to its `rank` leading eigenpairs, or to the fewest that have the share `energy` of its trace.

    Dense and low-rank factors become U Uᵀ with U = Q√σ, of the s kept eigenvalues σ and eigenvectors Q; 2·n·r·s FLOPs for a
    factor of r columns. Of diag(d) ± U Uᵀ only U Uᵀ is compressed, and `energy` is a share of its trace; with the minus sign
    the matrix grows by what is left out, and stays positive semi-definite. A diagonal factor is returned unchanged.

    Raises:
        GramianError: unless exactly one of `rank` ≥ 1 and `energy` in (0, 1] is given.
    """
    if isinstance(factor, DiagonalLowRank):
        low = compress(LowRank(factor.columns), rank, energy)
        assert isinstance(low.factor, LowRank)
        columns = within_diagonal(factor.values_N, low.factor.columns, factor.sign)
        return Compressed(DiagonalLowRank(factor.values_N, columns, factor.sign), low.discarded_trace)
    assert isinstance(factor, Dense | LowRank | Diagonal)
    values, vectors = (factor.values_N.sort().values, None) if isinstance(factor, Diagonal) else factor.eigenpairs()
    descending = values.flip(0)
    count = _leading(descending, rank, energy)
    if vectors is None:
        return Compressed(factor, 0.0)
    lost = float(descending[count:].double().sum())
    if isinstance(factor, Dense):
        return Compressed(
            LowRank.of(vectors.flip(1)[:, :count] * descending[:count].sqrt(), factor.storage_dtype), lost
        )
    assert isinstance(factor, LowRank)
    return Compressed(LowRank(factor.columns.mixed((vectors * values.sqrt()).flip(1)[:, :count].contiguous())), lost)


def _leading(descending: Tensor, rank: int | None, energy: float | None) -> int:
    """Number of leading eigenvalues to keep, from exactly one of `rank` and the share `energy` of their sum."""
    if (rank is None) == (energy is None):
        raise GramianError("compress: expected either rank= or energy=")
    if rank is not None:
        if rank < 1:
            raise GramianError(f"rank: expected at least 1, got {rank}")
        return min(rank, len(descending))
    assert energy is not None
    if not 0 < energy <= 1:
        raise GramianError(f"energy: expected a share of the trace in (0, 1], got {energy}")
    descending = descending.double()
    reached = descending.cumsum(0) >= energy * descending.sum() * (1 - 1e-12)
    return int((~reached).sum().clamp(max=len(descending) - 1)) + 1 if len(descending) else 0
