"""Cholesky factorisation of a small symmetric matrix, with jitter and an eigenvalue fallback that are recorded."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.linalg.factors.eigendecomposition import eigendecompose
from gramian.linalg.wide import padded

LARGEST_JITTER = 1e-1
"""Largest jitter relative to the mean diagonal; a matrix that needs more is decomposed by eigenvalues instead."""


@dataclass(frozen=True)
class CholeskyAttempt:
    """One attempt to factorise a matrix."""

    jitter: float
    """Number that was added to the diagonal."""
    result: str
    """"ok", "not positive definite", or the name of the fallback."""


class Cholesky:
    """M = L Lᵀ for a symmetric M [n, n], with fallbacks where M is not quite positive definite.

    The factorisation is launched at once; whether it worked is checked on first use, so that many of them can be queued on a
    GPU before anyone waits. If it failed: jitter `first_jitter`·mean|diag| on the diagonal, ten times more after every
    failure up to `LARGEST_JITTER`, then the eigenvalue form with eigenvalues raised to the first jitter, and above rounding
    error. Every try is in `attempts`; NaN or infinity in M is an error. Cost: n³/3 FLOPs for each.
    """

    def __init__(self, matrix: Tensor, first_jitter: float) -> None:
        """Launch the plain factorisation of a float32 or float64 matrix, which is referenced until the first use."""
        self._matrix: Tensor | None = matrix
        self._first_jitter = first_jitter
        self._attempts: list[CholeskyAttempt] = []
        self._eigen: tuple[Tensor, Tensor] | None = None
        self._inverse: Tensor | None = None
        self._logdet: Tensor | None = None
        self._factorise(matrix)

    def _factorise(self, matrix: Tensor) -> None:
        self._lower: Tensor | None
        self._lower, info = torch.linalg.cholesky_ex(matrix)
        self._good = (info == 0) & self._lower.diagonal().isfinite().all()

    @classmethod
    def of_parts(cls, parts: Sequence[Tensor], attempts: Sequence[CholeskyAttempt]) -> "Cholesky":
        """A factorisation that another process made, from the values of its `parts` and `attempts`."""
        found = cls.__new__(cls)
        found._matrix = found._inverse = found._logdet = None
        found._attempts = list(attempts)
        found._lower = parts[0] if len(parts) == 1 else None
        found._eigen = None if len(parts) == 1 else (parts[0], parts[1])
        return found

    def parts(self) -> list[Tensor]:
        """[L], or [eigenvalues, eigenvectors] where Cholesky failed; must be called before the first `solve`."""
        self._settle()
        if self._eigen is not None:
            return list(self._eigen)
        assert self._lower is not None
        return [self._lower]

    @property
    def attempts(self) -> tuple[CholeskyAttempt, ...]:
        """All attempts to factorise the matrix, in order; the last one succeeded."""
        self._settle()
        return tuple(self._attempts)

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix, while it is referenced, and of what was computed from it."""
        tensors = (self._lower, self._inverse, self._matrix, *(self._eigen or ()))
        return sum(t.nbytes for t in tensors if t is not None)

    def solve(self, y_NK: Tensor) -> Tensor:
        """M⁻¹ Y for Y [n, k], in the matrix's dtype. 2·n²·k FLOPs.

        With many columns as L⁻ᵀ(L⁻¹ Y), L⁻¹ being formed once (n³/3 FLOPs) and stored in place of L: plain products are
        several times as fast as triangular solves on a GPU, and as accurate, since L has the square root of M's condition
        number.
        """
        self._settle()
        if self._eigen is not None:
            values, vectors = self._eigen
            return vectors @ ((vectors.mT @ y_NK.to(vectors.dtype)) / values[:, None])
        if self._lower is not None and 2 * y_NK.shape[1] < len(self._lower):
            return torch.cholesky_solve(y_NK.to(self._lower.dtype), self._lower)
        if self._inverse is None:
            assert self._lower is not None
            eye = torch.eye(len(self._lower), dtype=self._lower.dtype, device=self._lower.device)
            self._logdet = self.logdet()
            inverse = torch.linalg.solve_triangular(self._lower, eye, upper=False)
            self._inverse, self._lower = padded(inverse)[:, : len(inverse)], None
        return self._inverse.mT @ (self._inverse @ y_NK.to(self._inverse.dtype))

    def logdet(self) -> Tensor:
        """log det M of the factorised matrix, 0-dim."""
        self._settle()
        if self._eigen is not None:
            return self._eigen[0].log().sum()
        if self._logdet is not None:
            return self._logdet
        assert self._lower is not None
        return 2 * self._lower.diagonal().log().sum()

    def _settle(self, good: bool | None = None) -> None:
        """Check once whether the factorisation worked and repair it if not; `good`: the result of the check, if known."""
        if self._matrix is None:
            return
        self._attempts = []
        if not self._succeeded(0.0, good):
            self._repair(self._matrix)
        self._matrix = None

    def _repair(self, matrix: Tensor) -> None:
        if not bool(matrix.isfinite().all()):
            raise GramianError("cholesky: the matrix holds NaN or infinity; expected finite numbers")
        scale = float(matrix.diagonal().double().abs().mean()) or 1.0
        jitter = self._first_jitter
        while jitter <= LARGEST_JITTER:
            shifted = matrix.clone()
            shifted.diagonal().add_(jitter * scale)
            self._factorise(shifted)
            if self._succeeded(jitter * scale):
                return
            jitter *= 10
        values, vectors, where = eigendecompose(matrix)
        limits = torch.finfo(values.dtype)
        floor = max(self._first_jitter * scale, limits.eps * float(values.abs().max()), limits.tiny)
        self._eigen, self._lower = (values.clamp(min=floor), vectors), None
        self._attempts.append(CholeskyAttempt(floor, f"eigenvalues raised ({where})"))

    def _succeeded(self, jitter: float, good: bool | None = None) -> bool:
        good = bool(self._good) if good is None else good
        self._attempts.append(CholeskyAttempt(jitter, "ok" if good else "not positive definite"))
        return good


def settle_all(systems: Sequence[Cholesky]) -> None:
    """Check the results of many factorisations and repair those that failed, waiting for each device once."""
    waiting = [system for system in systems if system._matrix is not None]
    by_device: dict[torch.device, list[Cholesky]] = {}
    for system in waiting:
        by_device.setdefault(system._good.device, []).append(system)
    for together in by_device.values():
        for system, good in zip(together, torch.stack([s._good for s in together]).tolist(), strict=True):
            system._settle(good)
