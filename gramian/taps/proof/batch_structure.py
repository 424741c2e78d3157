"""The structure of a batch: a row proof is stored under it, and covers all batches of the same structure.

A proof holds for the code path that ran, so the structure has everything on which a forward may branch: nesting, names, dtypes,
numbers of axes and flags of the arguments, the modules with their modes, boolean attributes and hooks, autocast, and which
parameters train. Sizes are no part of it, except where arguments have as many tokens as samples: no shape shows which is which.
Batches in which samples differ in how many of their tokens count (labels other than
−100, mask other than 0) are a structure of their own.
"""

import itertools
import weakref
from typing import Any

import torch
from torch import nn

from gramian.taps.proof.sample_arguments import SampleArguments
from gramian.taps.tapped_model import TappedModel
from gramian.taps.units import Units

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
    modules = tuple((_number(module), *_flags(module), *_hooks(module)) for module in model.root_module.modules())
    private = model.rule.withholds  # proves more: the loader's own collation, buffers, inputs that are left alone
    alike = batch if model.tells_samples_apart and found[0].alike else 0
    key = (tuple(s.structure for s in found), modules, autocast, frozenset(model.parameters), private, alike)
    return (key, found[0].uneven() if model.tells_samples_apart else ()), found


def _number(module: nn.Module) -> int:
    """A number that no other module of this process ever had; an `id` is reused once its module is gone."""
    return _numbers.setdefault(module, next(_count))


def _flags(module: nn.Module) -> list[Any]:
    """Boolean attributes of a module on which its forward may branch: `training` and the user's own."""
    return [value for key, value in vars(module).items() if type(value) is bool and key != "_is_full_backward_hook"]


def _hooks(module: nn.Module) -> list[Any]:
    """Code object of each hook that users set on a module, or the number that torch gave a hook without one."""
    several = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return [
        getattr(hook, "__code__", number)
        for hooks in several
        for number, hook in hooks.items()
        if not (getattr(hook, "__module__", None) or "").startswith("gramian.")
    ]
