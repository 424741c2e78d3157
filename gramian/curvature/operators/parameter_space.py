"""The parameters that an operator acts on: {name: tensor} and one flat vector are two forms of the same thing.

Legend: n numbers in all, k vectors at once.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.curvature.blocks.consistency import unique_parameters

Which = Sequence[str] | Callable[[str, Tensor], bool] | None
"""Some of the parameters: their names, or what is asked of each (name, parameter); None: all."""


class ParameterSpace:
    """Named parameters in a fixed order; a tied one counts once, under its first name."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, device: torch.device) -> None:
        """Remember what belongs where."""
        self.shapes = {name: torch.Size(shape) for name, shape in shapes.items()}
        self.sizes = [shape.numel() for shape in self.shapes.values()]
        self.dim = sum(self.sizes)
        self.dtype, self.device = dtype, device

    @classmethod
    def of(cls, model: nn.Module, which: Which = None) -> "ParameterSpace":
        """The trained parameters of a model, or some of them, in the model's order.

        Args:
            model: on one device, in one dtype.
            which: names, or what is asked of each (name, parameter); None: all that train.

        Raises:
            GramianError: for a name that no trained parameter has, if nothing is left, or if dtypes or devices differ.
        """
        chosen = choose({name: p for name, p in unique_parameters(model) if p.requires_grad}, which, "that trains")
        kinds = {(p.dtype, p.device) for p in chosen.values()}
        if len(kinds) > 1:
            raise GramianError(f"parameters: are of {len(kinds)} dtypes or devices; expected one")
        ((dtype, device),) = kinds
        return cls({name: p.shape for name, p in chosen.items()}, dtype, device)

    def flatten(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """[n] from {name: tensor like the parameter}, [n, k] from {name: [*shape, k]}; one that is missing is zero."""
        extra = {v.shape[len(self.shapes[name]) :] for name, v in vectors.items() if name in self.shapes}
        unknown = [name for name in vectors if name not in self.shapes]
        if unknown or len(extra) > 1:
            raise GramianError(
                f"vector: {unknown or 'columns differ'}; expected tensors like {next(iter(self.shapes))}, …"
            )
        columns = next(iter(extra), torch.Size())
        pieces = [
            vectors[name].reshape(size, *columns)
            if name in vectors
            else torch.zeros(size, *columns, dtype=self.dtype, device=self.device)
            for name, size in zip(self.shapes, self.sizes, strict=True)
        ]
        return torch.cat(pieces)

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """{name: [*shape]} of [n], {name: [*shape, k]} of [n, k]; views.

        Raises:
            GramianError: if there are not n rows.
        """
        if not flat.dim() or len(flat) != self.dim:
            raise GramianError(f"vector: has shape {[*flat.shape]}; expected [{self.dim}] or [{self.dim}, k]")
        pieces = flat.split(self.sizes)
        return {
            name: piece.reshape((*shape, *flat.shape[1:]))
            for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)
        }

    def columns(self, y_NK: Tensor) -> list[Tensor]:
        """Copies of the k columns of Y, each in one piece of memory, in this space's dtype and on its device.

        Raises:
            GramianError: unless Y is [n, k].
        """
        if y_NK.dim() != 2 or len(y_NK) != self.dim:
            raise GramianError(f"vector: has shape {[*y_NK.shape]}; expected [{self.dim}, k]")
        columns_KN = torch.empty(y_NK.shape[1], self.dim, dtype=self.dtype, device=self.device)
        return list(columns_KN.copy_(y_NK.detach().mT))


def choose(named: Mapping[str, Tensor], which: Which, kind: str) -> dict[str, Tensor]:
    """Those of the named tensors that are asked for, in their own order.

    Args:
        named: all there are.
        which: names, or what is asked of each (name, tensor); None: all.
        kind: what they have in common, for messages: "that trains".

    Raises:
        GramianError: for a name that is not there, or if nothing is left.
    """
    if isinstance(which, str):
        raise GramianError(f"parameters: is the text {which!r}; expected a list of names, [{which!r}]")
    if which is None:
        chosen = dict(named)
    elif callable(which):
        chosen = {name: t for name, t in named.items() if which(name, t)}
    else:
        unknown = [name for name in which if name not in named]
        if unknown:
            raise GramianError(
                f"parameters: {unknown[0]} is no parameter {kind}; expected names such as {[*named][:3]}"
            )
        wanted = set(which)
        chosen = {name: t for name, t in named.items() if name in wanted}
    if not chosen:
        raise GramianError(f"parameters: none is left; expected at least one {kind}")
    return chosen
