"""Sums over the student's logits of all ids that a sparse teacher does not list, token by token, and their gradient.

Legend: N tokens, V vocabulary, S numbers per row (`REST`), u = 1/temperature. Rows are the student's head products (hidden
state · head), one per token; a product of −inf leaves an id out.
"""

import torch
from torch import Tensor

from gramian.core.dtypes import wide_dtype
from gramian.kernels.distillation.distill_rows import PLAIN, Squash
from gramian.kernels.launch import on_device, takes_kernel

REST = ("largest", "lse", "mean", "lse_at_one")
"""Numbers per row of logits z, u = 1/temperature: largest z, log Σ exp(u z), Σ z exp(u z) / Σ exp(u z), log Σ exp(z).
Ids that are left out do not count."""


def rest_rows(products_NV: Tensor, temperature: Tensor, squash: Squash = PLAIN) -> Tensor:
    """For every row of logits z the largest, log Σ exp(u z), Σ z exp(u z) / Σ exp(u z) and log Σ exp(z), u = 1/temperature.

    Cost: one read of the products.

    Args:
        products_NV: Products of hidden states and head, [tokens, vocabulary]; −inf leaves an id out, and every row must have
            at least one other product. The kernel needs adjacent columns (stride 1); other layouts use plain torch.
        temperature: 0-dim, on the same device.
        squash: Map from products to logits.

    Returns:
        [4, tokens], in the order of `REST`, in float32; in float64 if the products are.
    """
    if takes_kernel(products_NV, temperature.float()) and products_NV.stride(1) == 1:
        return rest_rows_kernel(products_NV, temperature, squash)
    return rest_rows_twin(products_NV, temperature, squash)


def rest_gradient_(
    products_NV: Tensor,
    targets_N: Tensor,
    temperature: Tensor,
    factor_N: Tensor,
    lse_N: Tensor,
    lse_at_one_N: Tensor,
    ce_weight: float,
    ignore_index: int,
    squash: Squash = PLAIN,
) -> None:
    """Overwrite each product x [N, V] by (factor · exp(u z − lse) + ce_weight · (exp(z − lse₁) − onehot(target))) · dz/dx.

    z is the logit of x, u = 1/temperature. The result is 0 where x is −inf (an id left out) and in rows whose target is
    `ignore_index`. Cost: one read and one write of the products.

    Args:
        products_NV: Products of hidden states and head, overwritten in place.
        targets_N: Target ids, integers.
        temperature: 0-dim, on the same device.
        factor_N: Factor of the probabilities exp(u z − lse) in the gradient.
        lse_N: log Σ exp(u z) over the ids whose probabilities `factor_N` multiplies.
        lse_at_one_N: lse₁ = log Σ exp(z) over the whole vocabulary.
        ce_weight: Weight of the cross-entropy in the loss.
        ignore_index: Target of tokens that do not count.
        squash: Map from products to logits.
    """
    on_cuda = takes_kernel(products_NV, factor_N, lse_N, lse_at_one_N) and targets_N.is_cuda and temperature.is_cuda
    function = rest_gradient_kernel_ if on_cuda and products_NV.stride(1) == 1 else rest_gradient_twin_
    function(products_NV, targets_N, temperature, factor_N, lse_N, lse_at_one_N, ce_weight, ignore_index, squash)


@torch.no_grad()
def rest_rows_twin(products_NV: Tensor, temperature: Tensor, squash: Squash = PLAIN) -> Tensor:
    """The same as `rest_rows`, in plain torch: the largest logit, two log-sum-exps and a weighted mean of each row, [4, N]."""
    x_NV = products_NV.to(wide_dtype(products_NV))
    left_out_NV = x_NV == -torch.inf
    z_NV = squash(x_NV).masked_fill_(left_out_NV, -torch.inf) if squash.softcap else squash(x_NV)
    temperature, largest_N = temperature.to(z_NV.dtype), z_NV.amax(1)
    z_NV = z_NV - largest_N[:, None]  # the normaliser is then small, and so is its rounding
    scaled_NV = z_NV / temperature
    lse_N = scaled_NV.logsumexp(1)
    share_NV = (scaled_NV - lse_N[:, None]).exp_()
    mean_N = (share_NV * z_NV.masked_fill(left_out_NV, 0.0)).sum(1)
    return torch.stack([largest_N, largest_N / temperature + lse_N, largest_N + mean_N, largest_N + z_NV.logsumexp(1)])


