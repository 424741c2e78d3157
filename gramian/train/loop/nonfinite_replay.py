"""Where a number first stopped being finite: one replay of a bad batch with every module watched.

Forward: the first module to return something that is not finite though all it was given is. Modules end before those that
hold them, so it is the innermost one, and a module that holds others is named only for code of its own.

Backward: every tensor a module is given directly is passed on as a view of itself, whose gradient is what flows back through
this module alone; so where several modules read one tensor, the guilty one is told apart. The first gradient that is not
finite names its module; where it arrives at the output of a module, from code between modules, it names the one that called it.

Else a parameter that is not finite, or whose gradient is not. Minus infinity in a tensor without a gradient is a mask.

A run pays nothing for this until it has failed: hooks are there for one replay, which costs a reduction and a read-back per
tensor. The model must run eagerly; under sharding each process looks at its own shards.
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
    """The first tensor that is not finite."""

    name: str
    """Of the module in whose code it arose, or of the parameter; `ROOT`: the model itself, `LOSS`: after it."""
    where: Literal["forward", "backward", "parameter"]
    tensor: str
    """Which one: "its output", "the gradient of its input", "the gradient of NAME's output", "its value", "its gradient"."""
    shape: tuple[int, ...]
    count: int
    """Elements that are not finite."""
    parameters: tuple[str, ...] = ()
    """The module's own that are not finite themselves."""

    def __str__(self) -> str:
        """One line for a report."""
        shape = "×".join(map(str, self.shape)) or "scalar"
        cause = f"; not finite itself: {', '.join(self.parameters)}" if self.parameters else ""
        return f"{self.name}: {self.where}, {self.count:,} elements of {self.tensor} ({shape}) not finite{cause}"


def first_nonfinite(model: nn.Module, run: Callable[[], None]) -> NonfiniteSource | None:
    """Replay a batch and name the first module or parameter that is not finite.

    Args:
        model: what `run` calls; its hooks are as they were when this returns or raises.
        run: one forward and backward of the batch, from the state and with the random numbers of the step that failed, without
            an optimizer step. Gradients it leaves in `p.grad` stay there.

    Returns:
        What was found; None if everything was finite.
    """
    watch = _Watch(model)
    try:
        run()
    finally:
        watch.close()
    return watch.found or next(_parameters(model), None)


class _Watch:
    """Hooks on every module, until closed."""

    def __init__(self, model: nn.Module) -> None:
        self.found: NonfiniteSource | None = None
        self._names = {module: name or ROOT for name, module in model.named_modules()}
        self._running: list[tuple[str, bool]] = []
        """Modules whose forward has begun, outermost first, and whether what they were given is finite."""
        self._blamed: Any = WeakIdKeyDictionary()
        """{tensor: [module to blame for its gradient, which gradient that is]}; tensors are not kept alive."""
        self._handles: list[RemovableHandle] = []
        for module in self._names:
            self._handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            # Also where the forward is left early, as a recomputation of activations may be.
            self._handles.append(module.register_forward_hook(self._after, with_kwargs=True, always_call=True))

    def close(self) -> None:
        """Leave no hook behind."""
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
        """Watch the gradient of a tensor; one that is returned as it was given is the business of whoever called last."""
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
    """Parameters that are not finite, then gradients."""
    for name, parameter in model.named_parameters():
        if count := _count(parameter):
            yield NonfiniteSource(name, "parameter", "its value", tuple(parameter.shape), count)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and (count := _count(parameter.grad)):
            yield NonfiniteSource(name, "parameter", "its gradient", tuple(parameter.shape), count)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Tensors inside nested structures: tuples, lists, dictionaries and objects that behave like one."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):
            yield from _tensors(dict(leaf))
        elif is_dataclass(leaf):
            yield from _tensors([getattr(leaf, field.name) for field in fields(leaf)])


def _count(tensor: Tensor) -> int:
    """Elements that are not finite."""
    local = _local(tensor)
    return int((~torch.isfinite(local)).sum()) if local.is_floating_point() or local.is_complex() else 0


def _count_unmasked(tensor: Tensor) -> int:
    """The same of what modules are given and return, where minus infinity without a gradient is a mask."""
    count = _count(tensor)
    masked = count and not tensor.requires_grad and int((_local(tensor) == -torch.inf).sum())
    return 0 if count == masked else count


def _local(tensor: Tensor) -> Tensor:
    """Plain, dense and without a graph."""
    local = tensor.detach()
    if isinstance(local, DTensor):
        local = local.to_local()
    return local._values() if local.is_sparse else local
