"""Functions of a spectrum by stochastic Lanczos quadrature: densities, traces of functions, log-determinants.

Legend: n side of the operator M, p probes Z [n, p] with E[z zᵀ] = I, s Lanczos steps for each.

s Lanczos steps from z/‖z‖ give a tridiagonal T = U diag(θ) Uᵀ, and a Gauss quadrature with nodes θ and weights ‖z‖²U_1i²:

    zᵀ f(M) z ≈ ‖z‖² Σ_i U_1i² f(θ_i),    exact for polynomials f of degree 2s − 1,

whose mean over probes estimates tr f(M) (Ubaru, Chen and Saad 2017).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.linalg.spectra.krylov import lengths
from gramian.linalg.spectra.operator import (
    Operator,
    basis_device_of,
    check_counts,
    check_numbers,
    check_operator,
    parts,
    seeded,
    seen,
)
from gramian.linalg.spectra.trace import Distribution, Estimate, random_blocks


@dataclass(frozen=True)
class SmoothDensity:
    """A spectral density on a grid: ρ(t) = mean over probes of Σ_i w_i N(t; θ_i, σ²)/n, with nodes θ_i and weights w_i."""

    grid: Tensor
    """[points], evenly spaced, from 4 kernel widths below the lowest node to 4 above the highest."""
    density: Tensor
    """[points], the density ρ, of integral 1."""
    standard_error: Tensor
    """[points], standard error of the density from the spread over probes; infinite for one probe."""
    kernel_width: float
    """Standard deviation σ of the Gaussian kernel; eigenvalues closer than that are not resolved."""


@dataclass(frozen=True)
class SpectralDensity:
    """The spectrum of a symmetric operator as a measure: nodes and weights of Gauss rules, one rule per random probe."""

    dim: int
    """Side n of the operator."""
    nodes_PS: Tensor
    """Nodes θ [p, s], float64, ascending for every probe. Where a Krylov space is exhausted before s steps, the last repeats.
    """
    weights_PS: Tensor
    """Weights of the nodes [p, s], float64; a probe's weights sum to n in the mean over probes; 0 for repeated nodes."""
    matvecs: int
    """Number of products with vectors that were computed."""
    rounding: float
    """Magnitude below which a node cannot be told from zero because of rounding."""

    def samples(self, f: Callable[[Tensor], Tensor]) -> Tensor:
        """Estimates of zᵀ f(M) z for every probe z, [p], for a function f that maps float64 tensors element by element.

        Raises:
            GramianError: if f is not a function, changes the shape, or is complex or not finite on a node.
        """
        if not callable(f):
            raise GramianError(f"f: {seen(f)}; expected a function of a tensor, element by element")
        values_PS = f(self.nodes_PS)
        if not isinstance(values_PS, Tensor) or values_PS.shape != self.nodes_PS.shape or values_PS.is_complex():
            tensor = isinstance(values_PS, Tensor)
            got = f"{values_PS.dtype} {[*values_PS.shape]}" if tensor else type(values_PS).__name__
            raise GramianError(
                f"f: returned {got}; expected a function that takes {[*self.nodes_PS.shape]} real numbers to as many"
            )
        if not bool(values_PS.isfinite().all()):
            node = float(self.nodes_PS[~values_PS.isfinite()][0])
            raise GramianError(f"f: is not finite at {node:.6g}; expected a function that is finite on the spectrum")
        return (self.weights_PS * values_PS).sum(1)

    def trace_of(self, f: Callable[[Tensor], Tensor]) -> Estimate:
        """Estimate tr f(M) for a function f that maps float64 tensors element by element; errors as in `samples`.

        The standard error is that of the probes alone. It does not include the error of the Gauss quadrature, which is small
        for smooth f and vanishes with more steps.
        """
        return Estimate.of(self.samples(f), self.matvecs)

    def log_det(self, damping: float) -> Estimate:
        """Estimate log det(M + λI), λ = `damping`; the Gauss quadrature itself overestimates it.

        Raises:
            GramianError: if a node shows that M + λI is not positive definite.
        """
        check_numbers(damping=damping)
        lowest = float(self.nodes_PS.min()) + damping
        if not lowest > self.rounding:
            raise GramianError(
                f"damping: is {damping:.6g}, which leaves a Ritz value of M + damping·I at {lowest:.3g}; "
                f"expected a positive definite matrix"
            )
        return self.trace_of(lambda nodes: (nodes + damping).log())

    def smooth(self, kernel_width: float | None = None, points: int = 1024) -> SmoothDensity:
        """The density on a grid, smoothed by a Gaussian kernel.

        Args:
            kernel_width: σ of the kernel; None: the distance from the lowest to the highest node over the number of steps, or
                a thousandth of the node if all nodes are equal.
            points: number of points of the grid, at least 16.

        Raises:
            GramianError: for too few points, or a kernel narrower than the spacing of the grid.
        """
        check_counts(points=points)
        low, high = float(self.nodes_PS.min()), float(self.nodes_PS.max())
        if kernel_width is None:
            lone = 1e-3 * max(abs(low), abs(high)) or 1e-3
            kernel_width = (high - low) / self.nodes_PS.shape[1] if high - low > self.rounding else lone
        check_numbers(kernel_width=kernel_width)
        least = (high - low) / max(1, points - 9)
        if points < 16 or not kernel_width > least:
            raise GramianError(
                f"kernel_width: is {kernel_width:.3g} on {points} points; expected 16 points and more than {least:.3g}"
            )
        grid_G = torch.linspace(low - 4 * kernel_width, high + 4 * kernel_width, points, dtype=torch.float64)
        normal = 1 / (math.sqrt(2 * math.pi) * kernel_width * self.dim)
        densities_PG = torch.stack(
            [
                normal * (-((grid_G[:, None] - nodes_S) / kernel_width).square() / 2).exp() @ weights_S
                for nodes_S, weights_S in zip(self.nodes_PS, self.weights_PS, strict=True)
            ]
        )
        p = len(densities_PG)
        error_G = densities_PG.std(0) / math.sqrt(p) if p > 1 else torch.full_like(grid_G, math.inf)
        return SmoothDensity(grid_G, densities_PG.mean(0), error_G, kernel_width)


