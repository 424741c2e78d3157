r"""Capacity metrics of layers and of the model, from the eigenvalues of the estimated Fisher.

The eigenvalues of a block G ⊗ A are all products α_j·σ_i, so sums over them are products of sums over each side:

| metric | of a block | of a model |
|---|---|---|
| trace | Σα·Σσ | Σ |
| frobenius | √(Σα²·Σσ²) | √Σ² |
| max_eigenvalue | α_max·σ_max | max |
| participation_ratio | tr²/‖F‖_F² | (Σtr)²/Σ‖·‖_F² |
| entropy_rank | exp(H_A + H_G), H the entropy of normalised eigenvalues | exp(Σ_b w_b(H_b − log w_b)), w_b = tr_b/tr |
| stable_rank | ‖F‖_F²/λ_max² | the same |
| numerical_rank | eigenvalues above rank_rtol·λ_max, rank_rtol = max(o, m)·ε, or the rounding of stored sides | Σ |
| log_det | Σ_ij log(α_jσ_i + λ) | Σ |
| effective_dimension | Σ_ij α_jσ_i/(α_jσ_i + λ) | Σ |
| condition_number | (λ_max + λ)/(λ_min + λ) | the same |
| pac_bayes | √(tr/n): a heuristic, no bound | the same |

α_j and σ_i are the eigenvalues of A [m, m] and G [o, o], λ is the damping, λ_max and λ_min are the extreme eigenvalues of F.
Sums in the last column run over the blocks b. The o·m eigenvalues of EK-FAC have the same metrics, as with one side.

Nothing is damped, clipped or cut off except where λ is written, and nothing is added to a denominator. Ranks of a zero matrix
are 0. Cost beyond the spectra (`side_spectra`): o·m logarithms and exponentials a block, `spectrum_products.CHUNK` at a time.
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
    """A number and a bound on its error; error 0: exact up to rounding."""

    value: float
    error: float = 0.0


@dataclass(frozen=True)
class Spectrum:
    """Sums over the eigenvalues λ of one block or of several together, relative to the largest eigenvalue λ_max."""

    largest: float
    log_largest: float
    """log λ_max; -inf: all eigenvalues are zero."""
    log_smallest: float
    log_smallest_bound: float
    """Upper bound of `log_smallest`, the log of the smallest eigenvalue; equal to it where that is exact."""
    mass: float
    """Σ λ/λ_max over all eigenvalues λ, λ_max the largest."""
    squares: float
    """Σ (λ/λ_max)² over all eigenvalues λ, λ_max the largest."""
    entropy: SpectrumEstimate
    """Entropy −Σ p log p of p = λ/Σλ over all eigenvalues λ, in nats."""
    log_det: SpectrumEstimate
    effective_dimension: SpectrumEstimate
    numerical_rank: SpectrumEstimate
    rank_rtol: float
    largest_error: float = 0.0

    @property
    def log_trace(self) -> float:
        """log Σ λ, the logarithm of the trace."""
        return self.log_largest + (math.log(self.mass) if self.mass else 0.0)


def capacity_metrics(
    blocks: Mapping[str, Block], damping: float, n: float | None, coverage: Mapping[str, float], group: Exchange | None
) -> dict[str, Any]:
    """{"layers": {name: metrics}, "model": metrics and coverage} of the blocks' Fisher, λ = `damping`. Collective.

    `n` is the number of samples for pac_bayes (None: without it), `group` the processes that have the same factors (None: this
    process alone); a GramianError is raised on all if their arguments differ.
    """
    _check_same_request(group, {"asked": "capacity metrics", "damping": damping, "n": n})
    with torch.no_grad():
        factors = _factors(blocks)
        sides = sides_of(factors, group) | {id(one): estimate(one) for one in factors if is_estimated(one)}
        found = {
            name: _measure(*_pair(block, sides), damping, max(block.spec.outputs, block.spec.inputs), block.G.device)
            for name, block in blocks.items()
        }
    layers = {name: _report(spectrum, damping, n) for name, spectrum in found.items()}
    model = _report(_together(list(found.values())), damping, n)
    return {"layers": layers, "model": {**model, "coverage": dict(coverage)}}


def top_eigenvalues(blocks: Mapping[str, Block], k: int, group: Exchange | None) -> Tensor:
    """The k largest eigenvalues of all blocks together, [k], descending, float64 on the CPU. Collective.

    A heap over the sorted spectra of both sides: O(k log k) beyond the spectra, no eigenvectors. Lanczos is used only for sides
    that are too wide for a dense matrix. `group`: the processes that have the same factors; None: this process alone. A
    GramianError is raised if k exceeds the number of all eigenvalues, or differs between processes.
    """
    _check_same_request(group, {"asked": "top eigenvalues", "k": k})
    directions = sum(block.G.dim * (1 if block.A is None else block.A.dim) for block in blocks.values())
    if k > directions:
        raise GramianError(f"k: the blocks have {directions} directions in all; expected at most that many, got {k}")
    with torch.no_grad():
        factors = _factors(blocks)
        sides = sides_of(factors, group)
        sides |= {id(one): SideSpectrum.of(leading(one, k)) for one in factors if is_estimated(one)}
        found = [_pair(block, sides) for block in blocks.values()]
    pairs = [(G.parts[0], A.parts[0]) for A, G in found]
    return torch.tensor(largest_products(pairs, k), dtype=torch.float64)


def coverage_of(specs: Mapping[str, Spec], blocks: Mapping[str, Block], rest: Mapping[str, int]) -> dict[str, float]:
    """{"parameters": number of trained parameters, "kronecker", "block", "diagonal", "none": their shares by approximation}.

    `specs` are all blocks, `blocks` those with factors, `rest` is {trained parameter in no block: its size}.
    """
    known = {**specs, **{name: block.spec for name, block in blocks.items()}}
    sizes = {"kronecker": 0, "block": 0, "diagonal": 0, "none": sum(rest.values())}
    for name, spec in known.items():
        sizes[spec.kind if name in blocks else "none"] += sum(math.prod(shape) for shape in spec.shapes)
    total = sum(sizes.values())
    return {"parameters": total, **{kind: size / total for kind, size in sizes.items()}}


def _check_same_request(group: Exchange | None, request: Mapping[str, Any]) -> None:
    """Raise a GramianError, on all processes, if their requests differ: their collectives would not match."""
    if group is None:
        return
    first, *rest = group.gather_messages(request)
    for rank, other in enumerate(rest, start=1):
        for name, value in other.items():
            if first.get(name) != value:
                raise GramianError(
                    f"{name}: process {rank} asks for {value}, process 0 for {first.get(name)}; "
                    "expected the same on all processes"
                )


# ---- one block -------------------------------------------------------------------------------------------------------


def _factors(blocks: Mapping[str, Block]) -> list[Factor]:
    """The factors of the blocks without EK-FAC eigenvalues; a factor that blocks share is listed once."""
    plain = [block for block in blocks.values() if block.correction is None]
    return list({id(f): f for block in plain for f in block.factors.values()}.values())


def _pair(block: Block, sides: Mapping[int, SideSpectrum]) -> tuple[SideSpectrum, SideSpectrum]:
    """The spectra of A and G, whose products are the block's eigenvalues; `sides` is {id of a factor: its spectrum}.

    For EK-FAC: the spectrum {1}, and one with all eigenvalues of the block.
    """
    if block.correction is not None:
        values = block.correction.values_RS
        return ONE, SideSpectrum.of(
            Values.of(values.flatten(), block.G.dim * block.correction.A.dim), torch.finfo(values.dtype).eps
        )
    return (ONE if block.A is None else sides[id(block.A)]), sides[id(block.G)]


def _measure(A: SideSpectrum, G: SideSpectrum, damping: float, widest: int, device: torch.device) -> Spectrum:
    """The `Spectrum` of G ⊗ A from those of both sides, at λ = `damping`; `widest`: the larger of the widths o and m.

    Damped sums are computed on `device`.
    """
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
    """Each of the numbers that `function`(values of A, values of G) returns, as an estimate.

    Where a spectrum is a stochastic quadrature, the number is the mean over its probes, with an error.
    """
    fine = list(zip(*(function(a, g) for a, g in _pairs(A.parts, G.parts)), strict=True))
    if not (A.coarse or G.coarse):
        return [SpectrumEstimate(values[0]) for values in fine]
    pairs = _pairs(A.coarse or A.parts, G.coarse or G.parts)
    coarse = list(zip(*(function(a, g) for a, g in pairs), strict=True))
    return [_mean(values, before) for values, before in zip(fine, coarse, strict=True)]


def _pairs(left: Sequence[Values], right: Sequence[Values]) -> list[tuple[Values, Values]]:
    """(left, right) spectra of equal probes; a spectrum without probes is paired with each probe of the other."""
    count = max(len(left), len(right))
    return [(left[i % len(left)], right[i % len(right)]) for i in range(count)]


def _mean(fine: Sequence[float], coarse: Sequence[float]) -> SpectrumEstimate:
    mean = fmean(fine)
    return SpectrumEstimate(mean, 3 * stdev(fine) / len(fine) ** 0.5 + abs(mean - fmean(coarse)))


def _entropy(side: SideSpectrum) -> SpectrumEstimate:
    """The entropy −Σ p log p of a side's eigenvalues σ, p = σ/Σσ: log Σs − Σ s log s/Σs with s = σ/σ_max."""
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
    """exp(value) as a float; infinity beyond the range of float64."""
    return float(torch.tensor(value, dtype=torch.float64).exp())


def _log_sum(a: float, b: float) -> float:
    """log(exp a + exp b), without overflow."""
    return max(a, b) + math.log1p(math.exp(-abs(a - b)))


# ---- several blocks --------------------------------------------------------------------------------------------------


def _together(blocks: Sequence[Spectrum]) -> Spectrum:
    """The `Spectrum` of a block-diagonal matrix from those of its blocks."""
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
    """{metric: value} of a spectrum at λ = `damping`, with an entry "error" for metrics that are not exact."""
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
