"""Evaluation mode for runs of a row proof: modules are in eval mode, and functions such as `F.dropout` drop nothing, too.

A model that calls `F.dropout(h, 0.3)`, whose flag `training` is True by default, draws random numbers in eval mode, too. A
reversed batch and single samples would then have other dropout masks and could not be compared with the batch.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_DROPOUT = {
    F.dropout: "training", F.dropout1d: "training", F.dropout2d: "training", F.dropout3d: "training",
    F.alpha_dropout: "training", F.feature_alpha_dropout: "training", torch.dropout: "train",
    torch.alpha_dropout: "train", torch.feature_dropout: "train", torch.feature_alpha_dropout: "train",
}  # fmt: skip
"""{dropout function: name of its training flag, the third argument}."""


class WithoutDropout(TorchFunctionMode):
    """Torch function mode in which dropout functions return their input and attention drops nothing out."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        named: dict[str, Any] = dict(kwargs or {})
        flag = _DROPOUT.get(func)
        if flag is not None:
            args, named = (*args[:2], False) if len(args) > 2 else args, _with(named, flag, len(args) > 2)
        elif func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            named.pop("dropout_p", None)
        return func(*args, **named)


def _with(named: Mapping[str, Any], flag: str, given: bool) -> dict[str, Any]:
    """Keyword arguments `named` with the training flag `flag` set to False, unless it was given as a positional argument."""
    return dict(named) if given else {**named, flag: False}


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
