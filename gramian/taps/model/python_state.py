"""The Python state of a model: attributes of its modules, and variables that its hooks write.

A forward may count steps, append to lists, or write tensors into attributes. After extra forwards this must be undone, and each
of them must begin in the same state as the first.
"""

import functools
import sys
import types
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.modules import module as torch_module

from gramian.taps.model import user_names

OWN = frozenset(vars(nn.Module())) | {"forward"}
"""Names of attributes that every module has; torch and the taps restore these themselves."""
PLAIN = (int, float, complex, bool, str, bytes, type(None))
CONTAINERS = (list, set, deque, OrderedDict, dict)
"""Container classes, derived ones included, whose items are copied; read and written by these classes' own methods."""
DEPTH = 6
"""Number of levels of nested containers and objects, below an attribute, whose contents are copied with a model's state."""
LARGEST = 256
"""Items of containers that are larger (vocabularies, histories) are not searched; only a new length counts as a change."""
FOREIGN = frozenset(sys.stdlib_module_names) | {"torch", "gramian", "numpy"}
"""Top-level packages of classes whose objects' attributes are not copied with a model's Python state."""
FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)
ARRAYS = (Tensor, np.ndarray)


@dataclass
class _Place:
    """An object or container (`owner`), a copy of its items (`content`), and copies of the tensors and arrays among them."""

    name: str
    owner: Any
    content: Any
    copies: list[tuple[Any, Any]] = field(default_factory=list)

    @property
    def identity(self) -> int:
        """Key of the owner: its `id`; the negative `id` of an object whose attributes, not items, the place stores."""
        return _identity(self.owner)

    def restore(self) -> None:
        if not _same_items(self.owner, self.content):
            _put_back(self.owner, self.content)
        for array, copy in self.copies:
            if not same_values(array, copy):
                with torch.no_grad():
                    array.copy_(copy) if isinstance(array, Tensor) else np.copyto(array, copy)


class PythonState:
    """A copy of the values in attributes of modules, in hooks, and in containers and plain objects inside of these.

    Memory: a copy of every tensor that is an attribute and neither a parameter nor a buffer. Of a hook, the variables of its
    closure, its object, its arguments (`functools.partial`) and the global variables that it names are copied.
    """

    def __init__(self, root: nn.Module, *, tensors: bool = True) -> None:
        """Copy the present state.

        Args:
            root: the model.
            tensors: False to copy attributes and containers only, neither the values of tensors nor the state of hooks.
        """
        self._root = root
        self._places = list(_places(root, hooks=tensors, copies=tensors))

    def restore(self) -> None:
        """Restore all copied values in place; attributes that are new are removed."""
        for place in self._places:
            place.restore()

    def values(self) -> dict[str, Any]:
        """{name: value} of numbers, tensors and arrays in modules that changed since the state was copied; tensors cloned."""
        before = {place.identity: place for place in self._places}
        found: dict[str, Any] = {}
        for place in _places(self._root, hooks=False):
            known = before.get(place.identity)
            old, copies = (dict(_items(known.content)), known.copies) if known else ({}, [])
            for key, value in _items(place.content):
                if not isinstance(value, Tensor | np.ndarray | int | float | complex) or isinstance(
                    value, nn.Parameter
                ):
                    continue
                earlier = next((copy for array, copy in copies if array is value), old.get(key))
                if not same_values(value, earlier):
                    found[user_names.join(place.name, str(key))] = _copy(value)
        return found


def tensors_inside(value: Any) -> list[Tensor]:
    """List of the tensors inside an object of the user's own class, in its containers and attributes."""
    places = _followed("", (value,), [value], set(), DEPTH, copies=False)
    return [t for place in places for _, t in _items(place.content) if isinstance(t, Tensor)]


def graph_tensors(root: nn.Module) -> dict[str, Tensor]:
    """{name: tensor} of floating-point tensors with a `grad_fn` in attributes of modules, which a loss may depend on."""
    return {
        user_names.join(place.name, str(key)): value
        for place in _places(root, hooks=False, copies=False)
        for key, value in _items(place.content)
        if isinstance(value, Tensor)
        and not is_functorch_wrapped_tensor(value)  # left by a layer that was run again by samples
        and value.grad_fn is not None
        and value.is_floating_point()
    }


