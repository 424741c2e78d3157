"""The contract of every factor: a symmetric positive semi-definite matrix M [n, n], never formed where it need not be.

Legend: n side of M, r stored directions, k columns of a right-hand side Y [n, k], λ damping, κ the largest condition number
that is let through.

The clip (κ given): eigenvalues of M + λI below (σ_max+λ)/κ are raised to it, those of the unstored complement too.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from gramian.core.dtypes import HALF
from gramian.core.errors import GramianError
from gramian.linalg.factors.cholesky import Cholesky
from gramian.linalg.factors.stored import Stored
from gramian.linalg.wide import exact_float32, tensor_float32

WIDEST_DENSE = 16_384
"""Widest side n of a matrix that is ever stored or formed as n×n."""
TENSOR_FLOAT = 2.0**-11
"""Rounding of operands in TF32 products."""
COARSE = 0.1
"""Largest relative error ε·κ that such products may cost a factor whose storage cost as much."""
TRUSTED = {True: 1e-3, False: 1e-6}
"""Largest relative error ε·κ that float32 products may cost a factor stored in half precision (True) or not (False); above
it the algebra runs in float64. The other side of a block multiplies the error by its own κ."""


@dataclass
class FactorWork:
    """Work done with a factor since it was made: Cholesky attempts, decompositions, fallbacks. It goes into the record."""

    attempts: list[dict[str, float | str]] = field(default_factory=list)
    """Cholesky attempts: jitter and result."""
    decomposed: str = ""
    """Precision and device of the eigendecomposition, if there was one."""
    fallback: str = ""
    """The replacement that was used where something failed, and the reason."""
    error_bound: float = 0.0
    """Relative error bound of the last approximate function of the matrix; 0: exact up to rounding."""
    clip_note: str = ""
    """The replacement where the clip could not be applied to single eigenvalues."""


@dataclass(frozen=True)
class Clip:
    """Effect of the κ_max clip: `count` of `total` eigenvalues of M + λI were raised to `floor`, by `mass` in sum."""

    count: int
    total: int
    mass: float
    floor: float


class Factor(ABC):
    """A symmetric positive semi-definite matrix M."""

    kind: str
    """Name of the representation."""
    dim: int
    """Side n of M."""
    rank: int
    """Stored directions: an upper bound of the rank of what is not diagonal."""
    dtype: torch.dtype
    """Dtype of results: float64 where stored so, else float32."""
    storage_dtype: torch.dtype
    """Dtype in which M is stored."""
    device: torch.device
    """Device on which M is stored."""
    work: FactorWork
    _bound: float | None = None
    _trace: float | None = None
    _pending_trace: Tensor | None = None
    """Trace that was computed before the factor moved, and not read from the device yet."""

    # ---- what each representation answers --------------------------------------------------------------------------

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes stored, decompositions included."""

    @property
    @abstractmethod
    def quantisation_error(self) -> Tensor:
        """Relative error of M in the Frobenius norm from being stored (a bound for factored forms), 0-dim."""

    @abstractmethod
    def matvec(self, y_NK: Tensor) -> Tensor:
        """M Y."""

    @abstractmethod
    def trace(self) -> Tensor:
        """tr M, 0-dim float64."""

    @abstractmethod
    def frobenius(self) -> Tensor:
        """‖M‖_F, 0-dim float64."""

    @abstractmethod
    def largest_bound(self) -> Tensor:
        """A number that σ_max certainly does not exceed, 0-dim float64; exact once M is decomposed."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """The diagonal of M, [n]."""

    @abstractmethod
    def eigenvalues(self) -> Tensor:
        """All n eigenvalues, ascending, zeros counted."""

    @abstractmethod
    def power(self, y_NK: Tensor, p: float, damping: float, max_condition: float | None = None) -> Tensor:
        """(M + λI)^p Y for any real p, with the clip if `max_condition` is given; float64 where M or Y is."""

    @abstractmethod
    def prepare_solve(self, damping: float, first_jitter: float, dtype: torch.dtype = torch.float32) -> None:
        """Launch what `solve` of a Y of this dtype needs at this damping, and wait for nothing."""

    @abstractmethod
    def solve(self, y_NK: Tensor, damping: float, first_jitter: float = 1e-6) -> Tensor:
        """(M + λI)⁻¹ Y by Cholesky, without an eigendecomposition and without the clip; float64 where M or Y is."""

    @abstractmethod
    def logdet(self, damping: float) -> Tensor:
        """log det(M + λI), 0-dim float64."""

    @abstractmethod
    def moved(self, move: Callable[[Tensor], Tensor], home: torch.device | None = None) -> Self:
        """The same matrix with every tensor moved; `home`: the GPU that goes on making its products."""

    @abstractmethod
    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "Factor":
        """The same matrix stored elsewhere or otherwise."""

    @abstractmethod
    def dense(self) -> Tensor:
        """M written out, [n, n]; use `to_dense`."""

    @abstractmethod
    def clip(self, damping: float, max_condition: float) -> Clip:
        """The effect of the κ_max clip at this damping."""

    def extremes(self) -> tuple[float, float] | None:
        """Smallest and largest eigenvalue of M, where they are known without more work."""
        return None

    # ---- what follows ----------------------------------------------------------------------------------------------

    def to_dense(self) -> Tensor:
        """M written out, [n, n], for tests and sides up to `WIDEST_DENSE`."""
        if self.dim > WIDEST_DENSE:
            raise GramianError(f"to_dense: the side is {self.dim} wide; expected at most {WIDEST_DENSE}")
        return self.dense()

    def bound(self) -> float:
        """`largest_bound` as a number, read from the device once; exact once M is decomposed."""
        known = self.extremes()
        if known is not None:
            return known[1]
        if self._bound is None:
            self._bound = float(self.largest_bound())
        return self._bound

    def _known_bound(self) -> float:
        """`bound` where it was asked for before, else the trace, which costs no product."""
        if self._bound is None and self._trace is None:
            self._trace = float(self.trace())
        return self._bound if self._bound is not None else float(self._trace or 0.0)

    def clips_nothing(self, damping: float, max_condition: float | None) -> bool:
        """True if a bound on σ_max shows that no eigenvalue of M + λI would be raised."""
        return max_condition is None or damping * max_condition >= self.bound() + damping

    def condition(self, damping: float, max_condition: float | None) -> tuple[float, bool]:
        """κ of the damped, clipped matrix, and True; where nothing was decomposed a bound of it, and False."""
        known = self.extremes()
        low, high = (0.0, self._known_bound()) if known is None else known
        if not low + damping > 0:
            return (float("inf") if max_condition is None else max_condition), known is not None
        kappa = (high + damping) / (low + damping)
        return (kappa if max_condition is None else min(kappa, max_condition)), known is not None

    def condition_bound(self, damping: float) -> float:
        """A number that the condition of M + λI does not exceed."""
        return self.bound() / damping + 1.0 if damping > 0 else float("inf")

    def working_dtype(self, damping: float, p: float = -1.0) -> torch.dtype:
        """The dtype of products for the power p at this damping: ε·κ^|p| decides."""
        if self.dtype == torch.float64:
            return torch.float64
        allowed = TRUSTED[self.storage_dtype in HALF] / torch.finfo(torch.float32).eps
        trusted = abs(p) * math.log(self.condition_bound(damping)) <= math.log(allowed)
        return torch.float32 if trusted else torch.float64

    def coarse(self, damping: float) -> bool:
        """True if tensor cores may multiply where this factor is applied at this damping.

        Being stored in half precision has rounded M by 2⁻¹¹ or so, and a solve multiplies that by up to κ. Products that round
        their operands alike (TF32), and a Gram summed with float32 accumulators, cost of the same order again; they are used
        while κ·2⁻¹¹ stays below `COARSE`.
        """
        half = self.storage_dtype in HALF and self.device.type == "cuda"
        return half and TENSOR_FLOAT * self.condition_bound(damping) <= COARSE

    def products(self, damping: float) -> AbstractContextManager[None]:
        """The precision of float32 products while this factor is applied at this damping: TF32 or float32 proper."""
        return tensor_float32() if self.coarse(damping) else exact_float32()

    def pending(self) -> list[Cholesky]:
        """Cholesky factorisations that were launched and not checked."""
        return []


class Spectral(Factor):
    """A factor with known eigenvectors: M = Q diag(σ) Qᵀ, and zero on the complement of Q."""

    @property
    @abstractmethod
    def spectrum(self) -> Tensor:
        """σ [r], not negative, float64 or the working dtype; decomposes on first use."""

    @abstractmethod
    def to_basis(self, y_NK: Tensor) -> Tensor:
        """Qᵀ Y, [r, k]."""

    @abstractmethod
    def from_basis(self, c_RK: Tensor) -> Tensor:
        """Q C, [n, k]."""

    @property
    def complete(self) -> bool:
        """True if Q spans everything."""
        return len(self.spectrum) == self.dim

    def eigenvalues(self) -> Tensor:
        """σ and zeros, ascending."""
        values = self.spectrum
        return torch.cat([values.new_zeros(self.dim - len(values)), values.sort().values])

    def power(self, y_NK: Tensor, p: float, damping: float, max_condition: float | None = None) -> Tensor:
        """f₀Y + Q (f(σ) − f₀) C with C = QᵀY: exact for every p. 4·n·r·k FLOPs.

        f₀ = f(0) is subtracted before Q is applied: directions whose σ is far below λ, which a thin Q knows badly, then
        count for as little as they should.

        Raises:
            GramianError: for a negative power of a singular matrix without damping.
        """
        floor = self._floor(damping, max_condition)
        lowest = max(damping, floor)
        if p < 0 and lowest <= 0 and not self.complete:
            raise GramianError(f"damping: expected more than 0 for the power {p} of a singular matrix, got {damping}")
        given = torch.promote_types(self.dtype, y_NK.dtype)
        y_NK = y_NK.to(torch.promote_types(self.working_dtype(lowest, p), y_NK.dtype))
        c_RK = self.to_basis(y_NK)  # first: the spectrum is then as exact as the basis
        f_R = raised(self.spectrum.double() + damping, floor).pow(p).to(y_NK)
        if self.complete:
            return self.from_basis(f_R[:, None] * c_RK).to(given)
        outside = float(lowest**p)
        return (outside * y_NK + self.from_basis((f_R - outside)[:, None] * c_RK)).to(given)

    def clip(self, damping: float, max_condition: float) -> Clip:
        """Count on the spectrum and its complement."""
        floor = self._floor(damping, max_condition)
        values = self.spectrum.double() + damping
        low = values < floor
        count, mass = int(low.sum()), float((floor - values[low]).sum())
        missing = self.dim - len(values)
        if missing and damping < floor:
            count, mass = count + missing, mass + missing * (floor - damping)
        return Clip(count, self.dim, mass, floor)

    def _floor(self, damping: float, max_condition: float | None) -> float:
        if max_condition is None:
            return 0.0
        top = float(self.spectrum.max()) if len(self.spectrum) else 0.0
        return (top + damping) / max_condition


class AtRest(Factor):
    """A factor that stores one matrix, and solves by a Cholesky factorisation of a system that it makes of it."""

    def __init__(self, stored: Stored, dim: int, rank: int) -> None:
        self.stored, self.dim, self.rank = stored, dim, rank
        self.dtype, self.storage_dtype, self.device = stored.dtype, stored.body.dtype, stored.body.device
        self.work = FactorWork()
        self._cholesky: dict[tuple[float, torch.dtype], Cholesky] = {}
        """The system at one damping, in the dtype of its algebra."""

    def pending(self) -> list[Cholesky]:
        """Cholesky factorisations that were launched and not checked."""
        return list(self._cholesky.values())


class Decomposable(AtRest, Spectral):
    """A factor at rest whose eigenpairs are computed on first use."""

    _eigen: tuple[Tensor, Tensor] | None = None
    _largest: Tensor | None = None

    @abstractmethod
    def eigenpairs(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """σ and the matrix of the basis, exact enough for products in this dtype."""

    @abstractmethod
    def _system(self, damping: float, dtype: torch.dtype) -> Tensor:
        """The damped matrix that a solve factorises, as a new tensor."""

    @property
    def spectrum(self) -> Tensor:
        """σ of the eigenpairs."""
        return self.eigenpairs()[0]

    @property
    def _factorised_nbytes(self) -> int:
        """Bytes of the decompositions."""
        return sum(part.nbytes for part in (*(self._eigen or ()), *self._cholesky.values()))

    def prepare_solve(self, damping: float, first_jitter: float, dtype: torch.dtype = torch.float32) -> None:
        """Launch the Cholesky factorisation of the damped system; one damping is kept."""
        key = (damping, torch.promote_types(self.working_dtype(damping), dtype))
        if key in self._cholesky:
            return
        self._cholesky = {key: Cholesky(self._system(*key), first_jitter)}


def fetch_traces(factors: Sequence[Factor]) -> dict[int, float]:
    """{id of a factor: its trace}, waiting for each device once; what was read before is not read again."""
    by_device: dict[torch.device, list[tuple[Factor, Tensor]]] = {}
    for factor in {id(factor): factor for factor in factors if factor._trace is None}.values():
        trace = factor.trace() if factor._pending_trace is None else factor._pending_trace
        by_device.setdefault(trace.device, []).append((factor, trace.double()))
    for together in by_device.values():
        for (factor, _), number in zip(together, torch.stack([t for _, t in together]).tolist(), strict=True):
            factor._trace, factor._pending_trace = number, None
    return {id(factor): factor._trace for factor in factors if factor._trace is not None}


def fetch_bounds(factors: Sequence[Factor]) -> None:
    """Read the bounds of many factors, waiting for each device once."""
    unknown = [factor for factor in factors if factor._bound is None and factor.extremes() is None]
    by_device: dict[torch.device, list[Factor]] = {}
    for factor in unknown:
        by_device.setdefault(factor.device, []).append(factor)
    for together in by_device.values():
        bounds = torch.stack([factor.largest_bound().double() for factor in together]).tolist()
        for factor, bound in zip(together, bounds, strict=True):
            factor._bound = bound


def raised(values: Tensor, floor: float) -> Tensor:
    """Values, none below the floor."""
    return values.clamp(min=floor) if floor > 0 else values
