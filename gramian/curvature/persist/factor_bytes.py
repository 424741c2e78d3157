"""The state of a K-FAC object as one tensor of bytes, for checkpoints that have a place for tensors of parameters alone.

`torch.distributed.checkpoint` takes "state" and "param_groups" of an optimizer, and loads into tensors of the saved shapes. So
the bytes of a model are as many before the first refresh as after it: those of its factors at most, the rest are zeros.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.curvature.blocks.block_specs import Spec
from gramian.curvature.memory.memory_budget import keeps_of
from gramian.curvature.options import Options
from gramian.curvature.persist.factor_file import flattened, nested

HEADER = "header"
FACTS, COUNTERS = 2**12, 2**16
"""Bytes that are reserved for the facts of a block, and for everything else that is not a factor."""


def most_bytes(specs: Mapping[str, Spec], options: Options) -> int:
    """Number of bytes that the state of these blocks takes at most, with factors that are dense or diagonal."""
    found = COUNTERS
    for name, keep in keeps_of(specs, options, None, False).items():
        spec = specs[name]
        sides = ((spec.inputs, keep.A), (spec.outputs, keep.G))
        each = max(4, options.storage_dtype(spec.dtype).itemsize)
        found += FACTS + sum(each * (n if side.diagonal else n * n) for n, side in sides)
    return found


def to_bytes(saved: Mapping[str, Any], most: int) -> Tensor:
    """A value of `state_dict` as uint8 [most] on the host: its length in 8 bytes, the state, zeros; longer if it must be."""
    from safetensors.torch import save

    header, tensors = flattened(saved)
    written = save({**tensors, HEADER: torch.frombuffer(bytearray(header.encode()), dtype=torch.uint8)})
    packed = torch.zeros(max(most, 8 + len(written)), dtype=torch.uint8)
    packed[:8] = torch.frombuffer(bytearray(len(written).to_bytes(8, "little")), dtype=torch.uint8)
    packed[8 : 8 + len(written)] = torch.frombuffer(bytearray(written), dtype=torch.uint8)
    return packed


def from_bytes(packed: Tensor) -> dict[str, Any]:
    """The value of `state_dict` that `to_bytes` packed; numbers may have been cast to a parameter's dtype and device since."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    here = packed.detach().to("cpu", torch.uint8)
    try:
        length = int.from_bytes(here[:8].numpy().tobytes(), "little")
        tensors = load(here[8 : 8 + length].numpy().tobytes())
        return nested(tensors.pop(HEADER).numpy().tobytes().decode(), tensors)
    except (SafetensorError, RuntimeError, ValueError, KeyError, TypeError):
        raise GramianError('state_dict: its "kfac" is damaged; expected the state of a gramian.optim.KFAC') from None
