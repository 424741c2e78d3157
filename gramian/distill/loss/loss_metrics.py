"""Metrics of the distillation loss: sums that add up over micro-batches and ranks, and the means that follow from them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gramian.kernels.distillation.distill_rows import ROWS

SUMS = (*ROWS[: ROWS.index("slope")], "student_gold", "teacher_gold²", "student_gold²", "product")
"""Names of `DistillOutput.sums`, in order. `gold` counts the tokens whose target the teacher knows. `teacher_gold` and the last
four sum over these tokens: log-probabilities of the target at T = 1, their squares, and their product.
"""


def sums_of(rows_RN: Tensor) -> Tensor:
    """Sum the R results of every token, [R, N] named by `distill_rows.ROWS`, over tokens: the sums `SUMS`, in float64."""
    rows = dict(zip(ROWS, rows_RN.to(torch.float64), strict=True))
    rows.pop("slope")
    student_N = torch.where(rows["gold"] > 0, -rows["ce"], 0.0)
    teacher_N = rows["teacher_gold"]
    moments = (student_N, teacher_N.square(), student_N.square(), student_N * teacher_N)
    return torch.stack([*rows.values(), *moments]).sum(1)


def metrics_of(sums: Tensor) -> dict[str, Tensor]:
    """Metrics of the distillation loss from its sums: means over the counted tokens, 0-dim tensors on the sums' device.

    kl is the divergence at T without T², in nats; ce the cross entropy; agreement the fraction of tokens where student and
    teacher rank the same id first (any of equal logits); the entropies are at T; correlation is Pearson's r of the
    log-probabilities that student and teacher give the target at T = 1, over the tokens whose target the teacher knows. A
    metric without tokens, without variance, or unknown for this kind of teacher is NaN.

    Args:
        sums: `DistillOutput.sums`, or a total of several.
    """
    total = dict(zip(SUMS, sums.to(torch.float64), strict=True))
    metrics = {
        name: total[name] / total["terms"] for name in ("kl", "ce", "agreement", "teacher_entropy", "student_entropy")
    }
    count = total["gold"]
    x, y = total["teacher_gold"] / count, total["student_gold"] / count
    covariance = total["product"] / count - x * y
    variances = (total["teacher_gold²"] / count - x * x) * (total["student_gold²"] / count - y * y)
    metrics["correlation"] = covariance / variances.clamp(min=0).sqrt()
    return metrics


def _metric(name: str, doc: str) -> property:
    """Make a property of `DistillOutput` that returns the metric `name` of `metrics_of`."""
    return property(lambda self: metrics_of(self.sums)[name], doc=doc)


@dataclass(frozen=True)
class DistillOutput:
    """The loss to call backward on, and its metrics, each computed on the device when it is read."""

    loss: Tensor
    sums: Tensor
    """Sums for metrics, [len(SUMS)] in float64: add those of micro-batches and ranks, then call `metrics_of`."""

    kl = _metric("kl", "The divergence at T, without T², in nats per token.")
    ce = _metric("ce", "Cross entropy in nats per token.")
    agreement = _metric("agreement", "The fraction of tokens where student and teacher rank the same id first.")
    teacher_entropy = _metric("teacher_entropy", "Entropy of the teacher at T, in nats per token.")
    student_entropy = _metric("student_entropy", "Entropy of the student at T, in nats per token.")
    correlation = _metric("correlation", "Pearson's r of the targets' log-probabilities under student and teacher.")
