"""A digest of what the next clipped sum of a private run depends on: weights, buffers and the optimizer's state.

A replay after a resume draws the noise of a release (noised sum) again, so the sum must be the same; with other weights it
would differ, and the digest shows it.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gramian.core.wrapped_tensors import plain_tensors
from gramian.kernels import chacha
from gramian.parallel.data_parallel import local, reshard
from gramian.parallel.process_grid import ProcessGrid
from gramian.taps.model.user_names import join, named_modules

CHUNK = 2**22
"""Number of elements that are digested at once: 32 MB of multipliers, and as much for the products."""

FIELDS = ("processes", "process", "digest")
"""Entries of a weight digest: number of processes, rank whose shards it covers (0 if all ranks have the same), 64-bit digest.
"""


def digest(value: Any) -> int:
    """63-bit integer hash of the `repr` of a value."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "big") >> 1


def weight_digest(
    root: nn.Module, optimizer: Optimizer, trained: Mapping[str, nn.Parameter], parallel: ProcessGrid
) -> Tensor:
    """Digest of the model's parameters and buffers and the optimizer's state: int64 [3], the `FIELDS`.

    Σ_t (h_t + Σ_j m_tj Σ_i k_i w_tji) modulo 2⁶⁴, with w the bits of element i of chunk j of tensor t as an integer, and h a
    hash of the tensor's name, dtype and shape. The odd multipliers k and m are fixed and known: the digest finds accidents, and
    can be forged. Under FSDP2 it covers this process's shards, so that no process waits for another; it changes with the number
    of processes. The host does not wait for the device. Cost: three passes over the tensors, and 64 MB.

    Args:
        root: its parameters and persistent buffers are included.
        optimizer: the tensors of its state are included, options such as the learning rate are not.
        trained: the optimizer's parameters by name.
        parallel: how the model is distributed over processes.
    """
    reshard(root)
    tensors = dict(_tensors(root, optimizer, trained))
    device = local(next(iter(trained.values())).detach()).device
    length = min(CHUNK, max((2 * t.numel() for t in tensors.values()), default=0))  # a complex number is two words
    keys: dict[torch.device, Tensor] = {}
    total = torch.zeros((), dtype=torch.int64, device=device)
    for name, t in tensors.items():
        if t.device not in keys:
            keys[t.device] = chacha.words(bytes(32), 0, 0, 2 * length, t.device).view(torch.int64) | 1
        identity = (name, str(t.dtype), tuple(t.shape))
        total += digest(identity)
        for j, words in enumerate(_words(t).split(CHUNK)):
            part = (words.to(torch.int64) * keys[t.device][: len(words)]).sum() * (digest((identity, j)) | 1)
            total += part.to(device, non_blocking=True)
    sharded = parallel.shards
    return torch.stack([torch.full_like(total, parallel.size), torch.full_like(total, sharded * parallel.rank), total])


def _tensors(
    root: nn.Module, optimizer: Optimizer, trained: Mapping[str, nn.Parameter]
) -> Iterator[tuple[str, Tensor]]:
    """(name, this process's part) of all parameters, persistent buffers and optimizer state tensors; shared ones repeatedly."""
    for name, module in named_modules(root):
        buffers = {key: t for key, t in module._buffers.items() if key not in module._non_persistent_buffers_set}
        for key, tensor in (*module._parameters.items(), *buffers.items()):
            parts = [] if tensor is None else plain_tensors(local(tensor.detach()))
            for number, part in enumerate(parts):  # of a quantised weight several
                yield f"{join(name, key)}{number or ''}", part
    for name, p in trained.items():
        state: Mapping[Any, Any] = optimizer.state.get(p, {})
        for key, value in state.items():
            if isinstance(value, Tensor):
                yield f"optimizer of {name}: {key}", local(value.detach())


def _words(t: Tensor) -> Tensor:
    """The bits of a tensor in row-major order, as a flat tensor of integers of the same width."""
    flat = t.contiguous().view(-1)
    flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
