"""Any number of statistics on one backward."""

from typing import Any

import torch
from torch import Tensor, nn

from gramian.taps import Capture, Statistic


def observe(
    model: nn.Module,
    *statistics: Statistic,
    loss_reduction: str | float = "mean",
    batch_size: int | None = None,
    sample_ids: Tensor | None = None,
    token_weights: Tensor | None = None,
    loss_scale: "float | torch.amp.GradScaler" = 1.0,
    process_group: Any = None,
    audit: bool = True,
) -> Capture:
    """Observe every backward inside a `with` block.

    ```python
    fisher, noise = gramian.DiagonalFisher(), gramian.NoiseScale()
    with gramian.observe(model, fisher, noise, loss_reduction="mean") as seen:
        F.cross_entropy(model(x), y).backward()
    seen[fisher]["fc.weight"], seen[noise].simple
    ```

    Args:
        model: the user's model, or any wrapper of it.
        *statistics: what to compute; all share one backward.
        loss_reduction: "mean" or "sum" over the samples of the batch, or the coefficient of one sample's loss.
        batch_size: B, if it is not the first axis of the model's first tensor argument.
        sample_ids: [B] or [B, T]: the unit that each row or token belongs to; None: row i is sample i.
        token_weights: [B, T], zero for tokens that do not count (padding, prompts); None: all do.
        loss_scale: what the loss was multiplied by before `backward`, or the `GradScaler` that does it.
        process_group: sum the statistics over these processes on leaving the block (collective); None: this one only.
        audit: compare with autograd's gradients on the model's first batch.

    Returns:
        The capture, to be entered; `capture[statistic]` is a result, `capture.coverage` says what was covered.
    """
    return Capture(
        model,
        statistics,
        loss_reduction=loss_reduction,
        batch_size=batch_size,
        sample_ids=sample_ids,
        token_weights=token_weights,
        loss_scale=loss_scale,
        process_group=process_group,
        audit=audit,
    )
