"""One call of a layer that is run again: its arguments without tensors, and everything else that it depended on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gramian.taps.sites.batch_layout import CallLayouts
from gramian.taps.sites.borrowed import Attributes


@dataclass(frozen=True)
class Call:
    """What is needed to run one call of a layer again: flattened arguments without their tensors, and the autocast state."""

    forward: Callable[..., Any]
    leaves: list[Any]
    """Flattened arguments, None in place of tensors."""
    places: list[int]
    """Indices into `leaves` at which the tensors belong."""
    names: list[str]
    """Name of the argument that each leaf belongs to: the keyword, or the position as text."""
    spec: Any
    observed: list[int]
    """Indices of the flattened outputs whose gradients are observed."""
    output_rows: list[int]
    """Number of rows of each observed output; one row is shared by all samples."""
    autocast: tuple[str, torch.dtype, bool]
    buffers: list[str]
    """Names, inside the layer, of the buffers whose values before the call were saved."""
    attributes: Attributes
    """Those of the layer and its children before the call, where it has set some anew."""
    copies: bool = False
    """True if outputs have no batch axis, and gradients those of a copy for each sample."""
    layouts: CallLayouts | None = None
    """Where the samples lie, as a row proof has found; None: as the site assumes."""

    def of_one(self, batch: int) -> "Call":
        """The call with sizes of one sample in the place of those of the batch: 1 for B, a shape [k·B, …] as [k, …]."""

        def own(leaf: Any) -> Any:
            if isinstance(leaf, torch.Size):
                fits = bool(leaf) and leaf[0] % batch == 0
                return torch.Size((leaf[0] // batch, *leaf[1:])) if fits else leaf
            return 1 if type(leaf) is int and leaf == batch else leaf

        return replace(self, leaves=[own(leaf) for leaf in self.leaves])

    def again(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Call the layer's forward with `tensors` in place of the original tensors; returns the observed outputs."""
        leaves = list(self.leaves)
        for place, value in zip(self.places, tensors, strict=True):
            leaves[place] = value
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        device, dtype, enabled = self.autocast
        with torch.autocast(device, dtype=dtype, enabled=enabled):
            outputs = pytree.tree_leaves(self.forward(*args, **kwargs))
        return [outputs[i] for i in self.observed]
