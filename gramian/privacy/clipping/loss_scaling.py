"""The factor that a loss scale leaves in the gradients of a step, and who removes it: optimizer, engine or GradScaler."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from gramian.core.errors import GramianError


@dataclass(frozen=True)
class Scaling:
    """Factors of a loss scale in the gradients of a step, by who removes them: optimizer, engine or GradScaler."""

    inside: Any = None
    """Scale that the optimizer removes inside its step, so that gradients stay multiplied by it; None: no such scale."""
    left: float = 1.0
    """Scale that is still in the gradients and that the engine divides by."""
    undone: float = 1.0
    """Scale by which a GradScaler has already divided `p.grad`."""


def scaling_at(optimizer: Optimizer, loss_scale: "float | torch.amp.GradScaler") -> Scaling:
    """Scale factors in `p.grad` as a step begins.

    Raises:
        GramianError: if a GradScaler should have unscaled the gradients and has not, or is in use without being `loss_scale`.
    """
    inside = getattr(optimizer, "grad_scale", None)  # a fused optimizer unscales inside its step
    if not isinstance(loss_scale, torch.amp.GradScaler):
        if inside is not None:
            raise GramianError("loss_scale: a GradScaler is at work; expected it as make_private(loss_scale=scaler)")
        return Scaling(left=float(loss_scale))
    if not loss_scale.is_enabled():
        return Scaling()
    stage = loss_scale._per_optimizer_states[id(optimizer)]["stage"]
    if inside is None and stage is OptState.READY:
        raise GramianError("loss_scale: the gradients are still scaled; expected scaler.step(optimizer)")
    return Scaling(inside=inside, undone=loss_scale.get_scale() if inside is None else 1.0)
