"""The distillation loss per token from student and teacher logits; its gradient can overwrite the student's head products.

Legend: N tokens, V vocabulary (of student or teacher), C ids that both have, R quantities of a token (`ROWS`), T temperature.
With the student's logits s and the teacher's t: p = softmax(t/T) and q = softmax(s/T) over the C common ids, q₁ = softmax(s)
over the student's V ids. Head products are hidden state · head, from which a `Squash` computes logits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gramian.core.dtypes import wide_dtype
from gramian.kernels.distillation.divergence import DIRECTIONS, divergence, log_probabilities
from gramian.kernels.launch import on_device, takes_kernel

ROWS = ("terms", "kl", "ce", "agreement", "teacher_entropy", "student_entropy", "gold", "teacher_gold", "slope")
"""Names of the quantities per token. terms: 1 if the token counts; all are 0 if not. kl: the divergence at temperature T,
without T². ce: cross-entropy. agreement: 1 if student and teacher have the same most likely id. The entropies are those of
softmax(logits/T). gold: 1 if the teacher has the target id; teacher_gold: its log-probability at T = 1. slope: d(T² kl)/dT.
"""


@dataclass(frozen=True)
class RowObjective:
    """Loss of one token: kd_weight · T² · divergence + ce_weight · cross-entropy; 0 where the target is `ignore_index`.

    `direction` is "forward" KL(p‖q), "reverse" KL(q‖p) or "jsd", p teacher and q student; `beta` is the weight of p in "jsd".
    """

    direction: str = "forward"
    beta: float = 0.5
    kd_weight: float = 1.0
    ce_weight: float = 0.5
    ignore_index: int = -100


@dataclass(frozen=True)
class Squash:
    """The map from head products x (hidden state · head) to logits z = softcap · tanh(scale · x / softcap).

    Without a softcap (None), z = scale · x.
    """

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Return the logits of head products x."""
        if self.scale != 1.0:
            x = x * self.scale
        return x if self.softcap is None else self.softcap * (x / self.softcap).tanh()

    def derivative(self, z: Tensor) -> Tensor | float:
        """Derivative dz/dx of the logits z with respect to the head products x, as a function of z."""
        return self.scale if self.softcap is None else self.scale * (1 - (z / self.softcap).square())


PLAIN = Squash()


def distill_rows(
    student_NV: Tensor,
    teacher_NV: Tensor,
    targets_N: Tensor,
    temperature: Tensor,
    objective: RowObjective,
    student: Squash = PLAIN,
    teacher: Squash = PLAIN,
    *,
    gradient: bool,
    out_RN: Tensor | None = None,
) -> Tensor:
    """The quantities in `ROWS` for every token; with `gradient`, the student's products become d(sum of losses)/d(products).

    In the forward direction without softcap or scale the gradient is

        d(products) = kd_weight · T · (q − p) + ce_weight · (q₁ − onehot(target)),

    p and q the softmax of teacher and student logits over T, and q₁ the student's at T = 1. A token whose target is
    `ignore_index` has zeros in all quantities and in its gradient, whatever its logits contain. A target outside the student's
    vocabulary gives a cross-entropy of NaN.

    Cost: the kernel reads the products of both twice (with the gradient of "reverse" and "jsd" three times) and writes the
    gradient once. Products in half precision are not copied; everything is computed in float32.

    Args:
        student_NV: The student's products of hidden states and head, bias included, [tokens, vocabulary]. The kernel needs
            adjacent columns (stride 1) of both; other layouts use plain torch.
        teacher_NV: The teacher's products. The vocabularies may differ in length: the divergence is over the common ids.
        targets_N: Target ids, integers.
        temperature: T, 0-dim, on the device of the logits.
        objective: Direction and weights of the loss.
        student: Map from the student's products to logits.
        teacher: Map from the teacher's products to logits.
        gradient: Whether to overwrite `student_NV` by the gradient.
        out_RN: Tensor to write the result to; None: a new one.

    Returns:
        [len(ROWS), tokens] in float32; in float64 if the products are.
    """
    on_cuda = targets_N.is_cuda and temperature.is_cuda
    adjacent = student_NV.stride(1) == teacher_NV.stride(1) == 1
    function = (
        distill_rows_kernel if takes_kernel(student_NV, teacher_NV) and on_cuda and adjacent else distill_rows_twin
    )
    return function(
        student_NV, teacher_NV, targets_N, temperature, objective, student, teacher, gradient=gradient, out_RN=out_RN
    )


