"""The state of one backward that is being clipped: squared norms so far, gradients saved for the sums, clip factors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.privacy.clipping.clipping_plan import ClippingPlan, ClippingRow
from gramian.privacy.clipping.step_timing import Stopwatch
from gramian.taps.gradients import ExplicitGradient, Outer, PerSampleGradient
from gramian.taps.records import PassInfo


class SumReceiver(Protocol):
    """Takes the clipped sums of a backward, parameter by parameter."""

    def receive(self, name: str, total: Tensor | None) -> None:
        """Take a parameter's sum; None if it has none."""

    def settle(self) -> None:
        """All sums of this backward were received."""


@dataclass
class DoubtfulNorms:
    """Squared norms of layers that were computed in one go, and the samples in which tokens cancel.

    In those samples a norm, or a sum, may have lost its digits. Whether there are any is read once for all layers.
    """

    outers: Mapping[str, Outer]
    squares_B: Tensor
    doubtful_B: Tensor


@dataclass
class SavedForClipping:
    """The per-sample gradient from which one parameter's weighted sum will be formed."""

    gradient: PerSampleGradient
    versions: tuple[int, ...]

    @classmethod
    def of(cls, gradient: PerSampleGradient) -> "SavedForClipping":
        """Save a gradient with the versions of its tensors: a later write into them would spoil the sum."""
        return cls(gradient, tuple(t._version for t in gradient.tensors()))

    def check(self, parameter: str) -> None:
        """Raise a `GramianError` that names the parameter if one of the tensors was written to."""
        if self.versions != tuple(t._version for t in self.gradient.tensors()):
            raise GramianError(
                f"{parameter}: its layer's input or output gradient was changed in place during the backward; "
                'expected custom backwards to leave them alone, or clipping="two_pass"'
            )


@dataclass
class ClippingWork:
    """One backward that is being clipped."""

    info: PassInfo
    plan: ClippingPlan | None
    trained: Mapping[str, nn.Parameter]
    max_grad_norm: float
    stopwatch: Stopwatch
    norms_only: bool
    """True in the first of two backwards, which brings norms and saves nothing."""
    ignored: bool
    """True if this is not `backward()` but `torch.autograd.grad` of something else: parameters get nothing then."""
    placeholder: bool
    """True if the batch has no samples: what arrives belongs to a row of zeros in their place."""
    start_time: Any
    """When the backward reached the first layer."""
    rows: dict[str, ClippingRow] = field(default_factory=dict)
    """How each parameter is handled."""
    slack: float = 0.0
    squares_B: Tensor | None = None
    """Σ over the parameters so far of the squared norms."""
    gram_group: dict[str, Outer] = field(default_factory=dict)
    """Layers that share a side, whose Gram matrices will be multiplied in one go."""
    doubtful: list[DoubtfulNorms] = field(default_factory=list)
    recomputed: dict[str, tuple[Tensor, ExplicitGradient | None]] = field(default_factory=dict)
    """{parameter: (doubtful samples, their gradients in a wide dtype)}; None: to be computed again in the second pass."""
    saved: dict[str, SavedForClipping] = field(default_factory=dict)
    saved_bytes: int = 0
    small_gradients: dict[str, Tensor] = field(default_factory=dict)
    """Per-sample gradients [B, n] of biases and norms: small and many, so they are handled all at once."""
    small_groups: list[tuple[Tensor, list[str]]] = field(default_factory=list)
    """The same side by side: ([B, N], names)."""
    factors_B: Tensor | None = None
    """The clip factors c, known before a second pass."""
    finite_runs: list[tuple[int, int]] | None = None
    """[start, stop) of the runs of samples that take part; None: all do."""
    weights: dict[torch.device, Tensor] = field(default_factory=dict)
    """Weights [B] of the carried gradients, on every device that has some."""
    totals: dict[str, Tensor] = field(default_factory=dict)
    """Clipped sums that are formed already."""

    def add(self, squares_B: Tensor) -> None:
        """Add one parameter's share of the squared norms."""
        if self.squares_B is None:
            self.squares_B = squares_B
        else:
            self.squares_B = self.squares_B + squares_B.to(self.squares_B.device)

    def time(self, phase: str, name: str, gradient: PerSampleGradient, way: str) -> Any:
        """Time the norm or the sum of one parameter, with its FLOPs and bytes, where the stopwatch is on."""
        if not self.stopwatch.on:
            return self.stopwatch.time(phase)
        tensors = gradient.tensors()
        flops = 0.0
        if isinstance(gradient, Outer):
            rows, columns = gradient.shape
            tokens = gradient.tokens
            norms = {"gram": tokens * (tokens + 1) * (rows + columns), "rank1": 2 * (rows + columns)}
            product = 2 * tokens * rows * columns
            flops = float(gradient.batch * (norms.get(way, product) if phase == "norm" else product))
        nbytes = float(sum(t.nbytes for t in tensors))
        return self.stopwatch.time(phase, name, way, flops, nbytes, tensors[0].is_cuda)
