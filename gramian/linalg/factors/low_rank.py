"""A factor M = U Uᵀ with fewer columns than rows: the Woodbury form, with thin eigenpairs on demand.

U is stored in any precision. All else is computed from K = UᵀU [r, r] in float64, so results are those of the stored U
exactly. K = V diag(σ) Vᵀ gives the eigenvectors Q = U V σ^(-1/2) of M, which are applied as two thin products and never
formed. Powers at any damping, log det and merging need nothing else.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.linalg.factors.cholesky import Cholesky
from gramian.linalg.factors.columns import Columns
from gramian.linalg.factors.eigendecomposition import eigendecompose, singular_pairs
from gramian.linalg.factors.factor import Decomposable
from gramian.linalg.factors.stored import MatrixSource, Stored, store_columns
from gramian.linalg.wide import by_columns


class LowRank(Decomposable):
    """A factor M = U Uᵀ with U [n, r]. Memory: n·r numbers, r² more once used.

    FLOPs of the first use: 2·n·r² + r³/3 (Cholesky) or + 9r³ (eigenpairs).
    """

    kind = "low rank"
    orthonormal = False  # Q = U W multiplies the rounding of a product with U by up to √(σ_max/σ)

    def __init__(self, columns: Stored | Columns) -> None:
        """Reference the columns U [n, r]; nothing is copied or computed."""
        self.columns = Columns(columns) if isinstance(columns, Stored) else columns
        super().__init__(self.columns.stored, self.columns.dim, self.columns.count)

    @classmethod
    def of(cls, columns_NR: Tensor | MatrixSource, storage: torch.dtype | None = None, scale: float = 1.0) -> "LowRank":
        """The factor M = scale²·U Uᵀ of columns U [n, r]; `storage`: dtype in which U is stored, None: its own.

        Raises:
            GramianError: if the columns are not a matrix.
        """
        if not isinstance(columns_NR, Tensor | MatrixSource) or len(columns_NR.shape) != 2:
            raise GramianError(f"factor: expected columns of shape [n, r], got {list(columns_NR.shape)}")
        stored = store_columns(columns_NR, storage or columns_NR.dtype)
        return cls(stored if scale == 1.0 else stored.scaled(scale))

    @property
    def nbytes(self) -> int:
        """Bytes of U, the cached Gram matrix and the small decompositions."""
        return self.columns.nbytes + self._factorised_nbytes

    @property
    def quantisation_error(self) -> Tensor:
        """Relative error of the stored U Uᵀ: 2e for the error e of U, the leading part of the bound √r(2e + e²)."""
        return 2 * self.columns.stored.relative_error

    def matvec(self, y_NK: Tensor) -> Tensor:
        """M Y = U(UᵀY) for Y [n, k]. 4·n·r·k FLOPs."""
        y_NK = y_NK.to(self.dtype)
        return self.columns.times(self.columns.transposed_times(y_NK))

    def trace(self) -> Tensor:
        """Trace of M, ‖U‖_F², 0-dim float64."""
        return self.columns.square()

    def diagonal(self) -> Tensor:
        """The diagonal of M, [n]: squared norms of U's rows."""
        return self.columns.squares_N().to(self.dtype)

    def frobenius(self) -> Tensor:
        """‖M‖_F = ‖UᵀU‖_F, 0-dim float64."""
        norm: Tensor = torch.linalg.vector_norm(self.columns.cached_gram())
        return norm

    def largest_bound(self) -> Tensor:
        """Upper bound of the largest eigenvalue, 0-dim float64: 1.001·‖UᵀU‖_F."""
        return self._norm_of(self.columns.cached_gram(exact=False)) if self._largest is None else self._largest

    def _norm_of(self, gram: Tensor) -> Tensor:
        """Store the bound 1.001·‖UᵀU‖_F, unless there is one, and return it; UᵀU may be off by 1e-4."""
        if self._largest is None:
            self._largest = torch.linalg.vector_norm(gram) * (1 + 1e-3)
        return self._largest

    def extremes(self) -> tuple[float, float] | None:
        """Smallest and largest eigenvalue once M is decomposed, else None; the smallest is 0 unless U has rank n."""
        if self._eigen is None or not len(self._eigen[0]):
            return None
        values = self._eigen[0]
        return (float(values.min()) if self.complete else 0.0), float(values.max())

    def to_basis(self, y_NK: Tensor) -> Tensor:
        """QᵀY = Wᵀ(UᵀY), [s, k], for Y [n, k] and the s eigenvectors Q = U W, W = Vσ^(-1/2), from UᵀU = V diag(σ) Vᵀ."""
        return self.eigenpairs()[1].to(y_NK).mT @ self.columns.transposed_times(y_NK)

    def from_basis(self, c_RK: Tensor) -> Tensor:
        """Q C = U(W C), [n, k], for coordinates C [s, k] and the s eigenvectors Q = U W of `eigenpairs`."""
        return self.columns.times(self.eigenpairs()[1].to(c_RK) @ c_RK)

    def eigenpairs(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """Eigenvalues σ [s], ascending, and W [r, s] such that U W are the eigenvectors; s ≤ r, without σ at rounding level.

        Both are float64 whatever `dtype` is: an error from rounding W to float32 would be multiplied by up to σ/λ in a solve
        with damping λ. If the eigendecomposition of UᵀU fails, its SVD is used, and `work.fallback` says so.

        Raises:
            GramianError: if UᵀU contains NaN or infinity, or the SVD fails too.
        """
        if self._eigen is None:
            gram = self.columns.take_gram()
            self._norm_of(gram)  # while UᵀU is there
            try:
                values, vectors, self.work.decomposed = eigendecompose(gram)
            except GramianError as error:
                if "NaN" in str(error):
                    raise
                values, vectors = singular_pairs(gram)
                self.work.fallback = f"singular values in place of eigenvalues: {error}"
            noise = torch.finfo(torch.float64).eps * max(self.dim, self.rank) * (values.max() if self.rank else 0.0)
            kept = int((values > noise).sum())
            values, vectors = values[len(values) - kept :], vectors[:, len(values) - kept :]
            if kept > self.dim:
                values, vectors = values[-self.dim :], vectors[:, -self.dim :]
            self._eigen = (values, vectors / values.sqrt())
        return self._eigen

    def _system(self, damping: float, dtype: torch.dtype) -> Tensor:
        """The matrix UᵀU + λI [r, r] that a solve factorises, in `dtype`, λ = `damping`."""
        gram = self.columns.take_gram(exact=not self.coarse(damping))
        gram.diagonal().add_(damping)
        return gram.to(dtype)

    def solve(self, y_NK: Tensor, damping: float, first_jitter: float = 1e-6) -> Tensor:
        """(M + λI)⁻¹ Y = (Y − U(UᵀU + λI)⁻¹UᵀY)/λ for Y [n, k], λ = `damping` > 0. 2·n·r² + r³/3 FLOPs once, then 4·n·r·k."""
        self.prepare_solve(damping, first_jitter, y_NK.dtype)
        (_, dtype), system = next(iter(self._cholesky.items()))

        def solved(y_NC: Tensor) -> Tensor:
            wide = y_NC.to(dtype)
            inner = system.solve(self.columns.transposed_times(wide).to(self.device))
            return self.columns.times(inner.to(wide)).neg_().add_(wide).div_(damping)

        solution = by_columns(y_NK, self.dim, solved, torch.promote_types(self.dtype, y_NK.dtype))
        self.work.attempts = [vars(attempt) for attempt in system.attempts]
        return solution

    def logdet(self, damping: float) -> Tensor:
        """log det(M + λI), λ = `damping`, 0-dim float64.

        Once M is decomposed, Σ log(σ + λ) over its s eigenvalues σ plus (n − s) log λ; else log det(UᵀU + λI) + (n − r) log λ.
        """
        log_damping = torch.log(torch.tensor(damping, dtype=torch.float64, device=self.device))
        if self._eigen is not None:
            values = self._eigen[0]
            return (values + damping).log().sum() + (self.dim - len(values)) * log_damping
        gram = self.columns.gram()
        gram.diagonal().add_(damping)
        return Cholesky(gram, 1e-12).logdet() + (self.dim - self.rank) * log_damping

    def thin(self, chosen: Tensor) -> "LowRank":
        """A factor of the columns with indices `chosen`, times √(r / their number): M in expectation over random choices."""
        return LowRank(self.columns.select(chosen, (self.rank / len(chosen)) ** 0.5))

    def moved(self, move: Callable[[Tensor], Tensor], home: torch.device | None = None) -> "LowRank":
        """The same factor with U passed through `move`; `home`: device for products with U, None: where U is."""
        return LowRank(self.columns.moved(move, home))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "LowRank":
        """The same factor on another device or with U rounded to another storage dtype; None leaves either as it is."""
        return LowRank(self.columns.to(device, dtype))

    def dense(self) -> Tensor:
        """The matrix M = U Uᵀ, [n, n]. 2·n²·r FLOPs."""
        return self.columns.whole().squared()