@torch.no_grad()
def distill_rows_twin(
    student_NV: Tensor,
    teacher_NV: Tensor,
    targets_N: Tensor,
    temperature: Tensor,
    objective: RowObjective,
    student: Squash = PLAIN,
    teacher: Squash = PLAIN,
    *,
    gradient: bool,
    out_RN: Tensor | None = None,
) -> Tensor:
    """`distill_rows`, distillation loss quantities per token and the student's gradient, in plain torch; same arguments."""
    wide = wide_dtype(student_NV, teacher_NV)
    z_NV, t_NC = student(student_NV.to(wide)), teacher(teacher_NV.to(wide))
    common = min(z_NV.shape[1], t_NC.shape[1])
    z_NC, t_NC = z_NV[:, :common], t_NC[:, :common]
    temperature = temperature.to(wide)
    between = divergence(z_NC / temperature, t_NC / temperature, z_NC, t_NC, objective.direction, objective.beta)
    best_N = (z_NC == z_NC.amax(1, keepdim=True)) & (t_NC == t_NC.amax(1, keepdim=True))
    known_N = (targets_N >= 0) & (targets_N < common)
    teacher_gold_N = t_NC.gather(1, targets_N.clamp(0, common - 1)[:, None])[:, 0] - t_NC.logsumexp(1)
    log_q1_NV = log_probabilities(z_NV)
    ce_N = -log_q1_NV.gather(1, targets_N.clamp(0, z_NV.shape[1] - 1)[:, None])[:, 0]
    out_RN = assemble_rows(
        targets_N, objective, z_NV.shape[1], temperature, out_RN,
        ce=ce_N, kl=between.value_N, agreement=best_N.any(1), teacher_entropy=between.teacher_entropy_N,
        student_entropy=between.student_entropy_N, known=known_N, teacher_gold=teacher_gold_N, slope=between.slope_N,
    )  # fmt: skip
    if gradient:
        # kd_weight · T · ∂D/∂a + ce_weight · (q₁ − onehot), times the derivative of the squash
        dz_NV = objective.ce_weight * log_q1_NV.exp()
        places_N1 = targets_N.clamp(0, dz_NV.shape[1] - 1)[:, None]
        dz_NV.scatter_add_(1, places_N1, torch.full_like(places_N1, -objective.ce_weight, dtype=dz_NV.dtype))
        dz_NV[:, :common] += objective.kd_weight * temperature * between.gradient_NK
        counts_N1 = (targets_N != objective.ignore_index)[:, None]
        student_NV.copy_(torch.where(counts_N1, dz_NV * student.derivative(z_NV), 0))
    return out_RN


def assemble_rows(
    targets_N: Tensor,
    objective: RowObjective,
    vocabulary: int,
    temperature: Tensor,
    out_RN: Tensor | None,
    *,
    ce: Tensor,
    kl: Tensor,
    agreement: Tensor,
    teacher_entropy: Tensor,
    student_entropy: Tensor,
    known: Tensor,
    teacher_gold: Tensor,
    slope: Tensor,
) -> Tensor:
    """Write the quantities of every token in the order of `ROWS`, zero if a token does not count; returns [len(ROWS), tokens].

    The keyword arguments are [tokens] each. `known`: whether the teacher has the target id. `slope`: derivative of the
    divergence with respect to u = 1/temperature, from which d(T² · divergence)/dT is computed. `vocabulary`: number of the
    student's ids; the cross-entropy of any other target is NaN. `out_RN`: tensor to write to; None: a new one.
    """
    counts_N = targets_N != objective.ignore_index
    inside_N = (targets_N >= 0) & (targets_N < vocabulary)
    ce_N = torch.where(inside_N, ce, torch.nan)
    rows = (
        torch.ones_like(ce_N), kl, ce_N, agreement, teacher_entropy, student_entropy, known,
        torch.where(known, teacher_gold, 0.0), 2 * temperature * kl - slope,
    )  # fmt: skip
    if out_RN is None:
        out_RN = ce_N.new_empty((len(ROWS), len(ce_N)))
    for row_N, value_N in zip(out_RN, rows, strict=True):
        row_N.copy_(torch.where(counts_N, value_N, 0))
    return out_RN


@torch.no_grad()
def distill_rows_kernel(
    student_NV: Tensor,
    teacher_NV: Tensor,
    targets_N: Tensor,
    temperature: Tensor,
    objective: RowObjective,
    student: Squash = PLAIN,
    teacher: Squash = PLAIN,
    *,
    gradient: bool,
    out_RN: Tensor | None = None,
    block: int = 1024,
    warps: int = 8,
    stages: int = 4,
) -> Tensor:
    """`distill_rows`, loss quantities per token and the student's gradient, in Triton and float32: one program per token.

    `block`, a power of two of at least 16, is the number of ids read at once; `warps` and `stages` are Triton launch options.
    Sums are accumulated per lane and added at the end. Four ids per thread need 111 registers, so that two programs fit on a
    multiprocessor; eight ids need 179.
    """
    from gramian.kernels.distillation import _triton_distill_rows as triton_kernels

    tokens, vocabulary = student_NV.shape
    if out_RN is None:
        out_RN = student_NV.new_empty((len(ROWS), tokens), dtype=torch.float32)
    if not tokens:
        return out_RN
    common = min(vocabulary, teacher_NV.shape[1])
    with on_device(student_NV):
        triton_kernels.distill_rows[(tokens,)](
            out_RN, student_NV, teacher_NV, targets_N, temperature.to(torch.float32),
            objective.kd_weight, objective.ce_weight, objective.beta,
            student.scale, student.softcap or 1.0, teacher.scale, teacher.softcap or 1.0,
            vocabulary, common, common // 16 * 16, objective.ignore_index,
            out_RN.stride(0), student_NV.stride(0), teacher_NV.stride(0), targets_N.stride(0),
            DIRECTION=DIRECTIONS.index(objective.direction), GRADIENT=gradient,
            STUDENT_CAP=student.softcap is not None, TEACHER_CAP=teacher.softcap is not None,
            BLOCK=block, STAGES=stages, num_warps=warps,
        )  # fmt: skip
    return out_RN
