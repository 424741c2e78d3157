"""Natural gradients for any optimizer: the same optimizer object, with a hook before its step.

Before the optimizer's own step every `p.grad` becomes s (F + damping)⁻¹ p.grad, with the K-FAC estimate F of the Fisher matrix
and a factor s ≤ 1 that limits how far one step moves the model's predictions (trust region).
"""

import inspect
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gramian.core.errors import GramianError
from gramian.curvature.apply.apply_factors import full_vector
from gramian.curvature.blocks.consistency import unique_parameters
from gramian.curvature.kfac import KFACNaturalGradient
from gramian.curvature.persist import curvature_record
from gramian.taps.model.user_names import unwrap

KL_CLIP = 1e-3
"""Default of `kl_clip`, the trust region in nats per step; docs/concepts/damping.md says how it was chosen."""
_preconditioned: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()


def precondition(
    optimizer: Optimizer, model: nn.Module, kfac: KFACNaturalGradient, kl_clip: float | None = KL_CLIP
) -> Optimizer:
    """Make an optimizer step along natural gradients, by a hook before its `step`.

    Before each step every `p.grad` is replaced by (F + damping)⁻¹ p.grad, with the K-FAC estimate F of the Fisher matrix, and
    all of them are scaled by min(1, √(kl_clip / KL)). KL = ½ Σ lr² ∇ᵀ(F+damping)⁻¹∇ estimates, in the metric of F, how far a
    plain SGD step moves the model's predictions. As long as there is no curvature because the first capture was dropped,
    gradients are set to None.

    ```python
    optimizer = gramian.precondition(torch.optim.SGD(model.parameters(), lr=0.1), model, kfac)
    with kfac.capture(model, num_terms=y.numel()):
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    optimizer.step()
    ```

    Args:
        optimizer: its step is preconditioned; it stays the same object.
        model: the module whose parameters it updates.
        kfac: the curvature; the user wraps the backward in `kfac.capture`.
        kl_clip: largest KL of a step, in nats; None: no bound.

    Returns:
        The optimizer.

    Raises:
        GramianError: if the optimizer is preconditioned already or its step requires a closure (LBFGS), if kl_clip is not above
            0, or for an argument of another type.
    """
    if not isinstance(optimizer, Optimizer):
        raise GramianError(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if _needs_closure(optimizer):
        raise GramianError(
            f"optimizer: {type(optimizer).__name__} computes gradients itself, in a closure, after they were to be "
            "preconditioned; expected an optimizer whose step() takes no closure, such as SGD or AdamW"
        )
    number = isinstance(kl_clip, int | float) and not isinstance(kl_clip, bool)
    if kl_clip is not None and not (number and kl_clip > 0):
        raise GramianError(f"kl_clip: expected a number above 0 or None, got {kl_clip!r}")
    if not isinstance(model, nn.Module):
        raise GramianError(f"model: expected an nn.Module, got {type(model).__name__}")
    if not isinstance(kfac, KFACNaturalGradient):
        raise GramianError(f"kfac: expected a KFACNaturalGradient, got {type(kfac).__name__}")
    if optimizer in _preconditioned:
        raise GramianError("optimizer: is preconditioned already; expected one that is not")
    _preconditioned.add(optimizer)

    def before_step(stepping: Optimizer, args: Any, kwargs: Any) -> None:
        if any(value is not None for value in (*args[1:], kwargs.get("closure"))):  # args[0] is the optimizer
            raise GramianError(
                "closure: would bring its gradients after they were to be preconditioned; "
                "expected step() after a backward inside kfac.capture"
            )
        rates = {id(p): group["lr"] for group in stepping.param_groups for p in group["params"]}
        trained = {n: p for n, p in unique_parameters(unwrap(model)) if id(p) in rates and p.requires_grad}
        gradients = {name: p.grad for name, p in trained.items() if p.grad is not None}
        if not gradients:
            return
        if kfac.dropped and not kfac.kfac_factors:  # the first refresh was dropped: there is no step to take yet
            curvature_record.log_no_step(kfac.dropped[-1]["reason"])
            for p in trained.values():
                p.grad = None
            return
        natural = kfac.compute_natural_gradient(model, gradients=gradients)
        scale = 1.0 if kl_clip is None else _scale(stepping, trained, gradients, natural, rates, kl_clip)
        for name, step in natural.items():
            gradient = trained[name].grad
            assert gradient is not None
            gradient.copy_(step * scale)

    optimizer.register_step_pre_hook(before_step)
    return optimizer


def _scale(
    optimizer: Optimizer,
    trained: Mapping[str, nn.Parameter],
    gradients: Mapping[str, Tensor],
    natural: Mapping[str, Tensor],
    rates: Mapping[int, Any],
    kl_clip: float,
) -> float | Tensor:
    """√(kl_clip/KL), at most 1, as a 0-dim tensor, so that nothing waits for the device; KL = ½ Σ lr² ∇ᵀ(F+damping)⁻¹∇."""
    parts = [
        float(rates[id(trained[name])]) ** 2 * full_vector((gradients[name].double() * natural[name].double()).sum())
        for name in gradients
    ]
    kl = 0.5 * torch.stack([part.to(parts[0].device) for part in parts]).sum().clamp(min=0)
    loss_scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer unscales inside its step
    if loss_scale is not None:
        kl = kl / loss_scale.double().to(kl.device) ** 2
    return (kl_clip / kl.clamp(min=torch.finfo(torch.float64).tiny)).sqrt().clamp(max=1.0)


def _needs_closure(optimizer: Optimizer) -> bool:
    """True if the optimizer's `step()` has an argument without a default, such as LBFGS's closure."""
    _, *arguments = inspect.signature(type(optimizer).step).parameters.values()  # a scheduler wraps the instance's
    return any(
        given.default is given.empty and given.kind in (given.POSITIONAL_ONLY, given.POSITIONAL_OR_KEYWORD)
        for given in arguments
    )