def spectral_density(
    operator: Operator,
    probes: int = 16,
    steps: int = 40,
    *,
    distribution: Distribution = "rademacher",
    block_size: int | None = None,
    basis_device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
) -> SpectralDensity:
    """The spectrum of a symmetric operator as nodes and weights, one Gauss quadrature per random probe, by Lanczos.

    Each probe has its own Lanczos recurrence, with full reorthogonalisation, done twice, and sums in float64. The probes of a
    block are multiplied in one product.

    Cost: p·s products, 4·p·s²·n FLOPs beside them, and block_size·s·n numbers.

    Args:
        operator: symmetric; nothing else is assumed.
        probes: p, number of random probes; at least 2 for a standard error.
        steps: s, Lanczos steps for each.
        distribution: of the entries of probes, "rademacher" or "gaussian".
        block_size: probes at a time; None: as many as keep the bases within 2³⁰ bytes, and one at least.
        basis_device: device that stores the bases; None: the operator's.
        generator: source of the probes; None: a fresh one with seed 0. The global one is never touched.

    Raises:
        GramianError: for an argument outside its range, an operator without rows, or a product that is not finite.
    """
    check_operator(operator)
    n, dtype = operator.dim, operator.working_dtype
    check_counts(probes=probes, steps=steps)
    if not n:
        raise GramianError("operator: has no rows; expected one or more")
    steps = min(steps, n)
    if block_size is None:
        block_size = max(1, 2**30 // (steps * n * dtype.itemsize))
    device = basis_device_of(operator, basis_device)
    generator = seeded(operator, generator)
    nodes, weights, matvecs = [], [], 0
    for z_NB in random_blocks(operator, probes, distribution, block_size, generator):
        alpha_BS, beta_BS = _tridiagonal(operator, z_NB, steps, device)
        matvecs += alpha_BS.numel()
        nodes_BS, weights_BS = _gauss(alpha_BS, beta_BS, steps)
        nodes.append(nodes_BS)
        weights.append(weights_BS * z_NB.double().square().sum(0).cpu()[:, None])
    nodes_PS = torch.cat(nodes)
    rounding = operator.rounding * float(nodes_PS.abs().max())
    return SpectralDensity(n, nodes_PS, torch.cat(weights), matvecs, rounding)


def log_det(
    operator: Operator,
    damping: float,
    probes: int = 16,
    steps: int = 40,
    *,
    distribution: Distribution = "rademacher",
    generator: torch.Generator | None = None,
) -> Estimate:
    """Estimate log det(M + λI), λ = `damping`; for several λ use `spectral_density(…).log_det(λ)`, which reuses products.

    Arguments and errors are those of `spectral_density` and `SpectralDensity.log_det`.
    """
    check_numbers(damping=damping)
    density = spectral_density(operator, probes, steps, distribution=distribution, generator=generator)
    return density.log_det(damping)


def _tridiagonal(operator: Operator, z_NB: Tensor, steps: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Lanczos coefficients α and β of every column of Z, each [b, ≤ steps]; those after the first β = 0 are meaningless."""
    n, b = z_NB.shape
    basis_BSN = torch.zeros(b, steps, n, dtype=z_NB.dtype, device=device)
    alpha_BS, beta_BS = torch.zeros(2, b, steps, dtype=torch.float64, device=device)
    scale_B = torch.zeros(b, dtype=torch.float64, device=device)
    next_BN = z_NB.mT.to(device=device, dtype=torch.float64)
    next_BN = next_BN / next_BN.norm(dim=1, keepdim=True)
    for step in range(steps):
        basis_BSN[:, step] = next_BN
        product_NB = operator.checked_matmat(basis_BSN[:, step].mT)
        next_BN = product_NB.mT.to(device=device, dtype=torch.float64, copy=True)
        scale_B = torch.maximum(scale_B, lengths(next_BN))
        alpha_BS[:, step] = _orthogonalise(next_BN, basis_BSN[:, : step + 1])
        beta_B = lengths(next_BN)
        beta_B = torch.where(beta_B > operator.rounding * scale_B, beta_B, 0.0)
        beta_BS[:, step] = beta_B
        if not bool(beta_B.any()):
            return alpha_BS[:, : step + 1].cpu(), beta_BS[:, : step + 1].cpu()
        next_BN = torch.where(beta_B[:, None] > 0, next_BN / beta_B[:, None], 0.0)
    return alpha_BS.cpu(), beta_BS.cpu()


def _orthogonalise(vectors_BN: Tensor, basis_BSN: Tensor) -> Tensor:
    """Subtract from each of b float64 vectors its projection on its own basis, in place, twice.

    Returns:
        Each vector's coefficient on the last basis vector, [b].
    """
    b, s, n = basis_BSN.shape
    taken_B = torch.zeros(b, dtype=torch.float64, device=vectors_BN.device)
    for _ in range(2):
        share_BS = torch.zeros(b, s, dtype=torch.float64, device=vectors_BN.device)
        for part in parts(b * s, n, basis_BSN.device):
            share_BS += torch.einsum("bsn,bn->bs", basis_BSN[..., part].double(), vectors_BN[:, part])
        for part in parts(b * s, n, basis_BSN.device):
            vectors_BN[:, part] -= torch.einsum("bsn,bs->bn", basis_BSN[..., part].double(), share_BS)
        taken_B += share_BS[:, -1]
    return taken_B


def _gauss(alpha_BS: Tensor, beta_BS: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights, each [b, steps], of Gauss quadratures from tridiagonal (α, β), each cut off after its first β = 0."""
    lengths_B = (beta_BS[:, :-1] > 0).cumprod(1).sum(1) + 1
    nodes_BS = torch.zeros(len(alpha_BS), steps, dtype=torch.float64)
    weights_BS = torch.zeros_like(nodes_BS)
    for length in lengths_B.unique().tolist():
        rows = lengths_B == length
        off_BS = beta_BS[rows, : length - 1]
        T_BSS = alpha_BS[rows, :length].diag_embed() + off_BS.diag_embed(1) + off_BS.diag_embed(-1)
        values_BS, vectors_BSS = torch.linalg.eigh(T_BSS)
        nodes_BS[rows] = torch.cat([values_BS, values_BS[:, -1:].expand(-1, steps - length)], dim=1)
        weights_BS[rows, :length] = vectors_BSS[:, 0].square()
    return nodes_BS, weights_BS
