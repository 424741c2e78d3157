"""The distillation loss over chunks of tokens, as one autograd function that computes its gradients in the forward pass.

Hidden states [N, D] and a head [V, D] come in; the loss, sums for metrics, and the gradients of both go out, without the [N, V]
logits of all tokens.

Legend: N tokens (n of a chunk), D the student's width, V vocabulary, R results per token (divergence, cross entropy, …).
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gramian.distill.loss.loss_metrics import sums_of
from gramian.distill.loss.projection import HeadGradients, Projection
from gramian.kernels.distillation.distill_rows import ROWS, RowObjective, Squash

CHUNK_BYTES = 256 << 20
"""Memory for the logits and temporaries of a chunk of tokens, in bytes."""

CHUNK_LIMIT = 512 << 20
"""Memory of a chunk, in bytes, if CHUNK_BYTES is too little for CHUNK_TOKENS tokens."""

CHUNK_TOKENS = 1024
"""Desired tokens per chunk: matrix products over fewer tokens are limited by reading the head's weight."""


@dataclass(frozen=True)
class TokenChunk:
    """Some tokens of a call of the loss, and the buffers for their results."""

    tokens: slice
    products_nV: Tensor
    """The student's products h Wᵀ + b of hidden states and head; if `gradient` is set, overwritten by their gradient."""
    targets_n: Tensor
    temperature: Tensor
    objective: RowObjective
    squash: Squash
    """Map from the student's products to its logits: scale and soft cap."""
    gradient: bool
    out_Rn: Tensor


class TeacherRows(Protocol):
    """A teacher's signal for a whole call: `DenseTeacher`, `SparseTeacher`, `SampledTeacher` or `NoTeacher`."""

    def rows_(self, chunk: TokenChunk) -> None:
        """Write the results of a chunk (divergence, cross entropy, …) into its `out_Rn`.

        If its `gradient` is set, the student's products are overwritten by the gradient of the loss.
        """


@dataclass(frozen=True)
class LossCall:
    """The checked arguments of one call of the distillation loss."""

    student: Projection
    teacher: TeacherRows
    targets_N: Tensor
    temperature: Tensor
    """Temperature T as a 0-dim tensor of dtype `wide`, detached."""
    objective: RowObjective
    num_terms: float | Tensor | None
    chunk: int
    """Number of tokens per chunk."""
    wide: torch.dtype
    """Dtype of results and of the weight's gradient: float32, or float64 for float64 inputs."""


def chunk_tokens(bytes_per_token: int) -> int:
    """Number of tokens per chunk, a power of two, from the bytes that a token's buffers take.

    As many as fit into CHUNK_BYTES; if that is fewer than CHUNK_TOKENS, up to CHUNK_TOKENS within CHUNK_LIMIT; at least one.
    """
    many, few = (_power_of_two(limit // max(1, bytes_per_token)) for limit in (CHUNK_BYTES, CHUNK_LIMIT))
    return max(many, min(few, CHUNK_TOKENS))


def _power_of_two(most: int) -> int:
    return 1 << max(0, most.bit_length() - 1)


def run_chunks(call: LossCall, hidden: bool, weight: bool, bias: bool) -> tuple[Tensor, Tensor, HeadGradients]:
    """Run the loss chunk by chunk; returns results of every token [R, N], the divisor of the loss, and gradients (not divided).

    `hidden`, `weight` and `bias` select the gradients: of the hidden states, and of the head's weight and bias.
    """
    student, tokens = call.student, len(call.targets_N)
    gradients = HeadGradients(student, call.wide, hidden, weight, bias)
    rows_RN = torch.zeros((len(ROWS), tokens), dtype=call.wide, device=call.targets_N.device)
    buffer_nV = student.buffer(min(call.chunk, tokens))
    # Autocast does not change these products: it does not handle those that write into a given tensor.
    for start in range(0, tokens, call.chunk):
        span = slice(start, min(start + call.chunk, tokens))
        products_nV = student.products_(span, buffer_nV)
        chunk = TokenChunk(
            span, products_nV, call.targets_N[span], call.temperature, call.objective, student.squash,
            hidden or weight or bias, rows_RN[:, span],
        )  # fmt: skip
        call.teacher.rows_(chunk)
        gradients.add_(span, products_nV)
    if call.num_terms is None:
        terms = rows_RN[0].sum().clamp(min=1)
    else:
        terms = torch.as_tensor(call.num_terms).detach().to(rows_RN.dtype)
    return rows_RN, terms, gradients


def loss_of(call: LossCall, sums: Tensor, terms: Tensor) -> Tensor:
    """The loss (kd_weight · T² · Σ divergence + ce_weight · Σ CE) / terms from the sums over tokens.

    A part with weight 0 is left out, since it may be NaN.
    """
    loss = torch.zeros_like(sums[0])
    if call.objective.kd_weight:
        loss = loss + call.objective.kd_weight * call.temperature.square() * sums[1]
    if call.objective.ce_weight:
        loss = loss + call.objective.ce_weight * sums[2]
    return (loss / terms).to(call.wide)


class ChunkedLoss(torch.autograd.Function):
    """Autograd function of the distillation loss: computes gradients in the forward; backward scales them, and can run once."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        temperature: Tensor | None,
        call: LossCall,
    ) -> tuple[Tensor, Tensor]:
        """Compute the loss and the sums for metrics, and save the gradients for backward."""
        rows_RN, terms, gradients = run_chunks(call, *ctx.needs_input_grad[:3])
        slope = None
        if ctx.needs_input_grad[3]:  # with weight 0 the divergence may be NaN
            kd_weight = call.objective.kd_weight
            slope = kd_weight * rows_RN[-1].sum() if kd_weight else torch.zeros_like(call.temperature)
        ctx.save_for_backward(gradients.hidden_ND, gradients.weight_VD, gradients.bias_V, slope, terms)
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden_ND, weight_VD, bias_V, temperature)]
        sums = sums_of(rows_RN)
        ctx.mark_non_differentiable(sums)
        return loss_of(call, sums, terms), sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        """The saved gradients times outer / terms (`outer` is the loss's own gradient), rounded to the dtypes of the inputs."""
        *gradients, terms = ctx.saved_tensors
        factor = outer / terms
        return *(_times(x, factor, dtype) for x, dtype in zip(gradients, ctx.dtypes, strict=True)), None


def _times(gradient: Tensor | None, factor: Tensor, dtype: torch.dtype | None) -> Tensor | None:
    """A gradient times a factor, converted to `dtype`, in place if it has that dtype already; None if either is None."""
    if gradient is None or dtype is None:
        return None
    if gradient.dtype == dtype:
        return gradient.mul_(factor)
    return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))
