"""The distillation loss as its definition says, on whole logits in float64, by autograd. Slow, and independent of `distill`.

Legend: N tokens, D width, V vocabulary, K ids kept.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class DistillReference:
    """The loss and its gradients."""

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
    """kd_weight · T² · D + ce_weight · CE, each summed over targets that are not −100, over num_terms.

    Args:
        hidden_ND: of the student.
        weight_VD: of its head.
        targets_N: or −100.
        teacher_NV: the teacher's logits.
        temperature: T.
        kd_weight: of D.
        ce_weight: of the cross-entropy.
        direction: "forward", "reverse" or "jsd".
        beta: of "jsd".
        kept_NK: ids that are told apart; all others are one outcome. None: all are told apart.
        num_terms: None: the targets that count.

    Returns:
        On the CPU in float64.
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
    """[N, K + 1]: the kept ids, and all others together."""
    others = log_NV.scatter(1, kept_NK, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([log_NV.gather(1, kept_NK), others], 1)


def _divergence(p: Tensor, q: Tensor, direction: str, beta: float) -> Tensor:
    """Σ over outcomes, of log-probabilities."""
    if direction == "forward":
        return (p.exp() * (p - q)).sum(-1)
    if direction == "reverse":
        return (q.exp() * (q - p)).sum(-1)
    m = (beta * p.exp() + (1 - beta) * q.exp()).log()
    return (beta * p.exp() * (p - m) + (1 - beta) * q.exp() * (q - m)).sum(-1)
