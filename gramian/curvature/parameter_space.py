"""The parameters that an operator acts on: {name: tensor} and one flat vector are two forms of the same thing.

Legend: n numbers in all, k vectors at once.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from gramian.curvature.consistency import unique_parameters
from gramian.errors import GramianError


class ParameterSpace:
    """Named parameters in a fixed order; a tied one counts once, under its first name."""

    def __init__(self, shapes: Mapping[str, torch.Size], dtype: torch.dtype, device: torch.device) -> None:
        """Remember what belongs where."""
        self.shapes = dict(shapes)
        self.sizes = [shape.numel() for shape in self.shapes.values()]
        self.dim = sum(self.sizes)
        self.dtype, self.device = dtype, device

    @classmethod
    def of(
        cls, model: nn.Module, which: Sequence[str] | Callable[[str, nn.Parameter], bool] | None = None
    ) -> "ParameterSpace":
        """The trained parameters of a model, or some of them.

        Args:
            model: on one device, in one dtype.
            which: names, or what is asked of each (name, parameter); None: all that train.

        Raises:
            GramianError: for a name that no trained parameter has, if nothing is left, or if dtypes or devices differ.
        """
        trained = {name: p for name, p in unique_parameters(model) if p.requires_grad}
        if which is None:
            chosen = trained
        elif callable(which):
            chosen = {name: p for name, p in trained.items() if which(name, p)}
        else:
            unknown = [name for name in which if name not in trained]
            if unknown:
                raise GramianError(
                    f"parameters: {unknown[0]} is none that trains; expected names of trained parameters"
                )
            chosen = {name: p for name, p in trained.items() if name in set(which)}
        if not chosen:
            raise GramianError("parameters: none is left; expected at least one that trains")
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
        """{name: [*shape]} of [n], {name: [*shape, k]} of [n, k]; views."""
        pieces = flat.split(self.sizes)
        return {
            name: piece.reshape(*shape, *flat.shape[1:])
            for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)
        }