def held_values(root: nn.Module) -> Iterator[Any]:
    """Yield all values in attributes of modules, and in containers and plain objects inside of these."""
    for place in _places(root, hooks=False, copies=False):
        yield from (value for _, value in _items(place.content))


def same_values(one: Any, other: Any) -> bool:
    """True if two tensors, arrays or plain values (numbers, strings, None) are equal; others if they are one object.

    Equal tensors have the same shape and dtype; NaN in a tensor equals NaN.
    """
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.shape == other.shape and one.tobytes() == other.tobytes()
    if any(isinstance(t, Tensor) and is_functorch_wrapped_tensor(t) for t in (one, other)):
        return one is other
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return one is other or (type(one) is type(other) and isinstance(one, PLAIN) and bool(one == other))
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return one is other or bool(((one == other) | ((one != one) & (other != other))).all())


def _places(root: nn.Module, hooks: bool = True, copies: bool = True) -> Iterator[_Place]:
    seen: set[int] = set()
    for name, module in user_names.named_modules(root):
        content = {key: value for key, value in vars(module).items() if key not in OWN}
        yield from _followed(name, module, content, seen, DEPTH, copies)
        found = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        for hook in (hook for several in found for hook in several.values()) if hooks else ():
            yield from _function(name, hook, seen)
    everywhere = (
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
    )
    for attribute in everywhere if hooks else ():
        for hook in getattr(torch_module, attribute, {}).values():
            yield from _function("", hook, seen)


def _followed(name: str, owner: Any, content: Any, seen: set[int], depth: int, copies: bool = True) -> Iterator[_Place]:
    """Yield a `_Place` for an owner and its items (`content`), and for containers and objects inside, `depth` levels deep.

    Owners in `seen` are skipped, others are added to it; `copies`: clone tensors and arrays.
    """
    if _identity(owner) in seen:
        return
    seen.add(_identity(owner))
    items = _items(content) if len(content) <= LARGEST else []
    arrays = [v for _, v in items if isinstance(v, ARRAYS) and not isinstance(v, nn.Parameter)] if copies else []
    yield _Place(name, owner, content, [(v, _copy(v)) for v in arrays])
    for key, value in items if depth else ():
        if type(value) in PLAIN:  # most are, of a configuration with a hundred settings
            continue
        path = user_names.join(name, str(key))
        if isinstance(value, CONTAINERS):
            yield from _followed(path, value, _container(value), seen, depth - 1, copies)
        elif isinstance(value, tuple) and not all(isinstance(item, PLAIN) for item in value):  # an item may change
            yield from _followed(path, value, list(value), seen, depth - 1, copies)
        if _is_users(value):
            yield from _followed(path, _Attributes(value), attributes(value), seen, depth - 1, copies)


def _is_users(value: Any) -> bool:
    """True for an object of a user's own class, also one derived from a container, for SimpleNamespace and UserDict/List."""
    kind: Any = type(value)
    return _is_users_class(kind)


@functools.lru_cache(4096)
def _is_users_class(kind: type) -> bool:
    if issubclass(kind, (Tensor, tuple, nn.Module, type, types.ModuleType, *FUNCTIONS)):
        return False
    known = issubclass(kind, (types.SimpleNamespace, UserDict, UserList))
    return known or kind.__module__.partition(".")[0] not in FOREIGN | {"builtins"}


def attributes(value: Any) -> dict[str, Any]:
    """{name: value} of the attributes of an object, its slots included."""
    kind: Any = type(value)
    in_slots = {slot: getattr(value, slot) for slot in _slots(kind) if hasattr(value, slot)}
    return in_slots | dict(getattr(value, "__dict__", {}))


@functools.lru_cache(4096)
def _slots(kind: type) -> tuple[str, ...]:
    slots = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    found = [slot for names in slots for slot in ((names,) if isinstance(names, str) else names)]
    return tuple(slot for slot in found if not slot.startswith("__"))


def _identity(owner: Any) -> int:
    return -id(owner.value) if isinstance(owner, _Attributes) else id(owner)


