r"""The reference of private training: clip the gradient of every sample on its own, then add up.

.. math::
    S = \sum_i \min(1, C / \|g_i\|)\, g_i

Everything is float64. A sample whose gradient is not finite is left out. Names, losses and batches are those of
:mod:`gramian.oracles.single_sample`, whose loop of backward passes gives the :math:`g_i`.

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


def clip(per_sample: Mapping[str, Tensor], max_grad_norm: float) -> ClippedSum:
    """Clip per-sample gradients g_i to the norm C, min(1, C/‖g_i‖) g_i, and add them up.

    Samples whose gradient is not finite are left out. Cost: three passes over the gradients, and a copy.

    Args:
        per_sample: ``{name: [B, *shape]}``; the norm of a sample covers all names together.
        max_grad_norm: C.
    """
    wide = {name: g.double() for name, g in per_sample.items()}
    norms_B = torch.stack([g.flatten(1).square().sum(1).cpu() for g in wide.values()]).sum(0).sqrt()
    factors_B = torch.where(norms_B.isfinite(), (max_grad_norm / norms_B).clamp(max=1.0), 0.0)
    finite = norms_B.isfinite().nonzero()[:, 0]
    clipped = {
        name: g[finite.to(g.device)] * factors_B[finite].to(g.device).reshape(-1, *[1] * (g.dim() - 1))
        for name, g in wide.items()
    }
    return ClippedSum(
        {name: g.sum(0) for name, g in clipped.items()},
        norms_B,
        factors_B,
        {name: float(g.flatten(1).norm(dim=1).sum()) for name, g in clipped.items()},
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
