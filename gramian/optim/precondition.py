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
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from gramian.core.dtypes import wide_dtype
from gramian.core.errors import GramianError
from gramian.curvature.apply.natural_gradient import ready_natural_gradient
from gramian.curvature.blocks.consistency import unique_parameters
from gramian.curvature.kfac import KFACNaturalGradient
from gramian.curvature.persist import curvature_record
from gramian.optim.kfac_optimizer import KFAC
from gramian.taps.model.user_names import unwrap
from gramian.taps.products.parts import owner

KL_CLIP = 1e-3
"""Default of `kl_clip`, the trust region in nats per step; docs/concepts/damping.md says how it was chosen."""
_preconditioned: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()


def precondition(
    optimizer: Optimizer, model: nn.Module, kfac: KFACNaturalGradient, kl_clip: float | None = KL_CLIP
) -> Optimizer:
    """Make an optimizer step along natural gradients, by a hook before its `step`.

    Before each step every `p.grad` is replaced by (F + damping)⁻¹ p.grad, with the K-FAC estimate F of the Fisher matrix, and
    all of them are scaled by min(1, √(kl_clip / KL)). KL = ½ Σ lr₀² ∇ᵀ(F+damping)⁻¹∇ estimates, in the metric of F, how far a
    plain SGD step moves the model's predictions at the learning rate lr₀ that a schedule starts from (`initial_lr` of a
    scheduler, else the optimizer's when it was preconditioned): the trust region follows the schedule as (lr/lr₀)². As long as
    there is no curvature because the first capture was dropped, gradients are set to None. Copies and pickles of the optimizer
    have no hook, as torch has it: precondition them again.

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
        GramianError: if the optimizer is preconditioned already, is a `KFAC` or its step requires a closure (LBFGS), if kl_clip
            is not above 0, or for an argument of another type.
    """
    if not isinstance(optimizer, Optimizer):
        raise GramianError(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, KFAC):
        raise GramianError("optimizer: gramian.optim.KFAC brings its own curvature; expected SGD, AdamW or another one")
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

    optimizer.register_step_pre_hook(_NaturalStep(optimizer, model, kfac, kl_clip))
    return optimizer


