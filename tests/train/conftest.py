"""A run sets how the whole process computes; tests put it back."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def untouched_process() -> Iterator[None]:
    """Deterministic kernels and TF32 as they were."""
    before = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.set_float32_matmul_precision(before[1])
