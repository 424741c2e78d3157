"""Spectra of sides diag(d) ± U Uᵀ that are too wide to be written out: the exact softmax head, a tied head and embedding.

Sums Σ_i f(σ_i) come from stochastic Lanczos quadrature: for a random z of ±1, K steps of Lanczos give nodes θ and weights w
with zᵀf(M)z ≈ Σ_k w_k f(θ_k), and E zᵀf(M)z = Σ_i f(σ_i). Single eigenvalues from the large end come from block Krylov spaces.

Legend: n side, r columns of U, P probes, K steps, k eigenvalues. Probes are drawn from a seed, the same everywhere: processes
that share U by rows go through the same steps together.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gramian.curvature.products import Values
from gramian.linalg import DiagonalLowRank

PROBES, STEPS, SEED = 16, 80, 0
SPARE, DEPTH, RESTARTS, RESIDUAL = 8, 3, 40, 1e-7
"""Of block Krylov spaces: columns beside the k asked for, products before a restart, restarts, and the residual, relative to
σ_max, at which they end."""


@dataclass(frozen=True)
class Quadrature:
    """Estimates of one spectrum, one for each probe."""

    parts: tuple[Values, ...]
    """Nodes and weights after K steps, by probe."""
    coarse: tuple[Values, ...]
    """After K/2 steps: what the second half still changed says how far the sums have converged."""


def product(factor: DiagonalLowRank, y_NK: Tensor) -> Tensor:
    """M Y in float64 on Y's device. 4·n·r·k FLOPs; collective where rows of U are spread over processes."""
    image = factor.columns.times(factor.columns.transposed_times(y_NK))
    return image.mul_(factor.sign).addcmul_(factor.values_N.to(y_NK)[:, None], y_NK)


def quadrature(factor: DiagonalLowRank) -> Quadrature:
    """Stochastic Lanczos quadrature of M.

    No vector is kept for reorthogonalisation: what is lost splits a node in two of the same sum. A probe whose Krylov space
    ends early goes on with zeros, which get no weight. Cost: 4·n·r·P·K FLOPs, 4·8·n·P bytes.
    """
    n, device = factor.dim, _working_device(factor)
    generator = torch.Generator().manual_seed(SEED)
    v_NP = torch.randint(2, (n, PROBES), generator=generator).mul_(2).sub_(1).to(device, torch.float64).div_(n**0.5)
    before_NP, off_P = torch.zeros_like(v_NP), v_NP.new_zeros(PROBES)
    diagonal: list[Tensor] = []
    beside: list[Tensor] = []
    for _ in range(STEPS):
        next_NP = product(factor, v_NP).sub_(before_NP.mul_(off_P))
        diagonal.append((next_NP * v_NP).sum(0))
        next_NP.sub_(diagonal[-1] * v_NP)
        off_P = next_NP.norm(dim=0)
        size_P = torch.stack(diagonal).abs().amax(0)
        off_P = torch.where(off_P > torch.finfo(torch.float64).eps * size_P, off_P, 0.0)
        beside.append(off_P)
        before_NP, v_NP = v_NP, next_NP.mul_(torch.where(off_P > 0, 1 / off_P, 0.0))
    alpha_PK, beta_PK = torch.stack(diagonal, 1).cpu(), torch.stack(beside, 1).cpu()
    half = STEPS // 2
    return Quadrature(_gauss(alpha_PK, beta_PK, n), _gauss(alpha_PK[:, :half], beta_PK[:, :half], n))


def _gauss(alpha_PK: Tensor, beta_PK: Tensor, n: int) -> tuple[Values, ...]:
    """Nodes and weights from the tridiagonal matrices of Lanczos; weights add up to n."""
    beta_PK = beta_PK[:, :-1]
    matrices = alpha_PK.diag_embed() + beta_PK.diag_embed(1) + beta_PK.diag_embed(-1)
    nodes_PK, vectors = torch.linalg.eigh(matrices)
    weights_PK = n * vectors[:, 0].square()
    return tuple(Values.of(theta, n, w) for theta, w in zip(nodes_PK, weights_PK, strict=True))


def leading(factor: DiagonalLowRank, k: int) -> tuple[Tensor, float]:
    """The k largest eigenvalues, descending, float64 on the CPU, and what each of them is off by at most.

    Rayleigh-Ritz on span(Y, MY, …), begun again from the best k + `SPARE` vectors until no residual ‖Mx − θx‖ of the k exceeds
    `RESIDUAL`·σ_max: an eigenvalue lies within the residual of every θ. Copies of one are found up to the width of Y.
    Cost: about 4·n·r·(k + 8)·4 FLOPs a restart, 3·8·n·(k + 8)·4 bytes.
    """
    n, device = factor.dim, _working_device(factor)
    width = min(n, k + SPARE)
    start = torch.randn(n, width, dtype=torch.float64, generator=torch.Generator().manual_seed(SEED))
    y_NW = torch.linalg.qr(start.to(device)).Q
    values, residual = torch.zeros(k, dtype=torch.float64), 0.0
    for _ in range(RESTARTS):
        blocks = [y_NW]
        for _ in range(DEPTH):
            blocks.append(torch.linalg.qr(product(factor, blocks[-1])).Q)
        basis = torch.linalg.qr(torch.cat(blocks, 1)[:, :n]).Q
        image = product(factor, basis)
        small = basis.mT @ image
        theta, mix = torch.linalg.eigh((small + small.mT) / 2)
        theta, mix = theta.flip(0)[:width], mix.flip(1)[:, :width]
        y_NW = basis @ mix
        values, residual = theta[:k].cpu(), float((image @ mix[:, :k] - y_NW[:, :k] * theta[:k]).norm(dim=0).max())
        if residual <= RESIDUAL * float(values[0]):
            break
    return values.clamp(min=0), residual


def smallest_bound(factor: DiagonalLowRank) -> float:
    """What σ_min does not exceed: the smallest diagonal entry of M."""
    return max(0.0, float((factor.values_N.double() + factor.sign * factor.columns.squares_N()).min()))


def _working_device(factor: DiagonalLowRank) -> torch.device:
    return factor.stored.home or factor.stored.body.device
