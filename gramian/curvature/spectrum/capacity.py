r"""Capacity metrics: what the eigenvalues of the estimated Fisher say of a layer and of a model.

The eigenvalues of a block G ⊗ A are all products α_j·σ_i, so sums over them are products of sums over each side:

| metric | of a block | of a model |
|---|---|---|
| trace | Σα·Σσ | Σ |
| frobenius | √(Σα²·Σσ²) | √Σ² |
| max_eigenvalue | α_max·σ_max | max |
| participation_ratio | tr²/‖F‖_F² | (Σtr)²/Σ‖·‖_F² |
| entropy_rank | exp(H_A + H_G), H the entropy of λ/Σλ | exp(Σ_b w_b(H_b − log w_b)), w_b = tr_b/tr |
| stable_rank | ‖F‖_F²/λ_max² | the same |
| numerical_rank | eigenvalues above rank_rtol·λ_max, rank_rtol = max(o, m)·ε, or the rounding of sides at rest | Σ |
| log_det | Σ_ij log(α_jσ_i + λ) | Σ |
| effective_dimension | Σ_ij α_jσ_i/(α_jσ_i + λ) | Σ |
| condition_number | (λ_max + λ)/(λ_min + λ) | the same |
| pac_bayes | √(tr/n): a heuristic, no bound | the same |

EK-FAC's eigenvalues are o·m numbers of their own, of which the same are taken: a block that is no product.

Nothing is damped, clipped or cut off but where λ is written, and nothing is added to a denominator. Ranks of a zero matrix
are 0. Cost beyond the spectra (`sides`): o·m logarithms and exponentials a block, `products.CHUNK` at a time.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.curvature.blocks.block import Block
from gramian.curvature.blocks.block_specs import Spec
from gramian.curvature.spectrum import wide_side_spectra
from gramian.curvature.spectrum.side_spectra import ONE, SideSpectrum, estimate, is_estimated, leading, sides_of
from gramian.curvature.spectrum.spectrum_products import Values, count_above, damped_sums, largest_products
from gramian.linalg import Factor
from gramian.parallel.exchange import Exchange

ESTIMATED_BY = (
    f"stochastic Lanczos quadrature: {wide_side_spectra.PROBES} probes of {wide_side_spectra.STEPS} steps; "
    "errors are 3 standard errors and what the second half of the steps changed"
)
HEURISTIC = "heuristic: √(trace/n), no bound"


class SpectrumEstimate(NamedTuple):
    """A number, and what it may be off by; 0: exact up to rounding."""

    value: float
    error: float = 0.0


@dataclass(frozen=True)
class Spectrum:
    """All that the metrics need of the eigenvalues of a block, or of several: sums of them, apart from their scale."""

    largest: float
    log_largest: float
    """-inf: all of them are zero."""
    log_smallest: float
    log_smallest_bound: float
    """What the logarithm of the smallest does not exceed; the same where that is exact."""
    mass: float
    """Σ λ/λ_max."""
    squares: float
    """Σ (λ/λ_max)²."""
    entropy: SpectrumEstimate
    """In nats."""
    log_det: SpectrumEstimate
    effective_dimension: SpectrumEstimate
    numerical_rank: SpectrumEstimate
    rank_rtol: float
    largest_error: float = 0.0

    @property
    def log_trace(self) -> float:
        """Of the largest eigenvalue and the sum of all relative to it."""
        return self.log_largest + (math.log(self.mass) if self.mass else 0.0)


def capacity_metrics(
    blocks: Mapping[str, Block],
    damping: float,
    n: float | None,
    coverage: Mapping[str, float],
    others: Exchange | None,
) -> dict[str, Any]:
    """Metrics of every block and of all together. Collective.

    Args:
        blocks: {name: block}, the same on all processes.
        damping: λ of F + λI.
        n: samples, for pac_bayes; None: without it.
        coverage: goes into the result.
        others: the processes that hold the same factors; None: this one alone.

    Returns:
        {"layers": {name: metrics}, "model": metrics and coverage}.
    """
    _agree(others, {"asked": "capacity metrics", "damping": damping, "n": n})
    with torch.no_grad():
        sides = _sides(blocks, others)
        found = {
            name: _measure(*_pair(block, sides), damping, max(block.spec.outputs, block.spec.inputs), block.G.device)
            for name, block in blocks.items()
        }
    layers = {name: _report(spectrum, damping, n) for name, spectrum in found.items()}
    model = _report(_together(list(found.values())), damping, n)
    return {"layers": layers, "model": {**model, "coverage": dict(coverage)}}


def top_eigenvalues(blocks: Mapping[str, Block], k: int, others: Exchange | None) -> Tensor:
    """The k largest eigenvalues of all blocks together, [k], descending, float64 on the CPU. Collective.

    Sorted spectra of both sides and a heap: O(k log k) beyond the spectra, no eigenvector, no Lanczos but for sides that are
    too wide to be written out.

    Raises:
        GramianError: if there are fewer than k directions.
    """
    _agree(others, {"asked": "top eigenvalues", "k": k})
    directions = sum(block.G.dim * (1 if block.A is None else block.A.dim) for block in blocks.values())
    if k > directions:
        raise GramianError(f"k: the blocks have {directions} directions in all; expected at most that many, got {k}")
    with torch.no_grad():
        factors = _factors(blocks)
        sides = sides_of(factors, others)
        sides |= {id(one): SideSpectrum.of(leading(one, k)) for one in factors if is_estimated(one)}
        found = [_pair(block, sides) for block in blocks.values()]
    pairs = [(G.parts[0], A.parts[0]) for A, G in found]
    return torch.tensor(largest_products(pairs, k), dtype=torch.float64)


def coverage_of(specs: Mapping[str, Spec], blocks: Mapping[str, Block], others: Mapping[str, int]) -> dict[str, float]:
    """Which share of the trained parameters has which kind of block, and how many parameters that is of.

    Args:
        specs: of the blocks that the model has.
        blocks: those that have factors.
        others: {trained parameter that is in no block: its size}.

    Returns:
        {"parameters": count, "kronecker", "block", "diagonal", "none": shares that add up to 1}.
    """
    known = {**specs, **{name: block.spec for name, block in blocks.items()}}
    sizes = {"kronecker": 0, "block": 0, "diagonal": 0, "none": sum(others.values())}
    for name, spec in known.items():
        sizes[spec.kind if name in blocks else "none"] += sum(math.prod(shape) for shape in spec.shapes)
    total = sum(sizes.values())
    return {"parameters": total, **{kind: size / total for kind, size in sizes.items()}}


def _agree(others: Exchange | None, asked: Mapping[str, Any]) -> None:
    """Raise, on all processes, if they do not ask for the same: they would wait for each other in different collectives."""
    if others is None:
        return
    first, *rest = others.tell(asked)
    for rank, other in enumerate(rest, start=1):
        for name, value in other.items():
            if first.get(name) != value:
                unlike = f"process {rank} asks for {value}, process 0 for {first.get(name)}"
                raise GramianError(f"{name}: {unlike}; expected the same on all processes")


# ---- one block -------------------------------------------------------------------------------------------------------


def _factors(blocks: Mapping[str, Block]) -> list[Factor]:
    """Those whose spectra are asked for."""
    plain = [block for block in blocks.values() if block.correction is None]
    return list({id(f): f for block in plain for f in block.factors.values()}.values())


def _pair(block: Block, sides: Mapping[int, SideSpectrum]) -> tuple[SideSpectrum, SideSpectrum]:
    """The spectra whose products are the block's eigenvalues."""
    if block.correction is not None:
        values = block.correction.values_RS
        return ONE, SideSpectrum.of(
            Values.of(values.flatten(), block.G.dim * block.correction.A.dim), torch.finfo(values.dtype).eps
        )
    return (ONE if block.A is None else sides[id(block.A)]), sides[id(block.G)]


