"""The state of a model and its optimizer as flat tensors and JSON values (facts), and loading it again.

Names have no wrapper prefixes: `model.<parameter or buffer>` and `optimizer.<parameter>.<field>`, whatever wraps the model and
however it is sharded. Other names in a state belong to the caller and are ignored.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from gramian.core.errors import GramianError
from gramian.taps.model.user_names import join, named_modules
from gramian.train.state.nested import merge, split
from gramian.train.state.tensor_parts import Extent, Part, copy_parts, parts_of

MODEL, OPTIMIZER = "model.", "optimizer."
HOW = ("params", "param_names", "fused", "foreach", "capturable", "differentiable")
"""Keys of an optimizer's parameter group that affect how a step is computed, not its result; neither saved nor loaded."""
HOST_SCALARS = ("step", "mu_product")
"""Names of optimizer state that torch.optim keeps on the host unless the group is fused or capturable."""


def tensors_of(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Tensor]:
    """{name: tensor} of a model and its optimizer, the tensors themselves; FSDP2 parameters are resharded first.

    Every parameter and persistent buffer is there once, under its first name, and every tensor of the optimizer's state.
    """
    tensors = {f"{MODEL}{name}": t for name, t in _model_tensors(model).items()}
    if optimizer is not None:
        for name, p in _names_of(model, optimizer).items():
            split(f"{OPTIMIZER}{name}", optimizer.state.get(p, {}), tensors)
    return tensors


def facts_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state that is not tensors, as JSON values.

    Returns:
        `groups`: the `parameters` by name and the `options` of each parameter group; `state`: the fields of each parameter's
        state, with tensors by name.
    """
    names = _names_of(model, optimizer)
    by_id = {id(p): name for name, p in names.items()}
    groups = [
        {
            "parameters": [by_id[id(p)] for p in group["params"]],
            "options": {key: _number(value) for key, value in group.items() if key not in HOW},
        }
        for group in optimizer.param_groups
    ]
    state = {name: split(f"{OPTIMIZER}{name}", optimizer.state.get(p, {}), {}) for name, p in names.items()}
    return {"groups": groups, "state": {name: fields for name, fields in state.items() if fields}}


def extents(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Extent]:
    """Which part of each saved tensor this process needs, {name: index ranges}: its shard, if the model is sharded.

    `shapes` are those of the full tensors. The result has the model's tensors, and optimizer state that has its parameter's
    shape; a tensor that is not in the result is needed in full.
    """
    own = {name: part.extent for name, part in parts_of(_model_tensors(model)).items()}
    needed = {}
    for name, shape in shapes.items():
        owner = name.removeprefix(MODEL)
        if name.startswith(OPTIMIZER):
            owner = _owner(name.removeprefix(OPTIMIZER), own)
        if owner in own and own[owner].shape == tuple(shape):
            needed[name] = own[owner]
    return needed


def load(
    model: nn.Module,
    optimizer: Optimizer | None,
    tensors: Mapping[str, Tensor | Part],
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Load a saved state into model and optimizer, after all of it was checked, so that nothing is half loaded.

    Tensors are written in place. Optimizer state is created on the device where the optimizer would have created it, and
    removed where the saved optimizer has none.

    Args:
        model: model whose tensors have the saved names, shapes and dtypes; it may be sharded differently.
        optimizer: optimizer with the saved parameter groups; None: the optimizer's part of the state is ignored.
        tensors: full tensors, DTensors placed as the model's, or parts that contain what this process needs.
        facts: the result of `facts_of`; None is allowed without an optimizer.

    Raises:
        GramianError: naming what is missing, unexpected or of another shape or dtype.
    """
    parts = {name: t for name, t in tensors.items() if isinstance(t, Part)}
    parts |= parts_of({name: t for name, t in tensors.items() if not isinstance(t, Part)})
    targets = {f"{MODEL}{name}": t for name, t in _model_tensors(model).items()}
    wanted = {name: part for name, part in parts.items() if name.startswith(MODEL)}
    states: dict[nn.Parameter, dict[str, Any]] = {}
    if optimizer is not None:
        names = _names_of(model, optimizer)
        groups, saved_states = _checked_facts(facts, names, optimizer)
        group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for name, p in names.items():
            saved = saved_states.get(name, {})
            states[p], made = _new_state(name, p, group_of[id(p)], optimizer.state.get(p, {}), saved, parts)
            targets |= made
        wanted |= {name: part for name, part in parts.items() if name.startswith(OPTIMIZER)}
    copy_parts(wanted, targets)  # checks all of them before it writes the first
    if optimizer is None:
        return
    for p, state in states.items():
        if state:
            optimizer.state[p].clear()
            optimizer.state[p].update(state)
        else:
            optimizer.state.pop(p, None)
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved["options"].items():
            group[key] = _option(group.get(key), value)


