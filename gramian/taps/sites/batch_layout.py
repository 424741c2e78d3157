"""Where the samples of a layer's tensors lie, and how a tensor is taken apart by samples and put together again."""

from dataclasses import dataclass

from torch import Tensor

from gramian.core.errors import GramianError


@dataclass(frozen=True)
class Layout:
    """Axis on which a tensor has its B samples, with k·B rows there, k of each sample (k = 1, 2, …)."""

    axis: int | None
    """The axis; None: the tensor has none, and is one for all samples."""
    interleaved: bool = False
    """False: the k rows of a sample lie next to each other; True: the first rows of all samples do, then the second ones."""
    copies: bool = False
    """True: the tensor has no such axis, and axis 0 has a copy of it for each sample."""


@dataclass(frozen=True)
class CallLayouts:
    """Where the samples lie in the tensors of one call of a layer, as a row proof has found; None: as its site assumes."""

    inputs: tuple[Layout | None, ...]
    """Of each tensor among the flattened arguments."""
    outputs: tuple[Layout | None, ...]
    """Of each flattened output."""

    @property
    def moved(self) -> bool:
        """True if some tensor has its samples elsewhere than as rows of axis 0, those of a sample next to each other."""
        return any(layout not in (None, FIRST) for layout in (*self.inputs, *self.outputs))

    @property
    def output(self) -> Layout:
        """That of the first output that has one; the first axis if none has."""
        return next((layout for layout in self.outputs if layout is not None), FIRST)


SHARED, FIRST, SECOND, COPIES = Layout(None), Layout(0), Layout(1), Layout(None, copies=True)


def split(t: Tensor, layout: Layout, batch: int) -> Tensor:
    """View of a tensor with its B samples on a new axis 0, and k rows of each where `layout` has k·B of them.

    A tensor that is one for all samples, or copies for all, is returned as it is. GramianError if the axis is empty, absent, or
    no multiple of B = `batch`.
    """
    axis = layout.axis
    if axis is None:
        return t
    rows = t.shape[axis] if axis < t.dim() else 0
    if not rows or rows % batch:
        raise GramianError(
            f"is given or returns {list(t.shape)}, whose axis {axis} is not a multiple of the batch of {batch}; expected the "
            "rows of every sample"
        )
    sizes = (rows // batch, batch) if layout.interleaved else (batch, rows // batch)
    parts: Tensor = t.unflatten(axis, sizes)
    return parts.movedim(axis + layout.interleaved, 0)


def merged(t: Tensor, layout: Layout) -> Tensor:
    """Inverse of `split`: move the samples from axis 0 back to the axis that `layout` names; of copies, the first one."""
    if layout.axis is None:
        return t[0] if layout.copies else t
    return t.movedim(0, layout.axis + layout.interleaved).flatten(layout.axis, layout.axis + 1)


def first_axis(t: Tensor, layout: Layout, batch: int) -> Tensor:
    """A tensor of as many axes with the samples on axis 0, the rows of each next to each other: [T, B, D] as [B, T, D].

    A view if it has at most three axes and one row of each sample on its batch axis, else a copy.
    """
    if not batch:
        return t.movedim(layout.axis or 0, 0)
    parts = split(t, layout, batch)
    if layout.axis:
        moved: Tensor = parts.flatten(layout.axis, layout.axis + 1)
        return moved if moved.dim() < 4 else moved.contiguous()
    rows: Tensor = parts.flatten(0, 1)
    return rows
