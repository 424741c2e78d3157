"""The distillation loss over chunks of tokens, with its gradients, as one step of autograd.

Legend: N tokens (n of a chunk), D the student's width, V vocabulary, R what is known of a token.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gramian.distill.loss.loss_metrics import sums_of
from gramian.distill.loss.projection import Gradients, Projection
from gramian.kernels.distillation.distill_rows import ROWS, RowObjective, Squash

CHUNK_BYTES = 256 << 20
"""What the buffers of a chunk may take, so that chunks of many tokens are made only where a token takes little."""

CHUNK_LIMIT = 512 << 20
"""What they may take for the sake of CHUNK_TOKENS."""

CHUNK_TOKENS = 1024
"""Matrix products over fewer tokens are bound by reading the head's weight."""


@dataclass(frozen=True)
class Chunk:
    """Some tokens of a call, and where to write what becomes known of them."""

    tokens: slice
    products_nV: Tensor
    """Of the student; with `gradient` they become their gradient."""
    targets_n: Tensor
    temperature: Tensor
    objective: RowObjective
    squash: Squash
    """From the student's products to its logits."""
    gradient: bool
    out_Rn: Tensor


class TeacherRows(Protocol):
    """One of `DenseTeacher`, `SparseTeacher`, `SampledTeacher`, `NoTeacher`."""

    def rows_(self, chunk: Chunk) -> None:
        """Fill the rows of a chunk; with `gradient` overwrite the student's products by their gradient."""
        ...


@dataclass(frozen=True)
class Job:
    """One call of the loss."""

    student: Projection
    teacher: TeacherRows
    targets_N: Tensor
    temperature: Tensor
    """0-dim, in `wide`, detached."""
    objective: RowObjective
    num_terms: float | Tensor | None
    chunk: int
    """Tokens at a time."""
    wide: torch.dtype
    """What is known of a token, and the weight's gradient, is held in it."""


def chunk_tokens(bytes_per_token: int) -> int:
    """Tokens of a chunk: a power of two, as many as fit into CHUNK_BYTES, or CHUNK_TOKENS if they fit into CHUNK_LIMIT.

    Where even that is too much, as many as fit into CHUNK_LIMIT, at least one.
    """
    many, few = (_power_of_two(limit // max(1, bytes_per_token)) for limit in (CHUNK_BYTES, CHUNK_LIMIT))
    return max(many, min(few, CHUNK_TOKENS))


def _power_of_two(most: int) -> int:
    return 1 << max(0, most.bit_length() - 1)


def run(job: Job, hidden: bool, weight: bool, bias: bool) -> tuple[Tensor, Tensor, Gradients]:
    """What is known of every token, [R, N], by what the sums are divided, and the gradients that are asked for.

    The gradients are those of the sums: whoever takes them divides.
    """
    student, tokens = job.student, len(job.targets_N)
    gradients = Gradients(student, job.wide, hidden, weight, bias)
    rows_RN = torch.zeros((len(ROWS), tokens), dtype=job.wide, device=job.targets_N.device)
    buffer_nV = student.buffer(min(job.chunk, tokens))
    # Autocast leaves these products alone: it knows none that write into a given tensor.
    for start in range(0, tokens, job.chunk):
        span = slice(start, min(start + job.chunk, tokens))
        products_nV = student.products_(span, buffer_nV)
        chunk = Chunk(
            span, products_nV, job.targets_N[span], job.temperature, job.objective, student.squash,
            hidden or weight or bias, rows_RN[:, span],
        )  # fmt: skip
        job.teacher.rows_(chunk)
        gradients.add_(span, products_nV)
    if job.num_terms is None:
        terms = rows_RN[0].sum().clamp(min=1)
    else:
        terms = torch.as_tensor(job.num_terms).detach().to(rows_RN.dtype)
    return rows_RN, terms, gradients


def loss_of(job: Job, sums: Tensor, terms: Tensor) -> Tensor:
    """kd_weight · T² · Σ D + ce_weight · Σ CE over the number of terms; a weight of 0 leaves its part out."""
    loss = torch.zeros_like(sums[0])
    if job.objective.kd_weight:
        loss = loss + job.objective.kd_weight * job.temperature.square() * sums[1]
    if job.objective.ce_weight:
        loss = loss + job.objective.ce_weight * sums[2]
    return (loss / terms).to(job.wide)


class ChunkedLoss(torch.autograd.Function):
    """Gradients are made on the way forward; backward multiplies them, in place: autograd refuses a second one by itself."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, temperature: Tensor | None, job: Job
    ) -> tuple[Tensor, Tensor]:
        """The loss and the sums."""
        rows_RN, terms, gradients = run(job, *ctx.needs_input_grad[:3])
        slope = None
        if ctx.needs_input_grad[3]:  # where the weight is 0 the divergence may be unknown
            kd_weight = job.objective.kd_weight
            slope = kd_weight * rows_RN[-1].sum() if kd_weight else torch.zeros_like(job.temperature)
        ctx.save_for_backward(gradients.hidden_ND, gradients.weight_VD, gradients.bias_V, slope, terms)
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden_ND, weight_VD, bias_V, temperature)]
        sums = sums_of(rows_RN)
        ctx.mark_non_differentiable(sums)
        return loss_of(job, sums, terms), sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        """outer / terms times what is there, rounded to the dtypes of the inputs."""
        *gradients, terms = ctx.saved_tensors
        factor = outer / terms
        return *(_times(x, factor, dtype) for x, dtype in zip(gradients, ctx.dtypes, strict=True)), None


def _times(gradient: Tensor | None, factor: Tensor, dtype: torch.dtype | None) -> Tensor | None:
    """In place where the dtype stays."""
    if gradient is None or dtype is None:
        return None
    if gradient.dtype == dtype:
        return gradient.mul_(factor)
    return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))