def _sides(blocks: Mapping[str, Block], others: Exchange | None) -> dict[int, SideSpectrum]:
    factors = _factors(blocks)
    return sides_of(factors, others) | {id(one): estimate(one) for one in factors if is_estimated(one)}


def _measure(A: SideSpectrum, G: SideSpectrum, damping: float, widest: int, device: torch.device) -> Spectrum:
    """The eigenvalues of G ⊗ A; `widest`: the wider side of the block."""
    rtol = max(widest * max(A.eps, G.eps), A.noise + G.noise)

    def sums(a: Values, g: Values) -> tuple[float, float, float]:
        return *damped_sums(g, a, damping, device), count_above(g, a, rtol)

    log_det, dimension, rank = _estimates(A, G, sums)
    entropies = [_entropy(side) for side in (A, G)]
    return Spectrum(
        largest=A.largest * G.largest,
        log_largest=_log(A.largest) + _log(G.largest),
        log_smallest=_log(A.smallest) + _log(G.smallest),
        log_smallest_bound=_log(A.smallest + A.smallest_error) + _log(G.smallest + G.smallest_error),
        mass=A.mass * G.mass,
        squares=A.squares * G.squares,
        entropy=SpectrumEstimate(sum(e.value for e in entropies), sum(e.error for e in entropies)),
        log_det=log_det,
        effective_dimension=dimension,
        numerical_rank=rank,
        rank_rtol=rtol,
        largest_error=A.largest_error * G.largest + G.largest_error * A.largest,
    )


