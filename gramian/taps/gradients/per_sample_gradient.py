"""The interface of a per-sample gradient: norms, sums and projections of the gradients g_1 … g_B without forming them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Self

import torch
from torch import Tensor

from gramian.kernels.sums.weighted_sum import weighted_sum
from gramian.linalg.wide import wide_norms
from gramian.plan.norm_algorithm import Algorithm, samples_per_chunk
from gramian.taps.gradients.directions import Directions
from gramian.taps.units import Units


class PerSampleGradient(ABC):
    """The gradients g_1 … g_B of one parameter for B samples, stored as the tensors from which they are computed on demand.

    All results are in float32, or float64 for float64 layers. They are parts of the gradient that the backward computes, with
    the user's loss scale and reduction (1/B of a mean loss) in them. A "token" is one position of a sample at which the
    parameter acts. A sample may also be a unit: a group of rows or tokens that counts as one sample.
    """

    shape: tuple[int, ...]
    """Shape of the parameter."""
    batch: int
    """Number B of samples, or of units after `regroup`."""
    dtype: torch.dtype
    """The narrowest dtype of the tensors that the gradients were computed from: it bounds their accuracy."""
    summed_wide = True
    """True: autograd adds the tokens' gradients up in float32 or float64. False: it may add them one after the other in their
    own dtype, as it does on a CPU."""

    @abstractmethod
    def per_sample(self) -> Tensor:
        """The gradient of every sample, formed explicitly: [B, *shape]. Takes B times the memory of the parameter."""

    @abstractmethod
    def total(self) -> Tensor:
        """Σ_i g_i over the samples' gradients g_i, of the parameter's shape: what autograd adds to `p.grad`."""

    @abstractmethod
    def token_squares(self) -> Tensor:
        """Σ over samples and tokens of the squared gradient of a single token, of the parameter's shape."""

    @abstractmethod
    def magnitude(self) -> Tensor:
        """Σ over all tokens of the norm of a token's gradient, 0-dim: an upper bound of ‖total()‖, which bounds rounding."""

    def projected(self, directions: Directions) -> Tensor:
        """Terms [n, K] whose sum over n is u_kᵀ(Σ_i g_i)v_k for K directions u_k v_kᵀ: n is 1, or B·T in subclasses."""
        return directions.project(self.total())[None]

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """The stored tensors [B, …] from which the gradients are computed."""

    def fingerprinted(self) -> "list[tuple[str | None, Tensor]]":
        """(name, tensor [B, …]) of what a row proof compares sample by sample: by default the stored tensors.

        A name is "input" or "output gradient"; None: it follows from the layer's record.
        """
        return [(None, t) for t in self.tensors()]

    @abstractmethod
    def mapped(self, function: Callable[[Tensor], Tensor]) -> Self:
        """A new gradient of the same class, with `function` applied to each of the stored tensors [B, …]."""

    def select(self, start: int, stop: int) -> Self:
        """The gradients of samples start … stop-1 only; their tensors are views."""
        return self.mapped(lambda t: t[start:stop])

    def picked(self, samples: Tensor) -> Self:
        """The gradients of some samples, by their numbers [K]: copies of their tensors."""
        return self.mapped(lambda t: t[samples])

    def copy(self) -> Self:
        """The same gradients on clones of their tensors, valid after the backward pass has reused the originals."""
        return self.mapped(torch.clone)

    def regroup(self, units: Units) -> "PerSampleGradient":
        """The gradients of units (groups of rows or tokens) instead of rows: the stored tokens [B, T, …], grouped by unit.

        Raises:
            GramianError: if units are groups of tokens, and the layer has another number of tokens per row.
        """
        return self.mapped(units.gather_tokens)

    @property
    def tokens(self) -> int:
        """Number of tokens per sample; 1 if gradients are not stored by token."""
        return 1

    def weighted_total(self, weights_B: Tensor, dtype: torch.dtype) -> Tensor:
        """Σ_i weights_B[i] · g_i, of the parameter's shape: summed in float32 or float64, then cast to `dtype`."""
        total = self.per_sample_zeros().flatten()
        for start, part in zip(range(0, max(self.batch, 1), self._chunk), self.chunks(), strict=True):
            total += weighted_sum(flat(part.per_sample()), weights_B[start : start + self._chunk])
        return total.reshape(self.shape).to(dtype)

    def algorithm(self, choice: Algorithm) -> str:
        """The name of the algorithm that `squared_norms(choice)` runs."""
        return "direct"

    def squared_norms(self, choice: Algorithm = "auto") -> Tensor:
        """‖g_i‖² of the gradient g_i of every sample: [B]; here from the formed gradients, `choice` matters in subclasses."""
        return torch.cat([wide_norms(flat(part.per_sample())).square() for part in self.chunks()])

    def sum_of_squares(self) -> Tensor:
        """Σ_i g_i ⊙ g_i over the samples' gradients, of the parameter's shape: B times the empirical Fisher's diagonal."""
        squares = self.per_sample_zeros()
        for part in self.chunks():
            squares += part.per_sample().square().sum(0)
        return squares

    def per_sample_zeros(self) -> Tensor:
        """A tensor of zeros of the parameter's shape (not one per sample), in the dtype of the results."""
        return self.select(0, 0).per_sample().sum(0)

    def chunks(self) -> Iterator["PerSampleGradient"]:
        """Yield the gradients of consecutive groups of samples, small enough to be formed at once; an empty one if B is 0."""
        for start in range(0, max(self.batch, 1), self._chunk):
            yield self.select(start, min(start + self._chunk, self.batch))

    @property
    def _chunk(self) -> int:
        return samples_per_chunk(torch.Size(self.shape).numel())


def flat(gradients_B: Tensor) -> Tensor:
    """Gradients [B, *shape] reshaped to [B, N], N elements each, also where B is 0 or the shape is ()."""
    return gradients_B.reshape(gradients_B.shape[0], torch.Size(gradients_B.shape[1:]).numel())
