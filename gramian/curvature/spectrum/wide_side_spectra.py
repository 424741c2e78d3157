"""Spectra of factors diag(d) ± U Uᵀ that are too wide for a dense matrix: an exact softmax head, or one tied to an embedding.

Sums Σ_i f(σ_i) come from stochastic Lanczos quadrature: for a random z of ±1, K steps of Lanczos give nodes θ and weights w
with zᵀf(M)z ≈ Σ_k w_k f(θ_k), and E zᵀf(M)z = Σ_i f(σ_i). Single eigenvalues come from Lanczos.

Legend: n width, r columns of U, P probes (vectors z), K steps, k eigenvalues. All processes draw the same probes from a seed,
so processes that shard the rows of U compute the same steps.
"""

import torch
from torch import Tensor

from gramian.curvature.spectrum.spectrum_products import Values
from gramian.linalg import DiagonalLowRank
from gramian.linalg.spectra.lanczos import lanczos
from gramian.linalg.spectra.operator import Operator

PROBES, STEPS, SEED = 16, 80, 0
BLOCK, RESIDUAL = 4, 1e-7
"""Block Lanczos: number of columns of a product, and the residual relative to σ_max at which it stops."""


class WideSide(Operator):
    """A factor M = diag(d) ± U Uᵀ as an operator."""

    def __init__(self, factor: DiagonalLowRank) -> None:
        self.factor, self.dim, self.dtype = factor, factor.dim, torch.float64
        self.device = factor.stored.home or factor.stored.body.device

    def matmat(self, y_NK: Tensor) -> Tensor:
        """M Y = d ⊙ Y ± U(UᵀY) for Y [n, k], float64 on Y's device. 4·n·r·k FLOPs; collective for sharded rows of U."""
        image = self.factor.columns.times(self.factor.columns.transposed_times(y_NK))
        return image.mul_(self.factor.sign).addcmul_(self.factor.values_N.to(y_NK)[:, None], y_NK)


def quadrature(factor: DiagonalLowRank) -> tuple[tuple[Values, ...], tuple[Values, ...]]:
    """Stochastic Lanczos quadrature of a factor: nodes and weights of each probe, after K steps and after K/2.

    Unlike `linalg.quadrature`, no basis is stored for reorthogonalisation, since n is large: a direction that recurs splits its
    node into two whose weights have the same sum. A probe whose Krylov space is exhausted continues with zeros, which get no
    weight. Cost: 4·n·r·P·K FLOPs, 4·8·n·P bytes.
    """
    n, side = factor.dim, WideSide(factor)
    generator = torch.Generator().manual_seed(SEED)
    v_NP = (
        torch.randint(2, (n, PROBES), generator=generator).mul_(2).sub_(1).to(side.device, torch.float64).div_(n**0.5)
    )
    before_NP, off_P = torch.zeros_like(v_NP), v_NP.new_zeros(PROBES)
    diagonal: list[Tensor] = []
    beside: list[Tensor] = []
    for _ in range(STEPS):
        next_NP = side.matmat(v_NP).sub_(before_NP.mul_(off_P))
        diagonal.append((next_NP * v_NP).sum(0))
        next_NP.sub_(diagonal[-1] * v_NP)
        off_P = next_NP.norm(dim=0)
        size_P = torch.stack(diagonal).abs().amax(0)
        off_P = torch.where(off_P > torch.finfo(torch.float64).eps * size_P, off_P, 0.0)
        beside.append(off_P)
        before_NP, v_NP = v_NP, next_NP.mul_(torch.where(off_P > 0, 1 / off_P, 0.0))
    alpha_PK, beta_PK = torch.stack(diagonal, 1).cpu(), torch.stack(beside, 1).cpu()
    half = STEPS // 2
    return _gauss(alpha_PK, beta_PK, n), _gauss(alpha_PK[:, :half], beta_PK[:, :half], n)


def _gauss(alpha_PK: Tensor, beta_PK: Tensor, n: int) -> tuple[Values, ...]:
    """Gauss quadrature of P Lanczos probes, one `Values` each: nodes, and weights that sum to n.

    α and β are the diagonals and off-diagonals of the probes' tridiagonal matrices.
    """
    beta_PK = beta_PK[:, :-1]
    matrices = alpha_PK.diag_embed() + beta_PK.diag_embed(1) + beta_PK.diag_embed(-1)
    nodes_PK, vectors = torch.linalg.eigh(matrices)
    weights_PK = n * vectors[:, 0].square()
    return tuple(Values.of(theta, n, w) for theta, w in zip(nodes_PK, weights_PK, strict=True))


def leading(factor: DiagonalLowRank, k: int) -> tuple[Tensor, float]:
    """The k largest eigenvalues of a factor, descending, float64 on the CPU, and a bound on their errors.

    Block Lanczos, which finds repeated eigenvalues. Cost: 4·n·r FLOPs a product, some 20 + 5k of them; 8·n·(2k + 44) bytes.
    """
    found = lanczos(WideSide(factor), k, "LA", tol=RESIDUAL, block_size=BLOCK, max_basis=2 * k + 40)
    return found.eigenvalues.cpu().clamp(min=0), float(found.residual_bounds.max())


def smallest_bound(factor: DiagonalLowRank) -> float:
    """An upper bound of the smallest eigenvalue of a factor M: the smallest entry of its diagonal."""
    return max(0.0, float((factor.values_N.double() + factor.sign * factor.columns.squares_N()).min()))
