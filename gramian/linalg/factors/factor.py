"""The interface of every factor: a symmetric positive semi-definite matrix M [n, n], formed as n×n only where it must be.

Legend: n side of M, r stored directions, k columns of a right-hand side Y [n, k], λ damping, σ eigenvalues of M, κ the
largest condition number that the clip allows.

The clip, for calls with `max_condition` = κ: eigenvalues of M + λI below the floor (σ_max + λ)/κ are raised to the floor, also
the eigenvalue λ of directions in which M is 0 and nothing is stored.
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
"""Relative rounding error of the operands of TF32 products."""
COARSE = 0.1
"""Largest error ε·κ (precision times condition number) for which a factor stored in half precision uses TF32 products."""
TRUSTED = {True: 1e-3, False: 1e-6}
"""{True for half-precision storage: largest relative error ε·κ of float32 products that is accepted}; above it float64 is
used. In a Kronecker product the other factor multiplies the error by its own condition number.
"""


@dataclass
class FactorWork:
    """Record of a factor's Cholesky attempts, decomposition and fallbacks; later work overwrites it."""

    attempts: list[dict[str, float | str]] = field(default_factory=list)
    """Cholesky attempts of the last solve: {"jitter", "result"} of each."""
    decomposed: str = ""
    """Precision and device of the eigendecomposition, such as "float32 on cuda"; "" if there was none."""
    fallback: str = ""
    """What replaced a step that failed, and the reason; "" if none failed."""
    error_bound: float = 0.0
    """Relative error bound of the last power that was approximated; 0: exact up to rounding."""
    clip_note: str = ""
    """What was done instead, if eigenvalues could not be raised one by one to limit the condition number; else ""."""


@dataclass(frozen=True)
class Clip:
    """Effect of limiting the condition number of M + λI: `count` of `total` eigenvalues raised to `floor`, in sum by `mass`."""

    count: int
    total: int
    mass: float
    floor: float


