"""Runs of a proof that leave no trace in the user's model."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gramian.parallel.data_parallel import local
from gramian.taps.model.preserve_state import preserve_state
from gramian.taps.model.run_eagerly import run_eagerly


@contextmanager
def undisturbed(root: nn.Module, arguments: Iterable[Any]) -> Iterator[None]:
    """Context manager for runs of a proof: restores the model afterwards; inside, compiled modules run eagerly.

    Hooks of saved tensors around the model (checkpoints) see nothing. Weights that are all zero are random inside: no gradient
    would flow through them. Generators among the model's arguments are restored too.
    """
    with (
        preserve_state(root, counters=True, arguments=arguments),
        run_eagerly(),
        _without_hooks_around(),
        zeros_filled(root),
    ):
        yield


def _without_hooks_around() -> AbstractContextManager[Any]:
    """Context manager: hooks on saved tensors that stand around the model, such as those of a checkpoint, see nothing.

    If there are none it does nothing, because `torch.func` does not run under any. An output that a hook saves as it is would
    hold its own graph for good, so it is detached.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda t: t)


@contextmanager
def zeros_filled(root: nn.Module) -> Iterator[None]:
    """Context manager: weight matrices that are all zero have random values inside, and are zero again afterwards."""
    weights = [local(p.detach()) for p in root.parameters() if p.requires_grad and p.is_floating_point() and p.numel()]
    zeros = [w for w in weights if w.numel() and w.dim() > 1 and not bool(w.any())]
    for number, weight in enumerate(zeros):
        generator = torch.Generator(weight.device).manual_seed(number)
        drawn = torch.randn(weight.shape, generator=generator, device=weight.device, dtype=torch.float32)
        weight.data.copy_(drawn / max(1, weight[0].numel()) ** 0.5)
    torch.clear_autocast_cache()  # of weights in half precision, which autocast keeps until the user leaves it
    try:
        yield
    finally:
        for weight in zeros:
            weight.data.zero_()
        torch.clear_autocast_cache()
