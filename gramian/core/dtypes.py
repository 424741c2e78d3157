"""Floating-point dtypes: which are half precision, and which dtype sums over a tensor are accumulated in."""

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
"""Half-precision dtypes."""


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """The accumulation dtype of sums over these tensors: float64 if one of them is float64, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
