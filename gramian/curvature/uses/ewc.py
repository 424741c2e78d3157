"""Elastic weight consolidation (Kirkpatrick et al. 2017): a quadratic penalty on leaving the solution of an earlier task.

Each task k has a snapshot θ_k and a Fisher F_k. Later training adds ½·s_k·δᵀF_kδ with δ = θ − θ_k, whose gradient is s_k·F_kδ.
For a layer F = G ⊗ A, so δᵀFδ = tr(δᵀGδA) = Σ (GδA ⊙ δ) with δ [o, m], the bias its last column.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gramian.core.dtypes import wide_dtype
from gramian.core.errors import GramianError
from gramian.curvature.apply.apply_factors import full_vector
from gramian.curvature.blocks.block import Block
from gramian.curvature.blocks.consistency import check_number
from gramian.curvature.kfac import KFACNaturalGradient
from gramian.curvature.uses.fisher_parameters import fisher_parameters, parameters_of
from gramian.linalg.wide import wide


@dataclass(frozen=True)
class ConsolidatedTask:
    """The Fisher and the parameters of a finished task, from which EWC forms its penalty."""

    kfac: KFACNaturalGradient
    snapshot: dict[str, Tensor]
    """{parameter: its value at the end of the task}, for the parameters that have a Fisher block."""
    strength: float
    blocks: Mapping[str, Block]
    """The Fisher's blocks when the task was added, to detect that a refresh or a load has replaced them."""


class EWCPenalty:
    """The penalty Σ_k ½·s_k·(θ − θ_k)ᵀ F_k (θ − θ_k) over added tasks k: strength s_k, snapshot θ_k, Fisher F_k.

    ```python
    penalty = EWCPenalty()
    penalty.add_task(kfac, model, strength=1000.0)  # after the first task
    (loss + penalty(model)).backward()  # in the second
    ```

    A call costs one product with every F_k (2·o·m·(o + m) FLOPs for a weight [o, m] with dense factors), and stores the
    penalty's gradient until the backward.
    """

    def __init__(self) -> None:
        self.tasks: list[ConsolidatedTask] = []

    def add_task(self, kfac: KFACNaturalGradient, model: nn.Module, strength: float = 1.0) -> None:
        """Add a task: from now on `self(model)` penalises the distance from the model's current parameters.

        Args:
            kfac: the task's Fisher, used undamped and unclipped. The object is stored, not copied, so it must not be refreshed
                any more: every task needs its own object.
            model: its parameters are copied; those without a Fisher block are not penalised.
            strength: s_k; with the task's number of loss terms the penalty is the second-order expansion of its summed loss.
        """
        check_number("strength", strength, "not negative")
        shapes = fisher_parameters(kfac)
        parameters = parameters_of(model, shapes)
        snapshot = {name: parameters[name].detach().clone() for name in shapes}
        self.tasks.append(ConsolidatedTask(kfac, snapshot, float(strength), kfac.kfac_factors))

    def __call__(self, model: nn.Module) -> Tensor:
        """The penalty at the model's parameters: 0-dim, differentiable once.

        A GramianError is raised if no task was added, or if a task's Fisher was refreshed or loaded after that.
        """
        if not self.tasks:
            raise GramianError("tasks: there is none; expected add_task before")
        if any(task.kfac.kfac_factors is not task.blocks for task in self.tasks):
            raise GramianError(
                "kfac: was refreshed or loaded after its task was added; expected an object of its own for every task"
            )
        shapes = {name: theta.shape for task in self.tasks for name, theta in task.snapshot.items()}
        found = parameters_of(model, shapes)
        value: Tensor = _Quadratic.apply(self.tasks, [*shapes], *(found[name] for name in shapes))  # type: ignore[no-untyped-call]
        return value

    def free_parameters(self, model: nn.Module) -> list[str]:
        """Names of the trained parameters that no task penalises."""
        penalised = {name for task in self.tasks for name in task.snapshot}
        return [name for name, p in parameters_of(model).items() if p.requires_grad and name not in penalised]


class _Quadratic(torch.autograd.Function):
    """The EWC penalty as an autograd function; its gradient is computed in the forward and stored for the backward."""

    @staticmethod
    def forward(ctx: Any, tasks: Sequence[ConsolidatedTask], names: Sequence[str], *parameters: Tensor) -> Tensor:
        value, gradient = _penalty(tasks, dict(zip(names, (wide(p) for p in parameters), strict=True)))
        ctx.save_for_backward(*gradient.values())
        ctx.dtypes = [p.dtype for p in parameters]
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> Any:
        gradients = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return None, None, *((t * scale.to(t.device, t.dtype)).to(dtype) for t, dtype in gradients)


def _penalty(tasks: Sequence[ConsolidatedTask], there: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """(penalty Σ_k ½·s_k·δᵀF_kδ with δ = θ − θ_k, θ = `there` {parameter: tensor}, its gradient {parameter: Σ_k s_k·F_kδ})."""
    gradient = {name: torch.zeros_like(p) for name, p in there.items()}
    terms = []
    for task in tasks:
        delta = {name: there[name] - was.to(there[name]) for name, was in task.snapshot.items()}
        product = task.kfac.compute_fisher_vector_product(delta)
        for name, value in delta.items():
            gradient[name].add_(product[name], alpha=task.strength)
            terms.append(0.5 * task.strength * full_vector((value.double() * product[name].double()).sum()))
    total = torch.stack([term.to(terms[0].device) for term in terms]).sum()
    return total.to(wide_dtype(*there.values())), gradient
