"""The Hessian of a model's loss as an operator."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.curvature.blocks.consistency import check_number
from gramian.curvature.estimate.labelled_batch import logits_of
from gramian.curvature.operators.loss_terms import LossName, Terms, listed, read_all
from gramian.curvature.operators.model_operator import ModelOperator
from gramian.curvature.operators.parameter_space import Selection
from gramian.curvature.operators.side_effect_free import leaves, substituted, twice_differentiable

LossFunction = Callable[[nn.Module, Any], Tensor]


class HessianOperator(ModelOperator):
    """The Hessian ∇²L by the parameters, L the mean loss over all loss terms of all batches; in general indefinite.

    A product with k columns costs, per batch, a forward, a backward whose graph is stored, and k backwards through both: about
    3 + 6k forwards in FLOPs, and the memory of two ordinary backwards.

    ```python
    hessian = HessianOperator(model, "cross_entropy", [(x, y)])
    product_NK = hessian.matmat(torch.randn(hessian.dim, 2))
    ```
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction | LossName,
        batches: Iterable[Any],
        parameters: Selection = None,
        *,
        loss_reduction: str | float = "mean",
        num_terms: Sequence[float] | None = None,
        causal_shift: bool | None = None,
    ) -> None:
        """Store the batches that the loss is averaged over, and the number of their loss terms.

        Args:
            model: not sharded, in float32 or float64; it runs in evaluation mode.
            loss_fn: "cross_entropy" or "mse", whose terms are counted here, or `loss_fn(model, batch)` that returns a scalar.
            batches: a list of batches, or a loader, which is read once.
            parameters: names, or a predicate of (name, parameter); None: all trainable parameters.
            loss_reduction: how a user's loss_fn reduces its terms: "mean", "sum", or the coefficient of one term.
            num_terms: number of loss terms of every batch, for a user's loss_fn; None only for the mean loss of one batch, and
                for a named loss.
            causal_shift: for a named loss, whether position t predicts label t+1; None: as Hugging Face does for this model.
        """
        super().__init__(model, parameters)
        self._of_batch: list[tuple[Callable[[], Tensor], float]] = []
        """For each batch a function that returns its loss, and the factor that turns it into the sum over its terms."""
        if not callable(loss_fn):
            if loss_reduction != "mean" or num_terms is not None:
                raise GramianError("num_terms: terms of a named loss are counted; expected it for a function alone")
            terms, self.num_terms = read_all(self.model, batches, loss_fn, causal_shift)
            self._of_batch = [(partial(self._named, one), 1.0) for one in terms]
            return
        stored = listed(batches)
        counts = _counts(num_terms, len(stored), loss_reduction)
        self.num_terms = sum(counts)
        for batch, count in zip(stored, counts, strict=True):
            scale = _factor(loss_reduction, count)
            self._of_batch.append((partial(self._given, loss_fn, batch), scale))

    def _batches(self) -> list[tuple[Callable[[], Tensor], float]]:
        return self._of_batch

    def _named(self, terms: Terms) -> Tensor:
        question = terms.question
        return terms.summed_loss(logits_of(self.model(*question.args, **question.kwargs)))

    def _given(self, loss_fn: LossFunction, batch: Any) -> Tensor:
        loss = loss_fn(self.model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise GramianError("loss_fn: did not return a number; expected a tensor with one element")
        return loss.reshape(())

    def _add(self, batch: tuple[Callable[[], Tensor], float], columns: list[Tensor], total_KN: Tensor) -> None:
        loss_of, scale = batch
        theta = leaves(self.model, self.space)
        inputs = tuple(theta.values())
        with substituted(self.model, theta), twice_differentiable():
            loss = loss_of()
            if not loss.requires_grad:
                raise GramianError("loss_fn: its loss has no gradient; expected one that depends on the parameters")
            gradients = torch.autograd.grad(loss, inputs, create_graph=True, materialize_grads=True)
            curved = [i for i, g in enumerate(gradients) if g.requires_grad]  # constant gradients have no derivative
            for column, total_N in zip(columns, total_KN, strict=True):
                if curved:
                    vector = list(self.space.unflatten(column).values())
                    products = torch.autograd.grad(
                        [gradients[i] for i in curved],
                        inputs,
                        [vector[i] for i in curved],
                        retain_graph=column is not columns[-1],
                        materialize_grads=True,
                    )
                    total_N.add_(torch.cat([t.reshape(-1) for t in products]), alpha=scale)


def _counts(num_terms: Sequence[float] | None, batches: int, loss_reduction: str | float) -> list[float]:
    if num_terms is None:
        if loss_reduction != "mean" or batches > 1:
            raise GramianError("num_terms: expected the loss terms of every batch, by which their sum is divided")
        return [1.0]
    if not isinstance(num_terms, Sequence) or len(num_terms) != batches:
        raise GramianError(f"num_terms: expected a list of {batches} numbers, one for each batch")
    for count in num_terms:
        check_number("num_terms", count)
    if min(num_terms) < 0 or not sum(num_terms) > 0:
        raise GramianError("num_terms: expected counts of loss terms, at least one in all")
    return [float(count) for count in num_terms]


def _factor(loss_reduction: str | float, count: float) -> float:
    """The factor that turns the loss of a batch with `count` terms into the sum over its terms, from `loss_reduction`."""
    if loss_reduction == "mean":
        return count
    if loss_reduction == "sum":
        return 1.0
    if isinstance(loss_reduction, str) or not loss_reduction > 0:
        raise GramianError(f'loss_reduction: expected "mean", "sum" or a number above 0, got {loss_reduction!r}')
    check_number("loss_reduction", loss_reduction)
    return 1.0 / loss_reduction
