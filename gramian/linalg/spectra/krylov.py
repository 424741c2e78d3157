"""The orthonormal basis of a block Lanczos recurrence, with restarts that reduce it when it grows too large.

Legend: n side of the operator M, m vectors of the basis V, b vectors of a block, p vectors that a restart keeps.

The basis is stored as orthonormal rows, V [m, n]. After every block of products

    M Vᵀ = Vᵀ H + Qᵀ C,    T = symmetric matrix with the upper triangle of H,

with the measured products H [m, m], the next block Q [b, n] and its coupling C [b, m]. T is block tridiagonal, except in the
rows and columns of vectors that a restart kept. An eigenpair T s = θ s gives the Ritz pair (θ, Vᵀs) with the residual
Vᵀ(H − T)s + QᵀCs; some eigenvalue of M differs from θ by at most the norm of this residual.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gramian.linalg.spectra.operator import Operator, parts, seeded


def orthogonalise(vectors_BN: Tensor, rows_MN: Tensor) -> Tensor:
    """Subtract from b float64 vectors their projection on m orthonormal rows, in place; return the coefficients [m, b].

    Done twice, against rounding. Sums are in float64, whatever dtype the rows have; the coefficients are returned on the CPU.
    Cost: 8·b·m·n FLOPs.
    """
    m, n = rows_MN.shape
    taken_MB = torch.zeros(m, len(vectors_BN), dtype=torch.float64, device=vectors_BN.device)
    for _ in range(2):
        share_MB = torch.zeros_like(taken_MB)
        for part in parts(m, n, rows_MN.device):
            share_MB += rows_MN[:, part].double() @ vectors_BN[:, part].mT
        for part in parts(m, n, rows_MN.device):
            vectors_BN[:, part] -= share_MB.mT @ rows_MN[:, part].double()
        taken_MB += share_MB
    return taken_MB.cpu()


def lengths(vectors_BN: Tensor) -> Tensor:
    """Euclidean norm of every row, [b], without under- or overflow of the squares."""
    peaks_B = vectors_BN.abs().amax(1) if vectors_BN.numel() else vectors_BN.sum(1)
    units_B = torch.where(peaks_B > 0, peaks_B, 1.0)
    relative_B: Tensor = torch.linalg.vector_norm(vectors_BN / units_B[:, None], dim=1)
    return relative_B * units_B


@dataclass(frozen=True)
class Ritz:
    """Eigenpairs of the projected matrix, T = S diag(θ) Sᵀ, θ ascending, with bounds of their residuals as pairs of M."""

    values_M: Tensor
    """The eigenvalues θ of the projected matrix T, ascending."""
    vectors_MM: Tensor
    """The eigenvectors S of the projected matrix T, as columns."""
    couplings_M: Tensor
    """‖Cs‖ for each eigenvector s, C the coupling to the next block: the part of the residual that more products reduce."""
    losses_M: Tensor
    """Upper bound of the rest of each residual: ‖(H − T)s‖ for measured products H, plus what restarts dropped."""
    asymmetry: float
    """‖H − T‖_F for measured products H and their symmetrised form T."""


class KrylovBasis:
    """An orthonormal basis V, its products H, and the next block Q with its coupling C: M Vᵀ = Vᵀ H + Qᵀ C.

    The constructor allocates `room` vectors on `device` and draws the first block with `generator` (None: seed 0).

    Attributes:
        size: m, vectors of V whose products are known.
        matvecs: products with single vectors so far.
        breakdowns: times that a Krylov space was exhausted and a random vector continued it.
        scale: largest ‖Mq‖ seen, at most ‖M‖.
    """

    _next_BN: Tensor
    _coupling_BM: Tensor

    def __init__(
        self, operator: Operator, room: int, block_size: int, device: torch.device, generator: torch.Generator | None
    ) -> None:
        self._operator, self._block_size = operator, block_size
        self._generator = seeded(operator, generator)
        self._rows_MN = torch.empty(room, operator.dim, dtype=operator.working_dtype, device=device)
        self._H_MM = torch.zeros(room, room, dtype=torch.float64)
        self._lost_M = torch.zeros(room, dtype=torch.float64)  # what restarts left out of M Vᵀ: lengths of its columns,
        self._lost = 0.0  # and its Frobenius norm
        self.size = self.matvecs = self.breakdowns = 0
        self.scale = 0.0
        self._begin_anew()

    @property
    def waiting(self) -> int:
        """Number of vectors of the next block Q."""
        return len(self._next_BN)

    @property
    def rounding(self) -> float:
        """Norm below which a residual cannot be told from zero because of rounding, that of subnormal numbers included."""
        info = torch.finfo(self._operator.dtype)
        return self._operator.rounding * self.scale + 8 * self._operator.dim * info.smallest_normal * info.eps

    @property
    def nbytes(self) -> int:
        """Bytes of the basis V at its largest size and of a full next block Q."""
        return (len(self._rows_MN) + self._block_size) * self._operator.dim * self._rows_MN.element_size()

    def multiply(self) -> None:
        """Move the next block into the basis, multiply it by M, and find the block that follows."""
        n, begin, end = self._operator.dim, self.size, self.size + len(self._next_BN)
        self._rows_MN[begin:end] = self._next_BN
        self._H_MM[begin:end, :begin] = self._coupling_BM
        self.size = end
        product_NB = self._operator.checked_matmat(self._next_BN.mT)
        self.matvecs += end - begin
        residual_BN = product_NB.mT.to(device=self._rows_MN.device, dtype=torch.float64, copy=True)
        lengths_B = lengths(residual_BN)
        self.scale = max(self.scale, float(lengths_B.max()))
        self._H_MM[:end, begin:end] = self._orthogonalised(residual_BN)
        self._next_BN = self._rows_MN.new_empty(0, n)
        self._coupling_BM = torch.zeros(min(self._block_size, n - end), end, dtype=torch.float64)
        for column, (residual_N, length) in enumerate(zip(residual_BN, lengths_B, strict=True), start=begin):
            self._coupling_BM[: len(self._next_BN), column] = self._orthogonal_to_next(residual_N)
            beta = float(lengths(residual_N[None]))
            if beta > self.rounding and len(self._next_BN) < len(self._coupling_BM):
                residual_N /= beta
                if beta < 1e-3 * float(length):  # what is left of a long vector leans on the basis again
                    self._orthonormalise(residual_N)
                self._coupling_BM[len(self._next_BN), column] = beta
                self._append_next(residual_N)
        self._fill_next()

    def ritz(self) -> Ritz:
        """Eigenpairs of the projected matrix T (Rayleigh-Ritz), and their residuals."""
        m = self.size
        H_MM = self._H_MM[:m, :m]
        T_MM = H_MM.triu() + H_MM.triu(1).mT
        values_M, vectors_MM = torch.linalg.eigh(T_MM)
        couplings_M = lengths((self._coupling_BM @ vectors_MM).mT)
        noise_M = lengths(((H_MM - T_MM) @ vectors_MM).mT)
        lost_M = (self._lost_M[:m] @ vectors_MM.abs()).clamp(max=self._lost)
        return Ritz(values_M, vectors_MM, couplings_M, noise_M + lost_M, float(lengths((H_MM - T_MM).reshape(1, -1))))

    def restart(self, ritz: Ritz, kept: Tensor, anew: bool) -> None:
        """Reduce the basis to the Ritz vectors with the indices `kept`; `anew` replaces the next block by a random one.

        With `anew` the coupling to the old block is dropped, and its norm is added to the bounds of the residuals.
        """
        vectors_MP = ritz.vectors_MM[:, kept]
        rounded = torch.finfo(self._rows_MN.dtype).eps / 2 * self.scale
        added_P = ritz.couplings_M[kept] + rounded if anew else torch.full((len(kept),), rounded, dtype=torch.float64)
        self._lost += ritz.asymmetry + float(lengths(added_P[None]))
        self._lost_M.zero_()
        self._lost_M[: len(kept)] = ritz.losses_M[kept] + added_P
        self._combine_in_place(vectors_MP)
        self.size = len(kept)
        self._H_MM.zero_()
        self._H_MM[: self.size, : self.size] = torch.diag(ritz.values_M[kept])
        self._coupling_BM = self._coupling_BM @ vectors_MP
        if anew:
            self._begin_anew()

    def residuals(self, values_K: Tensor, vectors_MK: Tensor) -> Tensor:
        """‖M x − θ x‖ of k Ritz pairs with values θ and vectors x = Vᵀs, [k], by one product with M for each."""
        found = []
        for begin in range(0, len(values_K), self._block_size):
            block = slice(begin, begin + self._block_size)
            x_NB = self.combined(vectors_MK[:, block])
            product_NB = self._operator.checked_matmat(x_NB).double()
            found.append(lengths((product_NB - x_NB.double() * values_K[block].to(x_NB.device)).mT).cpu())
            self.matvecs += x_NB.shape[1]
        return torch.cat(found)

    def combined(self, vectors_MK: Tensor) -> Tensor:
        """Vᵀ S, [n, k], for coefficients S [m, k] in the basis, on the operator's device."""
        rows_MN = self._rows_MN[: self.size]
        combined_NK = rows_MN.new_empty(rows_MN.shape[1], vectors_MK.shape[1])
        for part in self._parts():
            combined_NK[part] = (rows_MN[:, part].double().mT @ vectors_MK.to(rows_MN.device)).to(rows_MN.dtype)
        return combined_NK.to(self._operator.device)

    def _combine_in_place(self, vectors_MP: Tensor) -> None:
        """Replace the first p rows of the basis V by Sᵀ V for S [m, p], some columns at a time."""
        m, p = vectors_MP.shape
        vectors_PM = vectors_MP.mT.to(self._rows_MN.device)
        for part in self._parts():
            self._rows_MN[:p, part] = (vectors_PM @ self._rows_MN[:m, part].double()).to(self._rows_MN.dtype)

    def _parts(self) -> list[slice]:
        return parts(self.size, self._operator.dim, self._rows_MN.device)

    def _begin_anew(self) -> None:
        """Set the next block to random vectors that are orthogonal to the basis, without coupling."""
        self._next_BN = self._rows_MN.new_empty(0, self._operator.dim)
        rows = min(self._block_size, self._operator.dim - self.size)
        self._coupling_BM = torch.zeros(rows, self.size, dtype=torch.float64)
        self._fill_next()
        self.breakdowns -= rows

    def _fill_next(self) -> None:
        """Append random vectors, orthogonal to the basis and to each other, to the next block until it is full."""
        while len(self._next_BN) < len(self._coupling_BM):
            random_N = torch.randn(self._operator.dim, generator=self._generator, device=self._generator.device)
            random_N = random_N.to(device=self._rows_MN.device, dtype=torch.float64)
            self._orthonormalise(random_N)
            self._append_next(random_N)
            self.breakdowns += 1

    def _append_next(self, vector_N: Tensor) -> None:
        self._next_BN = torch.cat([self._next_BN, vector_N[None].to(self._next_BN.dtype)])

    def _orthonormalise(self, vector_N: Tensor) -> None:
        """Make a vector orthogonal to the basis V and the next block Q, and of length 1, in place."""
        for _ in range(2):
            self._orthogonalised(vector_N[None])
            self._orthogonal_to_next(vector_N)
            vector_N /= vector_N.norm()

    def _orthogonalised(self, vectors_BN: Tensor) -> Tensor:
        """Subtract from float64 vectors their projection on the basis V, in place; return the coefficients [m, b]."""
        return orthogonalise(vectors_BN, self._rows_MN[: self.size])

    def _orthogonal_to_next(self, vector_N: Tensor) -> Tensor:
        """Subtract from one float64 vector its projection on the next block Q, in place; return the coefficients [b]."""
        taken_B = torch.zeros(len(self._next_BN), dtype=torch.float64)
        for _ in range(2):
            for i, row_N in enumerate(self._next_BN.double()):
                share = row_N @ vector_N
                vector_N -= share * row_N
                taken_B[i] += share.cpu()
        return taken_B
