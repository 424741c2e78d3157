"""Run a module on other tensors in place of its parameters and buffers, and put everything back afterwards."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from gramian.taps.model.python_state import OWN, PythonState

Attributes = list[tuple[dict[str, Any], dict[str, Any]]]
"""(what `vars` of a module returns, the attributes of the user's own that were in it) of some modules."""


def own_parameters(module: nn.Module, whole: bool) -> dict[str, nn.Parameter]:
    """{name inside the module: parameter}: all if `whole`, else direct ones, with ParameterLists and ParameterDicts."""
    if whole:
        return dict(module.named_parameters())
    found = {name: p for name, p in module._parameters.items() if p is not None}
    for name, child in module._modules.items():
        if isinstance(child, nn.ParameterList | nn.ParameterDict):
            found |= {f"{name}.{local}": p for local, p in child.named_parameters()}
    return found


def _buffers(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str, Tensor]]:
    """(name inside the module, the dict that has it, its key there, value) of every buffer of a module and its children."""
    for path, owner in module.named_modules():
        for local, b in owner._buffers.items():
            if b is not None:
                yield f"{path}.{local}" if path else local, owner._buffers, local, b


class StateBefore:
    """Copies of a module's buffers, and its attributes, before a run of it, to begin another run with.

    Memory: a copy of the buffers during the run, and of those that it changed after it; none in evaluation mode.
    """

    def __init__(self, module: nn.Module, hooked: bool) -> None:
        """Copy the buffers; those that hooks compute weights from (`hooked`) are needed in every case."""
        self._hooked = hooked
        own = [vars(one) for one in module.modules()]
        self._attributes = [(store, {key: value for key, value in store.items() if key not in OWN}) for store in own]
        training = hooked or any(one.training for one in module.modules())
        self._found = [
            (name, store, local, b, b._version, b.detach().clone())
            for name, store, local, b in (_buffers(module) if training else ())
        ]

    def attributes(self) -> Attributes:
        """Those of the modules in which the run has set an attribute anew (a state that is None at first)."""
        return [
            (store, before)
            for store, before in self._attributes
            if store.keys() - OWN != before.keys() or any(store[key] is not value for key, value in before.items())
        ]

    def buffers(self) -> dict[str, Tensor]:
        """{name: value before the run} of the buffers that the run has changed, or that hooks may change before another."""
        return {
            name: value
            for name, store, local, b, version, value in self._found
            if self._hooked or store.get(local) is not b or b._version != version
        }


class Borrowed:
    """Context manager that runs a module on other tensors in place of some of its parameters, and on copies of its buffers.

    Attributes that the module sets meanwhile are restored on exit: tensors of `vmap` cannot be used outside of it.
    """

    def __init__(
        self,
        module: nn.Module,
        tensors: dict[str, Tensor],
        whole: bool,
        buffers: Mapping[str, Tensor] | None = None,
        attributes: Attributes | None = None,
    ) -> None:
        """Find where the tensors are to be put; nothing is swapped before the context is entered.

        Args:
            module: the module.
            tensors: {parameter name inside the module: the tensor to use in its place}.
            whole: True to replace a parameter in all child modules, too; False in the module itself and its parameter lists
                only (a tied use in a child has a tap of its own).
            buffers: {buffer name inside the module: value to begin with}; all other buffers begin with their present value.
            attributes: those to begin with, as `StateBefore.attributes` returns them.
        """
        own = own_parameters(module, whole)
        swap = {id(own[name]): tensor for name, tensor in tensors.items()}
        containers = [m for m in module._modules.values() if isinstance(m, nn.ParameterList | nn.ParameterDict)]
        places: list[tuple[dict[str, Any], str, Tensor]] = [
            (owner._parameters, local, swap[id(p)])
            for owner in (module.modules() if whole else [module, *containers])
            for local, p in owner._parameters.items()
            if p is not None and id(p) in swap
        ]
        values = buffers or {}
        places += [(store, local, values.get(name, b).clone()) for name, store, local, b in _buffers(module)]
        self.places, self.attributes, self.python = places, attributes or [], PythonState(module, tensors=False)

    def __enter__(self) -> None:
        """Put the other tensors and copies of the buffers into the module."""
        self.old = [store[local] for store, local, _ in self.places]
        for store, local, tensor in self.places:
            store[local] = tensor
        for store, before in self.attributes:
            for key in store.keys() - before.keys() - OWN:
                del store[key]
            store.update(before)

    def __exit__(self, *error: object) -> None:
        """Put the module's own parameters, buffers and attributes back."""
        for (store, local, _), old in zip(self.places, self.old, strict=True):
            store[local] = old
        self.python.restore()
