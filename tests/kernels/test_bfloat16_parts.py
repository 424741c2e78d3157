"""A float32 matrix in parts of bfloat16: kernel and twin, and how close their sum is."""

import pytest
import torch

from gramian.kernels.bfloat16_parts import bfloat16_parts_kernel, bfloat16_parts_twin
from tests.kernels import interpreted, random


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("parts", ["HHL", "HLH"])
@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 1), (3, 4, 1030), (2, 0, 3)])
def test_the_parts_of_the_kernel_add_up_in_their_order(shape: tuple[int, ...], parts: str, axis: int) -> None:
    """Triton's interpreter rounds to bfloat16 towards zero, so that its parts are not bit for bit those of the twin."""
    x = random(*shape, seed=1)
    found = interpreted(bfloat16_parts_kernel, x, parts, axis)
    assert found.shape == bfloat16_parts_twin(x, parts, axis).shape
    by_name = dict(zip(parts, found.float().chunk(3, dim=axis), strict=True)) if x.numel() else {"H": x, "L": 0 * x}
    torch.testing.assert_close(by_name["H"] + by_name["L"], x, rtol=2.0**-14, atol=0)
    torch.testing.assert_close(by_name["H"], x, rtol=2.0**-7, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 1), (3, 400, 1030)])
def test_the_kernel_is_its_twin(shape: tuple[int, ...], axis: int) -> None:
    x = random(*shape, seed=1, device="cuda")
    assert torch.equal(bfloat16_parts_kernel(x, "HLH", axis), bfloat16_parts_twin(x, "HLH", axis))


def test_high_and_low_add_up() -> None:
    x = random(40, 30, seed=2)
    high, again, low = bfloat16_parts_twin(x, "HHL", -1).float().chunk(3, dim=-1)
    assert torch.equal(high, again)
    assert float(((high + low - x) / x).abs().max()) <= 2.0**-16
