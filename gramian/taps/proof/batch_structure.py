"""The structure of a batch: a row proof is stored under it, and covers all batches of the same structure.

A proof holds for the code path that ran, so the structure has everything on which a forward may branch: nesting, names, dtypes,
numbers of axes and flags of the arguments, the modules with their modes, plain attributes and hooks, autocast, and which
parameters train. Sizes are no part of it, except where arguments have as many tokens as samples: no shape shows which is which.
Batches in which samples differ in how many of their tokens count (labels other than
−100, mask other than 0) are a structure of their own.
"""

import enum
import itertools
import types
import weakref
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from gramian.taps.model.python_state import OWN, attributes
from gramian.taps.proof.sample_arguments import SampleArguments
from gramian.taps.tapped_model import TappedModel
from gramian.taps.units import Units

AXES = frozenset(range(-4, 5))
"""Numbers in attributes whose change makes another structure: axes, and other small numbers on which code may branch."""
WORDS = frozenset((bool, str, bytes, torch.dtype, torch.device))
NUMBERS = frozenset((int, float))
SCALARS = WORDS | NUMBERS
CONTAINERS = frozenset((type(None), dict, OrderedDict, set, types.FunctionType, types.MethodType))
"""Types of attributes that are passed over (dicts of up to eight are not): those of the torch module itself first of all."""
_numbers: "weakref.WeakKeyDictionary[nn.Module, int]" = weakref.WeakKeyDictionary()
_count = itertools.count()


def structure_of(model: TappedModel, args: Any, kwargs: Any, batch: int) -> tuple[Any, list[SampleArguments]]:
    """The structure of a call of the root module, hashable, and its arguments by sample for every grouping of rows into units.

    Raises:
        GramianError: if `sample_ids` of a listener do not fit the batch, or an argument is sparse, nested or quantized.
    """
    given = model.batch_size is not None
    found = []
    for ids in model.groupings():
        field = "ids" if model.rule.withholds else "sample_ids"  # of engine.units, or of a capture
        units = None if ids is None else Units.of(ids, batch, padding=True, field=field)
        found.append(SampleArguments.of((args, kwargs), batch, given=given, units=units))
        if model.tells_samples_apart:
            found[-1].refuse_layouts()
    autocast = (torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu"))
    known: dict[int, Any] = {}
    modules = tuple(
        (_number(module), *_flags(module, known), *_hooks(module)) for module in model.root_module.modules()
    )
    private = model.rule.withholds  # proves more: the loader's own collation, buffers, inputs that are left alone
    alike = batch if model.tells_samples_apart and found[0].alike else 0
    key = (tuple(s.structure for s in found), modules, autocast, frozenset(model.parameters), private, alike)
    return (key, found[0].uneven() if model.tells_samples_apart else ()), found


def _number(module: nn.Module) -> int:
    """A number that no other module of this process ever had; an `id` is reused once its module is gone."""
    return _numbers.setdefault(module, next(_count))


def _flags(module: nn.Module, known: dict[int, Any]) -> list[Any]:
    """Attributes of a module on which its forward may branch: plain values, those of plain objects (`module.config`) and dicts.

    `known` {id of an object: its plain values}: modules share such objects. 3 µs for a module.
    """
    found = []
    for name, value in vars(module).items():
        kind = type(value)
        if kind in CONTAINERS and (kind is not dict or name in OWN or len(value) > 8):
            continue
        flag = _flag(value, kind)
        if flag is not None:
            if name != "_is_full_backward_hook":
                found.append(flag)
        elif not isinstance(value, Tensor):
            if id(value) not in known:
                held = value if kind is dict else attributes(value)
                flags = (_flag(one, type(one)) for one in held.values())
                known[id(value)] = tuple(flag for flag in flags if flag is not None)
            found.append(known[id(value)])
    return found


def _flag(value: Any, kind: type) -> Any:
    """A truth value, word, dtype, device or enumeration; a number of `AXES`, else its type; up to eight of these in a row.

    None for any other value. A counter or a rate is a structure of its own only while it is a number that an axis can have.
    """
    if kind in WORDS:
        return value
    if kind in NUMBERS:
        return value if value in AXES else kind
    if kind is tuple or kind is list:
        return tuple([_flag(one, type(one)) for one in value if type(one) in SCALARS]) if len(value) <= 8 else kind
    return value if isinstance(value, enum.Enum) else None


def _hooks(module: nn.Module) -> list[Any]:
    """Code object of each hook that users set on a module, or the number that torch gave a hook without one."""
    several = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return [
        getattr(hook, "__code__", number)
        for hooks in several
        for number, hook in hooks.items()
        if not (getattr(hook, "__module__", None) or "").startswith("gramian.")
    ]
