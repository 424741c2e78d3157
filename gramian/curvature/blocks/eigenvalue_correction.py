"""EK-FAC's eigenvalues of one block, and their eigenbasis (George et al. 2018).

Legend: Y [o, m] the block's parameters as a matrix, Q_G [o, r] and Q_A [m, s] eigenvectors of its factors G and A, σ_i and
α_j their eigenvalues.

F ≈ (Q_G ⊗ Q_A) diag(S) (Q_G ⊗ Q_A)ᵀ with S [r, s] in place of K-FAC's products σ_i α_j. The basis is stored with S, because
another decomposition of the same factors may rotate the eigenvectors of close eigenvalues.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gramian.linalg import Dense, Diagonal, DiagonalLowRank, Factor, LowRank
from gramian.linalg.factors.columns import Columns


@dataclass(frozen=True)
class Basis:
    """Orthonormal vectors Q [n, r] of one side (A or G): a matrix, U W for a low-rank factor U Uᵀ, or the standard basis."""

    dim: int
    """n, the number of rows of the basis Q [n, r]."""
    matrix: Tensor | None
    """The basis Q [n, r] itself, or W [columns of U, r] where Q = U W; None: the standard basis."""
    columns: Columns | None = None
    """The columns U of a low-rank factor U Uᵀ, from which the basis is Q = U W, W = `matrix`; None for other factors."""

    @classmethod
    def of(cls, factor: Factor) -> "Basis":
        """The eigenvectors of a factor as a `Basis`, from its eigendecomposition, without copying them.

        Eigenvectors of a dense factor whose eigenvalue is 0 up to rounding in float64 are left out, since they are arbitrary.
        """
        if isinstance(factor, Diagonal):
            return cls(factor.dim, None)
        assert isinstance(factor, Dense | LowRank)
        if isinstance(factor, LowRank):
            return cls(factor.dim, factor.eigenpairs()[1], factor.columns)
        values, vectors = factor.eigenbasis()
        noise = torch.finfo(torch.float64).eps * factor.dim * float(values.max())
        return cls(factor.dim, vectors[:, int((values <= noise).sum()) :])  # ascending: a view

    @property
    def rank(self) -> int:
        """r, the number of basis vectors."""
        return self.dim if self.matrix is None else self.matrix.shape[1]

    def nbytes_beside(self, factor: Factor) -> int:
        """Bytes of the basis's matrix; 0 without a matrix, or if it shares the memory of the eigenvectors in `factor`."""
        holder = factor._whole if isinstance(factor, DiagonalLowRank) else factor
        eigen = holder._eigen if isinstance(holder, Dense | LowRank) else None
        if self.matrix is None:
            return 0
        if eigen is not None and eigen[1].untyped_storage().data_ptr() == self.matrix.untyped_storage().data_ptr():
            return 0
        return self.matrix.nbytes

    def coordinates(self, y_NK: Tensor) -> Tensor:
        """Qᵀ Y, [r, k], for Y [n, k]: its coordinates in this basis Q."""
        if self.matrix is None:
            return y_NK
        inner = y_NK if self.columns is None else self.columns.transposed_times(y_NK)
        return self.matrix.to(inner).mT @ inner

    def combined(self, c_RK: Tensor) -> Tensor:
        """Q C, [n, k], for coordinates C [r, k] in this basis Q."""
        if self.matrix is None:
            return c_RK
        mixed = self.matrix.to(c_RK) @ c_RK
        return mixed if self.columns is None else self.columns.times(mixed)

    def vectors(self, like: Tensor) -> Tensor:
        """The basis Q [n, r] written out, in the dtype and on the device of `like`."""
        if self.matrix is None:
            return torch.eye(self.dim, dtype=like.dtype, device=like.device)
        matrix = self.matrix.to(like)
        return matrix if self.columns is None else self.columns.times(matrix)

    def whole(self) -> "Basis":
        """The same basis with all rows of its columns on this process; a collective where they are sharded."""
        return self if self.columns is None else Basis(self.dim, self.matrix, self.columns.whole())

    def squared_cosines(self, other: "Basis", like: Tensor) -> Tensor | None:
        """(QᵀQ')⊙² [r, r'] of this basis Q and another Q', in the dtype and on the device of `like`; None: the identity.

        Times a vector s it is the diagonal, in basis Q, of the matrix that is diag(s) in basis Q'.
        """
        if self.matrix is None and other.matrix is None:
            return None
        eye = torch.eye(other.rank, dtype=like.dtype, device=like.device)
        return self.coordinates(other.combined(eye)).square_()


@dataclass(frozen=True)
class Correction:
    """EK-FAC's eigenvalues S [r, s] of one block with their eigenbases of G and A; outside these the eigenvalues are 0."""

    values_RS: Tensor
    """S [r, s], float32 or float64: second moments of per-sample gradients along q_G q_Aᵀ for basis vectors q_G and q_A."""
    G: Basis
    A: Basis
    outside: float
    """Share of the per-sample gradients' squared norm that lies outside the basis, and that S therefore misses."""

    @property
    def complete(self) -> bool:
        """True if the eigenbasis spans the whole space of [o, m] matrices."""
        return self.G.rank == self.G.dim and self.A.rank == self.A.dim

    def apply(self, y_OM: Tensor, f_RS: Tensor, outside: float) -> Tensor:
        """f₀Y + Q_G [(f − f₀) ⊙ Q_GᵀYQ_A] Q_Aᵀ for Y [o, m]: eigenvalues f [r, s] in the basis, f₀ = `outside` elsewhere.

        4·o·m·(r + s) FLOPs.
        """
        c_RS = self.A.coordinates(self.G.coordinates(y_OM).mT).mT
        out = self.A.combined(self.G.combined((f_RS.to(y_OM) - outside) * c_RS).mT).mT
        return out + outside * y_OM if outside else out

    def diagonal(self) -> Tensor:
        """diag F of the EK-FAC Fisher as a matrix [o, m] like the weight: Q_G⊙² S Q_A⊙²ᵀ. 2·o·s·(r + m) FLOPs."""
        left, right = (Basis(basis.dim, None).squared_cosines(basis, self.values_RS) for basis in (self.G, self.A))
        values = self.values_RS if left is None else left @ self.values_RS
        return values if right is None else values @ right.mT

    def seen_in(self, G: Basis, A: Basis) -> Tensor:
        """The diagonal [r, s] of this EK-FAC Fisher in the other bases Q_G = `G`, Q_A = `A`: (Q_GᵀQ_G')⊙² S (Q_AᵀQ_A')⊙²ᵀ.

        Q_G' and Q_A' are this object's own bases.
        """
        values = self.values_RS
        left, right = G.squared_cosines(self.G, values), A.squared_cosines(self.A, values)
        values = values if left is None else left @ values
        return values if right is None else values @ right.mT
