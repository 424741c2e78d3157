"""Find the module where a number first stopped being finite, by replaying a bad batch with hooks on every module.

Forward: the first module whose output is not finite although all its inputs are. Submodules return before the modules that
contain them, so it is the innermost one, and a container is named only for its own code.

Backward: every input tensor of a module is replaced by a view of itself, whose gradient is what flows back through this module
alone; so the right module is named if several modules read one tensor. The first gradient that is not finite names its module;
a gradient that arrives at the output of a module, from code between modules, names the module that called it.

If no such tensor is found: the first parameter that is not finite, or whose gradient is not. Minus infinity in a tensor without
a gradient counts as a mask, not as a fault.

The hooks exist for one replay only, which costs a reduction and a read-back per tensor. The model must run eagerly; under
sharding each process examines its own shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

ROOT = "(model)"
LOSS = "(loss)"


@dataclass(frozen=True)
class NonfiniteSource:
    """The module or parameter where the first value that is not finite arose, and in which of its tensors."""

    name: str
    """Name of the module whose code made the tensor, or of the parameter; `ROOT`: the model, `LOSS`: the code after it."""
    where: Literal["forward", "backward", "parameter"]
    tensor: str
    """Which tensor: "its output", "the gradient of its input", "the gradient of NAME's output", "its value", "its gradient"."""
    shape: tuple[int, ...]
    count: int
    """Number of elements of the tensor that are not finite."""
    parameters: tuple[str, ...] = ()
    """Parameters of the module that are not finite themselves."""

    def __str__(self) -> str:
        """One line for a report: module, tensor, shape and number of elements that are not finite."""
        shape = "×".join(map(str, self.shape)) or "scalar"
        cause = f"; not finite itself: {', '.join(self.parameters)}" if self.parameters else ""
        return f"{self.name}: {self.where}, {self.count:,} elements of {self.tensor} ({shape}) not finite{cause}"


def first_nonfinite(model: nn.Module, run: Callable[[], None]) -> NonfiniteSource | None:
    """Replay a batch and name the first module or parameter that is not finite.

    Args:
        model: the model that `run` calls; all hooks are removed when this returns or raises.
        run: one forward and backward of the batch, from the state and with the random numbers of the step that failed, without
            an optimizer step. Gradients in `p.grad` stay.

    Returns:
        The first tensor that is not finite; None if all are.

    Example:
        >>> first_nonfinite(model, lambda: model(x).sum().backward())  # doctest: +SKIP
        NonfiniteSource(name='blocks.2.fc', where='forward', tensor='its output', shape=(2, 8, 32), count=5, parameters=())
    """
    watch = _Watch(model)
    try:
        run()
    finally:
        watch.close()
    return watch.found or next(_parameters(model), None)


class _Watch:
    """Hooks on every module of a model that find the first tensor which is not finite; `close` removes them."""

    def __init__(self, model: nn.Module) -> None:
        self.found: NonfiniteSource | None = None
        self._names = {module: name or ROOT for name, module in model.named_modules()}
        self._running: list[tuple[str, bool]] = []
        """Modules whose forward is running, outermost first, and whether their inputs are finite."""
        self._blamed: Any = WeakIdKeyDictionary()
        """{tensor: [module to blame for its gradient, which gradient that is]}, with weak references."""
        self._handles: list[RemovableHandle] = []
        for module in self._names:
            self._handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            # Also where the forward is left early, as a recomputation of activations may be.
            self._handles.append(module.register_forward_hook(self._after, with_kwargs=True, always_call=True))

    def close(self) -> None:
        """Remove all hooks from the modules and tensors."""
        for handle in self._handles:
            handle.remove()

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        name = self._names[module]
        self._running.append((name, not any(_count_unmasked(tensor) for tensor in _tensors((args, kwargs)))))
        views: dict[int, Tensor] = {}

        def own(value: Any) -> Any:
            if not (isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()):
                return value
            if id(value) not in views:  # a module may ask whether two arguments are one tensor
                views[id(value)] = value.view_as(value)
                self._blame(views[id(value)], name, "the gradient of its input")
            return views[id(value)]

        return tuple(own(value) for value in args), {key: own(value) for key, value in kwargs.items()}

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        name, given_finite = self._running.pop()
        caller = self._running[-1][0] if self._running else LOSS
        for tensor in _tensors(output):
            count = _count_unmasked(tensor) if given_finite and self.found is None else 0
            if count:
                own = {key: parameter for key, parameter in module.named_parameters(recurse=False) if _count(parameter)}
                prefix = "" if name == ROOT else f"{name}."
                names = tuple(f"{prefix}{key}" for key in own)
                self.found = NonfiniteSource(name, "forward", "its output", tuple(tensor.shape), count, names)
            if tensor.requires_grad:
                self._blame(tensor, caller, f"the gradient of {name}'s output")

    def _blame(self, tensor: Tensor, name: str, which: str) -> None:
        """Watch the gradient of a tensor: if it is not finite, module `name` is reported; a later call replaces the name."""
        blamed = self._blamed.get(tensor)
        if blamed is not None:
            blamed[:] = name, which
            return
        blamed = self._blamed[tensor] = [name, which]

        def arrived(grad: Tensor) -> None:
            count = _count(grad) if self.found is None else 0
            if count:
                self.found = NonfiniteSource(blamed[0], "backward", blamed[1], tuple(grad.shape), count)

        self._handles.append(tensor.register_hook(arrived))


def _parameters(model: nn.Module) -> Iterator[NonfiniteSource]:
    """Yield the parameters that are not finite, then those whose gradient is not."""
    for name, parameter in model.named_parameters():
        if count := _count(parameter):
            yield NonfiniteSource(name, "parameter", "its value", tuple(parameter.shape), count)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and (count := _count(parameter.grad)):
            yield NonfiniteSource(name, "parameter", "its gradient", tuple(parameter.shape), count)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors inside nested tuples, lists, mappings and dataclasses."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):
            yield from _tensors(dict(leaf))
        elif is_dataclass(leaf):
            yield from _tensors([getattr(leaf, field.name) for field in fields(leaf)])


def _count(tensor: Tensor) -> int:
    """Number of elements of this process's part of a tensor that are not finite."""
    local = _local(tensor)
    return int((~torch.isfinite(local)).sum()) if local.is_floating_point() or local.is_complex() else 0


def _count_unmasked(tensor: Tensor) -> int:
    """Number of elements that are not finite; 0 if all are −∞ in a tensor without a gradient, which is a mask."""
    count = _count(tensor)
    masked = count and not tensor.requires_grad and int((_local(tensor) == -torch.inf).sum())
    return 0 if count == masked else count


def _local(tensor: Tensor) -> Tensor:
    """This process's values of a tensor, dense and without a graph."""
    local = tensor.detach()
    if isinstance(local, DTensor):
        local = local.to_local()
    return local._values() if local.is_sparse else local