class _Attributes:
    """Stands for the attributes of an object, as the owner in a `_Place`; its items, if it is a container, have their own."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def put_back(self, content: dict[str, Any]) -> None:
        for key in attributes(self.value).keys() - content.keys():
            object.__delattr__(self.value, key)
        for key, value in content.items():
            object.__setattr__(self.value, key, value)


def _function(name: str, function: Any, seen: set[int]) -> Iterator[_Place]:
    """Yield a `_Place` for each variable of a user's hook: closure, object, arguments, globals; none for torch's, gramian's."""
    if (getattr(function, "__module__", None) or "").partition(".")[0] in ("torch", "gramian"):
        return
    if isinstance(function, functools.partial):
        yield from _followed(name, function.args, list(function.args), seen, DEPTH)
        yield from _followed(name, function.keywords, dict(function.keywords), seen, DEPTH)
        yield from _function(name, function.func, seen)
        return
    code = getattr(function, "__code__", None)
    owner = getattr(function, "__self__", None if code is not None else function)
    if owner is not None and not isinstance(owner, nn.Module):
        yield from _followed(name, (owner,), [owner], seen, DEPTH)
    for cell in getattr(function, "__closure__", None) or ():
        try:
            content = {"cell_contents": cell.cell_contents}
        except ValueError:  # not assigned yet
            continue
        yield from _followed(name, cell, content, seen, DEPTH)
    variables = getattr(function, "__globals__", {})
    for key in code.co_names if code is not None else ():
        value = variables.get(key)
        if isinstance(value, PLAIN) and key in variables:
            yield _Place(name, _Global(variables, key), {"value": value})
        elif isinstance(value, (tuple, *CONTAINERS)) or _is_users(value):
            yield from _followed(name, (value,), [value], seen, DEPTH)


class _Global:
    """One global variable of a hook's module, with a `value` that can be read and set."""

    def __init__(self, variables: dict[str, Any], key: str) -> None:
        self._variables, self._key = variables, key

    @property
    def value(self) -> Any:
        return self._variables[self._key]

    @value.setter
    def value(self, value: Any) -> None:
        self._variables[self._key] = value


VARIABLES = (types.CellType, _Global)
"""Classes of `_Place` owners that have a single value: closure cells and global variables."""


def _container(owner: Any) -> Any:
    """Copy of the items of a container, in a plain dict, set or list."""
    kind: Any = next(kind for kind in CONTAINERS if isinstance(owner, kind))
    if issubclass(kind, dict):
        return dict(kind.items(owner))
    return set(set.__iter__(owner)) if kind is set else list(kind.__iter__(owner))


def _fill(owner: Any, content: Any) -> None:
    """Replace all items of a container by those of `content`."""
    kind: Any = next(kind for kind in CONTAINERS if isinstance(owner, kind))
    kind.clear(owner)
    if issubclass(kind, dict):
        for key, value in content.items():
            kind.__setitem__(owner, key, value)
    else:
        kind.update(owner, content) if kind is set else kind.extend(owner, content)


def _items(content: Any) -> list[tuple[Any, Any]]:
    if isinstance(content, dict):
        return list(content.items())
    return list(enumerate(content)) if isinstance(content, list | tuple) else []


def _same_items(owner: Any, content: Any) -> bool:
    if len(content) > LARGEST:
        return len(owner) == len(content)
    now = _now(owner, content)
    if isinstance(content, set):
        return bool(now == content)
    one, other = _items(now), _items(content)
    return len(one) == len(other) and all(v is w and a == b for (a, v), (b, w) in zip(one, other, strict=True))


def _now(owner: Any, content: Any) -> Any:
    if isinstance(owner, CONTAINERS):
        return _container(owner)
    if isinstance(owner, tuple):
        return owner
    if isinstance(owner, _Attributes):
        return attributes(owner.value)
    if isinstance(owner, nn.Module):
        return {key: value for key, value in vars(owner).items() if key not in OWN}
    return {key: getattr(owner, key) for key in content} if isinstance(owner, VARIABLES) else vars(owner)


def _put_back(owner: Any, content: Any) -> None:
    if isinstance(owner, CONTAINERS):
        _fill(owner, content)
        return
    if isinstance(owner, VARIABLES):
        for key, value in content.items():
            setattr(owner, key, value)
        return
    if isinstance(owner, _Attributes):
        owner.put_back(content)
        return
    for key in [key for key in vars(owner) if key not in content and key not in OWN]:
        del vars(owner)[key]
    vars(owner).update(content)


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value if is_functorch_wrapped_tensor(value) else value.detach().clone()
    return value.copy() if isinstance(value, np.ndarray) else value
