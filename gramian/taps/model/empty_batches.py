"""Batches without rows run on one row of zeros, which is cut from the outputs again: many models need a row.

Under FSDP2 every process must gather weights in one order, which depends on the identity of output tensors: the root's output
is another tensor than its last layer's on a process without rows, so it must be on all processes (`apart`).
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
    """Cut the row of zeros from the outputs, in the same graph: [1, …] becomes [0, …]. A 0-dim loss stays."""

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
