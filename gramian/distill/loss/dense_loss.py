"""A teacher that gives its whole distribution: hidden states and the head that reads them.

Legend: N tokens (n of a chunk), V vocabulary, R what is known of a token.
"""

from dataclasses import dataclass

from torch import Tensor

from gramian.distill.loss.chunked_loss import Chunk
from gramian.distill.loss.projection import Projection
from gramian.kernels.distillation.distill_rows import distill_rows


@dataclass(frozen=True)
class DenseTeacher:
    """The divergence is over the ids that both vocabularies have; each side is normalised over them."""

    side: Projection
    buffer_nV: Tensor
    """Room for the logits of a chunk."""

    def rows_(self, chunk: Chunk) -> None:
        """The rows of a chunk; with `gradient` the student's products become their gradient."""
        teacher_nV = self.side.products_(chunk.tokens, self.buffer_nV)
        distill_rows(
            chunk.products_nV, teacher_nV, chunk.targets_n, chunk.temperature, chunk.objective, chunk.squash,
            self.side.squash, gradient=chunk.gradient, out_RN=chunk.out_Rn,
        )  # fmt: skip
