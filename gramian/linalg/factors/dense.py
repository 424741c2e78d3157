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
    """M [n, n]. Bytes: n² at rest, n² more once decomposed. Decomposition: 9n³ FLOPs; Cholesky: n³/3."""

    kind = "dense"

    def __init__(self, stored: Stored) -> None:
        """Keep the stored matrix; nothing is computed."""
        super().__init__(stored, dim=len(stored.body), rank=len(stored.body))

    @classmethod
    def of(cls, matrix_NN: Tensor, storage: torch.dtype | None = None) -> "Dense":
        """Store a symmetric matrix, `WIDEST_DENSE` wide at most; `storage`: dtype at rest, None: its own."""
        if matrix_NN.dim() != 2 or matrix_NN.shape[0] != matrix_NN.shape[1] or matrix_NN.shape[0] > WIDEST_DENSE:
            raise GramianError(
                f"factor: expected a square matrix of side {WIDEST_DENSE} at most, got {list(matrix_NN.shape)}"
            )
        return cls(store_symmetric(matrix_NN, storage or matrix_NN.dtype))

    @classmethod
    def of_sum(cls, matrix_NN: Tensor, storage: torch.dtype) -> "Dense":
        """Store a running sum: in float32 at least, since one rounded to half at every step would stop moving."""
        return cls.of(matrix_NN, torch.float32 if storage in HALF else storage)

    @classmethod
    def summed(cls, left: Factor, right: Factor, mine: float, theirs: float, storage: torch.dtype) -> "Dense":
        """mine·M + theirs·M', written out: beside the sum one matrix at a time. It is off by what the two were, at most."""
        dtype = torch.promote_types(left.dtype, right.dtype)
        total = mine * left.dense().to(dtype)
        off = left.quantisation_error.double() * wide_norm(total)
        other = right.dense().to(total)
        off = off + theirs * right.quantisation_error.to(off) * wide_norm(other)
        total.add_(other, alpha=theirs)
        del other
        found = cls.of_sum(total, storage)
        off = off / wide_norm(total).clamp(min=torch.finfo(torch.float64).tiny)
        found.stored = replace(found.stored, relative_error=found.stored.relative_error + off)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix and of its decompositions."""
        return self.stored.nbytes + self._factorised_nbytes

    @property
    def quantisation_error(self) -> Tensor:
        """Relative error of M from being stored, measured when it was stored."""
        return self.stored.relative_error

    def matvec(self, y_NK: Tensor) -> Tensor:
        """M Y. 2·n²·k FLOPs."""
        return self.stored.load(device=y_NK.device) @ y_NK.to(self.dtype)

    def trace(self) -> Tensor:
        """Sum of the diagonal."""
        return self.diagonal().double().sum()

    def diagonal(self) -> Tensor:
        """The stored diagonal."""
        body = self.stored.body.diagonal().to(self.dtype)
        scales = [t.to(body) for t in (self.stored.left, self.stored.right) if t is not None]
        for scale in scales:
            body = body * scale
        return body

    def frobenius(self) -> Tensor:
        """‖M‖_F over all entries."""
        norm: Tensor = torch.linalg.vector_norm(self.stored.load(), dtype=torch.float64)
        return norm

    def largest_bound(self) -> Tensor:
        """σ_max where it is known, else ‖M‖_F."""
        if self._eigen is not None and not self.work.fallback:
            return self._eigen[0].max().double()
        if self._largest is None:
            self._largest = self.frobenius()
        return self._largest

    def extremes(self) -> tuple[float, float] | None:
        """Smallest and largest eigenvalue, once M is decomposed."""
        if self._eigen is None or self.work.fallback:
            return None
        return float(self._eigen[0].min()), float(self._eigen[0].max())

    def to_basis(self, y_NK: Tensor) -> Tensor:
        """Qᵀ Y."""
        return self.eigenpairs(y_NK.dtype)[1].to(y_NK).mT @ y_NK

    def from_basis(self, c_RK: Tensor) -> Tensor:
        """Q C."""
        return self.eigenpairs(c_RK.dtype)[1].to(c_RK) @ c_RK

    def eigenpairs(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """σ and Q, in float64 from the first use that multiplies in float64 on: a float32 Q is off by ε·κ there.

        Rounding and quantisation may make σ slightly negative, so they are taken as 0 at least.
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

    def _system(self, damping: float, dtype: torch.dtype) -> Tensor:
        """M + λI."""
        matrix = self.stored.load(dtype=dtype)
        matrix = matrix.clone() if matrix.data_ptr() == self.stored.body.data_ptr() else matrix
        matrix.diagonal().add_(damping)
        return matrix

    def solve(self, y_NK: Tensor, damping: float, first_jitter: float = 1e-6) -> Tensor:
        """n³/3 FLOPs once, then 2·n²·k."""
        self.prepare_solve(damping, first_jitter, y_NK.dtype)
        system, wide = next(iter(self._cholesky.values())), torch.promote_types(self.dtype, y_NK.dtype)
        solution = by_columns(y_NK, self.dim, lambda y: system.solve(y.to(self.device)).to(y.device), wide)
        self.work.attempts = [vars(attempt) for attempt in system.attempts]
        return solution

    def logdet(self, damping: float) -> Tensor:
        """From eigenvalues where they are known and good enough, else by Cholesky in float64."""
        if self._eigen is not None and not self.work.fallback and self.working_dtype(damping) == self.dtype:
            return (self._eigen[0].double() + damping).log().sum()
        return Cholesky(self._system(damping, torch.float64), 1e-12).logdet()

    def moved(self, move: Callable[[Tensor], Tensor], home: torch.device | None = None) -> "Dense":
        """The same matrix with its tensors moved."""
        return Dense(self.stored.moved(move, home))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "Dense":
        """Moved, or stored again."""
        if dtype is not None and dtype != self.storage_dtype:
            wide = self.stored.load(dtype=torch.promote_types(self.dtype, dtype), device=device)
            return Dense(store_symmetric(wide, dtype))
        return Dense(self.stored.to(device))

    def dense(self) -> Tensor:
        """M as stored, in the dtype of products."""
        return self.stored.load()
