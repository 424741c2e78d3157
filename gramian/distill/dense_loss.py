"""A teacher that gives its whole distribution: hidden states and the head that reads them.

Legend: N tokens (n of a chunk), V vocabulary, R what is known of a token.
"""

from dataclasses import dataclass

from torch import Tensor

from gramian.distill.projection import Projection
from gramian.kernels.distill_rows import Objective, Squash, distill_rows


@dataclass(frozen=True)
class DenseTeacher:
    """The divergence is over the ids that both vocabularies have; each side is normalised over them."""

    side: Projection
    buffer_nV: Tensor
    """Room for the logits of a chunk."""

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
        teacher_nV = self.side.products_(tokens, self.buffer_nV)
        distill_rows(
            products_nV, teacher_nV, targets_n, temperature, objective, squash, self.side.squash,
            gradient=gradient, out_RN=out_Rn,
        )  # fmt: skip
