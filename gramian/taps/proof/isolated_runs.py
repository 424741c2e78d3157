"""Context managers for runs of a row proof, after which the user's model is in its earlier state."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from gramian.linalg.wide import exact_float32
from gramian.parallel.data_parallel import local
from gramian.parallel.tensor_parallel import TensorParallel
from gramian.taps.model.preserve_state import preserve_state
from gramian.taps.model.run_eagerly import run_eagerly


@contextmanager
def undisturbed(root: nn.Module, arguments: Iterable[Any], shares: TensorParallel | None = None) -> Iterator[None]:
    """Context manager for runs of a proof; inside, compiled modules run eagerly and float32 products are exact.

    Inside, saved-tensor hooks that were set around the model (checkpoints) are not called, and weight matrices that are all
    zero have random values, because no gradient would flow through them. Random generators among `arguments`, those of the
    model's forward, are restored too. `shares`: as in `zeros_filled`, which has run before under FSDP2.
    """
    with (
        preserve_state(root, counters=True, arguments=arguments),
        run_eagerly(),
        exact_float32(),
        _without_hooks_around(),
        zeros_filled(root, None if isinstance(root, FSDPModule) else shares),
    ):
        yield


def _without_hooks_around() -> AbstractContextManager[Any]:
    """Context manager: saved-tensor hooks that were set around the model, such as those of a checkpoint, are not called.

    If there are none it does nothing, because `torch.func` runs under no such hooks. Inside, saved tensors are detached: an
    output that is saved with its graph would never be freed.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda t: t)


@contextmanager
def zeros_filled(root: nn.Module, shares: TensorParallel | None = None) -> Iterator[None]:
    """Context manager: weight matrices that are all zero have random values inside, and are zero again afterwards.

    Weights sharded over the group `shares` are scaled by random numbers of each process inside: where heads are alike,
    each process would compute the same part of a whole weight's gradient, which looks as if all had computed the whole.
    """
    parts = [local(p.detach()) for p in root.parameters() if shares is not None and shares.cuts(p)]
    kept = [part.clone() for part in parts]
    weights = [local(p.detach()) for p in root.parameters() if p.requires_grad and p.is_floating_point() and p.numel()]
    zeros = [w for w in weights if w.numel() and w.dim() > 1 and not bool(w.any())]
    for number, weight in enumerate(zeros):
        generator = torch.Generator(weight.device).manual_seed(number)
        drawn = torch.randn(weight.shape, generator=generator, device=weight.device, dtype=torch.float32)
        weight.data.copy_(drawn / max(1, weight[0].numel()) ** 0.5)
    for number, part in enumerate(parts):
        generator = torch.Generator(part.device).manual_seed(number * 7919 + dist.get_rank())
        part.data.mul_(torch.rand(part.shape, generator=generator, device=part.device) + 0.5)
    torch.clear_autocast_cache()  # of weights in half precision, which autocast keeps until the user leaves it
    try:
        yield
    finally:
        for weight in zeros:
            weight.data.zero_()
        for part, values in zip(parts, kept, strict=True):
            part.data.copy_(values)
        torch.clear_autocast_cache()
