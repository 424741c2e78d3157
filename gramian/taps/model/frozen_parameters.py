"""Whether a forward writes into frozen parameters, so that two equal forwards would differ."""

import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.core.wrapped_tensors import plain_tensors
from gramian.kernels.checksums import checksums
from gramian.parallel.data_parallel import local

SAMPLED = 4096
"""Number of first values of a frozen parameter that are compared before and after a forward."""


def checksums_of(parameters: dict[str, nn.Parameter]) -> Tensor:
    """Checksums [parameters] of the first SAMPLED values of each; of an empty tensor for 8-bit, integer and meta parameters.

    Of a quantised weight the first tensor of its own that can be compared counts: its scales.
    """
    found = []
    for p in parameters.values():
        parts = (t for t in plain_tensors(local(p.detach())) if t.is_floating_point() and t.element_size() > 1)
        found.append(next((t.contiguous() for t in parts if not t.is_meta), torch.empty(0)))
    return checksums(found, SAMPLED) if found else torch.empty(0)


def refuse_written(frozen: dict[str, nn.Parameter], before: Tensor) -> None:
    """Raise GramianError for a frozen parameter whose values differ from `before`: the forward wrote into it."""
    for name, changed in zip(frozen, (checksums_of(frozen) != before).tolist(), strict=True):
        if changed:
            raise GramianError(
                f"{name}: is a frozen parameter that the forward writes into, so that no two forwards are equal; expected it "
                "to be written after the optimizer's step, or to be a buffer"
            )
