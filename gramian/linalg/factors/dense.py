"""A factor stored as a dense matrix M [n, n]; its eigenvectors are computed on first use."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from gramian.core.dtypes import HALF
from gramian.core.errors import GramianError
from gramian.linalg.factors.cholesky import Cholesky
from gramian.linalg.factors.eigendecomposition import eigendecompose
from gramian.linalg.factors.factor import WIDEST_DENSE, Decomposable, Factor
from gramian.linalg.factors.stored import Stored, store_symmetric
from gramian.linalg.wide import by_columns, wide_norm


class Dense(Decomposable):
    """A factor stored as a matrix M [n, n]. Memory: n² numbers, n² more once M is decomposed.

    FLOPs: 9n³ for the eigendecomposition, n³/3 for Cholesky.
    """

    kind = "dense"

    def __init__(self, stored: Stored) -> None:
        """Reference the stored matrix; nothing is computed."""
        super().__init__(stored, dim=len(stored.body), rank=len(stored.body))

    @classmethod
    def of(cls, matrix_NN: Tensor, storage: torch.dtype | None = None) -> "Dense":
        """Store a symmetric matrix in the dtype `storage` (None: its own); GramianError if wider than `WIDEST_DENSE`."""
        if matrix_NN.dim() != 2 or matrix_NN.shape[0] != matrix_NN.shape[1] or matrix_NN.shape[0] > WIDEST_DENSE:
            raise GramianError(
                f"factor: expected a square matrix of side {WIDEST_DENSE} at most, got {list(matrix_NN.shape)}"
            )
        return cls(store_symmetric(matrix_NN, storage or matrix_NN.dtype))

    @classmethod
    def of_sum(cls, matrix_NN: Tensor, storage: torch.dtype) -> "Dense":
        """Store a running sum in `storage`, but in float32 in place of half precision, which would round small updates away."""
        return cls.of(matrix_NN, torch.float32 if storage in HALF else storage)

    @classmethod
    def summed(cls, left: Factor, right: Factor, mine: float, theirs: float, storage: torch.dtype) -> "Dense":
        """The factor mine·left + theirs·right as a dense matrix, stored as `of_sum` does; both factors are formed as matrices.

        Its `quantisation_error` includes those of both factors.
        """
        dtype = torch.promote_types(left.dtype, right.dtype)
        if isinstance(left, Dense) and isinstance(right, Dense) and left.stored.plain and right.stored.plain:
            total = left.stored.body.to(dtype) * mine
            return cls.of_sum(total.add_(right.stored.body.to(total), alpha=theirs), storage)
        total = mine * left.dense().to(dtype)
        off = left.quantisation_error.double() * wide_norm(total)
        other = right.dense().to(total)
        off = off + theirs * right.quantisation_error.to(off) * wide_norm(other)
        total.add_(other, alpha=theirs)
        del other
        found = cls.of_sum(total, storage)
        off = off / wide_norm(total).clamp(min=torch.finfo(torch.float64).tiny)
        error = found.stored.relative_error + off
        found.stored = replace(found.stored, relative_error=error, rounded=True)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the stored matrix and of its decompositions."""
        return self.stored.nbytes + self._factorised_nbytes

    @property
    def quantisation_error(self) -> Tensor:
        """Relative error of M from being rounded to its storage dtype, measured when it was stored."""
        return self.stored.relative_error

    def matvec(self, y_NK: Tensor) -> Tensor:
        """M Y for the stored matrix M and Y [n, k]. 2·n²·k FLOPs."""
        return self.stored.load(device=y_NK.device) @ y_NK.to(self.dtype)

    def trace(self) -> Tensor:
        """Trace of M, the sum of its stored diagonal, 0-dim float64."""
        return self.diagonal().sum(dtype=torch.float64)

    def diagonal(self) -> Tensor:
        """The diagonal of the stored M, [n]."""
        body = self.stored.body.diagonal().to(self.dtype)
        scales = [t.to(body) for t in (self.stored.left, self.stored.right) if t is not None]
        for scale in scales:
            body = body * scale
        return body

    def frobenius(self) -> Tensor:
        """‖M‖_F of the stored matrix, 0-dim float64."""
        norm: Tensor = torch.linalg.vector_norm(self.stored.load(), dtype=torch.float64)
        return norm

    def largest_bound(self) -> Tensor:
        """Upper bound of the largest eigenvalue, 0-dim float64: ‖M‖_F."""
        if self._largest is None:
            self._largest = self.frobenius()
        return self._largest

    def extremes(self) -> tuple[float, float] | None:
        """Smallest and largest eigenvalue of M once it is decomposed; None before, and where the decomposition failed."""
        if self._eigen is None or self.work.fallback:
            return None
        return float(self._eigen[0].min()), float(self._eigen[0].max())

    def to_basis(self, y_NK: Tensor) -> Tensor:
        """Qᵀ Y, [n, k], for Y [n, k] and the eigenvectors Q of M."""
        return self.eigenpairs(y_NK.dtype)[1].to(y_NK).mT @ y_NK

    def from_basis(self, c_RK: Tensor) -> Tensor:
        """Q C, [n, k], for coordinates C [n, k] and the eigenvectors Q of M."""
        return self.eigenpairs(c_RK.dtype)[1].to(c_RK) @ c_RK

    def eigenpairs(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Eigenvalues σ [n] and eigenvectors Q [n, n] of M, exact enough for products in `dtype`; cached.

        The first request for float64 recomputes a float32 result in float64, since a float32 Q has errors of ε·κ, ε the
        precision of float32 and κ the condition number. Eigenvalues that rounding made negative are set to 0. If the
        eigendecomposition fails, the sorted diagonal and unit vectors are returned, and `work.fallback` says so.

        Raises:
            GramianError: if M contains NaN or infinity.
        """
        narrow = self._eigen is not None and self._eigen[1].dtype == torch.float32 and not self.work.fallback
        if self._eigen is None or (narrow and dtype == torch.float64):
            try:
                matrix = self.stored.load(dtype=torch.promote_types(self.dtype, dtype))
                values, vectors, self.work.decomposed = eigendecompose(matrix)
            except GramianError as error:
                if "NaN" in str(error):
                    raise
                self.work.fallback = f"diagonal in place of eigenvectors: {error}"
                values, order = self.diagonal().sort()
                vectors = torch.eye(self.dim, dtype=self.dtype, device=self.device)[:, order]
            self._eigen = (values.clamp(min=0), vectors)
        return self._eigen

    def eigenbasis(self) -> tuple[Tensor, Tensor]:
        """`eigenpairs` computed in float64 and rounded to this factor's dtype, so that small eigenvalues have vectors too."""
        if self._eigen is None:
            values, vectors = self.eigenpairs(torch.float64)
            self._eigen = (values.to(self.dtype), vectors.to(self.dtype))
        return self._eigen

    def _system(self, damping: float, dtype: torch.dtype) -> Tensor:
        """The damped matrix M + λI as a new tensor in `dtype`, λ = `damping`."""
        matrix = self.stored.load(dtype=dtype)
        matrix = matrix.clone() if matrix.data_ptr() == self.stored.body.data_ptr() else matrix
        matrix.diagonal().add_(damping)
        return matrix

    def solve(self, y_NK: Tensor, damping: float, first_jitter: float = 1e-6) -> Tensor:
        """(M + λI)⁻¹ Y for Y [n, k] by Cholesky, λ = `damping`. n³/3 FLOPs once, then 2·n²·k.

        `first_jitter`: first diagonal shift tried if M + λI is not positive definite, relative to its mean |diagonal|.
        """
        self.prepare_solve(damping, first_jitter, y_NK.dtype)
        system, wide = next(iter(self._cholesky.values())), torch.promote_types(self.dtype, y_NK.dtype)
        solution = by_columns(y_NK, self.dim, lambda y: system.solve(y.to(self.device)).to(y.device), wide)
        self.work.attempts = [vars(attempt) for attempt in system.attempts]
        return solution

    def logdet(self, damping: float) -> Tensor:
        """log det(M + λI), λ = `damping`, 0-dim: from known eigenvalues if exact enough, else by Cholesky in float64."""
        if self._eigen is not None and not self.work.fallback and self.working_dtype(damping) == self.dtype:
            return (self._eigen[0].double() + damping).log().sum()
        return Cholesky(self._system(damping, torch.float64), 1e-12).logdet()

    def moved(self, move: Callable[[Tensor], Tensor], home: torch.device | None = None) -> "Dense":
        """The same factor with every tensor passed through `move`; `home`: device to compute on, None: where they are."""
        return Dense(self.stored.moved(move, home))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "Dense":
        """The same factor on another device or rounded to another storage dtype; None leaves either as it is."""
        if dtype is not None and dtype != self.storage_dtype:
            wide = self.stored.load(dtype=torch.promote_types(self.dtype, dtype), device=device)
            return Dense(store_symmetric(wide, dtype))
        return Dense(self.stored.to(device))

    def dense(self) -> Tensor:
        """The stored matrix M [n, n] in float32, or float64 if stored so."""
        return self.stored.load()
