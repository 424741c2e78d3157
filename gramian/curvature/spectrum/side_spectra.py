"""Spectra of the sides (A and G) of blocks: all eigenvalues in float64; each process decomposes one matrix at a time.

Spectra are those of the stored matrix; earlier decompositions in other precisions are not used. Eigenvectors are not computed.
A matrix is decomposed on its device or, where that has too little memory, on the CPU.

Legend: n width of a side, r columns of a low-rank one, W processes.

| side | matrix that is decomposed | bytes while it is |
|---|---|---|
| dense | M [n, n] | 3·8·n² |
| low rank | UᵀU [r, r] | 3·8·r² |
| diagonal | none | 8·n |
| diagonal ± low rank, n ≤ `WIDEST_DENSE` | M written out [n, n] | 3·8·n² + 8·n·r |
| diagonal ± low rank, wider | none: estimated (`wide_side_spectra`) | 8·n·64 |
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.curvature.spectrum import wide_side_spectra
from gramian.curvature.spectrum.spectrum_products import Values
from gramian.linalg import BlockDiagonal, Dense, Diagonal, DiagonalLowRank, Factor, LowRank
from gramian.linalg.factors import factor
from gramian.linalg.factors.eigendecomposition import fits, free_bytes
from gramian.parallel.exchange import Exchange


@dataclass(frozen=True)
class SideSpectrum:
    """The eigenvalues σ of one side (A or G), relative to σ_max; σ_max = 0 only if all eigenvalues are zero."""

    dim: int
    largest: float
    """σ_max, the largest eigenvalue."""
    smallest: float
    """σ_min, the smallest eigenvalue, or a lower bound of it."""
    mass: float
    """Σ σ/σ_max over all eigenvalues σ, σ_max the largest."""
    squares: float
    """Σ (σ/σ_max)² over all eigenvalues σ, σ_max the largest."""
    parts: tuple[Values, ...]
    """All eigenvalues as one `Values`; for an estimated spectrum the quadrature (nodes, weights) of each random probe."""
    coarse: tuple[Values, ...] = ()
    """The quadratures after half the Lanczos steps, from which the error is estimated; empty for exact eigenvalues."""
    largest_error: float = 0.0
    smallest_error: float = 0.0
    eps: float = torch.finfo(torch.float64).eps
    """Machine epsilon of the dtype in which the matrix was summed."""
    noise: float = 0.0
    """Largest value, relative to σ_max, that a zero eigenvalue may have after the matrix was rounded for storage."""

    @classmethod
    def of(cls, values: Values, eps: float = torch.finfo(torch.float64).eps) -> "SideSpectrum":
        """The spectrum of a side from all its eigenvalues; `eps`: machine epsilon of the dtype of its matrix."""
        relative = values.positive_R / values.largest if values.largest else values.positive_R
        mass, squares = float(relative.sum()), float(relative.square().sum())
        return cls(values.dim, values.largest, values.smallest, mass, squares, (values,), eps=eps)


ONE = SideSpectrum.of(Values.of(torch.ones(1, dtype=torch.float64)))
"""The spectrum {1} that stands for A in a block that is not a Kronecker product."""


def sides_of(factors: Sequence[Factor], group: Exchange | None) -> dict[int, SideSpectrum]:
    """{id of a factor: its `SideSpectrum`}, without those for which `is_estimated` is True. Collective.

    W matrices at a time, the largest first: every process of the group decomposes one and sends its eigenvalues to all. `group`
    None: this process alone. An error on one process is raised on all as a GramianError.
    """
    found: dict[int, SideSpectrum] = {}
    decomposed: list[Dense | LowRank | DiagonalLowRank] = []
    for one in {id(one): one for one in factors}.values():
        if isinstance(one, Diagonal | BlockDiagonal):
            found[id(one)] = SideSpectrum.of(Values.of(one.spectrum), _rounding(one))
        elif not is_estimated(one):
            assert isinstance(one, Dense | LowRank | DiagonalLowRank)
            decomposed.append(one)
    decomposed.sort(key=lambda one: -_side(one))
    size = 1 if group is None else group.size
    for start in range(0, len(decomposed), size):
        together = decomposed[start : start + size]
        for one, values in zip(together, _round(together, group), strict=True):
            nonzero = torch.where(values > _cancelled(one), values, 0.0)
            found[id(one)] = _with_noise(SideSpectrum.of(Values.of(nonzero[: one.dim], one.dim), _rounding(one)), one)
    return found


def is_estimated(one: Factor) -> bool:
    """True if a factor is too wide for a dense matrix and no smaller matrix has the same eigenvalues."""
    return isinstance(one, DiagonalLowRank) and one.dim > factor.WIDEST_DENSE


def estimate(one: Factor) -> SideSpectrum:
    """The spectrum of a factor for which `is_estimated` is True: trace and Frobenius norm exact, the rest with errors.

    Collective for sharded rows.
    """
    assert isinstance(one, DiagonalLowRank)
    trace, frobenius = float(one.trace()), float(one.frobenius())
    one.columns.forget()
    if trace <= _cancelled(one):
        return SideSpectrum.of(Values.of(torch.zeros(0), one.dim), _rounding(one))
    values, error = wide_side_spectra.leading(one, 1)
    largest, low = float(values[0]), wide_side_spectra.smallest_bound(one)
    parts, coarse = wide_side_spectra.quadrature(one)
    lowest = 0.0 if one.sign < 0 else min(low, max(0.0, float(one.values_N.min())))
    side = SideSpectrum(
        dim=one.dim,
        largest=largest,
        smallest=lowest,
        mass=max(1.0, trace / largest),
        squares=max(1.0, (frobenius / largest) ** 2),
        parts=parts,
        coarse=coarse,
        largest_error=error,
        smallest_error=low - lowest,
        eps=_rounding(one),
    )
    return _with_noise(side, one)


def leading(one: Factor, k: int) -> Values:
    """The k largest eigenvalues of a factor for which `is_estimated` is True; their relative error is stored in its `work`.

    Collective for sharded rows.
    """
    assert isinstance(one, DiagonalLowRank)
    values, residual = wide_side_spectra.leading(one, min(k, one.dim))
    one.work.error_bound = residual / float(values[0]) if float(values[0]) else 0.0
    return Values.of(values, one.dim)


def _round(together: Sequence[Dense | LowRank | DiagonalLowRank], group: Exchange | None) -> list[Tensor]:
    """Eigenvalues, descending, of each of the factors; factor i is decomposed by process i of the group. Collective."""
    if group is None:
        return [_eigenvalues(_matrix(one)) for one in together]
    mine: Tensor | None = None
    for rank, one in enumerate(together):
        sharded = isinstance(one, LowRank | DiagonalLowRank) and one.columns.others is not None
        if sharded or rank == group.rank:
            matrix = _matrix(one)
            mine = matrix if rank == group.rank else mine
            del matrix
    values, problem = torch.zeros(0, dtype=torch.float64), ""
    if mine is not None:
        try:
            values = _eigenvalues(mine)
        except (GramianError, RuntimeError) as error:
            problem = " ".join(str(error).split()) or type(error).__name__
    reports = group.gather_messages([problem, len(values)])
    for rank, (failure, _) in enumerate(reports):
        if failure:
            raise GramianError(f"process {rank}: {failure}")
    return [group.broadcast(values, [reports[rank][1]], values, rank) for rank in range(len(together))]


def _matrix(one: Dense | LowRank | DiagonalLowRank) -> Tensor:
    """A float64 matrix that has the factor's nonzero eigenvalues: M, or UᵀU if M = U Uᵀ. Collective for sharded rows."""
    where, cpu = one.stored.home or one.stored.body.device, torch.device("cpu")
    roomy = _has_room(where, _side(one))
    if isinstance(one, LowRank):
        return (one.columns if roomy else one.columns.to(cpu)).take_gram()
    where = where if roomy else cpu
    if isinstance(one, Dense):
        return one.stored.load(dtype=torch.float64, device=where)
    written = one.columns.whole().to(where).to(dtype=torch.float64).squared().mul_(one.sign)
    written.diagonal().add_(one.values_N.to(written))
    return written


