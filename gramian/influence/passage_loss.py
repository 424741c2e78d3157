"""The loss of passages and of queries, −log p in nats summed over their targets, and its backward."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gramian.curvature.estimate.labelled_batch import logits_of
from gramian.data.windows import NOT_COUNTED
from gramian.influence.corpus import Batch, PassageCorpus


def nats_of(model: nn.Module, batch: Batch) -> Tensor:
    """Σ −log p(target) of each row of a batch, [B], in float32 (float64 for a float64 model)."""
    labels_BT = batch["labels"]
    logits_BTV = logits_of(model(**{name: value for name, value in batch.items() if name != "labels"}))
    logits_BTV = logits_BTV if logits_BTV.dtype == torch.float64 else logits_BTV.float()
    nats = F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), ignore_index=NOT_COUNTED, reduction="none")
    return nats.view_as(labels_BT).sum(1)


def passage_losses(corpus: PassageCorpus, numbers: Sequence[int], batch: int) -> Iterator[Tensor]:
    """Run forward and backward of the summed loss of the passages of some numbers; yields the nats [B] of every `batch`.

    Gradients are for a capture around it: `p.grad` is None afterwards.
    """
    for first in range(0, len(numbers), batch):
        corpus.model.zero_grad(set_to_none=True)
        nats_B = nats_of(corpus.model, corpus.passages(numbers[first : first + batch]))
        nats_B.sum().backward()
        corpus.model.zero_grad(set_to_none=True)
        yield nats_B.detach()