class Factor(ABC):
    """Base of all factors: a symmetric positive semi-definite matrix M [n, n]."""

    kind: str
    """Name of the representation, such as "low rank"."""
    dim: int
    """Number n of rows of the factor's matrix M [n, n]."""
    rank: int
    """Number of stored directions (columns): an upper bound of the rank of the part that is not diagonal."""
    dtype: torch.dtype
    """Dtype of results: float64 if M is stored in float64, else float32."""
    storage_dtype: torch.dtype
    """Dtype in which the factor's matrix M is stored."""
    device: torch.device
    """Device on which the factor's matrix M is stored."""
    work: FactorWork
    _bound: float | None = None
    _trace: float | None = None
    _pending_trace: Tensor | None = None
    """Trace that was computed before the factor was moved to another device, not read yet."""

    # ---- what each representation answers --------------------------------------------------------------------------

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the stored matrix and of its decompositions."""

    @property
    @abstractmethod
    def quantisation_error(self) -> Tensor:
        """Relative error of M in the Frobenius norm from rounding to the storage dtype (a bound for factored forms), 0-dim."""

    @abstractmethod
    def matvec(self, y_NK: Tensor) -> Tensor:
        """M Y for the factor's matrix M [n, n] and Y [n, k]."""

    @abstractmethod
    def trace(self) -> Tensor:
        """Trace of the factor's matrix M, 0-dim float64."""

    @abstractmethod
    def frobenius(self) -> Tensor:
        """Frobenius norm of the factor's matrix M, 0-dim float64."""

    @abstractmethod
    def largest_bound(self) -> Tensor:
        """Upper bound of the largest eigenvalue of M by its norm, 0-dim float64; the same before and after a decomposition."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """The diagonal of the factor's matrix M, [n]."""

    @abstractmethod
    def eigenvalues(self) -> Tensor:
        """All n eigenvalues of M, ascending, zeros included."""

    @abstractmethod
    def power(self, y_NK: Tensor, p: float, damping: float, max_condition: float | None = None) -> Tensor:
        """(M + λI)^p Y for Y [n, k] and any real p, λ = `damping`; float64 if M or Y is.

        `max_condition`: largest condition number κ of M + λI, whose eigenvalues below largest/κ are raised; None: no limit.
        """

    @abstractmethod
    def prepare_solve(self, damping: float, first_jitter: float, dtype: torch.dtype = torch.float32) -> None:
        """Launch the factorisation that `solve` needs for a Y of this dtype at this damping, without waiting for it.

        `first_jitter`: first diagonal shift tried if Cholesky fails, relative to the mean |diagonal|.
        """

    @abstractmethod
    def solve(self, y_NK: Tensor, damping: float, first_jitter: float = 1e-6) -> Tensor:
        """(M + λI)⁻¹ Y for Y [n, k] by Cholesky, λ = `damping`, without eigendecomposition; float64 if M or Y is.

        `first_jitter`: first diagonal shift tried if Cholesky fails, relative to the mean |diagonal|.
        """

    @abstractmethod
    def logdet(self, damping: float) -> Tensor:
        """log det(M + λI), λ = `damping`, 0-dim float64."""

    @abstractmethod
    def moved(self, move: Callable[[Tensor], Tensor], home: torch.device | None = None) -> Self:
        """The same factor with every tensor passed through `move`; `home`: device to compute on, None: that of the tensors."""

    @abstractmethod
    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "Factor":
        """The same factor on another device or in another storage dtype; None leaves either as it is."""

    @abstractmethod
    def dense(self) -> Tensor:
        """M as a matrix [n, n]; callers use `to_dense`, which checks the width."""

    @abstractmethod
    def clip(self, damping: float, max_condition: float) -> Clip:
        """How many eigenvalues of M + λI are raised, and by how much, to limit its condition number to `max_condition`."""

    def extremes(self) -> tuple[float, float] | None:
        """Smallest and largest eigenvalue of M if they are known without more work, else None."""
        return None

    # ---- what follows ----------------------------------------------------------------------------------------------

    def to_dense(self) -> Tensor:
        """M as a matrix [n, n]; raises GramianError if n exceeds `WIDEST_DENSE`."""
        if self.dim > WIDEST_DENSE:
            raise GramianError(f"to_dense: the side is {self.dim} wide; expected at most {WIDEST_DENSE}")
        return self.dense()

    def bound(self) -> float:
        """Upper bound of the largest eigenvalue as a float, read from the device once.

        It does not depend on what was computed before, so that what it decides (Cholesky or eigenvectors, float32 or float64)
        is the same at every call.
        """
        if self._bound is None:
            self._bound = float(self.largest_bound())
        return self._bound

    def _known_bound(self) -> float:
        """Upper bound of the largest eigenvalue: `bound` if it was computed before, else the trace, which costs no product."""
        if self._bound is None and self._trace is None:
            self._trace = float(self.trace())
        return self._bound if self._bound is not None else float(self._trace or 0.0)

    def clips_nothing(self, damping: float, max_condition: float | None) -> bool:
        """True if M + λI, λ = `damping`, surely has a condition number of at most `max_condition`, or that is None.

        Shown by an upper bound of M's largest eigenvalue: no eigenvalue has to be raised.
        """
        return max_condition is None or damping * max_condition >= self.bound() + damping

    def condition(self, damping: float, max_condition: float | None) -> tuple[float, bool]:
        """Condition number of M + λI, λ = `damping`, and True; an upper bound of it and False if M is not decomposed yet.

        `max_condition`: upper limit, which `power` enforces by raising small eigenvalues; None: no limit.
        """
        known = self.extremes()
        low, high = (0.0, self._known_bound()) if known is None else known
        if not low + damping > 0:
            return (float("inf") if max_condition is None else max_condition), known is not None
        kappa = (high + damping) / (low + damping)
        return (kappa if max_condition is None else min(kappa, max_condition)), known is not None

    def condition_bound(self, damping: float) -> float:
        """Upper bound of the condition number of M + λI, λ = `damping`; infinity for λ = 0."""
        return self.bound() / damping + 1.0 if damping > 0 else float("inf")

    def working_dtype(self, damping: float, p: float = -1.0) -> torch.dtype:
        """Dtype for computing (M + λI)^p: float32, or float64 if M is or if an error of float32 exceeds `TRUSTED`.

        The errors are ε·κ^|p| of products with the power, and |p|·ε·κ of its smallest eigenvalues, since those of M are off by
        ε·σ_max: κ is an upper bound of the condition number of M + λI, λ = `damping`, and ε the precision of float32.
        """
        if self.dtype == torch.float64:
            return torch.float64
        allowed = TRUSTED[self.storage_dtype in HALF] / torch.finfo(torch.float32).eps
        kappa = self.condition_bound(damping)
        trusted = abs(p) * max(kappa, 1.0) <= allowed and abs(p) * math.log(kappa) <= math.log(allowed)
        return torch.float32 if trusted else torch.float64

    def coarse(self, damping: float) -> bool:
        """True if TF32 tensor cores are accurate enough to apply this factor at this damping: half-precision storage on a GPU.

        Half-precision storage has rounded M by about 2⁻¹¹, and a solve multiplies that error by up to the condition number κ
        of M + λI. TF32 products, and Gram matrices summed in float32, add an error of the same order. They are used if
        κ·2⁻¹¹ is at most `COARSE`.
        """
        half = self.storage_dtype in HALF and self.device.type == "cuda"
        return half and TENSOR_FLOAT * self.condition_bound(damping) <= COARSE

    def products(self, damping: float) -> AbstractContextManager[None]:
        """A context that sets float32 products to TF32 or full float32 while this factor is applied at this damping."""
        return tensor_float32() if self.coarse(damping) else exact_float32()

    def pending(self) -> list[Cholesky]:
        """Cholesky factorisations of this factor that were launched and perhaps not checked yet."""
        return []


