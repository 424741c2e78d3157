"""Run extra forwards and backwards of a model and restore its gradients, buffers, random states and Python attributes."""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from gramian.parallel.lockstep import fsdp_groups
from gramian.taps.model import user_names
from gramian.taps.model.python_state import PythonState, held_values, same_values


@contextmanager
def preserve_state(root: nn.Module, counters: bool = False, arguments: Iterable[Any] = ()) -> Iterator[None]:
    """Context manager that restores gradients, buffers and random states on exit, also after an error.

    Inside, `.grad` of every parameter is None at first. FSDP2 reduces no gradient over processes, not even one that the user is
    still accumulating, and frees gathered weights after every backward. Training and evaluation modes are not changed, so
    dropout is active if the user set it so. Memory: a copy of every buffer.

    Args:
        root: the model.
        counters: True to restore also what modules and hooks store in Python attributes and variables (`PythonState`).
        arguments: arguments of its forward; random generators among them are restored too.
    """
    sharded = [module for module in root.modules() if isinstance(module, FSDPModule)]
    groups = [group for module in sharded for group in fsdp_groups(module)]
    syncs = [(group, group.reduce_grads, group.all_reduce_grads, group.reshard_after_backward) for group in groups]
    gradients = [(p, p.grad) for p in root.parameters()]
    buffers = Buffers(root)
    python, generators = PythonState(root) if counters else None, Generators(root, arguments)
    random_states = generators.states()
    for p, _ in gradients:
        p.grad = None
    for group in groups:
        group.reduce_grads = group.all_reduce_grads = False
        group.reshard_after_backward = True
    try:
        with torch.enable_grad():
            yield
    finally:
        generators.restore(random_states)
        if python is not None:
            python.restore()
        for group, reduces, all_reduces, reshards in syncs:
            group.reduce_grads, group.all_reduce_grads, group.reshard_after_backward = reduces, all_reduces, reshards
        for p, gradient in gradients:
            p.grad = gradient
        buffers.restore()


class Buffers:
    """Copies of a model's buffers, to restore them after a forward that wrote into one or replaced it by another tensor."""

    def __init__(self, root: nn.Module) -> None:
        """Copy the values of all buffers of a model."""
        places = [
            (user_names.join(name, local), module._buffers, local)
            for name, module in user_names.named_modules(root)
            if not isinstance(module, torch.jit.ScriptModule)  # its buffers are not a dict; taps refuse it
            for local in module._buffers
        ]
        self._found = [(name, owner, local, owner[local], _copy(owner[local])) for name, owner, local in places]

    def changed(self) -> dict[str, torch.Tensor | None]:
        """{name: copy of the present value} of the buffers whose value differs from the copy made at the start."""
        return {
            name: _copy(owner[local])
            for name, owner, local, _, value in self._found
            if not same_values(owner[local], value)
        }

    def restore(self) -> None:
        """Put the original buffer tensors, with their original values, back where they changed."""
        with torch.no_grad():
            for _, owner, local, buffer, value in self._found:
                owner[local] = buffer
                if buffer is not None and value is not None and not same_values(buffer, value):
                    buffer.copy_(value)  # only now: writing spoils a backward of the user's that is still to come


def _copy(buffer: torch.Tensor | None) -> torch.Tensor | None:
    return None if buffer is None else buffer.detach().clone()


class InitialState:
    """A copy of the state in which a forward begins: random states, buffers, and Python attributes of modules and hooks."""

    def __init__(self, root: nn.Module, arguments: Iterable[Any] = ()) -> None:
        """Copy the state of a model, and of generators among the arguments of its forward."""
        self._generators = Generators(root, arguments)
        self._states = self._generators.states()
        self.buffers, self.python = Buffers(root), PythonState(root)

    def restore(self, *, forget: bool = True) -> None:
        """Restore the copied state; with `forget=False`, Python attributes of modules and hooks keep their present values."""
        self._generators.restore(self._states)
        self.buffers.restore()
        if forget:
            self.python.restore()

    @contextmanager
    def advanced(self) -> Iterator[None]:
        """Context manager: inside, `restore` sets random generators to their present states instead of the copied ones."""
        copied, self._states = self._states, self._generators.states()
        try:
            yield
        finally:
            self._states = copied

    @property
    def drew(self) -> bool:
        """True if a random number was drawn since the state was copied."""
        return self._generators.moved(self._states)


GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class Generators:
    """Every random generator that a forward may draw from: torch's, CUDA's, numpy's, Python's, and modules' own."""

    def __init__(self, root: nn.Module, given: Iterable[Any] = ()) -> None:
        """Find the generators of a model, and those among the arguments (`given`) of its forward."""
        self._cuda = sorted({p.device.index or 0 for p in root.parameters() if p.device.type == "cuda"})
        self._owned = [value for value in held_values(root) if isinstance(value, GENERATORS)]
        self._owned += [value for value in given if isinstance(value, GENERATORS)]

    def states(self) -> list[Any]:
        """Present states of all generators, in a list for `restore`. Does not wait for the device."""
        states: list[Any] = [random.getstate(), np.random.get_state(), torch.get_rng_state()]
        states += [torch.cuda.get_rng_state(index) for index in self._cuda]
        for owned in self._owned:
            if isinstance(owned, torch.Generator | np.random.RandomState):
                states.append(owned.get_state())
            else:
                states.append(owned.bit_generator.state if isinstance(owned, np.random.Generator) else owned.getstate())
        return states

    def restore(self, states: list[Any]) -> None:
        """Set every generator to its state in a list that `states` returned."""
        python, numpy_state, cpu, *rest = states
        random.setstate(python)
        np.random.set_state(numpy_state)
        torch.set_rng_state(cpu)
        for index, state in zip(self._cuda, rest, strict=False):
            torch.cuda.set_rng_state(state, index)
        for owned, state in zip(self._owned, rest[len(self._cuda) :], strict=True):
            if isinstance(owned, torch.Generator | np.random.RandomState):
                owned.set_state(state)
            elif isinstance(owned, np.random.Generator):
                owned.bit_generator.state = state
            else:
                owned.setstate(state)

    def moved(self, states: list[Any]) -> bool:
        """True if any generator was drawn from since these states were read."""
        return any(not _same(before, now) for before, now in zip(states, self.states(), strict=True))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, tuple) and any(isinstance(value, np.ndarray) for value in one):  # numpy's
        return all(_same(left, right) for left, right in zip(one, other, strict=True))
    if isinstance(one, dict):
        return all(_same(value, other[key]) for key, value in one.items())
    return bool(one == other)
