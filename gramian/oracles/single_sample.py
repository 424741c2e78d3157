r"""The reference: one backward pass per sample, and what follows from it.

A batch loss is :math:`\sum_i \ell_i` or :math:`\frac{1}{B} \sum_i \ell_i`, where :math:`\ell_i` depends on sample ``i``
only. On a batch of one sample the two are the same number, so every function here speaks of
:math:`g_i = \nabla \ell_i`, whichever reduction ``loss_fn`` uses. Gradients have the dtype and device of their
parameters; everything summed from them is float64.

What the functions share:

- ``loss_fn(model, *batch)`` returns a scalar. ``batch`` is a tuple of tensors, or of tuples, lists and dicts of
  tensors, with the sample on dim 0; other leaves and 0-dim tensors are passed on unchanged.
- ``params`` names the parameters to differentiate, in that order; by default all trainable ones, in the model's order.
  A tied parameter has one name, the first under which the model lists it, and its gradient is the sum over its uses.
  A parameter that the loss does not reach has gradient zero.
- Names are the user's: what DDP, ``torch.compile`` and checkpoint wrappers put in front is removed.
- The passes run on a copy of the model in the mode it is in: the model, its gradients and its buffers stay as they
  were. Every sample starts from the random state of the caller, which also stays as it was.

Shape legend: B samples, P entries of all named parameters together.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

LossFunction = Callable[..., Tensor]


class ReferenceNoiseScale(NamedTuple):
    """The simple gradient noise scale and its two parts.

    Attributes:
        simple: ``trace_covariance / squared_gradient``; negative where the estimate of the latter is.
        trace_covariance: unbiased estimate of the trace of the covariance of one sample's gradient.
        squared_gradient: unbiased estimate of the squared norm of the expected gradient; may be negative.
    """

    simple: float
    trace_covariance: float
    squared_gradient: float


def per_sample_gradients(
    model: nn.Module, loss_fn: LossFunction, batch: tuple[Any, ...], params: Sequence[str] | None = None
) -> dict[str, Tensor]:
    r"""Return :math:`g_i = \nabla \ell_i` for every sample of ``batch``.

    Cost: B forward and backward passes of one sample; B·P numbers.

    Args:
        model: the module to differentiate; only a copy of it is run.
        loss_fn: ``loss_fn(model, *batch)``, the sum or the mean over samples.
        batch: arguments of ``loss_fn`` with B samples on dim 0.
        params: names to differentiate; None for all trainable parameters.

    Returns:
        ``{name: [B, *parameter.shape]}``, in the parameter's dtype and on its device.
    """
    samples = list(_single_sample_gradients(model, loss_fn, batch, params))
    return {
        name: torch.stack([gradients[name] for gradients in samples]) if samples else p.new_zeros(0, *p.shape).detach()
        for name, p in _select_parameters(model, params).items()
    }


def per_sample_norms(
    model: nn.Module, loss_fn: LossFunction, batch: tuple[Any, ...], params: Sequence[str] | None = None
) -> Tensor:
    r"""Return :math:`\|g_i\|_2` over all named parameters together, [B] in float64 on the CPU.

    Cost: B passes of one sample; P numbers beside the model. Arguments as for :func:`per_sample_gradients`.
    """
    squares = [
        torch.stack([gradient.double().square().sum().cpu() for gradient in gradients.values()]).sum()
        for gradients in _single_sample_gradients(model, loss_fn, batch, params)
    ]
    return torch.stack(squares).sqrt() if squares else torch.zeros(0, dtype=torch.float64)


def diagonal_fisher(
    model: nn.Module, loss_fn: LossFunction, batch: tuple[Any, ...], params: Sequence[str] | None = None
) -> dict[str, Tensor]:
    r"""Return the sum :math:`\sum_i g_i \odot g_i`, not divided by B, as ``{name: [*parameter.shape]}`` in float64.

    Cost: B passes of one sample; 2P numbers beside the model. Arguments as for :func:`per_sample_gradients`.
    """
    diagonal = {
        name: torch.zeros_like(p, dtype=torch.float64, requires_grad=False)
        for name, p in _select_parameters(model, params).items()
    }
    for gradients in _single_sample_gradients(model, loss_fn, batch, params):
        for name, gradient in gradients.items():
            diagonal[name] += gradient.double().square()
    return diagonal


def dense_fisher(
    model: nn.Module, loss_fn: LossFunction, batch: tuple[Any, ...], params: Sequence[str] | None = None
) -> Tensor:
    r"""Return the sum :math:`\sum_i \mathrm{vec}(g_i)\, \mathrm{vec}(g_i)^\top`, not divided by B, [P, P] in float64.

    ``vec`` concatenates the named parameters in order, each flattened row by row.
    Cost: B passes of one sample and B·P² products; P² + B·P numbers. Arguments as for :func:`per_sample_gradients`.
    """
    gradients = per_sample_gradients(model, loss_fn, batch, params)
    g_BP = torch.cat([g.double().flatten(1) for g in gradients.values()], dim=1)
    return g_BP.T @ g_BP


def noise_scale(per_sample: dict[str, Tensor]) -> ReferenceNoiseScale:
    r"""Return the simple noise scale :math:`\mathrm{tr}\,\Sigma / |G|^2` from unbiased estimates of both.

    .. math::
        \mathrm{tr}\,\Sigma = \frac{\sum_i \|g_i\|^2 - B \|\bar g\|^2}{B - 1}, \qquad
        |G|^2 = \|\bar g\|^2 - \frac{\mathrm{tr}\,\Sigma}{B}

    Cost: one reading of the B·P numbers.

    Args:
        per_sample: ``{name: [B, *shape]}`` as :func:`per_sample_gradients` returns it, B at least 2.
    """
    g_BP = torch.cat([g.double().flatten(1) for g in per_sample.values()], dim=1)
    samples = g_BP.shape[0]
    if samples < 2:
        raise ValueError(f"per_sample holds {samples} sample(s); the variance between samples needs at least 2")
    mean_square = g_BP.mean(0).square().sum().item()
    trace_covariance = (g_BP.square().sum().item() - samples * mean_square) / (samples - 1)
    squared_gradient = mean_square - trace_covariance / samples
    return ReferenceNoiseScale(trace_covariance / squared_gradient, trace_covariance, squared_gradient)


def _single_sample_gradients(
    model: nn.Module, loss_fn: LossFunction, batch: tuple[Any, ...], params: Sequence[str] | None
) -> Iterator[dict[str, Tensor]]:
    """Yield ``{name: [*parameter.shape]}`` for one sample after another."""
    samples = _batch_size(batch)
    copy = deepcopy(model)
    selected = _select_parameters(copy, params)
    parameters = list(selected.values())
    devices = sorted({p.device.index for p in copy.parameters() if p.device.type == "cuda"})
    for i in range(samples):
        one = tree_map(lambda leaf, i=i: leaf[i : i + 1] if _has_samples(leaf) else leaf, batch)
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            loss = loss_fn(copy, *one)
            if loss.requires_grad:
                gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
            else:
                gradients = tuple(torch.zeros_like(p) for p in parameters)
        yield {name: gradient.detach() for name, gradient in zip(selected, gradients, strict=True)}


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
    """Return ``{clean name: parameter}`` for ``params`` in that order, or for all trainable parameters."""
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