class _NaturalStep:
    """The hook before an optimizer's step: replaces its gradients by natural gradients, scaled to the trust region."""

    def __init__(
        self, optimizer: Optimizer, model: nn.Module, kfac: KFACNaturalGradient, kl_clip: float | None
    ) -> None:
        self._model, self._kfac, self._kl_clip = model, kfac, kl_clip
        self._first_rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._names: dict[int, str] = {}
        """{id of a parameter of the optimizer: its name in the model}."""
        self._squares: tuple[tuple[list[float], torch.device], Tensor] | None = None
        """((lr₀² of every block, device), the same as a tensor there)."""

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if any(value is not None for value in (*args[1:], kwargs.get("closure"))):  # args[0] is the optimizer
            raise GramianError(
                "closure: would bring its gradients after they were to be preconditioned; "
                "expected step() after a backward inside kfac.capture"
            )
        trained, kfac = self._trained(optimizer), self._kfac
        gradients = {name: p.grad for name, p in trained.items() if p.grad is not None}
        if not gradients:
            return
        if kfac.dropped and not kfac.kfac_factors:  # the first refresh was dropped: there is no step to take yet
            curvature_record.log_no_step(kfac.dropped[-1]["reason"])
            for p in trained.values():
                p.grad = None
            return
        dots: dict[str, Tensor] | None = None if self._kl_clip is None else {}
        natural = ready_natural_gradient(kfac.state, unwrap(self._model), gradients, dots=dots)
        scale = None if dots is None else self._scale(optimizer, trained, dots)
        if scale is not None:
            kfac.state.trust_region = scale
        _overwrite(gradients, natural, scale)

    def _trained(self, optimizer: Optimizer) -> dict[str, nn.Parameter]:
        """{name in the model: parameter} of the optimizer's parameters that train; the model is walked if one is new."""
        given = [p for group in optimizer.param_groups for p in group["params"]]
        if any(id(p) not in self._names for p in given):
            self._names = {id(p): "" for p in given} | {id(p): n for n, p in unique_parameters(unwrap(self._model))}
        return {self._names[id(p)]: p for p in given if p.requires_grad and self._names[id(p)]}

    def _scale(self, optimizer: Optimizer, trained: Mapping[str, nn.Parameter], dots: Mapping[str, Tensor]) -> Tensor:
        """√(kl_clip/KL), at most 1, as a 0-dim tensor, so that nothing waits for the device; KL = ½ Σ lr₀² ∇ᵀ(F+damping)⁻¹∇.

        lr₀ is the learning rate that a schedule starts from: where the trust region binds, a step is lr/lr₀ of it. `dots` has
        ∇ᵀ(F+damping)⁻¹∇ of every block, whose parameters share the largest of their rates.
        """
        rates: dict[int, float] = {}
        for place, group in enumerate(optimizer.param_groups):
            first = self._first_rates[place] if place < len(self._first_rates) else group["lr"]
            rate = float(group.get("initial_lr", first))
            if rate == 0 and float(group["lr"]) > 0 and any(p.grad is not None for p in group["params"]):
                raise GramianError(
                    f"kl_clip: bounds no step of param_groups[{place}], whose schedule starts from lr 0; expected a first "
                    'rate (or "initial_lr") that the schedule multiplies, or kl_clip=None'
                )
            rates |= dict.fromkeys(map(id, group["params"]), rate)
        blocks = self._kfac.kfac_factors
        squares, parts = [], []
        for name, dot in dots.items():
            members = blocks[name].spec.parameters if name in blocks else (name,)
            owners = {owner(member) for member in members} & trained.keys()
            squares.append(max(rates[id(trained[one])] for one in owners) ** 2)
            parts.append(dot)
        where = parts[0].device
        if self._squares is None or self._squares[0] != (squares, where):  # a copy to the device waits for it
            self._squares = (squares, where), torch.tensor(squares, dtype=torch.float64).to(where)
        kl = 0.5 * (torch.stack([part.to(where) for part in parts]).double() @ self._squares[1])
        kl = kl.clamp(min=0)
        loss_scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer unscales inside its step
        if loss_scale is not None:
            kl = kl / loss_scale.double().to(kl.device) ** 2
        assert self._kl_clip is not None
        return (self._kl_clip / kl.clamp(min=torch.finfo(torch.float64).tiny)).sqrt().clamp(max=1.0)


def _overwrite(gradients: Mapping[str, Tensor], natural: Mapping[str, Tensor], scale: Tensor | None) -> None:
    """Write s·natural into the gradients, s = `scale` (None: 1), by multi-tensor operations, which are few kernels on a GPU.

    Tensors of one device and dtypes go together; apart from them those whose strides are not their gradient's (views of padded
    stacks), since one of these in a multi-tensor copy has all tensors copied one by one. The product is rounded in the dtype of
    the natural gradient and then to that of the gradient. Of DTensors each process writes its own shards.
    """
    kinds: dict[tuple[object, ...], list[tuple[Tensor, Tensor]]] = {}
    for name, gradient in gradients.items():
        to, given = (t.to_local() if isinstance(t, DTensor) else t for t in (gradient, natural[name]))
        kinds.setdefault((to.device, to.dtype, given.dtype, to.stride() == given.stride()), []).append((to, given))
    for pairs in kinds.values():
        into, values = [to for to, _ in pairs], [given for _, given in pairs]
        if scale is None:
            torch._foreach_copy_(into, values)
            continue
        factor = scale.to(into[0].device, wide_dtype(values[0]))  # of another dtype than the tensors it is slower
        if into[0].dtype == values[0].dtype:  # copies lie as gradients do, so they are multiplied together
            torch._foreach_copy_(into, values)
            torch._foreach_mul_(into, factor)
        else:
            torch._foreach_mul_(values, factor)  # of this step alone, and no gradient: those have the other dtype
            torch._foreach_copy_(into, values)


def _needs_closure(optimizer: Optimizer) -> bool:
    """True if the optimizer's `step()` has an argument without a default, such as LBFGS's closure."""
    _, *arguments = inspect.signature(type(optimizer).step).parameters.values()  # a scheduler wraps the instance's
    return any(
        given.default is given.empty and given.kind in (given.POSITIONAL_ONLY, given.POSITIONAL_OR_KEYWORD)
        for given in arguments
    )
