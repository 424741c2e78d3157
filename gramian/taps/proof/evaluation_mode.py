"""Evaluation mode for runs of a row proof: modules are in eval mode, and functions such as `F.dropout` drop nothing, too.

A model that calls `F.dropout(h, 0.3)`, whose flag `training` is True by default, draws random numbers in eval mode, too. A
reversed batch and single samples would then have other dropout masks and could not be compared with the batch.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from gramian.taps.model.dropout import WithoutDropout


@contextmanager
def evaluating(root: nn.Module) -> Iterator[None]:
    """Context manager: no dropout, all modules of `root` in evaluation mode; afterwards each has its own mode again."""
    modes = [(module, module.training) for module in root.modules()]
    for module, _ in modes:
        module.training = False
    try:
        with WithoutDropout():
            yield
    finally:
        for module, training in modes:
            module.training = training
