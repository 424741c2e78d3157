"""Gaussian noise as a function of (noise key, release, element), whichever process stores the element.

A release is one noised sum. Every element has one global index; its noise is the normal number at that place of the key stream
of (noise key, release). So any sharding over dim 0, on any number of ranks, draws the noise of the unsharded parameter. Of one
that is sharded over another axis, by W ranks, each draws the noise of all of it and keeps its part: W times as many draws.

Noise is sampled in float32 and added in floating point: that is the usual model of DP-SGD, and it does not defend against an
adversary who reads low-order bits of the result.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from gramian.core.dtypes import wide_dtype
from gramian.core.errors import GramianError
from gramian.kernels import chacha
from gramian.linalg.wide import wide

MOST_ELEMENTS = 2**40
"""Largest number of elements of a release (one noised sum): 2³⁹ pairs, since Box–Muller makes normal numbers in pairs."""

TAIL_MASS = 2.0**-64
"""Probability that a pair of normal numbers has a radius above TAIL_RADIUS; in the drawn noise, that of the largest."""

TAIL_RADIUS = math.sqrt(-2 * math.log(TAIL_MASS))
"""Radius R beyond which a pair of normal numbers lies with probability TAIL_MASS: 9.42."""


def tail_delta(noise_multiplier: float, releases: int = 1) -> float:
    """δ₀ by which δ grows for one participation of a record at this σ, because the noise is bounded and normal numbers are not.

    A record shifts the mean of the noise by v with ‖v‖ ≤ s = 1/σ, in standard deviations. Where both densities are positive,
    their ratio is that of normal distributions. Nothing bounds the ratio where the shift moves a pair of elements out of the
    disk of radius R = TAIL_RADIUS. A pair that is shifted by the length a is there with probability g(a) = e^(-(R - a)²/2) -
    e^(-R²/2) at most. Over K pairs with Σ a² ≤ s², since g'' grows for R - a ≥ √3,

        Σ g(a_k) ≤ g(s) + (√K - 1)·s·R·e^(-R²/2) ≤ e^(-(R - s)²/2) + √K·s·R·2⁻⁶⁴ = δ₀,    K = 2³⁹

    The first term is P(|Z₁, Z₂| > R - 1/σ) for a shift in one element; the second is for a shift over all elements: 4.1e-16 +
    3.8e-13 at σ = 1, 1.1e-12 + 7.6e-13 at σ = ½. δ₀ is 1 where R - s < √3, below σ = 0.13. With a participation that shifts the
    noise of several `releases`, by the length s over all of them, K is as many times larger.
    """
    shift = math.inf if noise_multiplier == 0 else 1 / noise_multiplier
    if TAIL_RADIUS - shift < math.sqrt(3):
        return 1.0
    return (
        math.exp(-((TAIL_RADIUS - shift) ** 2) / 2)
        + math.sqrt(releases * MOST_ELEMENTS / 2) * shift * TAIL_RADIUS * TAIL_MASS
    )


@dataclass(frozen=True)
class ColumnPlaces:
    """Places of a part of a parameter that is not a run of its rows: they are not contiguous."""

    first: int
    """Place of the parameter's first element."""
    shape: tuple[int, ...]
    """The parameter's shape."""
    bounds: tuple[tuple[int, int], ...]
    """(start, stop) of the part along each axis."""

    def of(self, whole: Tensor) -> Tensor:
        """The part of a tensor of the parameter's shape."""
        return whole[tuple(slice(*bounds) for bounds in self.bounds)]


Place = int | ColumnPlaces
"""Where the noise of a tensor lies in the key stream: the place of its first element, or of each of its columns."""
Box = tuple[slice, ...]
"""What a process stores of a parameter: a slice of each axis."""


