"""The listener in runs of a row proof: records fingerprints of rows and projections of gradients, not the tensors."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.linalg.wide import wide
from gramian.taps.audit import AMPLIFIED, amplified
from gramian.taps.gradients import GroupedOuter, GroupedSum, PerSampleGradient
from gramian.taps.proof.row_fingerprint import Fingerprint, relative_rounding
from gramian.taps.records import LayerRecord, ParameterRecord, PassInfo
from gramian.taps.sites.site import INLINE
from gramian.taps.units import Units

DIRECTIONS = 8
"""Number of random directions on which gradients of parameters are compared."""

Key = tuple[int, str, int, int]
"""Key of a recorded tensor: (number of the forward in the run, layer, number of its earlier calls, number of the tensor)."""


@dataclass(frozen=True)
class Sketch:
    """A parameter's gradient, reduced to K random projections, its norm, and the sum of its terms' norms (`magnitude`)."""

    projections_K: Tensor
    norm: float
    magnitude: float
    dtype: torch.dtype
    count: int
    sequential: bool = False
    """True if autograd may add the gradients of tokens one after the other in their own dtype, as torch does on a CPU."""

    @property
    def finite(self) -> bool:
        """True if all projections of the gradient are finite."""
        return bool(self.projections_K.isfinite().all())

    @classmethod
    def of(cls, gradient: Tensor, magnitude: Tensor | None = None, dtype: torch.dtype | None = None) -> "Sketch":
        """Sketch of a gradient G, seen as a matrix [first axis, rest]: projections ⟨u_k v_kᵀ, G⟩ and its norm. One pass.

        A change Δ of G changes each projection by about ‖Δ‖.

        Args:
            gradient: G.
            magnitude: sum of the norms of the terms of which G is the sum, 0-dim; None: 0 is stored.
            dtype: narrowest dtype from which G was computed; None: its own.
        """
        real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
        real = real.flatten(0, 1) if real.dim() == 3 else real  # a stack of matrices: fewer numbers to draw
        first = real.shape[0] if real.dim() else 1
        matrix = wide(real.detach()).reshape(first, real.numel() // max(first, 1))
        generator = torch.Generator().manual_seed(matrix.shape[0] * 1_000_003 + matrix.shape[1])
        left_MK = torch.randn(matrix.shape[0], DIRECTIONS, generator=generator).to(matrix)
        right_NK = torch.randn(matrix.shape[1], DIRECTIONS, generator=generator).to(matrix)
        projections = (left_MK * (matrix @ right_NK)).sum(0).double().cpu()
        bound = 0.0 if magnitude is None else float(magnitude)
        norm = float(matrix.square().sum().sqrt())  # Tensor.norm of 18 M entries is off by 0.2 % on a CPU; sums cascade
        return cls(projections, norm, bound, dtype or gradient.dtype, gradient.numel())

    @classmethod
    def of_unit(cls, gradient: PerSampleGradient, unit: int) -> "Sketch":
        """Sketch (projections, norm) of the gradient of one unit (sample), as weighted sums and norms compute it. Two passes.

        The weights are 1 for the unit and 0 for all others.
        """
        own, wide_type = gradient.select(unit, unit + 1), wide(gradient.tensors()[-1][:0]).dtype
        weights_U = torch.zeros(gradient.batch, device=gradient.tensors()[-1].device, dtype=wide_type)
        weights_U[unit] = 1
        total = gradient.weighted_total(weights_U, wide_type)
        if not bool(total.isfinite().all()):  # another unit is not finite, and 0·∞ is NaN
            total = own.total()
        norm = float(gradient.squared_norms()[unit].sqrt())
        found = replace(cls.of(total, own.magnitude(), gradient.dtype), norm=norm)
        return replace(found, sequential=_adds_narrow(gradient))


@dataclass
class Recorder:
    """Listener that records fingerprints of rows and sketches (projections, norms) of gradients in one run of a proof."""

    seed: int
    units: Units | None
    batch_size: int | None
    sums: bool = False
    """True to record a sketch (projections and norm) of every parameter's gradient summed over samples."""
    alone: Sequence[int] = ()
    """Units (samples, or groups that count as one) whose own gradients are recorded as sketches (projections and norms)."""
    per_sample: bool = True
    takes_shares: bool = False
    reads_calls: bool = True
    only: frozenset[str] | None = None
    statistics: Sequence[Any] = ()
    proof: str | int = "off"
    sample_ids: Tensor | None = None
    rows: dict[Key, Fingerprint] = field(default_factory=dict)
    sides: dict[Key, str] = field(default_factory=dict)
    """{key: "input", "output gradient" or "sum over calls"}: what each recorded tensor is."""
    totals: dict[str, Sketch] = field(default_factory=dict)
    own: dict[int, dict[str, Sketch]] = field(default_factory=dict)
    """{unit: {parameter: projections and norm of the gradient attributed to the unit}} of the units in `alone`."""
    ragged: set[str] = field(default_factory=set)
    """Parameters whose products have rows of samples in no fixed number or order, so that rounding depends on other samples."""
    forwards: list[int] = field(default_factory=list)
    """Numbers of the passes (forward and backward) of this run, in order."""

    def pass_info(self, number: int, batch: int) -> PassInfo:
        """Begin pass `number` of `batch` rows: gradients are grouped by `units` and not rescaled."""
        self.forwards.append(number)
        return PassInfo(number, batch, self.units, None, None, 1.0, 1.0)

    def layer(self, record: LayerRecord) -> None:
        """Fingerprint every tensor from which the layer's per-sample gradients are formed, once each."""
        if record.kind == INLINE:
            return  # how many products there are may depend on samples: compared together, by parameter
        units, found = record.info.units, record.gradients.values()
        try:
            gradients = found if units is None else [gradient.regroup(units) for gradient in found]
        except GramianError as error:
            raise GramianError(f"{record.layer}: {error}") from None
        inputs = {t.untyped_storage().data_ptr() for t in record.inputs}
        for number, (side, t) in enumerate(_tensors(gradients)):
            key = (self.forwards.index(record.info.number), record.layer, record.ordinal, number)
            self.rows[key] = Fingerprint.of(t, self.seed)
            stored = "input" if t.untyped_storage().data_ptr() in inputs else "output gradient"
            self.sides[key] = side or stored

    def parameter(self, record: ParameterRecord) -> None:
        """Record projections of a parameter's gradient sum and of units in `alone`, and fingerprints if it has several uses."""
        gradient = record.gradient
        for number, (side, t) in enumerate(_tensors([gradient] if record.uses > 1 or record.inline else [])):
            key = (self.forwards.index(record.info.number), record.parameter, 0, number)
            self.rows[key] = Fingerprint.of(t, self.seed)
            self.sides[key] = (side or "output gradient") if record.inline else "sum over calls"
        if any(isinstance(part, GroupedOuter | GroupedSum) for part in getattr(gradient, "parts", [gradient])):
            self.ragged.add(record.parameter)
        if self.sums:
            found = Sketch.of(gradient.total(), gradient.magnitude(), gradient.dtype)
            self.totals[record.parameter] = replace(found, sequential=_adds_narrow(gradient))
        for unit in self.alone:
            self.own.setdefault(unit, {})[record.parameter] = Sketch.of_unit(gradient, unit)

    def watch(self, parameter: str, tensor: Tensor) -> None:
        """Do nothing: the untapped run of the proof collects the weights."""

    def end_of_pass(self, info: PassInfo) -> None:
        """Do nothing at the end of a backward: no sample is counted."""

    def failed_pass(self, info: PassInfo) -> None:
        """Do nothing after a failed backward: the run is discarded."""

    def proof_is_due(self) -> bool:
        """False: a proof's run starts no other proof."""
        return False

    def proof_failed(self) -> None:
        """Do nothing: a proof has no result that could become invalid."""

    def proof_stays_open(self) -> None:
        """Do nothing: the proof itself reports batches of equal samples."""


