"""Fingerprints of rows: a hash that is equal for equal bits, and random projections that measure how far rows are apart.

Shapes: R rows (one per sample, or per group that counts as one), S positions and D features of a row, K projections. A tensor
[R, …, D] is read as [R, S, D].
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gramian.linalg.wide import pieces

PROJECTIONS = 4
HALF = 1e-4
"""Threshold on the machine ε of a dtype: half precision and narrower dtypes lie above it."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Fingerprint:
    """A tensor of R rows, reduced to a hash and K projections of each row (about 40 bytes), to compare rows of two runs."""

    hashes_R: Tensor
    """64-bit hash of each row, on the CPU: equal rows have equal hashes, different ones only with probability 2⁻⁶⁴."""
    projections_RK: Tensor
    """Projection of each row on K random directions of expected squared length 1, float64, on the CPU: a row that changes by δ
    everywhere changes each projection by about δ."""
    largest: float
    """Largest absolute value among the finite ones of the tensor."""
    eps: float
    """Machine ε of the tensor's dtype; 0 for integers."""
    shape: tuple[int, ...]
    """Shape of one row."""

    @classmethod
    def of(cls, t: Tensor, seed: int) -> "Fingerprint":
        """Fingerprint of a tensor [R, …] under a seed. One pass over the tensor, in parts; nothing of its size is stored."""
        t = t.detach()
        if t.is_complex():
            t = torch.view_as_real(t)
        count, positions = t.shape[0], math.prod(t.shape[1:-1])
        flat = t.reshape(count * positions, -1 if t.numel() else 0)
        width, device = flat.shape[1], t.device
        weights_D, directions_DK = _weights(seed, width, device), _directions(seed, width, device)
        eps = torch.finfo(t.dtype).eps if t.is_floating_point() else 0.0
        hashes, projections, largest = [], [], 0.0
        for piece in pieces(count * positions, width):
            part = flat[piece].contiguous() if eps == 0.0 else flat[piece] + 0.0  # -0 is 0
            bits = part.view(BITS[part.element_size()]).long()
            hashes.append(_mixed((bits * weights_D).sum(1)))
            real = part.double()
            projections.append(real @ directions_DK)
            largest = max(largest, _largest(real))
        if not hashes:
            zeros_RK = directions_DK.new_zeros(count, PROJECTIONS)
            return cls(torch.zeros(count, dtype=torch.int64), zeros_RK.cpu(), 0.0, eps, tuple(t.shape[1:]))
        hashes_RS, stacked = _joined(hashes).view(count, positions), _joined(projections)
        hashes_R = (hashes_RS * _weights(~seed, positions, device)).sum(1)
        found_RK = (stacked.view(count, positions, PROJECTIONS) * _directions(~seed, positions, device)).sum(1)
        return cls(hashes_R.cpu(), found_RK.cpu(), largest, eps, tuple(t.shape[1:]))

    def moved(self, other: "Fingerprint") -> Tensor:
        """Root mean square, over the K projections, of the difference of each row to the same row of `other`: [R]."""
        apart: Tensor = (self.projections_RK - other.projections_RK).square().mean(1).sqrt()
        return apart.nan_to_num(torch.inf)

    def finite(self) -> Tensor:
        """Mask [R], True for rows in which all numbers are finite."""
        return self.projections_RK.isfinite().all(1)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _largest(real: Tensor) -> float:
    """Largest absolute value among the finite ones, 0 if there are none. One pass if all are finite."""
    if not real.numel():
        return 0.0
    largest = float(torch.linalg.vector_norm(real, torch.inf))
    return largest if math.isfinite(largest) else float(real.abs().nan_to_num(0.0, posinf=0.0).max())


def _mixed(hashes: Tensor) -> Tensor:
    """Mix the bits of 64-bit hashes, so that a sum of hashes depends on every bit."""
    return hashes.bitwise_xor(hashes >> 29).mul(0x2545F4914F6CDD1D)


@lru_cache(maxsize=64)
def _weights(seed: int, count: int, device: torch.device) -> Tensor:
    """Odd random 64-bit integers [count], by seed: the weights of the hash."""
    generator = torch.Generator().manual_seed(seed & (2**63 - 1))
    drawn = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)
    return drawn.bitwise_or(1).to(device)


@lru_cache(maxsize=64)
def _directions(seed: int, count: int, device: torch.device) -> Tensor:
    """Normal random numbers over √count: [count, K], by seed: the directions of the projections."""
    generator = torch.Generator().manual_seed((seed ^ 0x5DEECE66D) & (2**63 - 1))
    drawn = torch.randn(count, PROJECTIONS, generator=generator, dtype=torch.float64)
    return drawn.div(max(count, 1) ** 0.5).to(device)


def relative_rounding(eps: float) -> float:
    """Relative rounding error of a few operations in a dtype of machine ε `eps`: 64 ε; 8 ε in half precision, 64 being half."""
    return (64 if eps < HALF else 8) * eps
