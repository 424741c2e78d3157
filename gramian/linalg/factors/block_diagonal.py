"""A factor M = diag(M_1, …, M_r) of r equal small blocks, such as the exact Fisher blocks of the rows of a parameter.

Legend: r blocks of side w each, n = r·w. All blocks are decomposed and applied together.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from gramian.linalg.factors.factor import FactorWork, Spectral


class BlockDiagonal(Spectral):
    """A block-diagonal factor, stored as its blocks [r, w, w]: r·w² numbers, and 4·r·w²·k FLOPs for a power times Y [n, k]."""

    kind = "block diagonal"

    def __init__(self, blocks_RWW: Tensor) -> None:
        """Reference symmetric positive semi-definite blocks [r, w, w]; nothing is copied or computed."""
        self.blocks_RWW = blocks_RWW
        self.dim = self.rank = blocks_RWW.shape[0] * blocks_RWW.shape[1]
        self.dtype = self.storage_dtype = blocks_RWW.dtype
        self.device, self.work = blocks_RWW.device, FactorWork()
        self._eigen: tuple[Tensor, Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks, and of their eigenvalues and eigenvectors once they are decomposed."""
        return self.blocks_RWW.nbytes + sum(t.nbytes for t in self._eigen or ())

    @property
    def quantisation_error(self) -> Tensor:
        """0, the relative error from being stored: blocks are stored in full precision."""
        return torch.zeros((), device=self.device)

    def _decomposed(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues [r, w] ≥ 0 and eigenvectors [r, w, w] of all blocks, computed in float64; cached."""
        if self._eigen is None:
            values, vectors = torch.linalg.eigh(self.blocks_RWW.double())
            self._eigen = values.clamp(min=0), vectors
        return self._eigen

    @property
    def spectrum(self) -> Tensor:
        """The eigenvalues of all blocks, block after block, [n]."""
        return self._decomposed()[0].flatten()

    def to_basis(self, y_NK: Tensor) -> Tensor:
        """Qᵀ Y, [n, k], for Y [n, k] and the eigenvectors Q of the blocks."""
        return self._times(self._decomposed()[1].mT, y_NK)

    def from_basis(self, c_RK: Tensor) -> Tensor:
        """Q C, [n, k], for coordinates C [n, k] and the eigenvectors Q of the blocks."""
        return self._times(self._decomposed()[1], c_RK)

    def _times(self, blocks_RWW: Tensor, y_NK: Tensor) -> Tensor:
        rows = y_NK.reshape(*blocks_RWW.shape[:2], y_NK.shape[1])
        return (blocks_RWW.to(rows) @ rows).flatten(0, 1)

    def matvec(self, y_NK: Tensor) -> Tensor:
        """M Y for Y [n, k]. 2·r·w²·k FLOPs."""
        return self._times(self.blocks_RWW, y_NK.to(self.dtype))

    def trace(self) -> Tensor:
        """Trace of M, 0-dim float64."""
        return self.diagonal().sum(dtype=torch.float64)

    def frobenius(self) -> Tensor:
        """‖M‖_F, 0-dim float64."""
        norm: Tensor = torch.linalg.vector_norm(self.blocks_RWW, dtype=torch.float64)
        return norm

    def largest_bound(self) -> Tensor:
        """The largest Frobenius norm of a block, an upper bound of the largest eigenvalue."""
        norms: Tensor = torch.linalg.vector_norm(self.blocks_RWW, dim=(1, 2), dtype=torch.float64)
        return norms.max()

    def extremes(self) -> tuple[float, float] | None:
        """Smallest and largest eigenvalue once the blocks are decomposed; None before."""
        return None if self._eigen is None else (float(self._eigen[0].min()), float(self._eigen[0].max()))

    def diagonal(self) -> Tensor:
        """The diagonal of M, [n]."""
        return self.blocks_RWW.diagonal(dim1=1, dim2=2).flatten()

    def prepare_solve(self, damping: float, first_jitter: float, dtype: torch.dtype = torch.float32) -> None:
        """Do nothing: blocks are decomposed when they are first used."""

    def solve(self, y_NK: Tensor, damping: float, first_jitter: float = 1e-6) -> Tensor:
        """(M + λI)⁻¹ Y for Y [n, k], λ = `damping`, by eigenvectors."""
        return self.power(y_NK, -1.0, damping)

    def logdet(self, damping: float) -> Tensor:
        """log det(M + λI), λ = `damping`, 0-dim float64."""
        return (self.spectrum + damping).log().sum()

    def moved(self, move: Callable[[Tensor], Tensor], home: torch.device | None = None) -> "BlockDiagonal":
        """The same factor with its blocks passed through `move`; `home` is not used."""
        return BlockDiagonal(move(self.blocks_RWW))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "BlockDiagonal":
        """The same factor on another device or in another dtype, float32 in place of half; None leaves either as it is."""
        wide = None if dtype is None else torch.float64 if dtype == torch.float64 else torch.float32
        return BlockDiagonal(self.blocks_RWW.to(device=device, dtype=wide))

    def dense(self) -> Tensor:
        """The matrix M, [n, n]."""
        matrix: Tensor = torch.block_diag(*self.blocks_RWW)
        return matrix
