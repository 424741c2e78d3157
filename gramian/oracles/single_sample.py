r"""Reference for per-sample gradients: the gradient of every sample, by one backward pass per sample.

A batch loss is :math:`\sum_i \ell_i` or :math:`\frac{1}{B} \sum_i \ell_i`, where :math:`\ell_i` depends on sample ``i``
only. On a batch of one sample the two are the same number, so :math:`g_i = \nabla \ell_i`, whichever reduction the loss
uses.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

LossFunction = Callable[..., Tensor]


def per_sample_gradients(
    model: nn.Module, loss_fn: LossFunction, batch: tuple[Any, ...], params: Sequence[str] | None = None
) -> dict[str, Tensor]:
    r"""Compute the gradient :math:`g_i = \nabla \ell_i` of every sample of ``batch`` by a backward of its own.

    The passes run on a copy of the model in the mode it is in: the model, its gradients and its buffers stay as they were.
    Every sample starts from the random state of the caller, which also stays as it was.

    Cost: B forward and backward passes of one sample; B·P numbers for parameters with P entries together.

    Args:
        model: the module to differentiate.
        loss_fn: ``loss_fn(model, *batch)`` returns a scalar, the sum or the mean over samples.
        batch: tensors, or tuples, lists and dicts of tensors, with B samples on dim 0; other leaves and 0-dim tensors are
            passed on unchanged.
        params: names to differentiate, in that order; None: all trainable parameters, in the model's order. Names are the
            user's: what DDP, ``torch.compile`` and checkpoint wrappers put in front is removed. A tied parameter has one name,
            the first under which the model lists it, and its gradient is the sum over its uses.

    Returns:
        ``{name: [B, *parameter.shape]}``, in the parameter's dtype and on its device; zero where the loss does not reach it.

    Raises:
        ValueError: if the tensors of ``batch`` have different numbers of samples or there are none, or for unknown names.
    """
    rows, copy = _batch_size(batch), deepcopy(model)
    selected = _select_parameters(copy, params)
    parameters = list(selected.values())
    devices = sorted({p.device.index for p in copy.parameters() if p.device.type == "cuda"})
    samples = []
    for i in range(rows):
        one = tree_map(lambda leaf, i=i: leaf[i : i + 1] if _has_samples(leaf) else leaf, batch)
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            loss = loss_fn(copy, *one)
            if loss.requires_grad:
                gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
            else:
                gradients = tuple(torch.zeros_like(p) for p in parameters)
        samples.append([gradient.detach() for gradient in gradients])
    if not samples:
        return {name: p.new_zeros(0, *p.shape).detach() for name, p in selected.items()}
    return {name: torch.stack(each) for name, each in zip(selected, zip(*samples, strict=True), strict=True)}


def _has_samples(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def _batch_size(batch: tuple[Any, ...]) -> int:
    rows = [leaf.shape[0] for leaf in tree_leaves(batch) if _has_samples(leaf)]
    if not rows:
        raise ValueError("batch holds no tensor with a sample dimension")
    if len(set(rows)) > 1:
        raise ValueError(f"tensors of batch have {rows} rows on dim 0; all must have the same number of samples")
    return int(rows[0])


def _select_parameters(model: nn.Module, params: Sequence[str] | None) -> dict[str, nn.Parameter]:
    """Return ``{clean name: parameter}`` for ``params`` in that order, or for all trainable parameters if it is None.

    Raises:
        ValueError: for a name that is not a trainable parameter, or if there is none.
    """
    trainable = {_clean_name(model, name): p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise ValueError("model has no trainable parameter")
    if params is None:
        return trainable
    unknown = [name for name in params if name not in trainable]
    if unknown:
        raise ValueError(f"params names {unknown}; the trainable parameters are {list(trainable)}")
    return {name: trainable[name] for name in params}


def _clean_name(model: nn.Module, name: str) -> str:
    """Remove the parts of ``name`` that wrappers added; a submodule that the user called ``module`` keeps its name."""
    *path, leaf = name.split(".")
    owner, kept = model, []
    for part in path:
        wrapped = part in ("_orig_mod", "_checkpoint_wrapped_module") or (
            part == "module" and isinstance(owner, DistributedDataParallel | DataParallel)
        )
        if not wrapped:
            kept.append(part)
        owner = owner.get_submodule(part)
    return ".".join([*kept, leaf])
