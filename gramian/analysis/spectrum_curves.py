"""Spectra as curves: the number of eigenvalues above a value, and their density per decade.

Legend: P probes, S nodes of each, T points of a curve.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gramian.curvature import Block
from gramian.curvature.spectrum.side_spectra import ONE, SideSpectrum, estimate, is_estimated, sides_of
from gramian.curvature.spectrum.spectrum_products import Values, count_above
from gramian.parallel.exchange import Exchange

POINTS = 121
"""Number of points of a layer's curve, evenly spaced in the logarithm of the eigenvalue."""
DECADES = 12
"""Number of decades below the largest eigenvalue that a layer's curve covers."""
PER_DECADE = 10
"""Number of points at which a spectral density is evaluated in each decade."""
KERNEL = 0.2
"""Smallest standard deviation of the Gaussian that smooths a density, in decades; wider if quadrature nodes are far apart."""


def layer_spectra(blocks: Mapping[str, Block], group: Exchange | None = None) -> dict[str, dict[str, list[float]]]:
    """{layer: {"eigenvalues": descending values, "ranks": number of eigenvalues of the layer's K-FAC block above each}}.

    Counts come from the spectra of the factors A and G without forming their product, so a vocabulary-sized layer costs no more
    than its factors. If a factor is too wide to be decomposed, counts are means over random probes of its quadrature.
    Collective: the processes of `group` share the decompositions; None: this process alone has the factors.
    """
    plain = [block for block in blocks.values() if block.correction is None]
    factors = list({id(f): f for block in plain for f in block.factors.values()}.values())
    sides = sides_of(factors, group) | {id(one): estimate(one) for one in factors if is_estimated(one)}
    found = {}
    for name, block in blocks.items():
        A, G = _pair(block, sides)
        largest = A.largest * G.largest
        shares = [10 ** (-DECADES * i / (POINTS - 1)) for i in range(POINTS)] if largest > 0 else []
        # Slightly lower thresholds, so that the largest eigenvalue counts as above itself.
        ranks = [_count(A, G, share * (1 - 1e-12)) for share in shares]
        found[name] = {"eigenvalues": [largest * share for share in shares], "ranks": ranks}
    return found


def _pair(block: Block, sides: Mapping[int, SideSpectrum]) -> tuple[SideSpectrum, SideSpectrum]:
    """Spectra of a K-FAC block's factors A and G; if EK-FAC corrects the block, a single 1 and the corrected eigenvalues.

    `sides` is {id of a factor: its spectrum}; without A its spectrum is a single 1.
    """
    if block.correction is not None:
        values = Values.of(block.correction.values_RS.flatten(), block.G.dim * block.correction.A.dim)
        return ONE, SideSpectrum.of(values)
    return (ONE if block.A is None else sides[id(block.A)]), sides[id(block.G)]


def _count(A: SideSpectrum, G: SideSpectrum, share: float) -> float:
    parts = max(len(A.parts), len(G.parts))
    counts = [count_above(G.parts[i % len(G.parts)], A.parts[i % len(A.parts)], share) for i in range(parts)]
    return math.fsum(counts) / parts


def kfac_density(spectra: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """K-FAC's eigenvalues per decade, all layers together, smoothed and returned as in `ggn_density`, for comparison.

    `spectra` is the result of `layer_spectra`.
    """
    values, weights = [], []
    for curve in spectra.values():
        before = 0.0
        for value, rank in zip(curve["eigenvalues"], curve["ranks"], strict=True):
            if rank > before:
                values.append(value)
                weights.append(rank - before)
            before = rank
    return _per_decade(*(torch.tensor([one], dtype=torch.float64) for one in (values, weights)))


def ggn_density(nodes_PS: Tensor, weights_PS: Tensor, resolution: float) -> dict[str, list[float]]:
    """Density of the Gauss-Newton matrix's spectrum, in eigenvalues per decade, from the Gauss rules of random probes.

    A probe has nodes θ_i and weights w_i, both [probes, nodes]; nodes up to `resolution` are left out. The density at t is
    Σ_i w_i N(log₁₀ t; log₁₀ θ_i, σ_i²) with the normal density N; σ_i is half the mean distance to the neighbouring nodes, at
    least 0.2: a Gauss rule does not resolve what lies between two nodes.

    Returns:
        {"eigenvalues": points t, "per_decade": mean density over probes at each, "standard_error": of that mean}.
    """
    return _per_decade(nodes_PS, torch.where(nodes_PS > resolution, weights_PS, 0.0))


def _per_decade(nodes_PS: Tensor, weights_PS: Tensor) -> dict[str, list[float]]:
    positive = weights_PS > 0
    if not bool(positive.any()):
        return {"eigenvalues": [], "per_decade": [], "standard_error": []}
    logs_PS = torch.where(positive, nodes_PS.double(), 1.0).log10()
    low, high = float(logs_PS[positive].min()) - KERNEL, float(logs_PS[positive].max()) + KERNEL
    grid_T = torch.linspace(low, high, max(2, math.ceil((high - low) * PER_DECADE) + 1), dtype=torch.float64)
    densities = [
        _smoothed(logs_S[k], w_S[k], grid_T) for logs_S, w_S, k in zip(logs_PS, weights_PS, positive, strict=True)
    ]
    density_PT = torch.stack(densities)
    error_T = density_PT.std(0) / math.sqrt(len(density_PT)) if len(density_PT) > 1 else torch.zeros_like(grid_T)
    return {
        "eigenvalues": (10**grid_T).tolist(),
        "per_decade": density_PT.mean(0).tolist(),
        "standard_error": error_T.tolist(),
    }


def _smoothed(logs_S: Tensor, weights_S: Tensor, grid_T: Tensor) -> Tensor:
    """A sum of Gaussians Σ_i w_i N(t; x_i, σ_i²) at the points t of `grid_T`, with x_i = `logs_S` and w_i = `weights_S`."""
    logs_S, order = logs_S.sort()
    widths_S = torch.full_like(logs_S, KERNEL)
    if len(logs_S) > 1:
        gaps = logs_S.diff()
        left, right = torch.cat([gaps[:1], gaps]), torch.cat([gaps, gaps[-1:]])
        widths_S = ((left + right) / 4).clamp(min=KERNEL)
    total_T = torch.zeros_like(grid_T)
    for x, w, width in zip(logs_S.tolist(), weights_S.double()[order].tolist(), widths_S.tolist(), strict=True):
        total_T += w * (-((grid_T - x) / width).square() / 2).exp() / (width * math.sqrt(2 * math.pi))
    return total_T
