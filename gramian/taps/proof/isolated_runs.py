"""Context managers for runs of a row proof, after which the user's model is in its earlier state."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from gramian.linalg.wide import exact_float32
from gramian.parallel.data_parallel import local
from gramian.parallel.tensor_parallel import TensorParallel
from gramian.taps.model.preserve_state import preserve_state
from gramian.taps.model.run_eagerly import run_eagerly

ATTENTION_BACKWARDS = {
    torch.ops.aten._scaled_dot_product_flash_attention_backward.default,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward.default,
    torch.ops.aten._flash_attention_backward.default,
    torch.ops.aten._efficient_attention_backward.default,
}
"""Operations of a GPU that add in a fixed order only where torch raises an error for those that cannot."""


@contextmanager
def undisturbed(root: nn.Module, arguments: Iterable[Any], shares: TensorParallel | None = None) -> Iterator[None]:
    """Context manager for runs of a proof; inside, compiled modules run eagerly, float32 products are exact, GPUs add in order.

    Inside, saved-tensor hooks that were set around the model (checkpoints) are not called, and weight matrices that are all
    zero have random values, because no gradient would flow through them. Random generators among `arguments`, those of the
    model's forward, are restored too. `shares`: as in `zeros_filled`, which has run before under FSDP2.
    """
    with (
        preserve_state(root, counters=True, arguments=arguments),
        run_eagerly(),
        exact_float32(),
        _added_in_order(),
        _without_hooks_around(),
        zeros_filled(root, None if isinstance(root, FSDPModule) else shares),
    ):
        yield


class AttentionInOrder(TorchDispatchMode):
    """Runs the backwards of attention where torch demands fixed orders: where it only warns, they still add atomically."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True: attention that compiles itself (`flex_attention`) is not refused for this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation as it is, or with the demand around it."""
        if func not in ATTENTION_BACKWARDS:
            return func(*args, **(kwargs or {}))
        before = torch.get_deterministic_debug_mode()
        torch.set_deterministic_debug_mode("error")
        try:
            return func(*args, **(kwargs or {}))
        finally:
            torch.set_deterministic_debug_mode(before)


@contextmanager
def _added_in_order() -> Iterator[None]:
    """Context manager: kernels of a GPU add in a fixed order where torch has such kernels, so that equal runs have equal bits.

    Attention adds atomically in its backward: over some thirty layers in half precision two equal runs end percents apart,
    which would hide a row that changes; `AttentionInOrder` makes it keep an order. Operations that have no fixed order run as
    they always do. Nothing changes where there is no GPU, or the user has chosen these kernels before.
    """
    cuda, cudnn, memory = torch.backends.cuda, torch.backends.cudnn, torch.utils.deterministic
    if not torch.cuda.is_available() or torch.are_deterministic_algorithms_enabled():
        yield
        return
    before = cuda.cudnn_sdp_enabled(), cudnn.deterministic, memory.fill_uninitialized_memory  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic")
        torch.set_deterministic_debug_mode("warn")
        cuda.enable_cudnn_sdp(False)  # has no fixed order, and is not left out where torch only warns
        cudnn.deterministic = True
        memory.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        try:
            with AttentionInOrder():  # type: ignore[no-untyped-call]
                yield
        finally:
            torch.set_deterministic_debug_mode("default")
            cuda.enable_cudnn_sdp(before[0])
            cudnn.deterministic = before[1]
            memory.fill_uninitialized_memory = before[2]  # type: ignore[attr-defined]


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
