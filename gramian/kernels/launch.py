"""Choices for a kernel launch: whether a kernel can run on given tensors, its tile sizes, and how it reads the tensors."""

import contextlib
import functools
import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gramian.core.errors import GramianError

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of the tensors that kernels read; sums are always accumulated in float32."""

PROCESSORS = 132
"""Number of multiprocessors assumed for a tensor that is not on a GPU (Triton's interpreter)."""


@dataclass(frozen=True)
class Tiles:
    """Tile sizes and launch options of one Triton program of a matrix kernel.

    A program computes `rows` × `columns` of the result in steps of `depth` along the summed axis. `cost` is the time of one
    program in units of a 128×128 tile at full speed: area / 128² / relative throughput.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    cost: float

    @property
    def options(self) -> dict[str, int]:
        """`num_warps` and `num_stages` of these tiles, as keyword arguments of a Triton launch."""
        return {"num_warps": self.warps, "num_stages": self.stages}

    def over(self, rows: int, columns: int) -> int:
        """Number of tiles that cover a matrix [rows, columns]."""
        return -(-rows // self.rows) * -(-columns // self.columns)


@functools.cache
def triton_found() -> bool:
    """Whether the package triton is installed; it is not imported."""
    return importlib.util.find_spec("triton") is not None


def takes_kernel(*tensors: Tensor) -> bool:
    """Whether a Triton kernel can run: every tensor is on CUDA in one of `DTYPES`, and triton is installed."""
    return all(tensor.is_cuda and tensor.dtype in DTYPES for tensor in tensors) and triton_found()


@functools.cache
def _processors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def processors(tensor: Tensor) -> int:
    """Number of streaming multiprocessors of the GPU of `tensor`; `PROCESSORS` if it is not on a GPU."""
    return _processors(tensor.device.index) if tensor.is_cuda else PROCESSORS


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Context manager that makes the device of `tensor` the current one, so that a Triton kernel is launched there."""
    here = not tensor.is_cuda or tensor.device.index == torch.cuda.current_device()
    return contextlib.nullcontext() if here else torch.cuda.device(tensor.device)


def cheapest(choices: Iterable[tuple[Tiles, int]], tensor: Tensor) -> Tiles:
    """The fastest of several tile sizes, from pairs (tiles, number of programs); the first one if several are equally fast.

    Estimated time: number of waves (programs over multiprocessors, rounded up) times the cost of a program. It depends only on
    the pairs and the device of `tensor`, so repeated runs choose the same kernel and give the same bits.
    """
    wave = processors(tensor)
    return min(choices, key=lambda choice: -(-choice[1] // wave) * choice[0].cost)[0]


@functools.cache
def _has_bulk_copies(index: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(index)[0] >= 9


def wants_descriptors(*tensors: Tensor) -> bool:
    """Whether a kernel should read these tensors by bulk copies (TMA): two-byte elements, compute capability 9 or above.

    Float32 products do not run on tensor cores, and ordinary loads are fast enough for them.
    """
    return all(
        tensor.numel() > 0 and tensor.element_size() == 2 and tensor.is_cuda and _has_bulk_copies(tensor.device.index)
        for tensor in tensors
    )


def fits_descriptor(x_BTN: Tensor) -> bool:
    """Whether bulk copies (TMA) can read the memory layout of a tensor [B, T, N]."""
    if x_BTN.stride(2) != 1 or x_BTN.data_ptr() % 16:
        return False
    samples, tokens, width = x_BTN.shape
    per_sample, per_token, _ = _descriptor_strides(x_BTN)
    if any(stride * x_BTN.element_size() % 16 for stride in (per_sample, per_token)):
        return False
    return (tokens == 1 or per_token >= width) and (samples == 1 or per_sample >= tokens * per_token)


def _descriptor_strides(x_BTN: Tensor) -> list[int]:
    """Strides of a tensor [B, T, N] in elements; for a dimension of size 1, a stride that bulk copies (TMA) accept."""
    samples, tokens, width = x_BTN.shape
    per_token = x_BTN.stride(1) if tokens > 1 else -(-width // 16) * 16
    return [x_BTN.stride(0) if samples > 1 else tokens * per_token, per_token, 1]


def layout(*tensors: Tensor) -> tuple[Any, ...]:
    """What tensors of one launch have in common: dtype, shape, strides and device of each."""
    return tuple((tensor.dtype, tensor.shape, tensor.stride(), tensor.device) for tensor in tensors)


def strides(x_BTN: Tensor, descriptor: bool) -> Sequence[int]:
    """The kernel arguments for the strides of x [B, T, N], read by a TMA descriptor if `descriptor`."""
    return _descriptor_strides(x_BTN) if descriptor else x_BTN.stride()


def table(rows: Sequence[Sequence[Tensor]]) -> Tensor:
    """Addresses of tensors as one tensor on their device, a row for each layer of a launch, without waiting for the device."""
    addresses = torch.tensor([[tensor.data_ptr() for tensor in row] for row in rows], dtype=torch.int64)
    return addresses.to(rows[0][0].device, non_blocking=True)


def alignment(rows: Sequence[Sequence[Tensor]]) -> int:
    """Number of bytes, 16 or those of an element, that divides all addresses."""
    return 16 if all(tensor.data_ptr() % 16 == 0 for row in rows for tensor in row) else rows[0][0].element_size()


def triton_dtype(dtype: torch.dtype) -> Any:
    """The dtype of `triton.language` with the name of a torch dtype."""
    import triton.language

    return getattr(triton.language, str(dtype).removeprefix("torch."))


def scratch_for_descriptors() -> None:
    """Let kernels that build TMA descriptors have memory for them from torch, as any of its tensors."""
    import triton

    triton.set_allocator(_scratch)


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Memory of the current device and stream, on which kernels begin."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def fitted(tensors: Sequence[Tensor], descriptor: bool) -> list[Tensor]:
    """Tensors [B, T, N] of one layout; aligned copies of all if bulk copies (`descriptor`) cannot read one of them as it is.

    Loading two bytes at a time would take several times as long as the copy. All are copied, as one launch has one set of
    strides.

    Raises:
        GramianError: if they have not one layout.
    """
    first = layout(tensors[0])
    for tensor in tensors[1:]:
        if layout(tensor) != first:
            raise GramianError(
                f"layers of one launch: strides {tensor.stride()}, shape {list(tensor.shape)}, {tensor.dtype}; expected those "
                f"of the first, {tensors[0].stride()}, {list(tensors[0].shape)}, {tensors[0].dtype}"
            )
    if not descriptor or all(fits_descriptor(tensor) for tensor in tensors):
        return list(tensors)
    samples, length, width = tensors[0].shape
    room = (samples, length, -(-width // 16) * 16)
    return [tensor.new_empty(room)[..., :width].copy_(tensor) for tensor in tensors]


def operand(x_BTN: Tensor, descriptor: bool, tokens: int, columns: int) -> Any:
    """The argument of a kernel that reads tiles [tokens, columns] of x [B, T, N]: a TMA descriptor if `descriptor`, else x."""
    if not descriptor:
        return x_BTN
    from triton.tools.tensor_descriptor import TensorDescriptor

    (x_BTN,) = fitted([x_BTN], descriptor)
    return TensorDescriptor(x_BTN, list(x_BTN.shape), _descriptor_strides(x_BTN), [1, tokens, columns])
