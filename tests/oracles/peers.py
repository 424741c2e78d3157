"""The per-sample gradients of other libraries, on the models they support.

All take ``loss_fn(model, *batch)`` with the sum over samples, and leave the model as it was.
"""

from collections.abc import Callable
from copy import deepcopy

import torch
from backpack import backpack, extend
from backpack.extensions import BatchL2Grad
from opacus import GradSampleModule
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

LossFunction = Callable[..., Tensor]


class _Loss(nn.Module):
    """The loss as a module, so that ``functional_call`` reaches the parameters of the model inside."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction):
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, *batch: Tensor) -> Tensor:
        return self.loss_fn(self.model, *batch)


def torch_func_gradients(model: nn.Module, loss_fn: LossFunction, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """``vmap`` of ``grad`` of one sample's loss: {name: [B, *shape]} for the trainable parameters."""
    loss = _Loss(model, loss_fn)
    trainable = {name: p.detach() for name, p in loss.named_parameters() if p.requires_grad}

    def one_sample(parameters: dict[str, Tensor], *sample: Tensor) -> Tensor:
        return functional_call(loss, parameters, tuple(t.unsqueeze(0) for t in sample))

    in_dims = (None, *(0 for _ in batch))
    gradients = vmap(grad(one_sample), in_dims=in_dims)(trainable, *batch)
    return {name.removeprefix("model."): gradient for name, gradient in gradients.items()}


def opacus_norms(model: nn.Module, loss_fn: LossFunction, batch: tuple[Tensor, ...]) -> Tensor:
    """Opacus' hooks: [B]."""
    wrapped = GradSampleModule(_without_inplace(model), batch_first=True, loss_reduction="sum")
    loss_fn(wrapped, *batch).backward()
    samples = [p.grad_sample for p in wrapped.parameters() if p.requires_grad]
    return torch.cat([g.flatten(1) for g in samples], dim=1).norm(dim=1)


def backpack_norms(model: nn.Module, loss_fn: LossFunction, batch: tuple[Tensor, ...]) -> Tensor:
    """BackPACK's squared norms per parameter, summed: [B]."""
    extended = extend(_without_inplace(model))
    with backpack(BatchL2Grad()):
        loss_fn(extended, *batch).backward()
    return torch.stack([p.batch_l2 for p in extended.parameters() if p.requires_grad]).sum(0).sqrt()


def _without_inplace(model: nn.Module) -> nn.Module:
    """A copy whose activations make new tensors: module hooks do not survive the in-place form."""
    copy = deepcopy(model)
    for module in copy.modules():
        if hasattr(module, "inplace"):
            module.inplace = False
    return copy
