"""The distillation loss by its definition, on full logits in float64, with gradients by autograd: slow and independent.

Legend: N tokens, D width, V vocabulary, K token ids that are separate outcomes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class DistillReference:
    """The distillation loss, and its gradients for the student's hidden states, the head's weight and the temperature."""

    loss: Tensor
    hidden: Tensor
    weight: Tensor
    temperature: Tensor


def reference(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    teacher_NV: Tensor,
    *,
    temperature: float,
    kd_weight: float,
    ce_weight: float,
    direction: str,
    beta: float = 0.5,
    kept_NK: Tensor | None = None,
    num_terms: float | None = None,
) -> DistillReference:
    """The distillation loss (kd_weight · T² · Δ + ce_weight · CE)/num_terms and its gradients, on the CPU in float64.

    T is the temperature, Δ the divergence of teacher p and student q at that temperature, and CE the student's cross entropy;
    both are summed over tokens whose target is not −100. The direction "forward" is KL(p‖q), "reverse" KL(q‖p), and "jsd" β
    KL(p‖m) + (1 − β) KL(q‖m) with m = βp + (1 − β)q and β = `beta`. The token ids in `kept_NK` are separate outcomes and all
    remaining ids together are one; None: every id is separate. `num_terms` None: the number of such tokens.
    """
    hidden, weight = (t.detach().cpu().double().requires_grad_() for t in (hidden_ND, weight_VD))
    teacher, targets = teacher_NV.detach().cpu().double(), targets_N.cpu()
    t = torch.tensor(temperature, dtype=torch.float64, requires_grad=True)
    student = hidden @ weight.T
    p, q = F.log_softmax(teacher / t, -1), F.log_softmax(student / t, -1)
    if kept_NK is not None:
        p, q = (_lumped(log, kept_NK.cpu()) for log in (p, q))
    counted = targets != -100
    terms = max(1, int(counted.sum())) if num_terms is None else num_terms
    distance = (_divergence(p, q, direction, beta) * counted).sum() * t**2
    ce = F.cross_entropy(student, targets, ignore_index=-100, reduction="sum")
    loss = (kd_weight * distance + ce_weight * ce) / terms
    gradients = torch.autograd.grad(loss, (hidden, weight, t), allow_unused=True)
    found = [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, (hidden, weight, t), strict=True)]
    return DistillReference(loss.detach(), *found)


def _lumped(log_NV: Tensor, kept_NK: Tensor) -> Tensor:
    """Log-probabilities of the ids `kept_NK`, and of all remaining ids together, [N, K + 1]."""
    rest = log_NV.scatter(1, kept_NK, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([log_NV.gather(1, kept_NK), rest], 1)


def _divergence(p: Tensor, q: Tensor, direction: str, beta: float) -> Tensor:
    """Divergence of teacher p and student q, given as log-probabilities, summed over outcomes: [N]; "jsd" by default."""
    if direction == "forward":
        return (p.exp() * (p - q)).sum(-1)
    if direction == "reverse":
        return (q.exp() * (q - p)).sum(-1)
    m = (beta * p.exp() + (1 - beta) * q.exp()).log()
    return (beta * p.exp() * (p - m) + (1 - beta) * q.exp() * (q - m)).sum(-1)
