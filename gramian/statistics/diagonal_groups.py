"""Sums of a diagonal Fisher over groups of entries (rows, columns, attention heads): each group's part of tr F.

A parameter that is one number, such as ReZero's gain, is one group, [1], for rows and for heads. The standard error of a sum
does not follow from those of its entries, which are correlated: give these functions to `DiagonalFisherEstimate(reduce=…)`.
"""

from numbers import Integral
from typing import Any

from torch import Tensor

from gramian.core.errors import GramianError


def by_row(diagonal: Tensor) -> Tensor:
    """Sums of a diagonal over all axes but the first, [N]; [1] for a single number.

    Rows are the outputs of `nn.Linear` and convolutions, and the tokens of an embedding. An argument that is not a tensor
    raises a `GramianError`.
    """
    _check_diagonal(diagonal)
    return diagonal.reshape(diagonal.shape or (1,)).unsqueeze(1).flatten(1).sum(1)


def by_column(diagonal: Tensor) -> Tensor:
    """Sums of a diagonal over all axes but the second, [N]: inputs of `nn.Linear`, outputs of a Hugging Face `Conv1D`.

    Raises:
        GramianError: if the diagonal is not a tensor with two axes or more.
    """
    _check_diagonal(diagonal)
    if diagonal.dim() < 2:
        raise GramianError(f"diagonal: has shape {list(diagonal.shape)}; expected two axes or more")
    return by_row(diagonal.transpose(0, 1))


def by_head(diagonal: Tensor, heads: int, dim: int = 0, fused: int = 1) -> Tensor:
    """Sums of a diagonal Fisher over the entries of each attention head.

    Args:
        diagonal: the diagonal of a projection's weight or bias.
        heads: number H of heads; the features of a head lie next to each other. Where queries share key and value heads, give
            keys and values their own number.
        dim: the axis of the heads' features: 0 for q, k and v of `nn.Linear` and their biases, 1 for the output projection.
        fused: number of projections that lie one after another along that axis, such as 3 for q, k and v in one weight.

    Returns:
        [H], or [fused, H]; [1] of a single number, which belongs to no head.

    Raises:
        GramianError: if `heads` times `fused` does not divide the axis, or for an argument of another type.
    """
    _check_diagonal(diagonal)
    for field, number in (("heads", heads), ("dim", dim), ("fused", fused)):
        if not isinstance(number, Integral):
            raise GramianError(f"{field}: got {number!r}; expected a whole number")
    if not diagonal.dim():
        return by_row(diagonal)
    if not -diagonal.dim() <= dim < diagonal.dim():
        raise GramianError(f"dim: got {dim}; expected an axis of {list(diagonal.shape)}")
    width = diagonal.shape[dim]
    if heads < 1 or fused < 1 or width % (heads * fused):
        raise GramianError(f"heads: {fused} x {heads} do not divide {width} features; expected a divisor")
    sums = diagonal.movedim(dim, 0).reshape(fused, heads, -1).sum(-1)
    return sums[0] if fused == 1 else sums


def _check_diagonal(diagonal: Any) -> None:
    if not isinstance(diagonal, Tensor):
        raise GramianError(f"diagonal: got {type(diagonal).__name__}; expected a tensor")
