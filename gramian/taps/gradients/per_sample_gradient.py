"""The interface of a per-sample gradient: norms, sums and projections of g_1 … g_B without forming them."""

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
    """The gradients of one parameter for B samples, as a recipe.

    All results are in the accumulation dtype (float32, or float64 for float64 layers). Loss scale and reduction are not
    applied here: these are the gradients that the backward pass carries.
    """

    shape: tuple[int, ...]
    """Shape of the parameter."""
    batch: int
    """B, the number of samples (units)."""
    dtype: torch.dtype
    """The narrowest dtype that took part: what the numbers can be trusted to."""
    summed_wide = True
    """False if autograd may add the tokens up one after the other in their own dtype, as it does on a CPU."""

    @abstractmethod
    def per_sample(self) -> Tensor:
        """The gradients themselves: [B, *shape]. Costs B times the memory of the parameter."""

    @abstractmethod
    def total(self) -> Tensor:
        """Σ_i g_i: what autograd puts into `p.grad`, of the parameter's shape."""

    @abstractmethod
    def token_squares(self) -> Tensor:
        """Σ over samples and tokens of the squared gradient of a single token, of the parameter's shape."""

    @abstractmethod
    def magnitude(self) -> Tensor:
        """Σ over tokens of the norm of a token's gradient, 0-dim: an upper bound of ‖total‖ that rounding scales with."""

    def projected(self, directions: Directions) -> Tensor:
        """Terms, one for each token where that is cheap, whose sum is u_kᵀ(Σ_i g_i)v_k: [terms, K], wide."""
        return directions.project(self.total())[None]

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """The tensors [B, …] that the recipe reads."""

    @abstractmethod
    def mapped(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The same recipe, with a function applied to each of its tensors."""

    def select(self, start: int, stop: int) -> Self:
        """The same recipe for samples start … stop-1 (a view)."""
        return self.mapped(lambda t: t[start:stop])

    def copy(self) -> Self:
        """A recipe that owns its tensors, for use after the backward pass has moved on."""
        return self.mapped(torch.clone)

    def regroup(self, units: Units) -> "PerSampleGradient":
        """The same gradients, summed by unit instead of by row: tokens [B, T, …] laid out by unit."""
        return self.mapped(units.gather_tokens)

    @property
    def tokens(self) -> int:
        """Tokens per sample; 1 where a sample is not made of tokens."""
        return 1

    def weighted_total(self, weights_B: Tensor, dtype: torch.dtype) -> Tensor:
        """Σ_i c_i g_i, of the parameter's shape: accumulated wide, rounded to `dtype` at the end."""
        total = self.per_sample_zeros().flatten()
        for start, part in zip(range(0, max(self.batch, 1), self._chunk), self.chunks(), strict=True):
            total += weighted_sum(flat(part.per_sample()), weights_B[start : start + self._chunk])
        return total.reshape(self.shape).to(dtype)

    def algorithm(self, choice: Algorithm) -> str:
        """The name of the algorithm that `squared_norms(choice)` runs."""
        return "direct"

    def squared_norms(self, choice: Algorithm = "auto") -> Tensor:
        """‖g_i‖² for every sample: [B]."""
        return torch.cat([wide_norms(flat(part.per_sample())).square() for part in self.chunks()])

    def sum_of_squares(self) -> Tensor:
        """Σ_i g_i ⊙ g_i, of the parameter's shape: the diagonal of the empirical Fisher times B."""
        squares = self.per_sample_zeros()
        for part in self.chunks():
            squares += part.per_sample().square().sum(0)
        return squares

    def per_sample_zeros(self) -> Tensor:
        """A zero gradient, of the parameter's shape."""
        return self.select(0, 0).per_sample().sum(0)

    def chunks(self) -> Iterator["PerSampleGradient"]:
        """The samples in groups whose written-out gradients stay small; at least one group, if an empty one."""
        for start in range(0, max(self.batch, 1), self._chunk):
            yield self.select(start, min(start + self._chunk, self.batch))

    @property
    def _chunk(self) -> int:
        return samples_per_chunk(torch.Size(self.shape).numel())


def flat(gradients_B: Tensor) -> Tensor:
    """[B, *shape] as [B, N], also where B is 0 or the shape is ()."""
    return gradients_B.reshape(gradients_B.shape[0], torch.Size(gradients_B.shape[1:]).numel())
