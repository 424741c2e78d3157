"""The listener of a proof's runs: it keeps fingerprints of what the taps attribute to each sample, and nothing else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gramian.linalg.wide import wide
from gramian.taps.proof.fingerprint import Fingerprint
from gramian.taps.record import LayerRecord, ParameterRecord, PassInfo
from gramian.taps.units import Units

DIRECTIONS = 8
"""Random directions on which gradients of parameters are compared."""

Key = tuple[int, str, int, int]
"""(which forward of the run, layer, ordinal of its call, number of the tensor)."""


@dataclass(frozen=True)
class Sketch:
    """A gradient of a parameter: its projections on random directions, its norm, and how far rounding may put it off."""

    projections_K: Tensor
    norm: float
    magnitude: float
    dtype: torch.dtype
    count: int

    @classmethod
    def of(cls, gradient: Tensor, magnitude: Tensor | None = None, dtype: torch.dtype | None = None) -> "Sketch":
        """Projections ⟨u_k v_kᵀ, G⟩ of G as a matrix [first axis, rest]: off by about ‖Δ‖ where G is off by Δ. One pass."""
        matrix = wide(gradient.detach()).reshape(gradient.shape[0] if gradient.dim() else 1, -1)
        generator = torch.Generator().manual_seed(matrix.shape[0] * 1_000_003 + matrix.shape[1])
        left_MK = torch.randn(matrix.shape[0], DIRECTIONS, generator=generator).to(matrix)
        right_NK = torch.randn(matrix.shape[1], DIRECTIONS, generator=generator).to(matrix)
        projections = (left_MK * (matrix @ right_NK)).sum(0).double().cpu()
        bound = 0.0 if magnitude is None else float(magnitude)
        return cls(projections, float(matrix.norm()), bound, dtype or gradient.dtype, gradient.numel())


@dataclass
class Recorder:
    """What one run of a proof brings."""

    seed: int
    units: Units | None
    batch_size: int | None
    sums: bool = False
    """True to sketch the sum over samples of every parameter's gradient."""
    alone: list[int] = field(default_factory=list)
    """Rows of the unit whose own gradient is to be sketched; none: of nobody."""
    per_sample: bool = True
    takes_shares: bool = False
    statistics: Sequence[Any] = ()
    proof: str | int = "off"
    sample_ids: Tensor | None = None
    rows: dict[Key, Fingerprint] = field(default_factory=dict)
    sides: dict[Key, str] = field(default_factory=dict)
    """What each tensor is, in words."""
    totals: dict[str, Sketch] = field(default_factory=dict)
    own: dict[str, Sketch] = field(default_factory=dict)
    """{parameter: the gradient attributed to the unit that is alone}."""
    forwards: list[int] = field(default_factory=list)
    """Numbers of the passes, in order."""

    def pass_info(self, number: int, batch: int) -> PassInfo:
        """Gradients as the backward carries them."""
        self.forwards.append(number)
        by_token = self.units is not None and self.units.ids.dim() == 2
        return PassInfo(number, batch, self.units if by_token else None, None, None, 1.0, 1.0)

    def layer(self, record: LayerRecord) -> None:
        """Fingerprint every tensor from which a sample's gradient is formed, once each."""
        inputs = {t.untyped_storage().data_ptr() for t in record.inputs}
        forward, seen = self.forwards.index(record.info.number), dict[tuple[int, torch.Size], Tensor]()
        for gradient in record.gradients.values():
            if record.info.units is not None:
                gradient = gradient.regroup(record.info.units)
            for t in gradient.tensors():
                if (t.data_ptr(), t.shape) in seen:  # two parameters of a layer share a side
                    continue
                seen[t.data_ptr(), t.shape] = t
                key = (forward, record.layer, record.ordinal, len(seen))
                self.rows[key] = Fingerprint.of(t, self.seed)
                self.sides[key] = "input" if t.untyped_storage().data_ptr() in inputs else "output gradient"

    def parameter(self, record: ParameterRecord) -> None:
        """Sketch sums, and the gradient of the unit that is to be compared with itself alone."""
        gradient = record.gradient
        if self.sums:
            self.totals[record.parameter] = Sketch.of(gradient.total(), gradient.magnitude(), gradient.dtype)
        if self.alone and record.info.units is None:
            parts = [gradient.select(row, row + 1) for row in self.alone]
            total = torch.stack([part.total() for part in parts]).sum(0)
            magnitude = torch.stack([part.magnitude() for part in parts]).sum()
            self.own[record.parameter] = Sketch.of(total, magnitude, gradient.dtype)

    def watch(self, parameter: str, tensor: Tensor) -> None:
        """Weights are looked at in the untapped run."""

    def end_of_pass(self, info: PassInfo) -> None:
        """Nothing is counted."""

    def failed_pass(self, info: PassInfo) -> None:
        """The run is given up."""

    def proof_is_due(self) -> bool:
        """One proof at a time."""
        return False

    def proof_failed(self) -> None:
        """One proof at a time."""

    def proof_stays_open(self) -> None:
        """One proof at a time."""


def disagreement(
    sketches: Mapping[str, Sketch],
    gradients: Mapping[str, Tensor | None],
    tolerances: Mapping[torch.dtype, float],
    *,
    floor: float = 0.0,
    scaled: bool = False,
) -> tuple[str, float, float] | None:
    """The first parameter whose attributed gradient is not autograd's: (name, norm of the first, norm of the second).

    Args:
        sketches: what the taps attribute; a parameter without one got nothing.
        gradients: autograd's.
        tolerances: largest relative difference, by the narrowest dtype that took part in the run.
        floor: rounding of a run's largest terms: what should cancel to nothing may leave as much.
        scaled: True if one factor for all parameters, which is fitted, may stand between both.
    """
    theirs = {name: Sketch.of(gradient) for name, gradient in gradients.items() if gradient is not None}
    if not all(sketch.projections_K.isfinite().all() for sketch in (*theirs.values(), *sketches.values())):
        return None  # nothing can be said of what is not finite
    both = [(sketches[name].projections_K, sketch.projections_K) for name, sketch in theirs.items() if name in sketches]
    squares = sum(float(mine.square().sum()) for mine, _ in both)
    factor = sum(float(mine @ other) for mine, other in both) / squares if scaled and squares else 1.0
    every = [sketch.dtype for sketch in (*theirs.values(), *sketches.values())]
    dtype = max(every, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)  # runs differ by its rounding
    info = torch.finfo(dtype)
    for name, sketch in theirs.items():
        mine = sketches.get(name)
        if mine is None:
            if sketch.norm > floor:
                return name, 0.0, sketch.norm
            continue
        tiny = info.smallest_normal * mine.count**0.5  # below it, numbers lie evenly
        rounding = info.eps * (mine.magnitude * abs(factor) + tiny)
        apart = (mine.projections_K * factor - sketch.projections_K).square().mean().sqrt()
        if not float(apart) <= 2 * (tolerances[dtype] * sketch.norm + 8 * rounding + floor):
            return name, mine.norm * abs(factor), sketch.norm
    return None
