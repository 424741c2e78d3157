"""Histogram of per-sample gradient norms before clipping, on a fixed logarithmic grid around the clip norm C.

The edges are C·2^(k/2) for k = −16 … 16, so that C is an edge: samples in the bins above it were clipped. The counts are
computed on private data without noise, so ε does not cover them.
"""

from typing import Any

import torch
from torch import Tensor

STEPS_PER_SIDE = 16
"""Number of bins between the clip norm and the first edge, and between the clip norm and the last."""
RATIO = 2.0**0.5
"""Ratio of two neighbouring edges."""
BINS = 2 * STEPS_PER_SIDE + 2
"""Number of bins; the first has all smaller norms, the last all larger ones."""
FIELDS = (*(f"norms_{i}" for i in range(BINS)), "norms_nonfinite")
"""Names of the values that a step reports: the counts of the bins, then the number of samples whose gradient is not finite."""


def norm_counts(norms_B: Tensor, max_grad_norm: float) -> Tensor:
    """Count norms [B] by bin: float64 [`BINS` + 1] on their device, the last for norms that are not finite; does not wait.

    A norm that equals an edge is in the bin below it: a norm of exactly C is not clipped. Cost: O(B log `BINS`).
    """
    exponents = torch.arange(-STEPS_PER_SIDE, STEPS_PER_SIDE + 1, dtype=torch.float64, device=norms_B.device)
    wide_B = norms_B.detach().to(torch.float64)
    places_B = torch.bucketize(wide_B, max_grad_norm * RATIO**exponents)
    places_B = torch.where(wide_B.isfinite(), places_B, BINS)
    counts = torch.zeros(BINS + 1, dtype=torch.float64, device=norms_B.device)
    return counts.index_add_(0, places_B, torch.ones_like(wide_B))


def histogram_metrics(extra: dict[str, float], max_grad_norm: float) -> dict[str, Any]:
    """The histogram of a step for `metrics.jsonl`, from the values that the step reported as `FIELDS`.

    Returns:
        {"clip_norm": C, "first_edge": lowest edge, "ratio": of two edges, "counts": by bin, "nonfinite": samples left out}.
    """
    *counts, nonfinite = (int(extra[name]) for name in FIELDS)
    first = max_grad_norm * RATIO**-STEPS_PER_SIDE
    return {"clip_norm": max_grad_norm, "first_edge": first, "ratio": RATIO, "counts": counts, "nonfinite": nonfinite}
