"""The way of the residual stream through a model's blocks: read at some of them, recomputed in segments.

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
    segment_size: int = 0,
) -> tuple[Tensor, dict[int, Tensor]]:
    """Run the blocks one after the other.

    Args:
        blocks: in their order.
        call: `call(block, x)`, the stream after a block.
        x_BTD: the stream before the first block.
        layers: where to keep the stream: 0 is before the first block, l is after block l, counted from 1.
        segment_size: blocks of a segment whose activations are computed again in the backward, whatever is kept; 0: none.

    Returns:
        The stream after the last block, and {layer: stream}.

    Raises:
        GramianError: for a layer that does not exist.
    """
    refuse_other_layers(layers, len(blocks))

    def segment(first: int, size: int, x_BTD: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        kept = {}
        for layer, block in enumerate(blocks[first : first + size], start=first + 1):
            x_BTD = call(block, x_BTD)
            if layer in layers:
                kept[layer] = x_BTD
        return x_BTD, kept

    kept = {0: x_BTD} if 0 in layers else {}
    if not segment_size:
        x_BTD, more = segment(0, len(blocks), x_BTD)
        return x_BTD, kept | more
    for first in range(0, len(blocks), segment_size):
        x_BTD, more = checkpoint(segment, first, segment_size, x_BTD, use_reentrant=False)
        kept |= more
    return x_BTD, kept


def recomputed(model: nn.Module, segment_size: int) -> int:
    """The segment size where there will be a backward that could recompute, else 0."""
    return segment_size if model.training and torch.is_grad_enabled() else 0


def refuse_other_layers(layers: Sequence[int], blocks: int) -> None:
    """Refuse a stream that the model does not have."""
    wrong = [layer for layer in layers if not 0 <= layer <= blocks]
    if wrong:
        raise GramianError(f"layers: got {wrong[0]}; accepted: 0 (the embedding) to {blocks} (after the last block)")
