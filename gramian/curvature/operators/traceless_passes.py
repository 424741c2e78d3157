"""Passes of a model that leave no trace, on tensors that stand in the places of its parameters."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from gramian.core.errors import GramianError
from gramian.curvature.blocks.consistency import unique_parameters
from gramian.curvature.operators.parameter_space import ParameterSpace
from gramian.taps.hub import hub_of
from gramian.taps.model.preserve_state import preserve_state
from gramian.taps.model.run_eagerly import run_eagerly
from gramian.taps.model.user_names import named_modules

EMBEDDING_ARGUMENTS = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")


@contextmanager
def quiet(root: nn.Module) -> Iterator[None]:
    """Evaluation mode, no autocast, no compiled graphs; afterwards gradients, modes, buffers and random states are as before.

    Dropout and running statistics would make every product one of another matrix, so both rest.

    Raises:
        GramianError: inside an open capture, which would take these passes for its own.
    """
    if hub_of(root).live:
        raise GramianError(
            "model: is inside an open capture, which would take these passes for its own; expected products outside of it"
        )
    modes = [(module, module.training) for module in root.modules()]
    fast = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as around:
        around.enter_context(preserve_state(root))
        around.enter_context(torch.inference_mode(False))
        around.enter_context(torch.enable_grad())
        around.enter_context(ExactEmbeddings())
        for device in {p.device.type for p in root.parameters()}:
            around.enter_context(torch.autocast(device, enabled=False))
        around.enter_context(run_eagerly())
        try:
            torch.backends.mha.set_fastpath_enabled(False)  # it has no derivatives
            for module, _ in modes:
                module.training = False
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            for module, training in modes:
                module.training = training


class ExactEmbeddings(TorchFunctionMode):
    """Embeddings whose forward derivative is the transpose of their backward.

    As torch has them, a padding row has no gradient but a forward derivative, and `scale_grad_by_freq` is known to the
    backward alone: Jᵀ C J would not be symmetric. Here padding is a constant both ways, and a gradient is a gradient.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: D105
        if func is not F.embedding:
            return func(*args, **(kwargs or {}))
        told = dict(zip(EMBEDDING_ARGUMENTS, args, strict=False)) | (kwargs or {})
        told["scale_grad_by_freq"] = told["sparse"] = False
        padding = told.pop("padding_idx", None)
        found = func(**told)
        if padding is None:
            return found
        is_padding = told["input"] == padding % len(told["weight"])
        return torch.where(is_padding[..., None], found.detach(), found)


@contextmanager
def substituted(root: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Let tensors stand where parameters do, a tied one in all of its places; the other parameters are constants meanwhile.

    It stays open until the backward is over: a checkpoint runs its forward again there.
    """
    name_of = {id(p): name for name, p in unique_parameters(root)}
    places = [
        (module._parameters, local, p)
        for _, module in named_modules(root)
        for local, p in module._parameters.items()
        if p is not None
    ]
    rest = {id(p): p.detach() for _, _, p in places if name_of[id(p)] not in tensors}
    try:
        for held, local, p in places:
            held[local] = rest[id(p)] if id(p) in rest else tensors[name_of[id(p)]]  # type: ignore[assignment]
        yield
    finally:
        for held, local, p in places:
            held[local] = p


def leaves(root: nn.Module, space: ParameterSpace) -> dict[str, Tensor]:
    """The parameters of a space as new leaves on the same memory: no gradient hook of the user's hangs on them."""
    return {name: p.detach().requires_grad_() for name, p in unique_parameters(root) if name in space.shapes}


def twice_differentiable() -> AbstractContextManager[Any]:
    """Attention written out: fused kernels have neither a forward derivative nor a second one."""
    made: AbstractContextManager[Any] = sdpa_kernel(SDPBackend.MATH)
    return made