class Spectral(Factor):
    """A factor with eigenvectors: M = Q diag(σ) Qᵀ with Q [n, r]; M is 0 in directions orthogonal to Q."""

    orthonormal: bool = True
    """Whether the columns of Q are orthonormal to rounding; False where those of a σ far below the largest may not be."""

    @property
    @abstractmethod
    def spectrum(self) -> Tensor:
        """Eigenvalues σ [r] ≥ 0 of the eigenvectors Q; the first use decomposes M."""

    @abstractmethod
    def to_basis(self, y_NK: Tensor) -> Tensor:
        """Qᵀ Y, [r, k], for Y [n, k] and the eigenvectors Q."""

    @abstractmethod
    def from_basis(self, c_RK: Tensor) -> Tensor:
        """Q C, [n, k], for coordinates C [r, k] and the eigenvectors Q."""

    @property
    def complete(self) -> bool:
        """True if the eigenvectors Q span the whole space (r = n)."""
        return len(self.spectrum) == self.dim

    def eigenvalues(self) -> Tensor:
        """All n eigenvalues of M, ascending: those of its eigenvectors Q, and zeros for the complement of Q."""
        values = self.spectrum
        return torch.cat([values.new_zeros(self.dim - len(values)), values.sort().values])

    def power(self, y_NK: Tensor, p: float, damping: float, max_condition: float | None = None) -> Tensor:
        """(M + λI)^p Y = f₀Y + Q (f(σ) − f₀) QᵀY with f(σ) = (σ + λ)^p, f₀ = f(0): exact for every real p. 4·n·r·k FLOPs.

        λ = `damping`; with `max_condition` κ, eigenvalues σ + λ below (σ_max + λ)/κ are raised to it. Subtracting f₀ before Q
        is applied makes directions with σ far below λ, whose eigenvectors are inaccurate, contribute almost nothing. If Q spans
        the whole space, every f₀ is exact: f₀ = f(σ_min) for a Q that is not `orthonormal`, else 0.

        Raises:
            GramianError: for a negative power of a singular matrix without damping.
        """
        working = self.working_dtype(max(damping, self._floor(damping, max_condition)), p)
        given, y_NK = torch.promote_types(self.dtype, y_NK.dtype), y_NK.to(torch.promote_types(working, y_NK.dtype))
        c_RK = self.to_basis(y_NK)  # first: the spectrum, and the floor, are then as exact as the basis
        floor = self._floor(damping, max_condition)
        lowest = max(damping, floor)
        if p < 0 and lowest <= 0 and not self.complete:
            raise GramianError(f"damping: expected more than 0 for the power {p} of a singular matrix, got {damping}")
        f_R = raised(self.spectrum.double() + damping, floor).pow(p).to(y_NK)
        if self.complete and self.orthonormal:
            return self.from_basis(f_R[:, None] * c_RK).to(given)
        outside = float(f_R[self.spectrum.argmin()] if self.complete else lowest**p)
        return (outside * y_NK + self.from_basis((f_R - outside)[:, None] * c_RK)).to(given)

    def clip(self, damping: float, max_condition: float) -> Clip:
        """How many eigenvalues of M + λI are raised, and by how much, to limit its condition number to `max_condition`.

        The eigenvalue λ = `damping` of the n − r directions orthogonal to Q counts n − r times.
        """
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
    """Base of factors that store one matrix, and solve by Cholesky of a damped matrix formed from it."""

    def __init__(self, stored: Stored, dim: int, rank: int) -> None:
        self.stored, self.dim, self.rank = stored, dim, rank
        self.dtype, self.storage_dtype, self.device = stored.dtype, stored.body.dtype, stored.body.device
        self.work = FactorWork()
        self._cholesky: dict[tuple[float, torch.dtype], Cholesky] = {}
        """{(damping, dtype): Cholesky factorisation of the damped system}, of the last damping only."""

    def pending(self) -> list[Cholesky]:
        """Cholesky factorisations of this factor that were launched and perhaps not checked yet."""
        return list(self._cholesky.values())