def _tensors(gradients: Iterable[PerSampleGradient]) -> list[tuple[str | None, Tensor]]:
    """What is compared of some per-sample gradients, each tensor once: weight and bias of a layer share the output gradient."""
    found = {(t.data_ptr(), t.shape): (side, t) for gradient in gradients for side, t in gradient.fingerprinted()}
    return list(found.values())


def _adds_narrow(gradient: PerSampleGradient) -> bool:
    return not gradient.summed_wide and gradient.tensors()[-1].device.type == "cpu"


def sketches_of(gradients: Mapping[str, Tensor | None]) -> dict[str, Sketch]:
    """{parameter: sketch, its projections and norm} of the gradients that are not None."""
    return {name: Sketch.of(gradient) for name, gradient in gradients.items() if gradient is not None}


def disagreement(
    sketches: Mapping[str, Sketch],
    theirs: Mapping[str, Sketch],
    tolerances: Mapping[torch.dtype, float],
    *,
    floor: float = 0.0,
    factors: Sequence[float] = (1.0,),
    noise: Mapping[str, float] | None = None,
    half: torch.dtype | None = None,
) -> tuple[str, float, float] | None:
    """(name, norm of the taps' gradient, norm of autograd's) of the first parameter whose gradients differ; None: all agree.

    A product of matrices has a float32 or wider accumulator, so its rounding error is ε of the result plus the accumulator's ε
    of the sum of its terms' norms. For every parameter, 64 ε (half precision: 8 ε) or 1e-11 of the norm of all
    gradients together counts as rounding; for one that the taps have no gradient of, ε² or 1e-11.
    If a gradient is not finite, nothing is compared and the result is None.

    Args:
        sketches: {parameter: the taps' gradient}; a parameter without one has a gradient of 0.
        theirs: {parameter: autograd's gradient}.
        tolerances: largest relative difference, by the narrowest dtype among all gradients.
        floor: absolute rounding error of the largest terms in the taps' run, which is left if terms should cancel.
        factors: possible ratios of autograd's to the taps' gradients; the best fit over all parameters is used.
        noise: {parameter: how far autograd's gradient is from itself where all of a run rounds otherwise}; 3 times as much is
            allowed, up to a quarter of the gradient.
        half: dtype of layers that the gradients came through, if it is narrower than theirs.
    """
    if not all(sketch.finite for sketch in (*theirs.values(), *sketches.values())):
        return None  # what is not finite cannot be compared
    both = [(sketches[name].projections_K, sketch.projections_K) for name, sketch in theirs.items() if name in sketches]
    squares = sum(float(mine.square().sum()) for mine, _ in both)
    fitted = sum(float(mine @ other) for mine, other in both) / squares if squares else 1.0
    factor = min(factors, key=lambda one: abs(one - fitted))
    every = [sketch.dtype for sketch in (*theirs.values(), *sketches.values())] + ([] if half is None else [half])
    dtype = max(every, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)  # runs differ by its rounding
    info, accumulator = torch.finfo(dtype), min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    total = sum(sketch.norm**2 for sketch in theirs.values()) ** 0.5
    floor = max(floor * max(1.0, abs(factor)), max(relative_rounding(info.eps), AMPLIFIED) * total)
    for name, sketch in theirs.items():
        mine = sketches.get(name)
        if mine is None:
            if sketch.norm > amplified(info.eps) * total:
                return name, 0.0, sketch.norm
            continue
        tiny = info.smallest_normal * mine.count**0.5  # below it, numbers lie evenly
        added = info.eps if mine.sequential else accumulator
        rounding = added * mine.magnitude * abs(factor) + info.eps * tiny
        scaled = mine.norm * abs(factor)
        estimate = float((mine.projections_K * factor - sketch.projections_K).square().mean().sqrt())
        apart = min(max(estimate, abs(scaled - sketch.norm)), scaled + sketch.norm)
        noisy = min(3 * (noise or {}).get(name, 0.0), 0.25 * sketch.norm)
        if not apart <= 2 * (tolerances[dtype] * sketch.norm + 8 * rounding + floor) + noisy:
            return name, scaled, sketch.norm
    return None