def _estimates(A: SideSpectrum, G: SideSpectrum, function: Any) -> list[SpectrumEstimate]:
    """A function of two spectra; where one of them is a quadrature, the mean over its probes."""
    fine = list(zip(*(function(a, g) for a, g in _pairs(A.parts, G.parts)), strict=True))
    if not (A.coarse or G.coarse):
        return [SpectrumEstimate(values[0]) for values in fine]
    pairs = _pairs(A.coarse or A.parts, G.coarse or G.parts)
    coarse = list(zip(*(function(a, g) for a, g in pairs), strict=True))
    return [_mean(values, before) for values, before in zip(fine, coarse, strict=True)]


def _pairs(left: Sequence[Values], right: Sequence[Values]) -> list[tuple[Values, Values]]:
    """Probe with probe; a spectrum without probes goes with each."""
    count = max(len(left), len(right))
    return [(left[i % len(left)], right[i % len(right)]) for i in range(count)]


def _mean(fine: Sequence[float], coarse: Sequence[float]) -> SpectrumEstimate:
    mean = fmean(fine)
    return SpectrumEstimate(mean, 3 * stdev(fine) / len(fine) ** 0.5 + abs(mean - fmean(coarse)))


def _entropy(side: SideSpectrum) -> SpectrumEstimate:
    """−Σ p log p with p = σ/Σσ: log Σs − Σ s log s/Σs with s = σ/σ_max."""
    if not side.mass:
        return SpectrumEstimate(0.0)

    def nats(values: Values, _: Values) -> tuple[float]:
        relative = values.positive_R / side.largest
        negative = torch.special.entr(relative)
        total = negative.sum() if values.weights_R is None else negative @ values.weights_R
        return (math.log(side.mass) + float(total) / side.mass,)

    return _estimates(side, ONE, nats)[0]


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def _exp(value: float) -> float:
    """Infinity beyond float64."""
    return float(torch.tensor(value, dtype=torch.float64).exp())


def _log_sum(a: float, b: float) -> float:
    """log(exp a + exp b)."""
    return max(a, b) + math.log1p(math.exp(-abs(a - b)))


# ---- several blocks --------------------------------------------------------------------------------------------------


