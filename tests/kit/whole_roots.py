"""Tests of what taps explain themselves: a model tapped as one layer would be exact whatever they count."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from torch import nn

from gramian.taps.model.whole_layers import restore, take_whole, whole_classes


@contextmanager
def never_the_root() -> Iterator[None]:
    """Context manager, or decorator: no model is tapped as one layer itself; layers inside it may be."""
    with patch("gramian.taps.proof.remedies.layer_assumptions.take_whole", _take_inside):
        yield


def _take_inside(root: nn.Module, name: str) -> bool:
    taken, classes = take_whole(root, name), whole_classes(root)
    restore(root, classes - {type(root)})
    return taken and type(root) not in classes
