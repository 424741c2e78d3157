"""One forward and backward of a refresh as its statistics see it: samples, number of loss terms, draw of labels."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.parallel.tensor_parallel import TensorParallel
from gramian.taps.records import PassInfo


@dataclass(frozen=True)
class RefreshPass(PassInfo):
    """One forward of a refresh and its backward: samples, loss terms and draw of labels."""

    num_terms: float = 0.0
    """Number of loss terms of the backward on this process."""
    samples_B: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    """Global ids [B] of the samples, from which random keys are derived."""
    draw: int = 0
    """Number of the draw of labels that this pass uses; 0 for the data's own labels."""
    announcement: int = 0
    """Number of the `cap.next(...)` call that gave num_terms; equal for several forwards of one backward."""
    other_weights: tuple[Tensor, ...] = ()
    """Token weights [B, T] or [B, 1] for layers whose number of tokens is not that of `token_weights`."""
    whole_batch: int = 0
    """Number of samples behind `num_terms`: this process's and those of the other processes of a tensor-parallel group."""
    tensor_parallel: TensorParallel | None = None
    """The tensor-parallel processes that see the same samples and sum over a share of them each; None: there are none."""

    @property
    def rows(self) -> int:
        """Number of samples in the batch; tensor-parallel processes each sum a share of them, all are counted."""
        return self.whole_batch


class SumsOfOneCapture:
    """Base of the two statistics of a refresh (K-FAC blocks, other parameters), whose sums are those of one capture only."""

    def merge(self, left: Any, right: Any) -> Any:
        """Raise a GramianError: K-FAC sums of several captures cannot be merged."""
        raise GramianError(
            "merge: K-FAC sums of several captures; expected one capture with cap.next() between backwards"
        )

    def finish(self, sums: Any) -> Any:
        """Return `sums` unchanged: the refresh turns them into factors."""
        return sums
