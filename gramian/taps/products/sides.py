"""What a layer's weight is as a matrix, and the inputs and output gradients of its tokens in one call."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True)
class LayerForm:
    """Size of a weight as one matrix [outputs, inputs], which maps input to output tokens, and how it is stored."""

    layout: Literal["out_in", "in_out", "kernel", "table"]
    """How the weight is stored: "out_in": as that matrix; "in_out": transposed; "kernel": [out, channels, *kernel]; "table":
    as rows [in, out] of an embedding table. Further axes are part of the columns."""
    inputs: int
    outputs: int
    bias: str | None = "bias"
    """Name inside the layer of the parameter, or part of one, that is added to the outputs; None, or of no such name: none."""
    assumed: bool = False
    """True if the form follows from shapes alone: the first backward shows whether the layer multiplies by this matrix."""


@dataclass(frozen=True)
class Sides:
    """Inputs a_t and output gradients g_t of a call, by token t; the gradient of the layer's weight matrix is Σ_t g_t a_tᵀ."""

    inputs_BT: Tensor
    """Inputs a [B, T, in] by token; for a table the indices [B, T]."""
    gradients_BTO: Tensor
    """Output gradients g [B, T, out] by token."""
    counted_BT: Tensor | None = None
    """Mask [B, T], False for tokens that the layer itself ignores (padding index); None: all count."""
    outputs: Callable[[Tensor], Tensor] | None = None
    """Function that applies the layer to inputs [T, in], in float32 or float64; None if the site offers none."""
    positions_BT: Tensor | None = None
    """[B, T]: which of its sample's tokens each one is, for layers that see some of them, or several times; −1: unknown. None:
    they are in order."""
    sequence: int | None = None
    """Number of tokens of a sample that `positions_BT` count; None: unknown, or there are no positions."""
    layout: Literal["out_in", "in_out"] | None = None
    """Of an assumed form: how the weight was seen to be stored; None: as the form says."""
    recorded: bool = False
    """True for an assumed form, whose products were recorded and are yet to be compared with the gradient."""
