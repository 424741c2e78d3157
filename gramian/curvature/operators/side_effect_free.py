"""Run a model without side effects, on tensors that temporarily replace its parameters."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from gramian.curvature.blocks.consistency import refuse_open_capture, unique_parameters
from gramian.curvature.operators.parameter_space import ParameterSpace
from gramian.taps.model.preserve_state import preserve_state
from gramian.taps.model.run_eagerly import run_eagerly
from gramian.taps.model.user_names import named_modules

EMBEDDING_ARGUMENTS = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")


@contextmanager
def side_effect_free(root: nn.Module) -> Iterator[None]:
    """A context in which the model `root` can run without side effects: evaluation mode, no autocast, no compiled graphs.

    Gradients, modes, buffers and random states are restored at its end. Dropout and updates of running statistics are off: with
    them every product would be with a different matrix. A GramianError is raised if a capture of the model is open.
    """
    refuse_open_capture(root)
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
            torch.backends.mha.set_fastpath_enabled(False)  # the fast path has no derivatives
            for module, _ in modes:
                module.training = False
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            for module, training in modes:
                module.training = training


class ExactEmbeddings(TorchFunctionMode):
    """A context in which the forward derivative of `F.embedding` is the transpose of its backward.

    In torch a padding row has a forward derivative but no gradient, and `scale_grad_by_freq` changes the backward only, so
    Jᵀ C J would not be symmetric. Here padding rows are constants in both, and gradients are not scaled.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: D105
        if func is not F.embedding:
            return func(*args, **(kwargs or {}))
        arguments = dict(zip(EMBEDDING_ARGUMENTS, args, strict=False)) | (kwargs or {})
        arguments["scale_grad_by_freq"] = arguments["sparse"] = False
        padding = arguments.pop("padding_idx", None)
        found = func(**arguments)
        if padding is None:
            return found
        is_padding = arguments["input"] == padding % len(arguments["weight"])
        return torch.where(is_padding[..., None], found.detach(), found)


@contextmanager
def substituted(root: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """A context that replaces parameters by `tensors`, {name: tensor}, in all modules that share them; others become constants.

    It must stay open until the backward is over, since activation checkpointing runs the forward again there.
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
        for parameters, local, p in places:
            parameters[local] = rest[id(p)] if id(p) in rest else tensors[name_of[id(p)]]  # type: ignore[assignment]
        yield
    finally:
        for parameters, local, p in places:
            parameters[local] = p


def leaves(root: nn.Module, space: ParameterSpace) -> dict[str, Tensor]:
    """{name: leaf tensor} for the parameters of `space`: new leaves on the same memory, without the user's gradient hooks."""
    return {name: p.detach().requires_grad_() for name, p in unique_parameters(root) if name in space.shapes}


def twice_differentiable() -> AbstractContextManager[Any]:
    """A context in which attention runs without fused kernels, which have neither a forward derivative nor a second one."""
    made: AbstractContextManager[Any] = sdpa_kernel(SDPBackend.MATH)
    return made
