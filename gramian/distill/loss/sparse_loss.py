"""Teachers that name a few ids of every token: the largest logits with a curve for the rest, a sample, or none at all.

Legend: N tokens (n of a chunk), V vocabulary, K ids of a token, R what is known of a token. u = 1/T.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gramian.distill.loss.chunked_loss import Chunk
from gramian.kernels.distillation.distill_rows import Squash, assemble_rows
from gramian.kernels.distillation.divergence import EMPTY, divergence
from gramian.kernels.distillation.rest_rows import rest_gradient_, rest_rows


@dataclass(frozen=True)
class SparseTeacher:
    """k ids and one outcome more that stands for all others; the divergence is over these k + 1.

    Student: log Σ exp(u z) over the ids that were not kept, taken directly, not as 1 − Σ q. Teacher: l(u) of its curve. The
    gradient of the last outcome is shared among its ids in proportion to exp(u z).
    """

    ids_NK: Tensor
    logits_NK: Tensor
    rest_N: Tensor
    """l(u); EMPTY without a tail."""
    rest_slope_N: Tensor
    """l'(u)."""
    rest_at_one_N: Tensor
    """l(1)."""

    def rows_(self, chunk: Chunk) -> None:
        """The rows of a chunk; with `gradient` the student's products become their gradient."""
        products_nV, targets_n, temperature = chunk.products_nV, chunk.targets_n, chunk.temperature
        objective, squash = chunk.objective, chunk.squash
        wide, vocabulary = chunk.out_Rn.dtype, products_nV.shape[1]
        ids_nK, t_nK = self.ids_NK[chunk.tokens], self.logits_NK[chunk.tokens].to(wide)
        gold_n = _gold(products_nV, targets_n, squash, wide)
        z_nK = squash(products_nV.gather(1, ids_nK).to(wide))
        products_nV.scatter_(1, ids_nK, -torch.inf)
        if ids_nK.shape[1] < vocabulary:
            largest_n, rest_n, rest_mean_n, rest_at_one_n = rest_rows(products_nV, temperature, squash)
        else:  # every id was kept: nobody is left to share
            largest_n = rest_n = rest_at_one_n = torch.full_like(gold_n, EMPTY)
            rest_mean_n = torch.zeros_like(gold_n)
        between = divergence(
            torch.cat([z_nK / temperature, rest_n[:, None]], 1),
            torch.cat([t_nK / temperature, self.rest_N[chunk.tokens, None].to(wide)], 1),
            torch.cat([z_nK, rest_mean_n[:, None]], 1),
            torch.cat([t_nK, self.rest_slope_N[chunk.tokens, None].to(wide)], 1),
            objective.direction,
            objective.beta,
        )
        at_one_n = torch.logaddexp(z_nK.logsumexp(1), rest_at_one_n)
        hit_nK = ids_nK == targets_n[:, None]
        teacher_at_one_n = torch.logaddexp(t_nK.logsumexp(1), self.rest_at_one_N[chunk.tokens].to(wide))
        largest_n = torch.maximum(largest_n, z_nK.amax(1))
        best_nK = (z_nK == largest_n[:, None]) & (t_nK == t_nK.amax(1, keepdim=True))
        assemble_rows(
            targets_n, objective, vocabulary, temperature, chunk.out_Rn,
            ce=at_one_n - gold_n, kl=between.value_N, agreement=best_nK.any(1),
            teacher_entropy=between.teacher_entropy_N, student_entropy=between.student_entropy_N, known=hit_nK.any(1),
            teacher_gold=torch.where(hit_nK, t_nK, 0.0).sum(1) - teacher_at_one_n, slope=between.slope_N,
        )  # fmt: skip
        if chunk.gradient:
            kd_nK = objective.kd_weight * temperature * between.gradient_NK
            rest_gradient_(
                products_nV, targets_n, temperature, kd_nK[:, -1], rest_n, at_one_n,
                objective.ce_weight, objective.ignore_index, squash,
            )  # fmt: skip
            dz_nK = kd_nK[:, :-1] + objective.ce_weight * ((z_nK - at_one_n[:, None]).exp() - hit_nK.to(wide))
            counts_n1 = (targets_n != objective.ignore_index)[:, None]
            dx_nK = torch.where(counts_n1, dz_nK * squash.derivative(z_nK), 0.0)
            products_nV.scatter_(1, ids_nK, dx_nK.to(products_nV.dtype))


