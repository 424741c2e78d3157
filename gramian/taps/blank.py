"""Batches without rows: many models cannot run on them, so they run on one row of zeros that nobody sees or counts."""

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def with_a_row(arguments: Any) -> Any:
    """Arguments in which every tensor of no rows has one, of zeros."""

    def filled(value: Any) -> Any:
        empty = isinstance(value, Tensor) and value.dim() > 0 and not value.shape[0]
        return value.new_zeros(1, *value.shape[1:]) if empty else value

    return pytree.tree_map(filled, arguments)


def without_a_row(output: Any) -> Any:
    """Outputs without that row: what has one row has none; the graph stays. A loss stays, and what it sends back is dropped."""
    return pytree.tree_map(
        lambda value: value[:0] if isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == 1 else value,
        output,
    )
