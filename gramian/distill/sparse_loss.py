"""Teachers that give a few ids per token: the largest logits with a curve for the rest, or a sample.

Legend: N tokens (n of a chunk), V vocabulary, K ids of a token, R what is known of a token. u = 1/T.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gramian.kernels.distill_rows import Objective, Squash, assemble_rows, write_gradient_
from gramian.kernels.divergence import EMPTY, divergence, log_probabilities


@dataclass(frozen=True)
class SparseTeacher:
    """k ids and one outcome more that stands for all others; the divergence is over these k + 1.

    Student: log Σ exp(u z) over the ids that were not kept, taken directly, not as 1 − Σ q. Teacher: l(u) of its curve.
    """

    ids_NK: Tensor
    logits_NK: Tensor
    rest_N: Tensor
    """l(u); EMPTY without a tail."""
    rest_slope_N: Tensor
    """l'(u)."""
    rest_at_one_N: Tensor
    """l(1)."""

    def rows_(
        self,
        tokens: slice,
        products_nV: Tensor,
        targets_n: Tensor,
        temperature: Tensor,
        objective: Objective,
        squash: Squash,
        gradient: bool,
        out_Rn: Tensor,
    ) -> None:
        """The rows of a chunk; with `gradient` the student's products become their gradient."""
        wide = out_Rn.dtype
        ids_nK, t_nK = self.ids_NK[tokens], self.logits_NK[tokens].to(wide)
        z_nV = squash(products_nV.to(wide))
        z_nK = z_nV.gather(1, ids_nK)
        # Every id was kept: nothing is left to share the mass of.
        exhausted = z_nV.shape[1] == ids_nK.shape[1]
        rest_nV = (z_nV / temperature).scatter_(1, ids_nK, EMPTY)
        rest_n1 = z_nK.new_full((len(z_nK), 1), EMPTY) if exhausted else rest_nV.logsumexp(1, keepdim=True)
        share_nV = (rest_nV - rest_n1).exp_() if not exhausted else rest_nV.zero_()
        between = divergence(
            torch.cat([z_nK / temperature, rest_n1], 1),
            torch.cat([t_nK / temperature, self.rest_N[tokens, None].to(wide)], 1),
            torch.cat([z_nK, (share_nV * z_nV).sum(1, keepdim=True)], 1),
            torch.cat([t_nK, self.rest_slope_N[tokens, None].to(wide)], 1),
            objective.direction,
            objective.beta,
        )
        log_q1_nV = log_probabilities(z_nV)
        hit_nK = ids_nK == targets_n[:, None]
        at_one_n = torch.logaddexp(t_nK.logsumexp(1), self.rest_at_one_N[tokens].to(wide))
        best_nK = (z_nK == z_nV.amax(1, keepdim=True)) & (t_nK == t_nK.amax(1, keepdim=True))
        assemble_rows(
            targets_n, objective, log_q1_nV, temperature, out_Rn,
            kl=between.value_N, agreement=best_nK.any(1), teacher_entropy=between.teacher_entropy_N,
            student_entropy=between.student_entropy_N, known=hit_nK.any(1),
            teacher_gold=torch.where(hit_nK, t_nK, 0.0).sum(1) - at_one_n, slope=between.slope_N,
        )  # fmt: skip
        if gradient:
            kd_nV = (between.gradient_NK[:, -1:] * share_nV).scatter_(1, ids_nK, between.gradient_NK[:, :-1])
            write_gradient_(products_nV, kd_nV, targets_n, objective, log_q1_nV, temperature, squash.derivative(z_nV))


@dataclass(frozen=True)
class SampledTeacher:
    """Ids drawn from the teacher at T with weights w: the cross entropy −Σ w log q, an unbiased KL up to the teacher's entropy.

    What it reports as kl is that cross entropy. The teacher's entropy, agreement and log-probabilities are unknown.
    """

    ids_NK: Tensor
    weights_NK: Tensor

    def rows_(
        self,
        tokens: slice,
        products_nV: Tensor,
        targets_n: Tensor,
        temperature: Tensor,
        objective: Objective,
        squash: Squash,
        gradient: bool,
        out_Rn: Tensor,
    ) -> None:
        """The rows of a chunk; with `gradient` the student's products become their gradient."""
        wide = out_Rn.dtype
        ids_nK, weights_nK = self.ids_NK[tokens], self.weights_NK[tokens].to(wide)
        z_nV = squash(products_nV.to(wide))
        log_q_nV = log_probabilities(z_nV / temperature)
        log_q1_nV = log_probabilities(z_nV)
        unknown_n = torch.full_like(log_q_nV[:, 0], torch.nan)
        assemble_rows(
            targets_n, objective, log_q1_nV, temperature, out_Rn,
            kl=-(weights_nK * log_q_nV.gather(1, ids_nK)).sum(1), agreement=unknown_n, teacher_entropy=unknown_n,
            student_entropy=-(log_q_nV.exp() * log_q_nV).sum(1), known=torch.zeros_like(targets_n, dtype=torch.bool),
            teacher_gold=unknown_n, slope=unknown_n,
        )  # fmt: skip
        if gradient:
            kd_nV = (log_q_nV.exp() * weights_nK.sum(1, keepdim=True)).scatter_add_(1, ids_nK, -weights_nK)
            write_gradient_(products_nV, kd_nV, targets_n, objective, log_q1_nV, temperature, squash.derivative(z_nV))