def _together(blocks: Sequence[Spectrum]) -> Spectrum:
    """The eigenvalues of a block-diagonal matrix."""
    top = max(blocks, key=lambda block: block.log_largest)
    some = [block for block in blocks if block.log_largest > -math.inf]
    scales = [math.exp(block.log_largest - top.log_largest) for block in some]
    reference = max((block.log_trace for block in some), default=0.0)
    shares = [math.exp(block.log_trace - reference) for block in some]
    total = math.fsum(shares)
    weights = [share / total for share in shares]
    return Spectrum(
        largest=top.largest,
        log_largest=top.log_largest,
        log_smallest=min(block.log_smallest for block in blocks),
        log_smallest_bound=min(block.log_smallest_bound for block in blocks),
        mass=math.fsum(block.mass * scale for block, scale in zip(some, scales, strict=True)),
        squares=math.fsum(block.squares * scale**2 for block, scale in zip(some, scales, strict=True)),
        entropy=SpectrumEstimate(
            math.fsum(w * (block.entropy.value - math.log(w)) for block, w in zip(some, weights, strict=True) if w),
            math.fsum(w * block.entropy.error for block, w in zip(some, weights, strict=True)),
        ),
        log_det=_sum([block.log_det for block in blocks]),
        effective_dimension=_sum([block.effective_dimension for block in blocks]),
        numerical_rank=_sum([block.numerical_rank for block in blocks]),
        rank_rtol=max(block.rank_rtol for block in blocks),
        largest_error=max(block.largest_error for block in blocks),
    )


def _sum(estimates: Sequence[SpectrumEstimate]) -> SpectrumEstimate:
    return SpectrumEstimate(math.fsum(e.value for e in estimates), math.fsum(e.error for e in estimates))


def _report(spectrum: Spectrum, damping: float, n: float | None) -> dict[str, Any]:
    """The metrics by name; those that are not exact have an error beside them."""
    zero = spectrum.log_largest == -math.inf
    trace = spectrum.largest * spectrum.mass
    entropy_rank = 0.0 if zero else math.exp(spectrum.entropy.value)
    log_low, log_bound, log_high = (
        _log_sum(value, math.log(damping))
        for value in (spectrum.log_smallest, spectrum.log_smallest_bound, spectrum.log_largest)
    )
    condition = _exp(log_high - log_low)
    found: dict[str, Any] = {
        "trace": trace,
        "frobenius": spectrum.largest * spectrum.squares**0.5,
        "max_eigenvalue": spectrum.largest,
        "participation_ratio": 0.0 if zero else spectrum.mass**2 / spectrum.squares,
        "entropy_rank": entropy_rank,
        "stable_rank": spectrum.squares,
        "numerical_rank": spectrum.numerical_rank.value,
        "rank_rtol": spectrum.rank_rtol,
        "damping": damping,
        "log_det": spectrum.log_det.value,
        "effective_dimension": spectrum.effective_dimension.value,
        "condition_number": condition,
    }
    if n is not None:
        found |= {"pac_bayes": (trace / n) ** 0.5, "pac_bayes_label": HEURISTIC}
    top_error = spectrum.largest_error
    uncertain = top_error / (spectrum.largest + damping) - math.expm1(log_low - log_bound)
    errors = {
        "max_eigenvalue": top_error,
        "stable_rank": 2 * spectrum.squares * top_error / spectrum.largest if top_error else 0.0,
        "entropy_rank": entropy_rank * math.expm1(spectrum.entropy.error),
        "numerical_rank": spectrum.numerical_rank.error,
        "log_det": spectrum.log_det.error,
        "effective_dimension": spectrum.effective_dimension.error,
        "condition_number": condition * uncertain if uncertain else 0.0,
    }
    if any(errors.values()):
        found |= {"error": {name: error for name, error in errors.items() if error}, "estimated_by": ESTIMATED_BY}
    return found
