"""What surrounds the products of an optimizer's step of weights of one shape.

Averaged gradients in one stack, a stack with its columns or rows scaled, and the step of each weight. An entry is read and
written once each time: 14, 4 and 10 bytes for float32 weights and 16-bit stacks; torch's multi-tensor operations move 30 and 28
bytes for the first and the last. Numbers of a matrix or a column are computed in the same launches: matrices may be small.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gramian.kernels.launch import on_device, takes_kernel

BLOCK = 2048
"""Entries of a Triton program."""
LEAST = {torch.float32: 1e-18, torch.float64: 1e-150}
"""{dtype of norms: the least that is divided by}: smaller ones are lost where their squares are added."""


class Addresses(NamedTuple):
    """Where k momenta, gradients and weights begin, int64 [k] each on their device: launches of kernels read them there."""

    momenta: Tensor
    gradients: Tensor
    weights: Tensor


def averages_in_kernel(momenta: Sequence[Tensor], gradients: Sequence[Tensor]) -> bool:
    """Whether `nesterov_averages` runs as a kernel."""
    return takes_kernel(*momenta, *gradients) and _uniform([*momenta, *gradients])


@torch.no_grad()
def nesterov_averages(
    momenta: Sequence[Tensor],
    gradients: Sequence[Tensor],
    beta: float,
    dtype: torch.dtype,
    at: Addresses | None = None,
) -> Tensor:
    """Update momenta M ← βM + (1−β)g in place; returns N = βM + (1−β)g, [k, *shape], of k weights of one shape, in `dtype`.

    `at`: their addresses, which a kernel looks up where they are not given.
    """
    if averages_in_kernel(momenta, gradients):
        return nesterov_averages_kernel(momenta, gradients, beta, dtype, at)
    return nesterov_averages_twin(momenta, gradients, beta, dtype)


@torch.no_grad()
def scaled_steps(
    weights: Sequence[Tensor], u: Tensor, scale: Tensor, rates: Tensor, at: Addresses | None = None
) -> None:
    """W ← keep·W + rate·scale·U in place, for k weights of one shape [a, …], U [k, a, …], `scale` broadcast to [k, a, c].

    `rates` are (rate, keep), float64 [2] on the weights' device; `at` as above.
    """
    kernel = takes_kernel(*weights, u) and _uniform(weights) and u.is_contiguous() and scale.dtype == torch.float32
    if kernel:
        scaled_steps_kernel(weights, u, scale, rates, at)
    else:
        scaled_steps_twin(weights, u, scale, rates)


@torch.no_grad()
def scaled_stack(x: Tensor, factor: float, over: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """factor·scale·x/over [k, a, c] in `dtype` and in the memory order of x; `scale`, if given, broadcasts to x.

    `over` [k, 1, 1], in float32 or float64, counts as at least `LEAST`.
    """
    if x.stride(-1) != 1:
        return scaled_stack(x.mT, factor, over, dtype, None if scale is None else scale.mT).mT
    kernel = takes_kernel(x, over) and x.is_contiguous() and x.numel() > 0
    return (scaled_stack_kernel if kernel else scaled_stack_twin)(x, factor, over, dtype, scale)


@torch.no_grad()
def scaled_in_parts(x: Tensor, factor: float, over: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(H, L) in `dtype` with factor·x/over [k, a, c] ≈ H + L: H is it rounded, L what rounding took away; `over` as above."""
    kernel = takes_kernel(x, over) and x.is_contiguous() and x.numel() > 0
    return (scaled_in_parts_kernel if kernel else scaled_in_parts_twin)(x, factor, over, dtype)


@torch.no_grad()
def direction_scales(norms: Tensor, D: Tensor | None, sizes: Tensor, least: Tensor, factor: float) -> Tensor:
    """factor·min(1, sizes/least)·D/‖norms·D‖ [k, 1, c], for norms of columns and D [k, 1, c]; without D, as if it were 1.

    `sizes` and `least` are [k, 1, 1]; all but D are in float32, or in float64. ‖norms·D‖ counts as at least `LEAST`.
    """
    kernel = takes_kernel(norms, sizes, least)
    return (direction_scales_kernel if kernel else direction_scales_twin)(norms, D, sizes, least, factor)


def nesterov_averages_twin(
    momenta: Sequence[Tensor], gradients: Sequence[Tensor], beta: float, dtype: torch.dtype
) -> Tensor:
    """`nesterov_averages` in torch."""
    torch._foreach_lerp_(list(momenta), list(gradients), 1 - beta)
    averaged = torch._foreach_lerp(list(gradients), list(momenta), beta)
    n = torch.empty((len(momenta), *momenta[0].shape), dtype=dtype, device=momenta[0].device)
    torch._foreach_copy_(list(n.unbind()), list(averaged))
    return n


