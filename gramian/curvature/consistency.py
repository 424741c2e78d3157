"""What must hold between a model and its factors, and who may be asked for them."""

import math
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from gramian.curvature.blocks import Spec
from gramian.curvature.options import Options
from gramian.errors import GramianError
from gramian.taps.names import named_parameters, unwrap


def check_spec(before: Spec, now: Spec) -> None:
    """Raise, naming the layer, if a block is not what it was.

    Raises:
        GramianError: if a bias appeared, vanished or was frozen, or shapes changed.
    """
    if before.kind == now.kind and before.parameters == now.parameters and before.shapes == now.shapes:
        return
    if before.has_bias != now.has_bias:
        what = "had a trained bias and has none now" if before.has_bias else "had no trained bias and has one now"
        raise GramianError(f"{before.name}: {what}; expected its bias as at the capture, or a new object")
    raise GramianError(
        f"{before.name}: was {before.kind} of {_shapes(before)} and is {now.kind} of {_shapes(now)}; "
        "expected the layer as at the capture"
    )


def _shapes(spec: Spec) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in zip(spec.parameters, spec.shapes, strict=True))


def module_of(model: Any) -> nn.Module:
    """The user's module inside its wrappers.

    Raises:
        GramianError: if it is none.
    """
    if not isinstance(model, nn.Module):
        raise GramianError(f"model: expected an nn.Module, got {type(model).__name__}")
    return unwrap(model)


def check_number(name: str, value: Any) -> None:
    """Raise unless a value is a finite real number.

    Raises:
        GramianError: naming it.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise GramianError(f"{name}: expected a finite number, got {value!r}")


def check_vector(name: str, vector: Any) -> None:
    """Raise unless a value is {parameter: floating-point tensor}.

    Raises:
        GramianError: naming it, or the entry.
    """
    if not isinstance(vector, Mapping):
        raise GramianError(f"{name}: expected a mapping from parameter names to tensors, got {type(vector).__name__}")
    for key, value in vector.items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            got = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise GramianError(f"{name}: {key}: expected a floating-point tensor, got {got}")


def has_factors(layer: str, specs: Mapping[str, Spec]) -> bool:
    """True if a layer has a K-FAC block."""
    return any(spec.kind == "kronecker" and layer in spec.layers for spec in specs.values())


def unique_parameters(root: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Every parameter once, under its first name."""
    seen: set[int] = set()
    found = []
    for name, p in named_parameters(root):
        if id(p) not in seen:
            seen.add(id(p))
            found.append((name, p))
    return found


def by_itself_of_many(options: Options) -> bool:
    """True if this is one of several processes and none of them hears of the others' factors.

    Raises:
        GramianError: if there are several and factors would have to be reduced.
    """
    many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if many and options.kfac_distributed_reduce != "none":
        raise GramianError(
            f'kfac_distributed_reduce: "{options.kfac_distributed_reduce}" over several processes is not available yet; '
            'expected "none" (each process by itself)'
        )
    return many
