"""What the loss tells beside its value: sums that add up over micro-batches and ranks, and the metrics that follow."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gramian.kernels.distillation.distill_rows import ROWS

SUMS = (*ROWS[: ROWS.index("slope")], "student_gold", "teacher_gold²", "student_gold²", "product")
"""The order of `DistillOutput.sums`. The last four and `teacher_gold` are over the tokens that `gold` counts."""


def sums_of(rows_RN: Tensor) -> Tensor:
    """[len(SUMS)] in float64 from what is known of every token: counts stay exact, moments keep their digits.

    Args:
        rows_RN: [R, N] as `gramian.kernels.distillation.distill_rows.ROWS` names them.
    """
    rows = dict(zip(ROWS, rows_RN.to(torch.float64), strict=True))
    rows.pop("slope")
    student_N = torch.where(rows["gold"] > 0, -rows["ce"], 0.0)
    teacher_N = rows["teacher_gold"]
    moments = (student_N, teacher_N.square(), student_N.square(), student_N * teacher_N)
    return torch.stack([*rows.values(), *moments]).sum(1)


def metrics_of(sums: Tensor) -> dict[str, Tensor]:
    """Means over the tokens that count, as 0-dim tensors on the device of the sums; nothing waits for it.

    kl is the divergence at T without T², in nats; ce the cross entropy; agreement the share of tokens where both sides
    put the same id first (of equal logits any); the entropies are at T; correlation is Pearson's r of the log-probabilities
    that student and teacher give the target at T = 1, over the tokens whose target the teacher knows. What has no tokens,
    or no variance, or is unknown for this kind of teacher, is not a number.

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


@dataclass(frozen=True)
class DistillOutput:
    """A loss to call backward on, and its metrics; each is computed when it is asked for, on the device."""

    loss: Tensor
    sums: Tensor
    """[len(SUMS)], float64: add those of micro-batches and ranks, then `metrics_of`."""

    @property
    def kl(self) -> Tensor:
        """The divergence at T, without T², in nats per token."""
        return metrics_of(self.sums)["kl"]

    @property
    def ce(self) -> Tensor:
        """Cross entropy in nats per token."""
        return metrics_of(self.sums)["ce"]

    @property
    def agreement(self) -> Tensor:
        """The share of tokens where student and teacher put the same id first."""
        return metrics_of(self.sums)["agreement"]

    @property
    def teacher_entropy(self) -> Tensor:
        """Of the teacher at T, in nats."""
        return metrics_of(self.sums)["teacher_entropy"]

    @property
    def student_entropy(self) -> Tensor:
        """Of the student at T, in nats."""
        return metrics_of(self.sums)["student_entropy"]

    @property
    def correlation(self) -> Tensor:
        """Pearson's r between the log-probabilities of the targets."""
        return metrics_of(self.sums)["correlation"]
