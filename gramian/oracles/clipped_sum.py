r"""The reference of private training: clip the gradient of every sample on its own, then add up.

.. math::
    S = \sum_i \min(1, C / \|g_i\|)\, g_i

That is "flat" clipping. "per_layer" clips the part of each layer to :math:`C_l`; "automatic" has the factors
:math:`C / (\|g_i\| + 0.01)`. Everything is float64. A sample whose gradient is not finite is left out. Names, losses and
batches are those of :mod:`gramian.oracles.single_sample`, whose loop of backward passes gives the :math:`g_i`.

Shape legend: B samples, C the clip norm.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gramian.oracles.single_sample import LossFunction, per_sample_gradients


class ClippedSum(NamedTuple):
    """The sum of clipped per-sample gradients, with which a private backward must agree.

    Attributes:
        totals: ``{name: [*parameter.shape]}``, float64: the clipped gradients added up.
        norms_B: norm of each sample's gradient over all parameters; inf or NaN where it is not finite.
        factors_B: clip factor of each sample's gradient; 0 where the norm is not finite.
        sizes: ``{name: number}``: sum of the norms of the clipped gradients. Rounding errors are relative to this sum; the norm
            of the total may be much smaller.
    """

    totals: dict[str, Tensor]
    norms_B: Tensor
    factors_B: Tensor
    sizes: dict[str, float]

    @property
    def nonfinite(self) -> int:
        """Number of samples with a gradient that is not finite, which are left out."""
        return int((~self.norms_B.isfinite()).sum())


def clip(
    per_sample: Mapping[str, Tensor], max_grad_norm: float | Sequence[float], function: str = "flat"
) -> ClippedSum:
    """Clip per-sample gradients g_i to the norm C and add them up; with "flat", the factors are min(1, C/‖g_i‖).

    Samples whose gradient is not finite are left out. Cost: three passes over the gradients, and a copy.

    Args:
        per_sample: ``{name: [B, *shape]}``; the norm of a sample covers all names together.
        max_grad_norm: C; with "per_layer" the list of C_l, or C for C/√L.
        function: "flat", "per_layer" or "automatic". A layer has the parameters whose names are equal up to the last dot;
            ``factors_B`` is then ``[B, L]``.
    """
    wide = {name: g.double() for name, g in per_sample.items()}
    layers: dict[str, list[str]] = {}
    for name in wide:
        layers.setdefault(name.rpartition(".")[0] if function == "per_layer" else "", []).append(name)
    if isinstance(max_grad_norm, Sequence):
        limits = list(max_grad_norm)
    else:
        limits = [max_grad_norm * len(layers) ** -0.5] * len(layers)
    squares = {name: g.flatten(1).square().sum(1).cpu() for name, g in wide.items()}
    norms_B = torch.stack([*squares.values()]).sum(0).sqrt()
    kept, of_layer = norms_B.isfinite(), {}
    for layer, limit in zip(layers, limits, strict=True):
        norms = torch.stack([squares[name] for name in layers[layer]]).sum(0).sqrt()
        factors = limit / (norms + 0.01) if function == "automatic" else (limit / norms).clamp(max=1.0)
        of_layer[layer] = torch.where(kept, factors, 0.0)
    finite, clipped = kept.nonzero()[:, 0], {}
    for layer, names in layers.items():
        for name in names:
            g = wide[name][finite.to(wide[name].device)]
            clipped[name] = g * of_layer[layer][finite].to(g.device).reshape(-1, *[1] * (g.dim() - 1))
    return ClippedSum(
        {name: clipped[name].sum(0) for name in wide},
        norms_B,
        torch.stack([*of_layer.values()], 1).squeeze(1),
        {name: float(clipped[name].flatten(1).norm(dim=1).sum()) for name in wide},
    )


def clipped_sum(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: tuple[Any, ...],
    max_grad_norm: float,
    params: Sequence[str] | None = None,
) -> ClippedSum:
    """Compute every sample's gradient by a backward of its own, clip them to the norm C, and add them up.

    Cost: B forward and backward passes of one sample; B numbers for each parameter entry.

    Args:
        model: only a copy of it is run; float64 for exact results.
        loss_fn: ``loss_fn(model, *batch)``, the sum or the mean over samples.
        batch: arguments of ``loss_fn`` with B samples on dim 0.
        max_grad_norm: C.
        params: names of the trained parameters; None: all with ``requires_grad``.
    """
    return clip(per_sample_gradients(model, loss_fn, batch, params), max_grad_norm)