@torch.no_grad()
def rest_gradient_twin_(
    products_NV: Tensor,
    targets_N: Tensor,
    temperature: Tensor,
    factor_N: Tensor,
    lse_N: Tensor,
    lse_at_one_N: Tensor,
    ce_weight: float,
    ignore_index: int,
    squash: Squash = PLAIN,
) -> None:
    """`rest_gradient_`, which overwrites head products by the gradient of the loss, in plain torch; same arguments."""
    x_NV = products_NV.to(factor_N.dtype)
    left_out_NV = x_NV == -torch.inf
    z_NV = squash(x_NV.masked_fill(left_out_NV, 0.0))
    dz_NV = (z_NV / temperature.to(z_NV.dtype) - lse_N[:, None]).exp_().mul_(factor_N[:, None])
    dz_NV += ce_weight * (z_NV - lse_at_one_N[:, None]).exp_()
    places_N1 = targets_N.clamp(0, z_NV.shape[1] - 1)[:, None]
    dz_NV.scatter_add_(1, places_N1, torch.full_like(places_N1, -ce_weight, dtype=dz_NV.dtype))
    nothing_NV = left_out_NV | (targets_N == ignore_index)[:, None]
    products_NV.copy_((dz_NV * squash.derivative(z_NV)).masked_fill_(nothing_NV, 0.0))


@torch.no_grad()
def rest_rows_kernel(
    products_NV: Tensor,
    temperature: Tensor,
    squash: Squash = PLAIN,
    *,
    block: int = 2048,
    warps: int = 8,
    stages: int = 3,
) -> Tensor:
    """The same as `rest_rows`, in Triton: one program per row reads `block` ids (a power of two ≥ 16) at once.

    `warps` and `stages` are Triton launch options.
    """
    from gramian.kernels.distillation import _triton_rest_rows as triton_kernels

    tokens, vocabulary = products_NV.shape
    out_SN = products_NV.new_empty((len(REST), tokens), dtype=torch.float32)
    if tokens:
        with on_device(products_NV):
            triton_kernels.rest_rows[(tokens,)](
                out_SN, products_NV, temperature.to(torch.float32), squash.scale, squash.softcap or 1.0,
                vocabulary, vocabulary // 16 * 16, out_SN.stride(0), products_NV.stride(0),
                CAP=squash.softcap is not None, BLOCK=block, STAGES=stages, num_warps=warps,
            )  # fmt: skip
    return out_SN


@torch.no_grad()
def rest_gradient_kernel_(
    products_NV: Tensor,
    targets_N: Tensor,
    temperature: Tensor,
    factor_N: Tensor,
    lse_N: Tensor,
    lse_at_one_N: Tensor,
    ce_weight: float,
    ignore_index: int,
    squash: Squash = PLAIN,
    *,
    block: int = 2048,
    warps: int = 4,
) -> None:
    """`rest_gradient_`, which overwrites head products by the gradient, in Triton: `block` ids (a power of two) per program."""
    from gramian.kernels.distillation import _triton_rest_rows as triton_kernels

    tokens, vocabulary = products_NV.shape
    if not tokens:
        return
    rows_3N = torch.stack([factor_N, lse_N, lse_at_one_N]).to(torch.float32)
    aligned = vocabulary // 16 * 16
    with on_device(products_NV):
        triton_kernels.rest_gradient[(max(1, -(-aligned // block)), tokens)](
            products_NV, targets_N, temperature.to(torch.float32), rows_3N, ce_weight, squash.scale, squash.softcap or 1.0,
            vocabulary, aligned, ignore_index, rows_3N.stride(0), products_NV.stride(0), targets_N.stride(0),
            CAP=squash.softcap is not None, BLOCK=block, num_warps=warps,
        )  # fmt: skip
