"""Moments over samples of every parameter's squared gradient, the statistic behind `DiagonalFisherEstimate`."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gramian.statistics.reliability_weights import Weights
from gramian.statistics.weighted_moments import WeightedMoment, WeightedMoments
from gramian.taps.gradients import PerSampleGradient
from gramian.taps.records import ParameterRecord
from gramian.taps.roles import Needs, ParameterInfo

WIDE = 2**20
"""Largest number of squared gradient entries in memory in float64 at a time, if one sample has fewer."""
Reduction = Callable[[str, Tensor], Tensor]
"""Maps (parameter name, its squared gradient) to sums over groups of its entries."""


@dataclass
class SquareSums:
    """Moments of squared gradients over the samples that used each parameter, and the number of all samples."""

    moments: WeightedMoments
    parameters: Mapping[str, ParameterInfo]
    samples: int = 0


class SquareMoments:
    """The statistic of mean and variance over samples of every parameter's squared gradient."""

    needs: Needs = "parameter"
    per_sample = True

    def __init__(self, per: Literal["sample", "token"], reduce: Reduction | None) -> None:
        """Set whose gradient is squared ("sample" or "token"), and a linear function of the squares.

        `reduce` maps (parameter name, squares of one sample) to sums over groups of entries; None: every entry.
        """
        self.per, self.reduce = per, reduce

    def start(self, parameters: Mapping[str, ParameterInfo]) -> SquareSums:
        """Empty sums: no sample has been observed."""
        return SquareSums(WeightedMoments(), parameters)

    def update(self, sums: SquareSums, record: ParameterRecord) -> None:
        """Add the squared gradients of one parameter for every sample of a pass, a chunk at a time."""
        name, reduce = record.parameter, self.reduce
        for squares_B in _squares(record.gradient, self.per, record.info.scale):
            rows_B = squares_B if reduce is None else torch.stack([reduce(name, squares) for squares in squares_B])
            sums.moments.extend({name: rows_B})

    def count(self, sums: SquareSums, samples: int) -> None:
        """Count the samples of a pass, whichever parameters it used."""
        sums.samples += samples

    def merge(self, left: SquareSums, right: SquareSums) -> SquareSums:
        """The `SquareSums` over the samples of both states, which are not changed."""
        moments = WeightedMoments()
        for side in (left, right):
            moments.merge(side.moments)
        return SquareSums(moments, {**left.parameters, **right.parameters}, left.samples + right.samples)

    def finish(self, sums: SquareSums) -> WeightedMoments:
        """Moments of the squared gradients over all samples; `sums` are not changed."""
        return self.completed(copy.deepcopy(sums))

    def completed(self, sums: SquareSums) -> WeightedMoments:
        """Moments of the squared gradients over all samples, in the tensors of `sums`, which is changed.

        A parameter that a sample did not use counts with a square of 0.
        """
        for name, info in sums.parameters.items():
            used = sums.moments.moments[name].weights.observations if name in sums.moments else 0
            unused = sums.samples - used
            if unused:
                zeros = torch.zeros(info.shape, dtype=torch.float64, device=info.device)
                zeros = zeros if self.reduce is None else self.reduce(name, zeros)
                sums.moments.add(name, WeightedMoment(zeros, zeros.clone(), Weights.equal(unused)))
        return sums.moments


def _squares(gradient: PerSampleGradient, per: str, scale: float | Tensor) -> Iterator[Tensor]:
    """Squared gradients of all samples in chunks [b, *shape], float64, of at most `WIDE` entries or one sample.

    `per` "token": squares of each token's gradient, summed over tokens. `scale` multiplies them before they are squared.
    """
    for part in gradient.chunks():
        if per == "token":
            for i in range(part.batch):
                yield part.select(i, i + 1).token_squares().double()[None] * scale**2
        elif part.batch:
            step = max(1, WIDE // max(1, torch.Size(part.shape).numel()))
            for narrow_B in part.per_sample().split(step):
                yield (narrow_B.double() * scale).square_()
