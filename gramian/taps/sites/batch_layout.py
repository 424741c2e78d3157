"""Where the samples of a layer's tensors lie, and how a tensor is taken apart by samples and put together again."""

from typing import Literal

from torch import Tensor

from gramian.core.errors import GramianError

Layout = Literal["shared", "first", "second", "grouped", "grouped_second", "copies"]
"""Axis on which a tensor has its B samples: "shared": none; "first": axis 0; "second": axis 1; "grouped" and "grouped_second":
axis 0 or 1 with k·B rows, the k rows of a sample next to each other; "copies": none, and axis 0 has a copy for each sample."""


def split(t: Tensor, layout: Layout, batch: int) -> Tensor:
    """Move the samples of a tensor from the axis that `layout` names to axis 0.

    In a grouped layout this axis has k adjacent rows for each sample and is split into axes B and k; a GramianError is raised
    if it is empty or no multiple of B = `batch`.
    """
    axis = 1 if layout == "grouped_second" else 0
    if layout in ("grouped", "grouped_second") and (not t.shape[axis] or t.shape[axis] % batch):
        raise GramianError(
            f"is given or returns {list(t.shape)}, whose axis {axis} is not a multiple of the batch of {batch}; expected the "
            "rows of every sample"
        )
    if layout == "grouped":
        return t.reshape(batch, t.shape[0] // batch, *t.shape[1:])
    if layout == "grouped_second":
        return t.reshape(t.shape[0], batch, t.shape[1] // batch, *t.shape[2:]).movedim(1, 0)
    return t.movedim(1, 0) if layout == "second" else t


def merged(t: Tensor, layout: Layout) -> Tensor:
    """Inverse of `split`: move the samples from axis 0 back to the axis that `layout` names."""
    if layout == "grouped":
        return t.flatten(0, 1)
    if layout == "copies":
        return t[0]
    if layout == "grouped_second":
        return t.movedim(0, 1).flatten(1, 2)
    return t.movedim(0, 1) if layout == "second" else t


def batch_of_one(t: Tensor, layout: Layout) -> Tensor:
    """One sample's tensor with a batch axis of size 1 where `layout` has the batch; grouped and shared tensors as they are."""
    return t if layout in ("shared", "grouped", "grouped_second") else t.unsqueeze(1 if layout == "second" else 0)


def single(t: Tensor, layout: Layout) -> Tensor:
    """A tensor of a batch of one without its batch axis, which `layout` names; grouped and shared tensors as they are."""
    return (
        t if layout in ("shared", "grouped", "grouped_second", "copies") else t.squeeze(1 if layout == "second" else 0)
    )
