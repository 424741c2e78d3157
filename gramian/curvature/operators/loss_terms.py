"""Read a batch: the arguments of the model's forward, and the targets and weights of its loss terms.

The loss is (1/N) Σ_t w_t ℓ_t over positions t with a target. Cross entropy has one term per position, N = Σ w_t; the squared
error has one term per output number, ℓ_t = |f_t − y_t|² for outputs f_t and targets y_t, and N = C Σ w_t, as in `F.mse_loss`.

Legend: V classes, C output numbers of one position, R rows (positions of all samples), w_t weights.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gramian.core.errors import GramianError
from gramian.curvature.estimate import labelled_batch
from gramian.curvature.estimate.likelihood import refuse_unknown_classes
from gramian.linalg.spectra.operator import seen

LossName = Literal["cross_entropy", "mse"]
LOSSES = ("cross_entropy", "mse")


@dataclass(frozen=True)
class Terms:
    """One batch: the arguments of the model's forward (`question`), and the targets and weights of its loss terms."""

    question: labelled_batch.LabelledBatch
    loss: LossName
    targets: Tensor
    """Targets of the positions: classes [*positions], or numbers [*positions, C], aligned with the outputs."""
    weights: Tensor
    """[*positions], float64: weights of the loss terms; 0 for positions without one."""

    @property
    def num_terms(self) -> float:
        """Number of loss terms of this batch: the sum of the positions' weights, for "mse" times the outputs per position."""
        return float(self.weights.sum()) * (self.targets.shape[-1] if self.loss == "mse" else 1)

    def rows(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """(targets [R] or [R, C], weights [R]) of all R positions, on the outputs' device, numbers in their dtype.

        A GramianError is raised if targets and outputs differ in shape, or a class is out of range.
        """
        wanted = outputs.shape if self.loss == "mse" else outputs.shape[:-1]
        if self.targets.shape != wanted:
            raise GramianError(f"labels: have shape {[*self.targets.shape]}; expected {[*wanted]}, as the outputs")
        weights_R = self.weights.reshape(-1).to(outputs)
        if self.loss == "mse":
            return self.targets.flatten(0, -2).to(outputs), weights_R
        refuse_unknown_classes(self.targets, self.weights > 0, outputs.shape[-1])
        return self.targets.masked_fill(self.weights == 0, 0).reshape(-1), weights_R

    def summed_loss(self, outputs: Tensor) -> Tensor:
        """Σ_t w_t ℓ_t, a scalar: the losses ℓ_t of all positions for these outputs [*positions, V], times their weights w_t."""
        targets, weights_R = self.rows(outputs)
        rows = outputs.flatten(0, -2)
        if self.loss == "mse":
            return ((rows - targets).square().sum(-1) * weights_R).sum()
        return (F.cross_entropy(rows, targets, reduction="none") * weights_R).sum()


def read_terms(root: nn.Module, batch: Any, loss: LossName, causal_shift: bool | None) -> Terms:
    """Read the loss terms of a batch: a mapping with "labels", (inputs, labels) or (inputs, labels, token_weights).

    Labels of -100 and positions outside `attention_mask` have no term. `causal_shift`: whether position t predicts label t+1,
    None: as Hugging Face does for this model; weights belong to positions and are not shifted. A GramianError is raised without
    labels, or for weights of another shape or below 0.
    """
    batch, token_weights = _without_weights(batch)
    if loss == "mse":
        question, targets = _numbers(root, batch)
        counted = torch.ones(targets.shape[:-1], dtype=torch.bool, device=targets.device)
        if question.mask_BT is not None and question.mask_BT.shape == counted.shape:
            counted &= question.mask_BT.to(counted.device) != 0
    else:
        question = labelled_batch.read_batch(root, batch, causal_shift)
        if question.unlabelled:
            raise GramianError("labels: expected them in the batch")
        found = labelled_batch.positions(question, None)
        assert found.labels is not None
        targets, counted = found.labels, found.counted
    weights = counted.double()
    if token_weights is not None:
        _check_weights(token_weights, weights.shape)
        weights = weights * token_weights.to(weights)
    return Terms(question, loss, targets, weights)


def read_all(
    root: nn.Module, batches: Any, loss: LossName, causal_shift: bool | None
) -> tuple[tuple[Terms, ...], float]:
    """(`Terms` of every batch, number of loss terms N of all batches); a GramianError if there is no batch or N is 0."""
    if loss not in LOSSES:
        raise GramianError(f"loss: got {loss!r}; expected {' or '.join(repr(name) for name in LOSSES)}")
    if isinstance(batches, Mapping | Tensor) or (
        isinstance(batches, Sequence) and len(batches) > 0 and all(isinstance(part, Tensor) for part in batches)
    ):
        raise GramianError("batches: is one batch; expected a list of batches, [batch]")
    terms = tuple(read_terms(root, batch, loss, causal_shift) for batch in listed(batches))
    total = sum(one.num_terms for one in terms)
    if total <= 0:
        raise GramianError("batches: no position has a target; expected at least one loss term")
    return terms, total


def listed(batches: Any) -> tuple[Any, ...]:
    """The batches as a tuple, so that every product uses the same data, even of a shuffling loader; a GramianError if empty."""
    if not isinstance(batches, Iterable):
        raise GramianError(f"batches: {seen(batches)}; expected a list of batches, or a loader")
    found = tuple(batches)
    if not found:
        raise GramianError("batches: is empty; expected at least one batch")
    return found


def _without_weights(batch: Any) -> tuple[Any, Tensor | None]:
    if isinstance(batch, Mapping):
        return {name: value for name, value in batch.items() if name != "token_weights"}, batch.get("token_weights")
    if isinstance(batch, Sequence) and len(batch) == 3:
        return tuple(batch[:2]), batch[2]
    return batch, None


def _check_weights(token_weights: Any, shape: torch.Size) -> None:
    if not isinstance(token_weights, Tensor) or token_weights.shape != shape:
        got = [*token_weights.shape] if isinstance(token_weights, Tensor) else type(token_weights).__name__
        raise GramianError(f"token_weights: got {got}; expected a tensor {[*shape]}, as the labels")
    if not bool((token_weights >= 0).all() & token_weights.isfinite().all()):
        raise GramianError("token_weights: hold negative or non-finite numbers; expected none")


def _numbers(root: nn.Module, batch: Any) -> tuple[labelled_batch.LabelledBatch, Tensor]:
    """(the forward's arguments, target numbers [B, ..., C]) of a batch for the squared error; a GramianError without them."""
    if isinstance(batch, Mapping):
        targets = batch.get("labels")
        question = labelled_batch.read_batch(
            root, {name: v for name, v in batch.items() if name != "labels"}, shifted=False
        )
    elif isinstance(batch, Sequence) and len(batch) == 2 and isinstance(batch[0], Tensor):
        inputs, targets = batch
        question = labelled_batch.LabelledBatch((inputs,), {}, None, None, inputs, shifted=False)
    else:
        raise GramianError(f"batch: expected a mapping with labels, or (inputs, labels), got {type(batch).__name__}")
    if not isinstance(targets, Tensor) or not targets.is_floating_point() or targets.dim() < 2:
        raise GramianError('labels: expected numbers [B, ..., C] for loss="mse"')
    return question, targets
