"""Records that a backward pass gives to statistics: one for each use of a layer, one for each parameter with all its uses.

Shapes: B samples (rows of the batch), U units (= samples unless `sample_ids` regroups them), T tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gramian.plan.norm_algorithm import Algorithm
from gramian.taps.gradients import PerSampleGradient
from gramian.taps.units import Units

if TYPE_CHECKING:
    from gramian.taps.sites.site import Sides


@dataclass(frozen=True)
class PassInfo:
    """How a listener reads one forward of the root and its backward: grouping of rows, token weights, loss scaling."""

    number: int
    """Number of this forward, counted per model, so that statistics can order the samples of several passes."""
    batch: int
    """Number B of rows of the batch."""
    units: Units | None
    """How rows or tokens are grouped; None: row i is sample i."""
    sample_ids: Tensor | None
    token_weights: Tensor | None
    """Weights [B, T] of tokens, zero for tokens that do not count; None: all count."""
    factor: float
    """B for a mean loss, 1 for a sum: multiplies a sample's part of the gradient to give the gradient of its own loss."""
    loss_scale: "float | torch.amp.GradScaler"

    @property
    def scale(self) -> float | Tensor:
        """Factor (float or 0-dim tensor) from a gradient of the running backward to that of one sample's own loss."""
        if not isinstance(self.loss_scale, torch.amp.GradScaler):
            return self.factor / self.loss_scale
        # a 0-dim tensor: reading it as a float would wait for the device
        scale: Tensor | None = getattr(self.loss_scale, "_scale", None)
        return self.factor / (scale if scale is not None else self.loss_scale.get_scale())

    @property
    def rows(self) -> int:
        """Number of rows of the batch; processes that share a batch's samples count all of them."""
        return self.batch

    @property
    def count(self) -> int:
        """Number of units: groups of rows by `sample_ids`, or the rows themselves."""
        return self.batch if self.units is None else self.units.count


@dataclass(frozen=True)
class LayerRecord:
    """One use of one layer: its inputs, its output gradients, and the per-sample gradients computed from them."""

    layer: str
    kind: str
    ordinal: int
    """Number of earlier calls of this layer in the same forward."""
    inputs: list[Tensor]
    """The tensors that the site saved: usually the one input; empty where only a bias is trained."""
    output_gradients: list[Tensor]
    gradients: dict[str, PerSampleGradient]
    """{parameter: per-sample gradient of this use}, B rows, not yet grouped by unit."""
    info: PassInfo
    sides: "Callable[[], Sides]"
    """Function that returns the inputs and output gradients by token, of a layer whose weight is one matrix."""
    borrowed: bool
    """True if the tensors are valid during the call only (a compiled graph reuses their memory)."""


@dataclass(frozen=True)
class ParameterRecord:
    """Per-sample gradients of one parameter in one pass; all its uses are summed per unit before anything is squared."""

    parameter: str
    kind: str
    """Kinds of the layers that used the parameter, joined by " + "."""
    uses: int
    gradient: PerSampleGradient
    info: PassInfo
    borrowed: bool = False
    """True if the gradient's tensors are valid during the call only (a compiled graph reuses their memory)."""

    def squared_norms(self, choice: Algorithm = "auto") -> Tensor:
        """‖gradient of unit i's own loss‖² for the U units: [U]. Cached per record and algorithm (`choice`)."""
        if choice not in self._norms:
            self._norms[choice] = self.gradient.squared_norms(choice) * self.info.scale**2
        return self._norms[choice]

    @cached_property
    def _norms(self) -> dict[str, Tensor]:
        return {}

    def sum_of_squares(self) -> Tensor:
        """Σ_i g_i ⊙ g_i over units, g_i the gradient of unit i's own loss; of the parameter's shape."""
        return self.gradient.sum_of_squares() * self.info.scale**2

    def token_squares(self) -> Tensor:
        """Σ over tokens of the squared gradient of one token's loss term, of the parameter's shape."""
        return self.gradient.token_squares() * self.info.scale**2

    def total(self) -> Tensor:
        """Σ_i g_i over units, g_i the gradient of unit i's own loss; of the parameter's shape."""
        return self.gradient.total() * self.info.scale
