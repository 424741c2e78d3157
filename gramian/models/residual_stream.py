"""Run the blocks of a model on its residual stream, with intermediate streams and activation checkpointing by segments.

Legend: B sequences, T tokens, D width.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gramian.core.errors import GramianError


def through_blocks(
    blocks: nn.ModuleList,
    call: Callable[[nn.Module, Tensor], Tensor],
    x_BTD: Tensor,
    layers: Sequence[int] = (),
    size: int = 0,
) -> tuple[Tensor, dict[int, Tensor]]:
    """Run blocks in order; returns the residual stream after the last one, and {layer: stream} of the wanted layers.

    Args:
        blocks: the model's blocks, in order.
        call: `call(block, x)` returns the stream after `block` from the stream x before it.
        x_BTD: the stream before the first block.
        layers: wanted layers: 0 is before the first block, l is after block l, counted from 1.
        size: blocks per segment whose activations are recomputed in the backward pass; 0: all activations are stored.

    Raises:
        GramianError: for a layer that does not exist.
    """
    wrong = [layer for layer in layers if not 0 <= layer <= len(blocks)]
    if wrong:
        raise GramianError(
            f"layers: got {wrong[0]}; expected 0 (the embedding) to {len(blocks)} (after the last block)"
        )

    def segment(first: int, count: int, x_BTD: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        streams = {}
        for layer, block in enumerate(blocks[first : first + count], start=first + 1):
            x_BTD = call(block, x_BTD)
            if layer in layers:
                streams[layer] = x_BTD
        return x_BTD, streams

    streams = {0: x_BTD} if 0 in layers else {}
    if not size:
        x_BTD, more = segment(0, len(blocks), x_BTD)
        return x_BTD, streams | more
    for first in range(0, len(blocks), size):
        x_BTD, more = checkpoint(segment, first, size, x_BTD, use_reentrant=False)
        streams |= more
    return x_BTD, streams


def segment_size(model: nn.Module, blocks: int) -> int:
    """Number of blocks per recomputed segment: `blocks` if the model trains with gradients enabled, else 0."""
    return blocks if model.training and torch.is_grad_enabled() else 0
