"""One release: clipped sums get their noise and are divided by the expected batch, some parameters at a time."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gramian.core.dtypes import wide_dtype
from gramian.linalg.wide import wide
from gramian.parallel.data_parallel import local, local_box
from gramian.privacy.metric.public_metric import PublicMetric
from gramian.privacy.noise.correlated_noise import CorrelatedNoise
from gramian.privacy.noise.element_noise import Box, NoisePlan, Place


@dataclass(frozen=True)
class StoredPart:
    """What this process stores of a parameter."""

    box: Box | None
    """A slice of each axis; None: all of it."""
    place: Place
    """The place of its noise in the key stream."""


class NoisedRelease:
    """(sum + std · noise of release `number`) / expected_batch, for the parameters of one model.

    With a `metric` W the noise is W⁻¹ times it, layer by layer, formed as a whole on every process.
    """

    def __init__(
        self,
        trained: Mapping[str, nn.Parameter],
        stored: dict[str, StoredPart],
        noise: NoisePlan | CorrelatedNoise,
        number: int,
        std: float,
        scale: Tensor | None,
        expected_batch: float,
        metric: PublicMetric | None,
    ) -> None:
        """Begin; `stored` has what earlier releases found and is added to, `scale` is the loss scale in the sums, if any."""
        self._trained, self._stored, self._noise, self._number = trained, stored, noise, number
        self._noises, self._expected_batch = std > 0, expected_batch
        self._std: float | Tensor = std if scale is None else std * scale
        self._blocks = {} if metric is None else metric.blocks
        self._coloured: dict[str, Tensor] = {}
        """Noise in the metric of parameters whose sums have not come yet."""

    def noised(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gradients of some parameters, in their dtypes, written over the sums where they can be; plain noise is one launch."""
        into = {name: self._target(self._trained[name], total) for name, total in sums.items()}
        plain = {name: total for name, total in sums.items() if self._noises and name not in self._blocks}
        if plain:
            targets, totals = [into[name] for name in plain], list(plain.values())
            places = [self._of(name).place for name in plain]
            self._noise.add_noise_to(targets, totals, places, self._std, self._number, 1 / self._expected_batch)
        rest = {name: total for name, total in sums.items() if name not in plain}  # in the metric, or without noise
        if rest:
            totals = [wide(t) + self._in_metric(name, t) if self._noises else t for name, t in rest.items()]
            torch._foreach_copy_([into[name] for name in rest], torch._foreach_div(totals, self._expected_batch))
        return into

    def _target(self, p: nn.Parameter, total: Tensor) -> Tensor:
        """Where a noised gradient is written: over its sum, or, of another dtype, over `p.grad` if that is contiguous."""
        if total.dtype == p.dtype:
            return total
        gradient = None if p.grad is None else local(p.grad)
        if gradient is not None and gradient.is_contiguous():
            return gradient
        return torch.empty(local(p).shape, dtype=p.dtype, device=p.device)

    def _of(self, name: str) -> StoredPart:
        if name not in self._stored:
            p = self._trained[name]
            box = local_box(p)
            self._stored[name] = StoredPart(box, self._noise.place(name, local(p.detach()).shape, box))
        return self._stored[name]

    def _in_metric(self, name: str, total: Tensor) -> Tensor:
        """This process's part of the noise of a parameter in the metric; made for all of its block at once."""
        if name not in self._coloured:
            block = self._blocks[name]
            self._coloured |= block.coloured({other: self._drawn(other) for other in block.spec.parameters})
        whole, box = self._coloured.pop(name), self._of(name).box
        return (whole if box is None else whole[box]).to(total.device)

    def _drawn(self, name: str) -> Tensor:
        """The plain noise of all of a parameter, whichever process stores it."""
        p = self._trained[name]
        found = torch.zeros(p.shape, dtype=wide_dtype(p), device=p.device)
        self._noise.add_noise_to([found], [found], [self._noise.place(name, p.shape)], self._std, self._number)
        return found
