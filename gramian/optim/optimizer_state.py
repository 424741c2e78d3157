"""Where the state of a `KFAC` optimizer has its factors: as bytes in the state of one parameter, under "kfac".

`torch.distributed.checkpoint` takes an optimizer's "state" and "param_groups" alone, and asks a new optimizer which names the
state of each parameter has; for that it lets it step once, with gradients and rates of zero.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gramian.core.errors import GramianError
from gramian.curvature.persist.factor_bytes import from_bytes
from gramian.taps.products.parts import owner

FACTORS = "kfac"
"""Name of the factors in a parameter's state; in `optimizer.state`, where 0 stands for them, and in `state_dict`."""
MATRIX = "momentum_buffer"
"""Name of the momentum in the state of a weight matrix that K-FAC preconditions; other parameters have states of AdamW."""
States = dict[Any, dict[str, Any]]
"""{parameter, by its place or name: its state}."""


def holder(optimizer: Optimizer) -> int:
    """Place of the parameter whose state has the factors: the first one that trains."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return next((place for place, p in enumerate(parameters) if p.requires_grad), 0)


def asks_for_names(optimizer: Optimizer) -> bool:
    """Whether a step is one that asks for the names of states: the first one, with gradients and rates of zero."""
    if optimizer.state or any(float(group["lr"]) for group in optimizer.param_groups):
        return False
    found = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return bool(found) and not any(bool(gradient.any()) for gradient in found)


def make_state(state: dict[str, Any], p: nn.Parameter, whitened: bool, fused: bool) -> None:
    """Create the state of a parameter that has not stepped yet."""
    if whitened:
        state[MATRIX] = torch.zeros_like(p)
        return
    state["step"] = torch.zeros((), dtype=torch.float32, device=p.device if fused else "cpu")
    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)


def split_factors(given: Mapping[str, Any], names: Sequence[str], place: int) -> tuple[Mapping[str, Any], States]:
    """(saved state of the K-FAC object, {parameter: its state}) of a `state_dict` for parameters of these `names`, in order.

    Where a state has the names of both kinds, those remain of the kind that a parameter is by its factors. A GramianError is
    raised if there are no factors, or nothing for names that were asked for. `place` is that of the `holder`.
    """
    states = {key: dict(state) for key, state in given["state"].items()}
    packed = [state.pop(FACTORS) for state in states.values() if FACTORS in state]
    tensors = [t for t in packed if isinstance(t, Tensor)]
    if not tensors and FACTORS not in given:
        raise GramianError('state_dict: has no "kfac"; expected the state of a gramian.optim.KFAC')
    factors = from_bytes(tensors[0]) if tensors else given[FACTORS]
    whitened = {
        owner(layer["spec"]["parameters"][0]) for layer in factors.get("layers", {}).values() if "A" in layer["sides"]
    }
    keys = [key for group in given["param_groups"] for key in group["params"]]
    for key, name in zip(keys, names, strict=True):
        state = states.get(key, {})
        asked = [field for field, value in state.items() if isinstance(value, dict)]  # {}: the saved state has none
        found = {field: value for field, value in state.items() if field not in asked}
        if asked and not found:
            raise GramianError(f"state_dict: has no {asked[0]} of {name!r}; expected that of the same model")
        if MATRIX in found and len(found) > 1:
            found = {field: value for field, value in found.items() if (field == MATRIX) == (name in whitened)}
        if state:
            states[key] = found
    states.setdefault(keys[place], {})[FACTORS] = 0
    return factors, states