def nesterov_averages_kernel(
    momenta: Sequence[Tensor],
    gradients: Sequence[Tensor],
    beta: float,
    dtype: torch.dtype,
    at: Addresses | None = None,
) -> Tensor:
    """`nesterov_averages` in Triton, for contiguous tensors of one dtype."""
    from gramian.kernels import _triton_matrix_steps as triton_kernels

    first, size = momenta[0], momenta[0].numel()
    n = torch.empty((len(momenta), *first.shape), dtype=dtype, device=first.device)
    if size:
        with on_device(first):
            triton_kernels.nesterov_averages[(-(-size // BLOCK), len(momenta))](
                n, addresses(momenta) if at is None else at.momenta,
                addresses(gradients) if at is None else at.gradients, first, size, beta,
                BLOCK=BLOCK, ALIGNED=_aligned([*momenta, *gradients]), num_warps=4,
            )  # fmt: skip
    return n


def scaled_steps_twin(weights: Sequence[Tensor], u: Tensor, scale: Tensor, rates: Tensor) -> None:
    """`scaled_steps` in torch."""
    steps = (u.flatten(2) * (rates[0] * scale)).to(weights[0].dtype).view_as(u)
    torch._foreach_mul_(list(weights), rates[1].to(weights[0].dtype))
    torch._foreach_add_(list(weights), list(steps.unbind()))


def scaled_steps_kernel(
    weights: Sequence[Tensor], u: Tensor, scale: Tensor, rates: Tensor, at: Addresses | None = None
) -> None:
    """`scaled_steps` in Triton, for contiguous tensors, weights of one dtype."""
    from gramian.kernels import _triton_matrix_steps as triton_kernels

    first, size = weights[0], weights[0].numel()
    if not size:
        return
    rows = len(first)
    strides = scale.expand(len(weights), rows, size // rows).stride()
    with on_device(first):
        triton_kernels.scaled_steps[(-(-size // BLOCK), len(weights))](
            addresses(weights) if at is None else at.weights, first, u, scale, size, size // rows, *strides, rates,
            BLOCK=BLOCK, ALIGNED=_aligned(weights), num_warps=4,
        )  # fmt: skip


def scaled_stack_twin(
    x: Tensor, factor: float, over: Tensor, dtype: torch.dtype, scale: Tensor | None = None
) -> Tensor:
    """`scaled_stack` in torch."""
    of_matrix = factor / over.clamp(min=LEAST[over.dtype])
    return (x * (of_matrix if scale is None else scale * of_matrix)).to(dtype)


def scaled_stack_kernel(
    x: Tensor, factor: float, over: Tensor, dtype: torch.dtype, scale: Tensor | None = None
) -> Tensor:
    """`scaled_stack` in Triton, for contiguous tensors."""
    return _scaled(x, factor, over, dtype, scale, 1)[0]


def scaled_in_parts_twin(x: Tensor, factor: float, over: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`scaled_in_parts` in torch."""
    value = x * (factor / over.clamp(min=LEAST[over.dtype]))
    high = value.to(dtype)
    return high, (value - high).to(dtype)


def scaled_in_parts_kernel(x: Tensor, factor: float, over: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`scaled_in_parts` in Triton, for a contiguous x."""
    high, low = _scaled(x, factor, over, dtype, None, 2)
    return high, low


def _scaled(
    x: Tensor, factor: float, over: Tensor, dtype: torch.dtype, scale: Tensor | None, parts: int
) -> list[Tensor]:
    from gramian.kernels import _triton_matrix_steps as triton_kernels

    out, size = [torch.empty_like(x, dtype=dtype) for _ in range(parts)], x[0].numel()
    read = over if scale is None else scale
    with on_device(x):
        triton_kernels.scaled_stack[(-(-size // BLOCK), len(x))](
            out[0], out[-1], x, over.contiguous(), read, size, x.shape[-1], *read.expand(x.shape).stride(),
            factor, LEAST[torch.float32], SCALED=scale is not None, PARTS=parts, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return out


def direction_scales_twin(norms: Tensor, D: Tensor | None, sizes: Tensor, least: Tensor, factor: float) -> Tensor:
    """`direction_scales` in torch."""
    scale = torch.ones_like(norms) if D is None else D.to(norms.dtype)
    length: Tensor = torch.linalg.vector_norm(norms * scale, dim=-1, keepdim=True)
    return scale * (factor * (sizes / least).clamp(max=1) / length.clamp(min=LEAST[norms.dtype]))


def direction_scales_kernel(norms: Tensor, D: Tensor | None, sizes: Tensor, least: Tensor, factor: float) -> Tensor:
    """`direction_scales` in Triton."""
    from gramian.kernels import _triton_matrix_steps as triton_kernels

    norms = norms.contiguous()
    d = torch.empty_like(norms)
    scale = norms if D is None else D.contiguous()
    with on_device(norms):
        triton_kernels.direction_scales[(len(norms),)](
            d, norms, scale, sizes.contiguous(), least.contiguous(), norms.shape[-1], factor, LEAST[torch.float32],
            DIAGONAL=D is not None, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return d


def _uniform(tensors: Sequence[Tensor]) -> bool:
    """Whether all tensors are contiguous and of one dtype and device."""
    first = tensors[0]
    return all(t.is_contiguous() and t.dtype == first.dtype and t.device == first.device for t in tensors)


def _aligned(tensors: Sequence[Tensor]) -> bool:
    """Whether every tensor begins at a multiple of 16 bytes, so that a thread may read as many at once."""
    return all(t.data_ptr() % 16 == 0 for t in tensors)


def addresses(tensors: Sequence[Tensor]) -> Tensor:
    """Addresses of tensors, int64, on their device; not to be written to."""
    return _stored(tuple(t.data_ptr() for t in tensors), tensors[0].device)


@functools.lru_cache(maxsize=256)
def _stored(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """A table of numbers on a device; most weights, momenta and gradients lie at the same places at every step."""
    return on_its_way(torch.tensor(addresses, device="cpu"), device)


def on_its_way(numbers: Tensor, device: torch.device) -> Tensor:
    """Numbers of the host on a device, without waiting for it."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers
