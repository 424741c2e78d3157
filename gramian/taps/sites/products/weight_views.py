"""The weights of a layer as its code reads them: whole, or parts (an expert's matrix, a third of `in_proj`)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gramian.core.errors import GramianError

CASTS = frozenset(["to", "float", "double", "half", "bfloat16", "type", "type_as", "contiguous", "clone"])
SUMS = frozenset(["add", "__add__", "__radd__"])
TRANSPOSED = frozenset(["T", "mT", "t"])


class UnknownUse(GramianError):  # noqa: N818
    """Raised where a layer uses a weight otherwise than in a product or a sum of rows."""


@dataclass(frozen=True)
class WeightView:
    """A part of a parameter: matrices of a stack [E, M, N], rows of a matrix [M, N], entries of a vector, or vectors [E, M]."""

    name: str
    """Name of the parameter inside the layer."""
    shape: tuple[int, ...]
    """Shape of the parameter."""
    index: Tensor | int | None = None
    """Which matrix or vector of a stack: one number, or [rows], one for each row; None: all of them."""
    transposed: bool = False
    """True if the last two axes are swapped."""
    first: int = 0
    """Number of the first row of a matrix that is divided by rows."""


class WeightViews:
    """The views of a layer's weights in one call."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        """Begin with the weights themselves: {name inside the layer: tensor}."""
        self._of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        for name, weight in weights.items():
            self._of[weight] = WeightView(name, tuple(weight.shape))

    def get(self, t: Any) -> WeightView | None:
        """The view that a tensor is; None for other tensors and other arguments."""
        found: WeightView | None = self._of.get(t) if isinstance(t, Tensor) else None
        return found

    def follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
        """Note that `result`, of a function of this name, is a view of a weight among `args`; False if it is not one.

        A copy in another dtype counts as a view, and so does a constant plus the weight: their gradients are the weight's.
        """
        source = next((t for t in args if self.get(t) is not None), None)
        view = self.get(source)
        if view is None or source is None:
            return False
        parts = [result] if isinstance(result, Tensor) else list(result) if isinstance(result, tuple | list) else []
        single = name in ("unbind", "__iter__") or (name == "__getitem__" and _is_number(args[1]))
        stack, found = len(view.shape) == 3 or (len(view.shape) == 2 and single), list[WeightView]()
        alone = not any(isinstance(t, Tensor) for t in (*args, *kwargs.values()) if t is not source)
        if name in CASTS or (name in SUMS and alone):
            found = [view]
        elif name in TRANSPOSED or (name in ("transpose", "swapaxes") and _last_two(args, kwargs)):
            found = [replace(view, transposed=not view.transposed)]
        elif stack and view.index is None and not view.transposed and single and not kwargs:
            found = [replace(view, index=args[1])] if name == "__getitem__" else []
            found = found or [replace(view, index=i) for i in range(len(parts))]
        elif (
            name in ("split", "chunk") and not stack and not view.transposed and not any((*args[2:], *kwargs.values()))
        ):
            sizes = [part.shape[0] for part in parts]
            found = [replace(view, first=view.first + sum(sizes[:i])) for i in range(len(sizes))]
        elif name == "__getitem__" and not stack and isinstance(args[1], slice) and args[1].step in (None, 1):
            found = [replace(view, first=view.first + args[1].indices(source.shape[0])[0])]
        for part, one in zip(parts, found, strict=False):
            self._of[part] = one
        return bool(found) and len(found) == len(parts)


def _is_number(index: Any) -> bool:
    integer = isinstance(index, int) and not isinstance(index, bool)
    return integer or (
        isinstance(index, Tensor) and index.dim() < 2 and not index.is_floating_point() and index.dtype.itemsize > 1
    )


def _last_two(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    axes = [axis % args[0].dim() for axis in (*args[1:], *kwargs.values())]
    return sorted(axes) == [args[0].dim() - 2, args[0].dim() - 1]
