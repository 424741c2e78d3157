"""Dropout inside a layer that runs again: the masks of its first run are recorded, and each sample runs again with its own.

The first run draws its masks from torch's generator, as it does without gramian: the mask of a row does not depend on what the
other rows are, and `torch.manual_seed` repeats it. On a CPU the numbers are those that the layer draws without a capture; on a
GPU the masks of attention and recurrent layers differ from those that their fused kernels draw.

Memory: one byte for each value of a mask until the backward is over; nothing on a GPU for plain dropout, whose mask autograd
saves anyway. Under activation checkpointing masks are drawn again, as autograd's own are.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.taps.model.batch_free import BatchFree
from gramian.taps.model.dropout import DropoutMode

ALPHA = 1.7580993408473766
"""−α of alpha dropout: the negative limit of SELU."""


class MaskMode(DropoutMode):
    """Torch function mode in which dropout takes its masks from `mask`."""

    def mask(self, shape: Sequence[int], draw: Callable[[], Tensor]) -> Tensor:
        """The next mask, of this shape; `draw` draws a new one."""
        raise NotImplementedError

    def dropout(self, func: Callable[..., Tensor], x: Tensor, p: float) -> Tensor:
        """`func` of x with the next mask; the same operations as torch's own."""
        name = func.__name__
        like = x[(slice(None), slice(None), *[slice(1)] * (x.dim() - 2))] if "feature" in name else x
        keep = self.mask(like.shape, lambda: func(torch.ones_like(like), p, True) > 0)
        noise, shift = keep.to(x.dtype), None
        if "alpha" in name:
            a = ((ALPHA**2 * p + 1) * (1 - p)) ** -0.5
            noise, shift = noise * a, (noise - 1) * (ALPHA * a) + ALPHA * a * p
        else:
            noise = noise / (1 - p)
        y = x.mul_(noise) if name.endswith("_") else x * noise
        if shift is None:
            return y
        return y.add_(shift) if name.endswith("_") else y + shift

    def native_dropout(self, x: Tensor, p: float) -> tuple[Tensor, Tensor]:
        """(x ⊙ m / (1 − p), m) with the next mask m."""
        keep = self.mask(x.shape, lambda: torch.native_dropout(x, p, True)[1])
        return x * keep * (1 / (1 - p)), keep

    def rrelu(self, func: Callable[..., Tensor], x: Tensor, lower: float, upper: float) -> Tensor:
        """y = x where x ≥ 0, else r ⊙ x. Slopes r are drawn for all values: a row's do not depend on signs in others."""
        slope = self.mask(x.shape, lambda: -func(-torch.ones_like(x), lower, upper, True))
        y = torch.where(x >= 0, x, x * slope)
        return x.copy_(y) if func.__name__.endswith("_") else y


class RecordedMasks(MaskMode):
    """Torch function mode in which dropout draws its masks from torch's generator, and records them in `masks`."""

    def __init__(self) -> None:
        """Start with no mask."""
        super().__init__()
        self.masks: list[Tensor] = []
        self._hooks = _saved_tensor_hooks()

    def rewritten(self, what: str) -> None:
        """Raise GramianError inside a checkpoint that this mode is around: the second run is outside of the mode."""
        if _saved_tensor_hooks() != self._hooks:
            raise GramianError(
                f"has {what} in a checkpoint inside it, whose second run would draw other numbers; expected the checkpoint "
                "around the layer, or the layer's own parameters in a module of their own"
            )

    def mask(self, shape: Sequence[int], draw: Callable[[], Tensor]) -> Tensor:
        """Draw a mask and record it."""
        return self._recorded(draw())

    def native_dropout(self, x: Tensor, p: float) -> tuple[Tensor, Tensor]:
        """`torch.native_dropout` itself, which returns its mask."""
        y, keep = torch.native_dropout(x, p, True)
        return y, self._recorded(keep)

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, p: float, causal: bool, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Attention as torch computes it on a CPU; a weight that is 0 by itself is as good as one that was dropped out."""
        y, weights = torch._scaled_dot_product_attention_math(query, key, value, mask, p, causal, None, **options)
        self._recorded(weights.detach() != 0)
        return y, weights

    def _recorded(self, mask: Tensor) -> Tensor:
        self.masks.append(mask.rows[0] if isinstance(mask, BatchFree) else mask)  # all copies have the same
        return mask


class RepeatedMasks(MaskMode):
    """Torch function mode in which dropout uses recorded masks again, in their order: of each, the rows of one sample."""

    def __init__(self, masks: Sequence[Tensor], sample: Tensor, batch: int) -> None:
        """Begin with the first mask.

        Args:
            masks: the recorded masks of a batch.
            sample: number of the sample that runs, [1].
            batch: number B of samples.
        """
        super().__init__()
        self._masks, self._sample, self._batch, self._used = masks, sample, batch, 0

    def mask(self, shape: Sequence[int], draw: Callable[[], Tensor]) -> Tensor:
        """The sample's part of the next mask: on the axis on which a mask of the batch is B times as long as one of `shape`.

        A mask of the same shape is shared by all samples (dropout of a weight).
        """
        if self._used == len(self._masks):
            raise GramianError(
                f"drops values out more often for a sample alone than in the batch, {len(self._masks)} times; "
                "expected the same calls of dropout for every sample"
            )
        mask, self._used = self._masks[self._used], self._used + 1
        sizes = tuple(mask.shape), tuple(shape)
        longer = [axis for axis, (of_batch, own) in enumerate(zip(*sizes, strict=False)) if of_batch != own]
        if sizes[0] == sizes[1]:
            return mask
        if mask.dim() != len(shape) or len(longer) > 1 or mask.shape[longer[0]] != self._batch * shape[longer[0]]:
            raise GramianError(
                f"drops out {list(sizes[0])} values for the batch of {self._batch}, and {list(sizes[1])} for a sample alone; "
                f"expected {self._batch} times as many on the axis of the batch"
            )
        axis = longer[0]
        rows: Tensor = mask.unflatten(axis, (self._batch, shape[axis])).index_select(axis, self._sample)
        return rows.flatten(axis, axis + 1)

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, p: float, causal: bool, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Attention with the sample's part of the next mask."""
        grouped = options.get("enable_gqa", False)  # several heads of queries for one of keys
        outer = query.shape[:-2] if grouped else torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
        keep = self.mask((*outer, query.shape[-2], key.shape[-2]), lambda: query)
        y, weights = torch._scaled_dot_product_attention_math(query, key, value, mask, p, causal, keep, **options)
        return y, weights

    def refuse_unused(self) -> None:
        """Raise GramianError if masks are left: the layer has dropped values out less often than in the batch."""
        if self._used < len(self._masks):
            raise GramianError(
                f"drops values out {self._used} times for a sample alone, and {len(self._masks)} times in the batch; "
                "expected the same calls of dropout for every sample"
            )


def _saved_tensor_hooks() -> Any:
    """The innermost hooks on tensors that autograd saves, such as a checkpoint's; None: there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)