class Decomposable(AtRest, Spectral):
    """A factor that stores one matrix (`AtRest`) and computes its eigenpairs on first use."""

    _eigen: tuple[Tensor, Tensor] | None = None
    _largest: Tensor | None = None

    @abstractmethod
    def eigenpairs(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Eigenvalues σ, and eigenvectors Q or a matrix W with Q = U W, exact enough for products in `dtype`."""

    @abstractmethod
    def _system(self, damping: float, dtype: torch.dtype) -> Tensor:
        """The matrix that a solve at λ = `damping` factorises (M + λI or UᵀU + λI), as a new tensor in `dtype`."""

    @property
    def spectrum(self) -> Tensor:
        """Eigenvalues σ of the eigenpairs; the first use decomposes M."""
        return self.eigenpairs()[0]

    @property
    def _factorised_nbytes(self) -> int:
        """Bytes of the stored eigenpairs and Cholesky factorisation."""
        return sum(part.nbytes for part in (*(self._eigen or ()), *self._cholesky.values()))

    def prepare_solve(self, damping: float, first_jitter: float, dtype: torch.dtype = torch.float32) -> None:
        """Launch the Cholesky factorisation of the matrix that `solve` needs; only that of the last damping is stored."""
        key = (damping, torch.promote_types(self.working_dtype(damping), dtype))
        if key in self._cholesky:
            return
        self._cholesky = {key: Cholesky(self._system(*key), first_jitter)}


def fetch_traces(factors: Sequence[Factor]) -> dict[int, float]:
    """{id(factor): its trace} for all factors, with one wait per device; traces that were read before are reused."""
    by_device: dict[torch.device, list[tuple[Factor, Tensor]]] = {}
    for factor in {id(factor): factor for factor in factors if factor._trace is None}.values():
        trace = factor.trace() if factor._pending_trace is None else factor._pending_trace
        by_device.setdefault(trace.device, []).append((factor, trace.double()))
    for together in by_device.values():
        for (factor, _), number in zip(together, torch.stack([t for _, t in together]).tolist(), strict=True):
            factor._trace, factor._pending_trace = number, None
    return {id(factor): factor._trace for factor in factors if factor._trace is not None}


def fetch_bounds(factors: Sequence[Factor]) -> None:
    """Compute and store upper bounds of the largest eigenvalues of many factors, waiting for each device once."""
    unknown = [factor for factor in factors if factor._bound is None]
    by_device: dict[torch.device, list[Factor]] = {}
    for factor in unknown:
        by_device.setdefault(factor.device, []).append(factor)
    for together in by_device.values():
        bounds = torch.stack([factor.largest_bound().double() for factor in together]).tolist()
        for factor, bound in zip(together, bounds, strict=True):
            factor._bound = bound


def raised(values: Tensor, floor: float) -> Tensor:
    """`values` clamped to at least `floor`; unchanged if the floor is 0."""
    return values.clamp(min=floor) if floor > 0 else values
