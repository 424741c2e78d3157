"""The loss of one chunk of tokens for each kind of teacher signal: dense, top-k with a tail, sampled, or none.

A `TokenChunk` with the student's products comes in; its rows [R, n] (divergence, cross entropy, …) are filled and, with
`gradient`, the products are overwritten by their gradient.

Legend: N tokens (n of a chunk), V vocabulary, K ids of a token, R results per token (`distill_rows.ROWS`). u = 1/T.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gramian.distill.loss.chunked_loss import TokenChunk
from gramian.distill.loss.projection import Projection
from gramian.kernels.distillation.distill_rows import Squash, assemble_rows, distill_rows
from gramian.kernels.distillation.divergence import EMPTY, divergence
from gramian.kernels.distillation.rest_rows import rest_gradient_, rest_rows


@dataclass(frozen=True)
class DenseTeacher:
    """A teacher with logits of all ids; the divergence is over the ids that both vocabularies have, normalised over them."""

    side: Projection
    buffer_nV: Tensor
    """Buffer for the teacher's logits of one chunk of tokens."""

    def rows_(self, chunk: TokenChunk) -> None:
        """Write the results of a chunk (divergence, cross entropy, …), and the gradient of its products if `chunk.gradient`."""
        teacher_nV = self.side.products_(chunk.tokens, self.buffer_nV)
        distill_rows(
            chunk.products_nV, teacher_nV, chunk.targets_n, chunk.temperature, chunk.objective, chunk.squash,
            self.side.squash, gradient=chunk.gradient, out_RN=chunk.out_Rn,
        )  # fmt: skip


@dataclass(frozen=True)
class SparseTeacher:
    """A teacher with its K largest logits and one outcome for all other ids; the divergence is over these K + 1 outcomes.

    With u = 1/T, the log-mass of the last outcome is, for the student, log Σ exp(u z) over the logits z of the other ids,
    computed directly, not as 1 − Σ q; for the teacher it is interpolated from the stored tail curve. Its gradient is divided
    among its ids in proportion to exp(u z).
    """

    ids_NK: Tensor
    logits_NK: Tensor
    rest_N: Tensor
    """The teacher's log Σ exp(u z) over the ids outside the top K, l(u); without a tail EMPTY, a finite stand-in for −∞."""
    rest_slope_N: Tensor
    """Derivative of `rest_N` with respect to u = 1/T."""
    rest_at_one_N: Tensor
    """The teacher's log Σ exp(z) over the ids outside the top K, that is at T = 1."""

    def rows_(self, chunk: TokenChunk) -> None:
        """Write the results of a chunk (divergence, cross entropy, …), and the gradient of its products if `chunk.gradient`."""
        products_nV, targets_n, temperature = chunk.products_nV, chunk.targets_n, chunk.temperature
        objective, squash = chunk.objective, chunk.squash
        wide, vocabulary = chunk.out_Rn.dtype, products_nV.shape[1]
        ids_nK, t_nK = self.ids_NK[chunk.tokens], self.logits_NK[chunk.tokens].to(wide)
        gold_n = _gold(products_nV, targets_n, squash, wide)
        z_nK = squash(products_nV.gather(1, ids_nK).to(wide))
        products_nV.scatter_(1, ids_nK, -torch.inf)
        if ids_nK.shape[1] < vocabulary:
            largest_n, rest_n, rest_mean_n, rest_at_one_n = rest_rows(products_nV, temperature, squash)
        else:  # the K ids are the vocabulary: the last outcome is empty
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
    """A teacher with ids drawn at T and weights w: the loss is −Σ w log q, whose mean is the KL plus the teacher's entropy.

    That cross entropy is reported as kl. The teacher's entropy, agreement and log-probabilities are NaN.
    """

    ids_NK: Tensor
    weights_NK: Tensor

    def rows_(self, chunk: TokenChunk) -> None:
        """Write the results of a chunk (divergence, cross entropy, …), and the gradient of its products if `chunk.gradient`."""
        products_nV, temperature, squash, wide = chunk.products_nV, chunk.temperature, chunk.squash, chunk.out_Rn.dtype
        ids_nK, weights_nK = self.ids_NK[chunk.tokens], self.weights_NK[chunk.tokens].to(wide)
        z_nK = squash(products_nV.gather(1, ids_nK).to(wide))
        drawn_nK = chunk.objective.kd_weight * temperature * weights_nK
        _student_rows_(
            chunk, lambda lse_n: (weights_nK * (lse_n[:, None] - z_nK / temperature)).sum(1), drawn_nK.sum(1)
        )
        if chunk.gradient:
            counts_n1 = (chunk.targets_n != chunk.objective.ignore_index)[:, None]
            dx_nK = torch.where(counts_n1, drawn_nK * squash.derivative(z_nK), 0.0)
            products_nV.scatter_add_(1, ids_nK, -dx_nK.to(products_nV.dtype))


@dataclass(frozen=True)
class NoTeacher:
    """No teacher: the loss is the cross entropy; results that concern a teacher are NaN."""

    def rows_(self, chunk: TokenChunk) -> None:
        """Write the cross entropy of a chunk, and the gradient of its products if `chunk.gradient`."""
        _student_rows_(chunk)


def _student_rows_(
    chunk: TokenChunk, kl_of: Callable[[Tensor], Tensor] | None = None, kd_n: Tensor | None = None
) -> None:
    """Write the results of a chunk that follow from the student's logits; without `kl_of` the divergence is NaN.

    `kl_of` maps log Σ exp(u z) of each token to its divergence. If `chunk.gradient`, the products become the gradient of CE
    plus `kd_n` times that of log Σ exp(u z).
    """
    products_nV, targets_n, temperature = chunk.products_nV, chunk.targets_n, chunk.temperature
    objective, squash = chunk.objective, chunk.squash
    gold_n = _gold(products_nV, targets_n, squash, chunk.out_Rn.dtype)
    _, lse_n, mean_n, at_one_n = rest_rows(products_nV, temperature, squash)
    unknown_n = torch.full_like(gold_n, torch.nan)
    assemble_rows(
        targets_n, objective, products_nV.shape[1], temperature, chunk.out_Rn,
        ce=at_one_n - gold_n, kl=kl_of(lse_n) if kl_of else unknown_n, agreement=unknown_n, teacher_entropy=unknown_n,
        student_entropy=lse_n - mean_n / temperature, known=torch.zeros_like(targets_n, dtype=torch.bool),
        teacher_gold=unknown_n, slope=unknown_n,
    )  # fmt: skip
    if chunk.gradient:
        kd_n = torch.zeros_like(lse_n) if kd_n is None else kd_n
        rest_gradient_(
            products_nV, targets_n, temperature, kd_n, lse_n, at_one_n,
            objective.ce_weight, objective.ignore_index, squash,
        )  # fmt: skip


def _gold(products_nV: Tensor, targets_n: Tensor, squash: Squash, wide: torch.dtype) -> Tensor:
    """Logit of the target of each token, [n]; an arbitrary one for tokens without a target."""
    places_n1 = targets_n.clamp(0, products_nV.shape[1] - 1)[:, None]
    return squash(products_nV.gather(1, places_n1).to(wide))[:, 0]
