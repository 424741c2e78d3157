"""Results of layers without a batch axis (biases of relative positions [T, T, H], positions [T, D]), a copy for each sample.

Their gradient is a sum over samples, because they are broadcast over the batch. `BatchFree` looks like the result [*shape] to
the user's code, and has B equal copies [B, *shape]: each operation runs on all copies (`torch.vmap`), with sample b of tensors
that have a batch axis beside copy b. From there on the result has a batch axis as any other tensor, and the gradient of copy b
is that of sample b. No value changes. The row proof then checks, as for any model, that each sample has its own rows.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from gramian.core.errors import GramianError

VIEWS = ("T", "mT", "H", "mH", "real", "imag")
"""Properties of a tensor that are tensors themselves; all other properties describe its shape, dtype or device."""
FACTS = (
    "size",
    "dim",
    "stride",
    "numel",
    "is_floating_point",
    "is_complex",
    "element_size",
    "ndimension",
    "get_device",
    "__len__",
)
"""Methods of a tensor that describe it, too."""
REPEATS = ("expand", "expand_as", "broadcast_to", "repeat", "tile")
"""Functions by which code gives a tensor a batch axis."""


class BatchFree(Tensor):
    """A tensor [*shape] without a batch axis to the code that uses it, with `rows` [B, *shape], a copy for each sample."""

    rows: Tensor

    @staticmethod
    def __new__(cls, rows: Tensor) -> "BatchFree":
        """Wrap the copies; gradients flow to them."""
        found: BatchFree = Tensor._make_wrapper_subclass(
            cls, rows.shape[1:], strides=rows.stride()[1:], dtype=rows.dtype, device=rows.device
        )
        found.rows = rows
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on the copies of all samples at once."""
        name = getattr(func.__self__, "__name__", "") if func.__name__ == "__get__" else func.__name__
        if (func.__name__ == "__get__" and name not in VIEWS) or name in FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return args[0].rows.requires_grad if name == "requires_grad" else func(*args, **(kwargs or {}))
        return _run(func, name, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse code that sees no torch functions (operators written in C++, functions of autograd)."""
        raise GramianError(
            f"{func}: is given a result without a batch axis, which has no gradient for each sample there; "
            "expected torch functions between a layer without a batch axis and the batch"
        )


def refuse_escaped(output: Any, modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Raise GramianError if a model returns a `BatchFree`, or stores one in a module's attributes or buffers.

    A loss, or a later forward, would use it without the batch that it belongs to.
    """
    if any(isinstance(leaf, BatchFree) for leaf in pytree.tree_leaves(output)):
        raise GramianError(
            "model: returns a result without a batch axis; expected one row for each sample in all that it returns"
        )
    for name, module in modules:
        for key, value in [*vars(module).items(), *module._buffers.items()]:
            if any(isinstance(leaf, BatchFree) for leaf in pytree.tree_leaves(value)):
                raise GramianError(
                    f"{name or 'model'}: stores a result without a batch axis as {key!r}; expected it to be computed in "
                    "every forward"
                )


def unwrapped(args: Any, kwargs: Any, any_axes: bool) -> tuple[Any, Any, bool]:
    """Arguments of a tapped layer with rows in place of `BatchFree`, and whether these have an axis more than before.

    [1, …] becomes [B, …], as if it were broadcast; [*shape] becomes [B, *shape] if the layer takes `any_axes`.

    Raises:
        GramianError: for any other.
    """
    grown = False

    def rows(value: Any) -> Any:
        nonlocal grown
        if not isinstance(value, BatchFree):
            return value
        if any_axes:
            grown = True
            return value.rows
        if value.dim() and value.shape[0] == 1:
            return value.rows[:, 0]
        raise GramianError(
            f"is given a result without a batch axis, {list(value.shape)}; expected the batch as first axis"
        )

    args, kwargs = pytree.tree_map(rows, (args, kwargs))
    return args, kwargs, grown


def with_rows(output: Tensor) -> Tensor:
    """The observed copies [B, *shape] of a result as `BatchFree`; the tensor itself for one sample."""
    return output[0] if output.shape[0] == 1 else BatchFree(output)


def _run(func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    free = [leaf for leaf in leaves if isinstance(leaf, BatchFree)]
    for leaf in free if name.endswith("_") or kwargs.get("inplace") or any(one is True for one in args) else ():
        leaf.rows = leaf.rows.contiguous()  # copies that an operation writes into have their own memory
    batch, axes = free[0].rows.shape[0], max(leaf.dim() for leaf in free)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    broadcasts = all(leaf.dim() < axes or (axes > 0 and leaf.shape[0] == 1) for leaf in free)

    def rows_of(t: Tensor) -> int:
        """Rows of each sample in a tensor with a batch axis; beside [1, …] several (windows of an image); 0: it has none."""
        alike = broadcasts and t.dim() == axes > 0
        if isinstance(t, BatchFree) or not (t.dim() > axes or alike) or not t.shape[0]:
            return 0
        return t.shape[0] // batch if t.shape[0] == batch or (alike and t.shape[0] % batch == 0) else 0

    rows = max(rows_of(leaves[i]) for i in places)
    as_long = all(leaves[i].dim() == axes for i in places if rows_of(leaves[i]))
    if rows == 1 and as_long and all(leaf.dim() == axes and broadcasts for leaf in free):  # [1, …] beside [B, …]
        own = [leaf.rows[:, 0] if isinstance(leaf, BatchFree) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(own, spec)
        return func(*args, **kwargs)
    given = [
        leaf.rows if isinstance(leaf, BatchFree) else leaf.unflatten(0, (batch, -1)) if rows_of(leaf) else leaf
        for leaf in (leaves[i] for i in places)
    ]
    copies = tuple(0 if isinstance(leaves[i], BatchFree) or rows_of(leaves[i]) else None for i in places)
    specs: list[Any] = []

    def of_one(*tensors: Tensor) -> tuple[Any, ...]:
        filled = list(leaves)
        for place, t in zip(places, tensors, strict=True):
            filled[place] = t
        own_args, own_kwargs = pytree.tree_unflatten(filled, spec)
        found, structure = pytree.tree_flatten(func(*own_args, **own_kwargs))
        specs.append(structure)
        return tuple(found)

    # under vmap attention does not see that its mask has a gradient, which its faster kernels do not compute
    with sdpa_kernel(SDPBackend.MATH) if name == "scaled_dot_product_attention" else nullcontext():
        results = torch.vmap(of_one, in_dims=copies, randomness="same")(*given)
    if rows:
        found = [_in_place(t, name, rows) for t in results]
    else:
        grown = results[0].dim() - 1 > axes or broadcasts
        repeated = name in REPEATS and grown and results[0].dim() > 1 and results[0].shape[1] == batch
        found = [t[:, 0] if repeated else BatchFree(t) for t in results]
        found = (
            [t.contiguous() for t in found] if repeated and name in ("repeat", "tile") else found
        )  # as these return it
    return pytree.tree_unflatten(found, specs[0])


def _in_place(result: Tensor, name: str, rows: int) -> Tensor:
    """Results [B, rows, …] of single samples as one of the batch, [B·rows, …]."""
    if result.dim() < 2 or result.shape[1] != rows:
        raise GramianError(
            f"{name}: takes a result without a batch axis, and returns none with the batch as first axis; "
            "expected the batch first"
        )
    return result.flatten(0, 1)
