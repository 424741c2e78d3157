"""One pass of a refresh as its statistics see it: which samples it has, how many loss terms, which draw of labels."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.parallel.tensor_parallel import TensorParallel
from gramian.taps.records import PassInfo


@dataclass(frozen=True)
class RefreshPass(PassInfo):
    """A forward of a refresh and its backward."""

    num_terms: float = 0.0
    """N of the backward: loss terms on this process."""
    samples_B: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    """Global ids of the samples, which random keys are derived from."""
    draw: int = 0
    """Number of the draw of labels."""
    announcement: int = 0
    """Number of the `cap.next(...)` that stated num_terms: several forwards of one backward share it."""
    whole_batch: int = 0
    """Samples behind `num_terms`: this process's and those of the other processes of a tensor-parallel group."""
    tensor_parallel: TensorParallel | None = None
    """The processes that see the same samples, of which each takes its share."""

    @property
    def rows(self) -> int:
        """Samples of the whole batch."""
        return self.whole_batch


class SumsOfOneCapture:
    """Base of both statistics of a refresh: `Join` adds their sums over processes; sums of two captures are never joined."""

    def merge(self, left: Any, right: Any) -> Any:
        """Refuse to join sums of several captures."""
        raise GramianError(
            "merge: K-FAC sums of several captures; expected one capture with cap.next() between backwards"
        )

    def finish(self, sums: Any) -> Any:
        """The sums as they are."""
        return sums
