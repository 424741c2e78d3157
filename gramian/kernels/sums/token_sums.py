"""Per-sample gradients of biases and of normalisation layers: sums over the tokens of a sample.

B samples, T tokens, N or D features.
"""

import torch
from torch import Tensor

from gramian.core.dtypes import wide_dtype
from gramian.core.errors import GramianError
from gramian.kernels.launch import on_device, processors, takes_kernel

WIDEST_NORMED = 16384
"""Largest number D of features for `normed_sums_kernel`, which loads all D of a token at once; wider layers use plain torch."""


def token_sums(g_BTN: Tensor) -> Tensor:
    """Σ_t g_bt, the bias gradient of every sample from output gradients g [B, T, N]: [B, N] in float32 (float64 if g is).

    Cost: one read of g.
    """
    return token_sums_kernel(g_BTN) if takes_kernel(g_BTN) else token_sums_twin(g_BTN)


def normed_sums(x_BTD: Tensor, g_BTD: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    """Σ_t g_bt ⊙ x̂_bt and Σ_t g_bt, the gradients of weight and bias of a normalisation layer for every sample.

    x̂ = (x − mean) / √(var + eps) if `centred` (layer norm), else x / √(mean x² + eps) (RMS norm), over D for each token.

    x is the layer's input and g the gradient of its output, both of any strides. Cost: one read of each. Returns the two sums,
    each [B, D], in float32; in float64 if an input is.

    Raises:
        GramianError: if the shapes of x and g differ.
    """
    if x_BTD.shape != g_BTD.shape:
        raise GramianError(f"x: {list(x_BTD.shape)} beside g {list(g_BTD.shape)}, the shapes must agree")
    if takes_kernel(x_BTD, g_BTD) and x_BTD.shape[2] <= WIDEST_NORMED:
        return normed_sums_kernel(x_BTD, g_BTD, eps, centred)
    return normed_sums_twin(x_BTD, g_BTD, eps, centred)


@torch.no_grad()
def token_sums_twin(g_BTN: Tensor) -> Tensor:
    """`token_sums`, the sum over tokens of g [B, T, N], in plain torch."""
    return g_BTN.sum(1, dtype=wide_dtype(g_BTN))


@torch.no_grad()
def normed_sums_twin(x_BTD: Tensor, g_BTD: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    """`normed_sums`, per-sample gradients of a norm layer's weight and bias, in plain torch."""
    wide = wide_dtype(x_BTD, g_BTD)
    x_BTD, g_BTD = x_BTD.to(wide), g_BTD.to(wide)
    if centred:
        x_BTD = x_BTD - x_BTD.mean(2, keepdim=True)
    normed_BTD = x_BTD / (x_BTD.square().mean(2, keepdim=True) + eps).sqrt()
    return (g_BTD * normed_BTD).sum(1), g_BTD.sum(1)


@torch.no_grad()
def token_sums_kernel(g_BTN: Tensor, *, chunk: int | None = None, rows: int = 8, columns: int = 512) -> Tensor:
    """`token_sums`, g [B, T, N] summed over T, in Triton: a program per sample, chunk of tokens and block of columns.

    `chunk`: number of tokens that one program sums; None: so that there are enough programs for the device. `rows`, the tokens
    read at once, and `columns`, the features of one program, are powers of two.
    """
    from gramian.kernels.sums import _triton_token_sums as triton_kernels

    samples, tokens, width = g_BTN.shape
    if not g_BTN.numel():
        return g_BTN.new_zeros((samples, width), dtype=torch.float32)
    blocks = -(-width // columns)
    chunk = chunk or _chunk(samples * blocks, tokens, 8 * processors(g_BTN))
    chunks = -(-tokens // chunk)
    partials_BCN = g_BTN.new_empty((samples, chunks, width), dtype=torch.float32)
    with on_device(g_BTN):
        triton_kernels.token_sums[(samples * chunks, blocks)](
            partials_BCN, g_BTN, tokens, width, chunks, chunk, *g_BTN.stride(), ROWS=rows, COLUMNS=columns, num_warps=4
        )
    return partials_BCN[:, 0] if chunks == 1 else partials_BCN.sum(1)


@torch.no_grad()
def normed_sums_kernel(
    x_BTD: Tensor, g_BTD: Tensor, eps: float, centred: bool, *, chunk: int | None = None, rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """`normed_sums`, gradients of a norm layer, in Triton: one program per sample and chunk of tokens; torch sums the chunks.

    `chunk`: number of tokens that one program sums; None: so that there are enough programs for the device. `rows`: tokens read
    at once, a power of two; None: as many as have about 2048 elements.
    """
    from gramian.kernels.sums import _triton_token_sums as triton_kernels

    samples, tokens, width = x_BTD.shape
    if not x_BTD.numel():
        nothing_BD = x_BTD.new_zeros((samples, width), dtype=torch.float32)
        return nothing_BD, nothing_BD.clone()
    columns = 1 << (width - 1).bit_length()
    rows = rows or max(1, 2048 // columns)
    chunk = chunk or _chunk(samples, tokens, 8 * processors(x_BTD))
    chunks = -(-tokens // chunk)
    partials_BCD = x_BTD.new_empty((2, samples, chunks, width), dtype=torch.float32)
    with on_device(x_BTD):
        triton_kernels.normed_sums[(samples * chunks,)](
            *partials_BCD, x_BTD, g_BTD, eps, tokens, width, chunks, chunk, *x_BTD.stride(), *g_BTD.stride(),
            CENTRED=centred, ROWS=rows, COLUMNS=columns, num_warps=min(32, max(4, rows * columns // 512)),
        )  # fmt: skip
    products_BD, sums_BD = partials_BCD.sum(2)
    return products_BD, sums_BD


def _chunk(rows: int, tokens: int, programs: int) -> int:
    """Number of tokens per program, at least 32, for which `rows` independent sums make about `programs` programs."""
    chunks = max(1, programs // max(1, rows))
    return max(32, -(-tokens // chunks))