def _eigenvalues(matrix_NN: Tensor) -> Tensor:
    """All eigenvalues of a matrix, descending, on the CPU; computed on its device if there is room. 4n³/3 FLOPs.

    If that fails, on the CPU, then by singular values; a GramianError if all fail, or the matrix is not finite.
    """
    if not bool(matrix_NN.isfinite().all()):
        raise GramianError("eigenvalues: the matrix holds NaN or infinity; expected finite numbers")
    here, cpu = matrix_NN.device, torch.device("cpu")
    for device in dict.fromkeys([here if _has_room(here, len(matrix_NN)) else cpu, cpu]):
        try:
            values: Tensor = torch.linalg.eigvalsh(matrix_NN.to(device)).cpu()
        except RuntimeError:  # no convergence, or no memory
            continue
        if bool(values.isfinite().all()):
            return values.flip(0)
    try:
        singular: Tensor = torch.linalg.svdvals(matrix_NN.cpu())
    except RuntimeError as error:
        raise GramianError(
            f"eigenvalues: {type(error).__name__} by every algorithm; expected that one converges"
        ) from error
    return singular


def _has_room(device: torch.device, n: int) -> bool:
    """True if a float64 decomposition of [n, n] takes at most half of a GPU's free memory; always on the CPU."""
    return device.type != "cuda" or fits(n, 8, free_bytes(device))


def _side(one: Factor) -> int:
    """Number of rows of the matrix that is decomposed for a factor: its rank if it is low rank, else its dimension."""
    return one.rank if isinstance(one, LowRank) else one.dim


def _cancelled(one: Factor) -> float:
    """The rounding error of a zero eigenvalue of diag(d) − U Uᵀ, n·ε·max d with float64's ε; 0 for all other factors."""
    if not isinstance(one, DiagonalLowRank) or one.sign > 0:
        return 0.0
    return one.dim * torch.finfo(torch.float64).eps * float(one.values_N.max())


def _rounding(one: Factor) -> float:
    return float(torch.finfo(one.dtype).eps)


def _with_noise(side: SideSpectrum, one: Factor) -> SideSpectrum:
    """The spectrum with `noise` set from the rounding error E of the stored factor: ‖E‖_F, or ‖E‖_F² for low-rank columns."""
    error = float(one.quantisation_error)
    noise = (error / 2) ** 2 * side.mass if isinstance(one, LowRank) else error * side.squares**0.5
    return replace(side, noise=noise)
