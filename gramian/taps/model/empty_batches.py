"""Run batches without rows on one row of zeros, which is removed from the outputs, because many models fail on no rows.

Under FSDP2 all processes must gather weights in the same order. The order depends on whether the root's output is the same
tensor object as its last layer's output. On a process without rows it is not, so `apart` makes it another one on all processes.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def with_a_row(arguments: Any) -> Any:
    """The arguments with one row of zeros in every tensor that has no rows."""

    def filled(value: Any) -> Any:
        empty = isinstance(value, Tensor) and value.dim() > 0 and not value.shape[0]
        return value.new_zeros(1, *value.shape[1:]) if empty else value

    return pytree.tree_map(filled, arguments)


def without_a_row(output: Any) -> Any:
    """Remove the row of zeros from the outputs, in the same graph: [1, …] becomes [0, …]. A 0-dim loss stays."""

    def cut(value: Any) -> Any:
        one = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == 1
        return _another(value[:0]) if one else apart(value)

    return pytree.tree_map(cut, output)


def apart(output: Any) -> Any:
    """The same values as new tensor objects, not views to autograd, for every output that requires a gradient."""
    return pytree.tree_map(
        lambda value: _another(value) if isinstance(value, Tensor) and value.requires_grad else value, output
    )


def _another(value: Tensor) -> Tensor:
    found: Tensor = torch.ops.aten._unsafe_view(value, value.shape)
    return found