def _new_state(
    name: str,
    p: nn.Parameter,
    group: Mapping[str, Any],
    state: Mapping[str, Any],
    saved: Mapping[str, Any],
    parts: Mapping[str, Part],
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Optimizer state that parameter `name` will have, and {name: its tensor to fill}: existing, or newly allocated."""
    existing: dict[str, Tensor] = {}
    split(f"{OPTIMIZER}{name}", state, existing)
    targets: dict[str, Tensor] = {}

    def target(full: str) -> Tensor:
        if full not in parts:
            raise GramianError(f"{full}: is not in the saved tensors; expected those that were saved with the facts")
        field = full.removeprefix(f"{OPTIMIZER}{name}.")
        targets[full] = existing[full] if full in existing else _made(full, field, parts[full], p, group)
        return targets[full]

    return merge(saved, target), targets


def _made(name: str, field: str, part: Part, p: nn.Parameter, group: Mapping[str, Any]) -> Tensor:
    """Allocate a tensor of the optimizer's state, without values, on the device where the optimizer would have it."""
    on_host = field in HOST_SCALARS and not (group.get("fused") or group.get("capturable"))
    shape, dtype = part.extent.shape, part.local.dtype
    if not on_host and shape and shape == tuple(p.shape):
        return torch.empty_like(p, dtype=dtype, requires_grad=False)
    if part.extent.sharded:
        raise GramianError(f"{name}: is sharded, but not as its parameter; expected the parameter's shape")
    return torch.empty(shape, dtype=dtype, device="cpu" if on_host else p.device)


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """{name: tensor} of a model's parameters and persistent buffers, each once, after FSDP2 has resharded them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    seen: set[int] = set()
    found: dict[str, Tensor] = {}
    for name, module in named_modules(model):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise GramianError(f"model: {name or 'the root'} keeps extra state; expected parameters and buffers alone")
        transient = module._non_persistent_buffers_set
        for local, t in (*module._parameters.items(), *module._buffers.items()):
            if t is not None and id(t) not in seen and local not in transient:
                seen.add(id(t))
                found[join(name, local)] = t
    return found


def _names_of(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """{model's name: parameter} of the optimizer, in its order; raises if it has other parameters or other state."""
    names = {id(t): name for name, t in _model_tensors(model).items()}
    found: dict[str, nn.Parameter] = {}
    for i, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if id(p) not in names:
                raise GramianError(
                    f"optimizer: group {i} holds a parameter of shape {list(p.shape)} that is not the model's; expected "
                    "the model's parameters alone"
                )
            found[names[id(p)]] = p
    known = {id(p) for p in found.values()}
    for key in optimizer.state:
        if id(key) not in known:
            what = repr(key) if isinstance(key, str) else f"a {type(key).__name__}"
            raise GramianError(f"optimizer: keeps state under {what}; expected parameters of its groups")
    return found


def _owner(rest: str, names: Mapping[str, Any]) -> str:
    """The parameter's name in "<parameter>.<field>" of optimizer state; "" if no name in `names` fits."""
    while rest and rest not in names:
        rest = rest.rpartition(".")[0]
    return rest


def _checked_facts(
    facts: Mapping[str, Any] | None, names: Mapping[str, Any], optimizer: Optimizer
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Parameter groups and state in the saved facts; raises if the groups' parameters differ from the optimizer's."""
    try:
        assert facts is not None
        groups, states = list(facts["groups"]), dict(facts["state"])
        saved = [list(group["parameters"]) for group in groups]
        assert all(isinstance(group["options"], Mapping) for group in groups)
    except (AssertionError, KeyError, TypeError):
        raise GramianError("facts: lack the optimizer's groups or state; expected what facts_of gave") from None
    by_id = {id(p): name for name, p in names.items()}
    here = [[by_id[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    if len(saved) != len(here):
        raise GramianError(f"optimizer: the saved one has {len(saved)} parameter groups; expected {len(here)}")
    for i, (old, new) in enumerate(zip(saved, here, strict=True)):
        if old != new:
            odd = min(set(old) ^ set(new), default="the order of its parameters")
            raise GramianError(
                f"optimizer: group {i} differs from the saved one in {odd}; expected the same parameters"
            )
    unknown = [name for name in states if name not in names]
    if unknown:
        raise GramianError(f"optimizer: the saved one has state of {unknown[0]}; expected the same parameters")
    return groups, states


def _number(value: Any) -> Any:
    """An optimizer option as plain numbers: `lr` may be a tensor."""
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_number(inner) for inner in value]
    return value


def _option(old: Any, new: Any) -> Any:
    """The saved optimizer option `new` in the form of the current one: tensor, tuple or number."""
    if isinstance(old, Tensor):
        return old.fill_(new)
    if isinstance(old, (list, tuple)) and isinstance(new, list):
        padded = list(old) + [None] * len(new)
        return type(old)(_option(before, now) for before, now in zip(padded, new, strict=False))
    return new
