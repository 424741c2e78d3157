"""The floating-point tensors that a forward returns, or stores in attributes of modules, and their rows per sample."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from gramian.core.errors import GramianError
from gramian.taps.model.python_state import graph_tensors
from gramian.taps.proof.sample_arguments import SampleArguments


def output_tensors(output: Any, depth: int = 3) -> list[Tensor]:
    """Floating-point tensors of an output in a fixed order: in tuples, lists, dicts, and attributes of other objects.

    Objects inside objects are searched `depth` levels deep.
    """
    found: list[Tensor] = []
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor):
            found += [leaf] if leaf.is_floating_point() else []
        elif depth and not callable(leaf):
            slots = [name for kind in type(leaf).__mro__ for name in getattr(kind, "__slots__", ())]
            values = [*getattr(leaf, "__dict__", {}).values(), *(getattr(leaf, name, None) for name in slots)]
            found += [t for value in values for t in output_tensors(value, depth - 1)]
    return found


def left_in_attributes(root: nn.Module, before: Collection[int], returned: Sequence[Tensor]) -> dict[str, Tensor]:
    """{name: tensor} of tensors with a `grad_fn` that a forward stored in attributes of modules (an auxiliary loss).

    Tensors whose `id` is in `before`, and those that the forward returned, are left out.
    """
    known = {*before, *map(id, returned)}
    return {name: t for name, t in graph_tensors(root).items() if id(t) not in known}


def parameters_behind(tensors: Iterable[Tensor]) -> Iterator[nn.Parameter]:
    """Yield the parameters that a backward through some tensors would reach."""
    variables = (getattr(node, "variable", None) for node in _nodes_behind(tensors))  # of leaves
    return (one for one in variables if isinstance(one, nn.Parameter))


def _nodes_behind(tensors: Iterable[Tensor]) -> set[Any]:
    """The nodes of the graph behind some tensors."""
    waiting, seen = [get_gradient_edge(t).node for t in tensors if t.requires_grad], set()
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting.extend(following for following, _ in node.next_functions if following is not None)
    return seen


def rows_of(output: Tensor, samples: SampleArguments) -> int:
    """Rows of an output per sample; 0 if its first axis is not a multiple of B.

    If units are groups of tokens, also 0 if the first two axes are not those of the tokens [B, T].
    """
    units = samples.units
    if units is not None and units.ids.dim() == 2 and output.shape[:2] != units.ids.shape:
        return 0
    if not output.dim() or not output.shape[0] or output.shape[0] % samples.batch:
        return 0
    return output.shape[0] // samples.batch


def refuse_backward_through(root: nn.Module, output: Any, before: Collection[int], reasons: dict[int, str]) -> None:
    """Hook the outputs in `reasons`, {index: why it was not proven}, so that a backward through one raises GramianError.

    Attributes of modules count as outputs, except tensors whose `id` is in `before`, which were there before the forward. Of
    one that lies behind a proven output (the last state of a recurrent layer) the module gets an alias, with the hook.
    """
    if not reasons:
        return
    returned = output_tensors(output)
    inner = _nodes_behind(t for number, t in enumerate(returned) if number not in reasons)
    for number, tensor in enumerate([*returned, *left_in_attributes(root, before, returned).values()]):
        if number in reasons and tensor.requires_grad:
            if number >= len(returned) and tensor.grad_fn in inner:
                tensor = _aliased(root, tensor)
            tensor.register_hook(partial(_refuse_gradient, reasons[number]))


def _aliased(root: nn.Module, tensor: Tensor) -> Tensor:
    """An alias of a tensor, which takes its place in attributes of modules; itself if it is in containers, too."""
    places = [(vars(one), key) for one in root.modules() for key, value in vars(one).items() if value is tensor]
    if len(places) < sum(value is tensor for value in graph_tensors(root).values()):
        return tensor
    alias: Tensor = torch.ops.aten._unsafe_view.default(tensor, tensor.shape)  # no view to autograd
    for store, key in places:
        store[key] = alias
    return alias


def _refuse_gradient(reason: str, gradient: Tensor | None) -> None:
    if gradient is None or not bool(gradient.any()):
        return  # of another output of the same layer
    raise GramianError(
        f"{reason}, and a backward goes through it; expected a loss of outputs with one row for each sample, and a model that "
        "does not return what it goes on with (use_cache=False)"
    )
