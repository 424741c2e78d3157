"""Operators of the form Jᵀ C J: J is the Jacobian of the outputs, C a curvature matrix of the loss by them in closed form.

Legend: n parameters, R rows (positions of all samples), V outputs of a position, k columns.
"""

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from gramian.curvature.operators.linearised import Linearised
from gramian.curvature.operators.loss_terms import LossName, Terms, read_all
from gramian.curvature.operators.model_operator import ModelOperator
from gramian.curvature.operators.parameter_space import Selection


class JacobianOperator(ModelOperator):
    """Base of the operators M = (1/N) Σ_b J_bᵀ C_b J_b over batches b, positive semi-definite.

    J_b is the Jacobian of the outputs f of batch b by the parameters, C_b the curvature of the loss by the outputs, N the
    number of loss terms.

    A product with k columns costs, per batch, k forwards in forward-mode differentiation, which store no activations, one
    forward, and k backwards: about 1 + 5k forwards in FLOPs. At most four tensors of the size of the outputs [R, V] exist at a
    time: f, both halves of J v and their sum, while torch differentiates the last layer. After that there are two: f and J v,
    which is overwritten by C J v a chunk of rows at a time. The backward has two as well; for k > 1 one more belongs to the
    stored forward. A model without forward mode costs 1 + 8k forwards and the memory of two backwards (see `Linearised`).
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        parameters: Selection = None,
        *,
        loss: LossName = "cross_entropy",
        causal_shift: bool | None = None,
    ) -> None:
        """Read the batches that the curvature is averaged over, and count their loss terms.

        Args:
            model: returns logits (or numbers) [*positions, V], alone, first, or as `.logits`; not sharded, in float32 or
                float64; it runs in evaluation mode.
            batches: a list of batches, or a loader, which is read once. A batch is a mapping as Hugging Face models take it,
                with "labels" and perhaps "token_weights", or (inputs, labels), or (inputs, labels, token_weights).
            parameters: names, or a predicate of (name, parameter); None: all trainable parameters.
            loss: "cross_entropy" of classes, or "mse" of numbers.
            causal_shift: whether position t predicts label t+1; None: as Hugging Face does for this model.
        """
        super().__init__(model, parameters)
        self.loss = loss
        self._forward_mode = True
        self._terms, self.num_terms = read_all(self.model, batches, loss, causal_shift)

    def _batches(self) -> tuple[Terms, ...]:
        return self._terms

    @abstractmethod
    def _curve(self, outputs_RV: Tensor, tangents_RV: Tensor, targets: Tensor, weights_R: Tensor, samples: int) -> None:
        """Overwrite U = J v (`tangents_RV` [R, V]) by C U, C the curvature of the summed loss by the outputs.

        `targets` are classes [R] or numbers [R, V]; `weights_R` are 0 for rows (positions) without a loss term; R/B consecutive
        rows belong to each of the B = `samples` samples.
        """

    def _add(self, batch: Terms, columns: list[Tensor], total_KN: Tensor) -> None:
        with Linearised(self.model, batch.question, self.space, self._forward_mode) as model:
            for column, total_N in zip(columns, total_KN, strict=True):
                curved = self._curved(model, batch, column)
                if curved is not None:
                    total_N.add_(model.pull(curved, last=column is columns[-1]))
                del curved  # before the next one is formed
            self._forward_mode = model.forward_mode

    def _curved(self, model: Linearised, batch: Terms, column_N: Tensor) -> Tensor | None:
        """C J v for v [n], shaped like the outputs: J = ∂outputs/∂parameters, C the loss curvature; None if J v is None."""
        outputs, tangents = model.push(column_N)
        if tangents is None:
            return None
        targets, weights_R = batch.rows(outputs)
        tangents = tangents.contiguous()
        self._curve(outputs.flatten(0, -2), tangents.flatten(0, -2), targets, weights_R, len(outputs))
        return tangents
