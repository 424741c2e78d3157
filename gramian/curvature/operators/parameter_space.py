"""The parameters that an operator acts on, and the conversion between {name: tensor} and one flat vector.

Legend: n elements of all parameters together, k vectors at once.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.curvature.blocks.consistency import unique_parameters
from gramian.linalg.spectra.operator import check_vector
from gramian.taps.model.user_names import named_parameters

Selection = Sequence[str] | Callable[[str, Tensor], bool] | None
"""A selection of parameters: names, or a predicate of (name, parameter); None: all."""


class ParameterSpace:
    """Named parameters in a fixed order, as one flat vector [n]; a tied one counts once, under its first name.

    ```python
    space = ParameterSpace.of(model)
    flat_N = space.flatten({name: p.grad for name, p in model.named_parameters()})
    ```
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, device: torch.device) -> None:
        self.shapes = {name: torch.Size(shape) for name, shape in shapes.items()}
        self.sizes = [shape.numel() for shape in self.shapes.values()]
        self.dim = sum(self.sizes)
        self.dtype, self.device = dtype, device

    @classmethod
    def of(cls, model: nn.Module, which: Selection = None) -> "ParameterSpace":
        """The space of the trainable parameters of a model, or of a selection of them, in the model's order.

        Args:
            model: a model on one device, in one dtype.
            which: names, or a predicate of (name, parameter); None: all trainable parameters.

        Raises:
            GramianError: if no parameter is selected, a name is unknown, or the parameters have several dtypes or devices.
        """
        chosen = choose({name: p for name, p in unique_parameters(model) if p.requires_grad}, which, "that trains")
        kinds = {(p.dtype, p.device) for p in chosen.values()}
        if len(kinds) > 1:
            raise GramianError(f"parameters: are of {len(kinds)} dtypes or devices; expected one")
        ((dtype, device),) = kinds
        return cls({name: p.shape for name, p in chosen.items()}, dtype, device)

    def flatten(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """Flat vector [n] from {name: tensor of its shape}, or [n, k] from {name: [*shape, k]}; missing parameters are zero.

        A GramianError is raised for an unknown name, or if the numbers of columns differ.
        """
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
        """{name: [*shape]} from a flat vector [n], or {name: [*shape, k]} from [n, k], as views where the layout allows it.

        A GramianError is raised if `flat` does not have n rows.
        """
        if not flat.dim() or len(flat) != self.dim:
            raise GramianError(f"vector: has shape {[*flat.shape]}; expected [{self.dim}] or [{self.dim}, k]")
        pieces = flat.split(self.sizes)
        return {
            name: piece.reshape((*shape, *flat.shape[1:]))
            for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)
        }

    def columns(self, y_NK: Tensor) -> list[Tensor]:
        """Contiguous copies [n] of the k columns of Y [n, k], in this space's dtype and on its device."""
        check_vector(y_NK, self.dim, columns=True)
        columns_KN = torch.empty(y_NK.shape[1], self.dim, dtype=self.dtype, device=self.device)
        return list(columns_KN.copy_(y_NK.detach().mT))


def choose(named: Mapping[str, Tensor], which: Selection, kind: str) -> dict[str, Tensor]:
    """{name: tensor} of those of `named` that `which` selects (names, predicate, or None for all), in the order of `named`.

    A GramianError is raised if none is selected or a name is unknown; `kind` completes "a parameter …" in its message, such as
    "that trains".
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
                f"parameters: {unknown[0]} is not a parameter {kind}; expected names such as {[*named][:3]}"
            )
        wanted = set(which)
        chosen = {name: t for name, t in named.items() if name in wanted}
    if not chosen:
        raise GramianError(f"parameters: none is left; expected at least one {kind}")
    return chosen


def first_names(root: nn.Module | None, which: Selection) -> Selection:
    """The selection `which`, with any name of a tied parameter replaced by its first name in the model `root`.

    `root` None: names stay as they are. A GramianError is raised for a selection that is not names, a predicate or None.
    """
    if which is None or isinstance(which, str) or callable(which):
        return which
    names = [*which] if isinstance(which, Iterable) else [which]
    if not all(isinstance(name, str) for name in names):
        raise GramianError(
            f"parameters: is {which!r}; expected a list of names, a function of (name, parameter), or None"
        )
    if root is None:
        return names
    first = {id(p): name for name, p in unique_parameters(root)}
    tied = {name: first[id(p)] for name, p in named_parameters(root)}
    return [tied.get(name, name) for name in names]
