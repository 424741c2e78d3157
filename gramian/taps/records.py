"""Records that statistics receive in a backward: one for each call of a layer, one for each parameter with all its uses.

Shapes: B rows of the batch, U units (the rows, or the groups of rows or tokens that `sample_ids` defines), T tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gramian.plan.norm_algorithm import Algorithm
from gramian.taps.gradients import PerSampleGradient
from gramian.taps.units import Units

if TYPE_CHECKING:
    from gramian.taps.products.banks import MatrixSides


@dataclass(frozen=True)
class PassInfo:
    """How a listener reads the gradients of one pass (a forward of the root module and its backward): grouping and scaling."""

    number: int
    """Number of this forward, counted per model, so that statistics can order the samples of several passes."""
    batch: int
    """Number B of rows of the batch."""
    units: Units | None
    """Assignment of rows or tokens to units, made from `sample_ids`; None: row i is sample i."""
    sample_ids: Tensor | None
    token_weights: Tensor | None
    """Weights [B, T] of tokens, zero for tokens that do not count; None: all count."""
    factor: float
    """B for a mean loss, 1 for a sum, 1/c if each sample's loss has the coefficient c: multiplies a sample's part of the
    gradient to give the gradient of its own loss."""
    loss_scale: "float | torch.amp.GradScaler"

    @property
    def scale(self) -> float | Tensor:
        """`factor` over the loss scale: multiplies a sample's part of the gradient to give that of its own unscaled loss."""
        if not isinstance(self.loss_scale, torch.amp.GradScaler):
            return self.factor / self.loss_scale
        # a 0-dim tensor: reading it as a float would wait for the device
        scale: Tensor | None = getattr(self.loss_scale, "_scale", None)
        return self.factor / (scale if scale is not None else self.loss_scale.get_scale())

    @property
    def rows(self) -> int:
        """Number of rows of the batch; 0 for an empty one."""
        return self.batch

    @property
    def count(self) -> int:
        """Number of units: the groups that `sample_ids` defines, or the rows of the batch."""
        return self.batch if self.units is None else self.units.count


@dataclass(frozen=True)
class LayerRecord:
    """One call of one layer: its inputs, its output gradients, and the per-sample gradients computed from them."""

    layer: str
    kind: str
    ordinal: int
    """Number of earlier calls of this layer in the same forward."""
    inputs: list[Tensor]
    """The tensors saved in the forward: usually the layer's one input; empty if only a bias is trained."""
    output_gradients: list[Tensor]
    gradients: dict[str, PerSampleGradient]
    """{parameter: its gradients from this call}, one for each of B rows, not yet grouped into units."""
    info: PassInfo
    sides: "Callable[[], Mapping[str, MatrixSides]]"
    """Function that returns inputs and output gradients by token, [B, T, …], of each matrix of the layer; only for layers that
    have some (`Site.matrix_sides`)."""
    borrowed: bool
    """True if the tensors are valid during the call only (a compiled graph reuses their memory)."""


@dataclass(frozen=True)
class ParameterRecord:
    """Per-sample gradients of one parameter in one forward and backward, summed over all uses of the parameter."""

    parameter: str
    kind: str
    """Kinds of the layers that used the parameter, joined by " + "."""
    uses: int
    gradient: PerSampleGradient
    info: PassInfo
    borrowed: bool = False
    """True if the gradient's tensors are valid during the call only (a compiled graph reuses their memory)."""
    inline: bool = False
    """True if some use is a product inside a layer, of which no single layer record is compared by a row proof."""

    def squared_norms(self, choice: Algorithm = "auto") -> Tensor:
        """Squared norm of the gradient of each unit's own loss: [U]. `choice` is the norm algorithm; cached for each."""
        if choice not in self._norms:
            self._norms[choice] = self.gradient.squared_norms(choice) * self.info.scale**2
        return self._norms[choice]

    @cached_property
    def _norms(self) -> dict[str, Tensor]:
        return {}

    def sum_of_squares(self) -> Tensor:
        """Σ_i g_i ⊙ g_i over units (samples or groups of rows), g_i the gradient of unit i's loss; of the parameter's shape."""
        return self.gradient.sum_of_squares() * self.info.scale**2

    def token_squares(self) -> Tensor:
        """Σ over tokens of the squared gradient of one token's loss term, of the parameter's shape."""
        return self.gradient.token_squares() * self.info.scale**2

    def total(self) -> Tensor:
        """Σ_i g_i over units (samples or groups of rows), g_i the gradient of unit i's loss; of the parameter's shape."""
        return self.gradient.total() * self.info.scale
