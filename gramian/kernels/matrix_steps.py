"""What surrounds the products of an optimizer's step of weights of one shape.

Averaged gradients in one stack, a stack with its columns or rows scaled, and the step of each weight. An entry is read and
written once each time: 14, 4 and 10 bytes for float32 weights and 16-bit stacks; torch's multi-tensor operations move 30 and 28
bytes for the first and the last.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from gramian.kernels.launch import on_device, takes_kernel

BLOCK = 2048
"""Entries of a Triton program."""


@torch.no_grad()
def nesterov_averages(
    momenta: Sequence[Tensor], gradients: Sequence[Tensor], beta: float, dtype: torch.dtype
) -> Tensor:
    """Update momenta M ← βM + (1−β)g in place; returns N = βM + (1−β)g, [k, *shape], of k weights of one shape, in `dtype`."""
    kernel = takes_kernel(*momenta, *gradients) and _uniform([*momenta, *gradients])
    return (nesterov_averages_kernel if kernel else nesterov_averages_twin)(momenta, gradients, beta, dtype)


@torch.no_grad()
def scaled_steps(weights: Sequence[Tensor], u: Tensor, scale: Tensor, keep: float) -> None:
    """W ← keep·W + scale·U in place, for k weights of one shape [a, …], U [k, a, …], and `scale` broadcast to [k, a, c]."""
    kernel = takes_kernel(*weights, u) and _uniform(weights) and u.is_contiguous() and scale.dtype == torch.float32
    (scaled_steps_kernel if kernel else scaled_steps_twin)(weights, u, scale, keep)


@torch.no_grad()
def scaled_stack(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """scale·x [k, a, c] in `dtype` and in the memory order of x, for `scale` that broadcasts to x."""
    if x.stride(-1) != 1:
        return scaled_stack(x.mT, scale.mT, dtype).mT
    kernel = takes_kernel(x, scale) and x.is_contiguous() and x.numel() > 0
    return (scaled_stack_kernel if kernel else scaled_stack_twin)(x, scale, dtype)


@torch.no_grad()
def scaled_in_parts(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(H, L) in `dtype` with scale·x [k, a, c] ≈ H + L: H is it rounded, L what rounding took away."""
    kernel = takes_kernel(x, scale) and x.is_contiguous() and x.numel() > 0
    return (scaled_in_parts_kernel if kernel else scaled_in_parts_twin)(x, scale, dtype)


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
    momenta: Sequence[Tensor], gradients: Sequence[Tensor], beta: float, dtype: torch.dtype
) -> Tensor:
    """`nesterov_averages` in Triton, for contiguous tensors of one dtype."""
    from gramian.kernels import _triton_matrix_steps as triton_kernels

    first, size = momenta[0], momenta[0].numel()
    n = torch.empty((len(momenta), *first.shape), dtype=dtype, device=first.device)
    if size:
        with on_device(first):
            triton_kernels.nesterov_averages[(-(-size // BLOCK), len(momenta))](
                n, _addresses(momenta), _addresses(gradients), first, size, beta,
                BLOCK=BLOCK, ALIGNED=_aligned([*momenta, *gradients]), num_warps=4,
            )  # fmt: skip
    return n


def scaled_steps_twin(weights: Sequence[Tensor], u: Tensor, scale: Tensor, keep: float) -> None:
    """`scaled_steps` in torch."""
    steps = (u.flatten(2) * scale).to(weights[0].dtype).view_as(u)
    torch._foreach_mul_(list(weights), keep)
    torch._foreach_add_(list(weights), list(steps.unbind()))


def scaled_steps_kernel(weights: Sequence[Tensor], u: Tensor, scale: Tensor, keep: float) -> None:
    """`scaled_steps` in Triton, for contiguous tensors, weights of one dtype."""
    from gramian.kernels import _triton_matrix_steps as triton_kernels

    first, size = weights[0], weights[0].numel()
    if not size:
        return
    rows = len(first)
    strides = scale.expand(len(weights), rows, size // rows).stride()
    with on_device(first):
        triton_kernels.scaled_steps[(-(-size // BLOCK), len(weights))](
            _addresses(weights), first, u, scale, size, size // rows, *strides, keep,
            BLOCK=BLOCK, ALIGNED=_aligned(weights), num_warps=4,
        )  # fmt: skip


def scaled_stack_twin(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`scaled_stack` in torch."""
    return (x * scale).to(dtype)


def scaled_stack_kernel(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`scaled_stack` in Triton, for a contiguous x."""
    return _scaled(x, scale, dtype, 1)[0]


def scaled_in_parts_twin(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`scaled_in_parts` in torch."""
    value = x * scale
    high = value.to(dtype)
    return high, (value - high).to(dtype)


def scaled_in_parts_kernel(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`scaled_in_parts` in Triton, for a contiguous x."""
    high, low = _scaled(x, scale, dtype, 2)
    return high, low


def _scaled(x: Tensor, scale: Tensor, dtype: torch.dtype, parts: int) -> list[Tensor]:
    from gramian.kernels import _triton_matrix_steps as triton_kernels

    out, size = [torch.empty_like(x, dtype=dtype) for _ in range(parts)], x[0].numel()
    with on_device(x):
        triton_kernels.scaled_stack[(-(-size // BLOCK), len(x))](
            out[0], out[-1], x, scale, size, x.shape[-1], *scale.expand(x.shape).stride(),
            PARTS=parts, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return out


def _uniform(tensors: Sequence[Tensor]) -> bool:
    """Whether all tensors are contiguous and of one dtype and device."""
    first = tensors[0]
    return all(t.is_contiguous() and t.dtype == first.dtype and t.device == first.device for t in tensors)


def _aligned(tensors: Sequence[Tensor]) -> bool:
    """Whether every tensor begins at a multiple of 16 bytes, so that a thread may read as many at once."""
    return all(t.data_ptr() % 16 == 0 for t in tensors)


def _addresses(tensors: Sequence[Tensor]) -> Tensor:
    """Addresses of tensors, int64, on their device."""
    return _stored(tuple(t.data_ptr() for t in tensors), tensors[0].device)


@functools.lru_cache(maxsize=256)
def _stored(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """A table of numbers on a device; most weights, momenta and gradients lie at the same places at every step."""
    return torch.tensor(addresses, pin_memory=device.type == "cuda").to(device, non_blocking=True)