class NoisePlan:
    """Gives every parameter element a place in the key stream from which the noise of a release (noised sum) is drawn.

    Parameters follow each other in the given order; each starts at an even place, so that no Box–Muller pair belongs to two of
    them. A nonce has 2³⁶ places: place p of release n has the nonce n + 2⁶⁴·⌊p / 2³⁶⌋. A name that is given twice, or more than
    2⁴⁰ places (the bound in `tail_delta`), raises a `GramianError`.

    Args:
        key: the noise key, 32 bytes, the same on every rank.
        parameters: (name, global shape) of each, in an order that is the same on every rank and after a resume.
    """

    def __init__(self, key: bytes, parameters: Iterable[tuple[str, Sequence[int]]]) -> None:
        self._key = key
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.offsets: dict[str, int] = {}
        place = 0
        for name, shape in parameters:
            if name in self.shapes:
                raise GramianError(f"{name}: given twice; expected every parameter once")
            self.shapes[name], self.offsets[name] = tuple(shape), place
            place += prod(shape) + prod(shape) % 2
        if place > MOST_ELEMENTS:
            raise GramianError(
                f"module: {place} trained elements; expected at most 2^40, which the accountant counts with"
            )
        self.total = place

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise GramianError("noise: holds a key, so copies and pickles are refused; expected engine.state_dict()")

    def place(self, name: str, shape: Sequence[int], box: Box | None = None) -> Place:
        """Where the noise of a parameter lies, or that of a `box` of it; None: of all of it.

        Raises:
            GramianError: for an unknown name, or a `shape` that is not that of the box.
        """
        if name not in self.shapes:
            raise GramianError(f"{name}: not in the noise plan; expected one of its {len(self.shapes)} parameters")
        whole = self.shapes[name]
        box = tuple(slice(size) for size in whole) if box is None else box
        bounds = tuple(part.indices(size)[:2] for part, size in zip(box, whole, strict=True))
        expected = [stop - start for start, stop in bounds]
        if list(shape) != expected:
            raise GramianError(f"{name}: gradient of shape {list(shape)}; expected {expected}")
        if bounds[1:] != tuple((0, size) for size in whole[1:]):
            return ColumnPlaces(self.offsets[name], whole, bounds)
        start = bounds[0][0] if bounds else 0
        return self.offsets[name] + start * prod(whole[1:])

    def add_noise_to(
        self,
        targets: Sequence[Tensor],
        sums: Sequence[Tensor],
        places: Sequence[Place],
        std: float | Tensor,
        release: int,
        factor: float = 1.0,
    ) -> None:
        """targets[i] = (sums[i] + std · noise of this release at places[i]) · factor, rounded once; on CUDA in one launch.

        Columns are one launch each, over all elements of their parameter.

        Args:
            targets: contiguous tensors on one device.
            sums: contiguous, with the shapes of the targets; a target may be its sum.
            places: place of the first element of each, from `place`.
            std: standard deviation of the noise, a number or a 0-dim tensor on the device.
            release: number of the release (noised sum), from `ReleaseCounter.begin`, below 2⁶⁴.
            factor: the sum of gradient and noise is multiplied by it before it is rounded.

        Raises:
            GramianError: for a release out of range.
        """
        if not 0 <= release < 2**64:
            raise GramianError(f"release: {release}; expected a number in [0, 2^64)")
        segments: dict[int, list[tuple[Tensor, Tensor, int]]] = {}  # by nonce
        for target, total, place in zip(targets, sums, places, strict=True):
            if isinstance(place, ColumnPlaces):
                drawn = torch.zeros(place.shape, dtype=wide_dtype(total), device=total.device)
                self.add_noise_to([drawn], [drawn], [place.first], std, release)
                own = place.of(drawn).reshape(target.shape)
                target.detach().copy_((wide(total.detach()) + own) * factor)
                continue
            done = 0
            while done < target.numel():
                segment, start = divmod(place + done, chacha.WORDS_PER_NONCE)
                count = min(target.numel() - done, chacha.WORDS_PER_NONCE - start)
                some, some_sums = target, total
                if count < target.numel():
                    some, some_sums = (t.detach().view(-1)[done : done + count] for t in (target, total))
                segments.setdefault(segment, []).append((some, some_sums, start))
                done += count
        for segment, parts in segments.items():
            into, out_of, starts = zip(*parts, strict=True)
            chacha.add_normals_to(into, out_of, self._key, release + (segment << 64), starts, std, factor)

    def __repr__(self) -> str:
        return f"NoisePlan({len(self.shapes)} parameters, {self.total} places)"
