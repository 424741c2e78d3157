"""The state of one backward that is being clipped: squared norms so far, gradients saved for the sums, clip factors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.privacy.clipping.clip_factors import ClipFunction
from gramian.privacy.clipping.clipping_plan import ClippingPlan, ClippingRow
from gramian.privacy.clipping.step_timing import Stopwatch
from gramian.privacy.metric.public_metric import PublicMetric
from gramian.taps.gradients import ExplicitGradient, GroupedOuter, Joined, Outer, PerSampleGradient
from gramian.taps.records import PassInfo


class SumReceiver(Protocol):
    """Receives the clipped sums of a backward, parameter by parameter."""

    def receive(self, name: str, total: Tensor | None) -> None:
        """Receive the clipped sum of the parameter `name`; None if it got no gradient."""

    def settle(self) -> None:
        """Called when all clipped sums of a backward were received."""


@dataclass
class DoubtfulNorms:
    """Squared norms [B] of a layer, and a mask [B] of doubtful samples, whose norm may have lost its digits.

    Digits are lost where the gradients of a sample's tokens cancel. Whether there are such samples is read once for all layers.
    """

    gradients: Mapping[str, PerSampleGradient]
    squares_B: Tensor
    doubtful_B: Tensor
    measure: Callable[[Mapping[str, PerSampleGradient]], Tensor]
    """Squared norms [B] of such gradients, once they are formed."""
    exact: Callable[[Tensor], Tensor] | None = None
    """Exact squared norms of some samples, by their numbers, in place of forming their gradients; their sums are right as
    they are. None: they are formed, measured and summed anew."""


@dataclass
class SavedForClipping:
    """A parameter's per-sample gradient, saved for its clipped sum, with the version counters of its tensors."""

    gradient: PerSampleGradient
    versions: tuple[int, ...]

    @classmethod
    def of(cls, gradient: PerSampleGradient) -> "SavedForClipping":
        """Save a gradient with the version counters of its tensors, which show a later write into them."""
        return cls(gradient, tuple(t._version for t in gradient.tensors()))

    def check(self, parameter: str) -> None:
        """Raise a `GramianError` that names the parameter if one of the gradient's tensors was written to."""
        if self.versions != tuple(t._version for t in self.gradient.tensors()):
            raise GramianError(
                f"{parameter}: its layer's input or output gradient was changed in place during the backward; "
                'expected custom backwards to leave them alone, or clipping="two_pass"'
            )


@dataclass
class ClippingWork:
    """The state of one backward that is being clipped: norms so far, saved gradients, clip factors, sums."""

    info: PassInfo
    plan: ClippingPlan | None
    trained: Mapping[str, nn.Parameter]
    clip: ClipFunction
    stopwatch: Stopwatch
    norms_only: bool
    """True in the first of two backwards, which computes norms and saves nothing."""
    ignored: bool
    """True if `torch.autograd.grad` runs, not `backward()`: no parameter gets a gradient, and nothing is clipped."""
    placeholder: bool
    """True if the batch has no samples: the gradients belong to a row of zeros in their place."""
    metric: PublicMetric | None
    """The metric in which norms are measured; None: the Euclidean one."""
    start_time: Any
    """Time at which the backward reached the first layer; None if the stopwatch is off."""
    rows: dict[str, ClippingRow] = field(default_factory=dict)
    """{parameter: its line of the clipping plan}."""
    slack: float = 0.0
    squares: dict[int, Tensor] = field(default_factory=dict)
    """{number of a norm of the clip function: sum over its parameters so far of each sample's squared gradient norm: [B]}."""
    waiting: dict[str, Outer | GroupedOuter | Joined] = field(default_factory=dict)
    """{parameter: gradient} of products whose norms are computed at the end of the backward."""
    incomplete: dict[str, dict[str, PerSampleGradient]] = field(default_factory=dict)
    """{block of the metric: gradients of those of its parameters that the backward has reached}, until it has reached all."""
    doubtful: list[DoubtfulNorms] = field(default_factory=list)
    recomputed: dict[str, tuple[Tensor, ExplicitGradient | None]] = field(default_factory=dict)
    """{parameter: (indices of doubtful samples, their gradients in float32 or float64)}, for samples whose norms lost digits.
    The gradients are None in the first of two passes: the second computes them again."""
    saved: dict[str, SavedForClipping] = field(default_factory=dict)
    saved_bytes: int = 0
    padding: Tensor | None = None
    """Norm of the gradient of rows or tokens that belong to no unit, 0-dim, which must be 0; None: there are none."""
    small_gradients: dict[str, Tensor] = field(default_factory=dict)
    """Per-sample gradients [B, n] of biases and norm layers: small and many, so they are clipped together."""
    small_groups: list[tuple[Tensor, list[str]]] = field(default_factory=list)
    """The small gradients concatenated by device and dtype: ([B, N], parameter names)."""
    factors: dict[int, Tensor] | None = None
    """{number of a norm: clip factors [B]}; None until the norms are known. Set before a second pass."""
    finite_runs: list[tuple[int, int]] | None = None
    """Ranges [start, stop) of samples with a finite gradient; only these are summed. None: all samples."""
    weights: dict[tuple[torch.device, int], Tensor] = field(default_factory=dict)
    """Weights [B] (clip factor times the factor of the loss reduction) of the gradients, by device and number of the norm."""
    launches: dict[str, list[str]] | None = None
    """{parameter: itself and others whose clipped sums one launch forms}, for products of one layout; None: not planned yet."""
    totals: dict[str, Tensor] = field(default_factory=dict)
    """{parameter: its clipped sum} of the sums that were computed already."""

    def add(self, name: str, squares_B: Tensor) -> None:
        """Add the squared per-sample norms [B] of a parameter to the norm that it is a part of."""
        group = self.clip.groups[name]
        earlier = self.squares.get(group)
        self.squares[group] = squares_B if earlier is None else earlier + squares_B.to(earlier.device)

    def time(self, phase: str, name: str, gradient: PerSampleGradient, way: str) -> Any:
        """Context manager that times the norm or the sum of one parameter, with its FLOPs and bytes, if the stopwatch is on.

        `phase` is "norm" or "clip", `way` how the parameter is clipped.
        """
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