@dataclass(frozen=True)
class SampledTeacher:
    """Ids drawn from the teacher at T with weights w: the cross entropy −Σ w log q, an unbiased KL up to the teacher's entropy.

    What it reports as kl is that cross entropy. The teacher's entropy, agreement and log-probabilities are unknown.
    """

    ids_NK: Tensor
    weights_NK: Tensor

    def rows_(self, chunk: Chunk) -> None:
        """The rows of a chunk; with `gradient` the student's products become their gradient."""
        products_nV, targets_n, temperature = chunk.products_nV, chunk.targets_n, chunk.temperature
        objective, squash = chunk.objective, chunk.squash
        wide = chunk.out_Rn.dtype
        ids_nK, weights_nK = self.ids_NK[chunk.tokens], self.weights_NK[chunk.tokens].to(wide)
        gold_n = _gold(products_nV, targets_n, squash, wide)
        z_nK = squash(products_nV.gather(1, ids_nK).to(wide))
        _, lse_n, mean_n, at_one_n = rest_rows(products_nV, temperature, squash)
        unknown_n = torch.full_like(gold_n, torch.nan)
        assemble_rows(
            targets_n, objective, products_nV.shape[1], temperature, chunk.out_Rn,
            ce=at_one_n - gold_n, kl=(weights_nK * (lse_n[:, None] - z_nK / temperature)).sum(1), agreement=unknown_n,
            teacher_entropy=unknown_n, student_entropy=lse_n - mean_n / temperature,
            known=torch.zeros_like(targets_n, dtype=torch.bool), teacher_gold=unknown_n, slope=unknown_n,
        )  # fmt: skip
        if chunk.gradient:
            drawn_nK = objective.kd_weight * temperature * weights_nK
            rest_gradient_(
                products_nV, targets_n, temperature, drawn_nK.sum(1), lse_n, at_one_n,
                objective.ce_weight, objective.ignore_index, squash,
            )  # fmt: skip
            counts_n1 = (targets_n != objective.ignore_index)[:, None]
            dx_nK = torch.where(counts_n1, drawn_nK * squash.derivative(z_nK), 0.0)
            products_nV.scatter_add_(1, ids_nK, -dx_nK.to(products_nV.dtype))


@dataclass(frozen=True)
class NoTeacher:
    """Cross entropy alone. Whatever concerns a teacher is not a number."""

    def rows_(self, chunk: Chunk) -> None:
        """The rows of a chunk; with `gradient` the student's products become their gradient."""
        products_nV, targets_n, temperature = chunk.products_nV, chunk.targets_n, chunk.temperature
        objective, squash = chunk.objective, chunk.squash
        gold_n = _gold(products_nV, targets_n, squash, chunk.out_Rn.dtype)
        _, lse_n, mean_n, at_one_n = rest_rows(products_nV, temperature, squash)
        unknown_n = torch.full_like(gold_n, torch.nan)
        assemble_rows(
            targets_n, objective, products_nV.shape[1], temperature, chunk.out_Rn,
            ce=at_one_n - gold_n, kl=unknown_n, agreement=unknown_n, teacher_entropy=unknown_n,
            student_entropy=lse_n - mean_n / temperature, known=torch.zeros_like(targets_n, dtype=torch.bool),
            teacher_gold=unknown_n, slope=unknown_n,
        )  # fmt: skip
        if chunk.gradient:
            rest_gradient_(
                products_nV, targets_n, temperature, torch.zeros_like(lse_n), lse_n, at_one_n,
                objective.ce_weight, objective.ignore_index, squash,
            )  # fmt: skip


def _gold(products_nV: Tensor, targets_n: Tensor, squash: Squash, wide: torch.dtype) -> Tensor:
    """The logit of the target; of some id where there is none."""
    places_n1 = targets_n.clamp(0, products_nV.shape[1] - 1)[:, None]
    return squash(products_nV.gather(1, places_n1).to(wide))[:, 0]
