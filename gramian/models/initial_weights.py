"""Initial weights and config checks that the reference models share."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gramian.core.errors import GramianError


@torch.no_grad()
def draw_matrices(model: nn.Module, seed: int, layers: int, residual: tuple[str, ...]) -> None:
    """Draw every matrix of a model from N(0, 0.02²) as GPT-2 does, as a function of `seed` alone.

    Values are drawn in float32 on the CPU, so they are the same on every device and in every dtype; parameters on the meta
    device are skipped. Matrices that write into the residual stream, whose names end in one of `residual`, are scaled by
    1/sqrt(2 * layers), so that the stream's variance does not grow with depth.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and not parameter.is_meta:
            std = 0.02 / math.sqrt(2 * layers) if name.endswith(residual) else 0.02
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float32, device="cpu")
            parameter.copy_(drawn * std)


def check_shape(config: Any, counts: Sequence[str]) -> None:
    """Raise a GramianError if a config field named in `counts` is below 1, `width` is 1, or `dropout` is not in [0, 1)."""
    for field in counts:
        if getattr(config, field) < 1:
            raise GramianError(f"{field}: got {getattr(config, field)}; expected an integer of at least 1")
    if config.width == 1:
        raise GramianError("width: got 1; expected at least 2, as the norm of one number is 0")
    if not 0.0 <= config.dropout < 1.0:
        raise GramianError(f"dropout: got {config.dropout}; expected 0 <= dropout < 1")
