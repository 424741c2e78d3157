"""When a kernel is taken, on which tiles; and that triton is not loaded before one runs."""

import pytest
import torch

from gramian.kernels.launch import Tiles, cheapest, fits_descriptor, takes_kernel, wants_descriptors
from tests.kernels import random
from tests.kit.fresh import run_fresh


@pytest.mark.full
@pytest.mark.xdist_group("fresh")
def test_calls_on_a_cpu_do_not_import_triton():
    code = """
import sys, torch
from gramian.kernels.norms.direct_squares import direct_squares
from gramian.kernels.norms.gram_squares import gram_squares
from gramian.kernels.sums.token_sums import normed_sums, token_sums
from gramian.kernels.sums.weighted_product import weighted_product
from gramian.kernels.sums.weighted_sum import row_squares, weighted_sum
x, c = torch.ones(2, 3, 4), torch.ones(2)
gram_squares(x, x), direct_squares(x, x), token_sums(x), normed_sums(x, x, 1e-5, True)
weighted_product(x, x, c, torch.float32), weighted_sum(x[0], torch.ones(3)), row_squares(x[0])
print([name for name in sys.modules if name.split(".")[0] == "triton"])
"""
    done = run_fresh(code)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_tensors_on_a_cpu_take_the_twin():
    assert not takes_kernel(random(2, 3, 4, dtype=torch.bfloat16))
    assert not wants_descriptors(random(2, 3, 4, dtype=torch.bfloat16))


def test_the_cheapest_tiles_count_whole_waves():
    """132 multiprocessors: 133 large programs take two waves, so that 4 x 133 small ones are cheaper."""
    large, small = Tiles(128, 128, 64, 8, 4, cost=1.0), Tiles(64, 64, 64, 4, 4, cost=0.3)
    x = random(1)
    assert cheapest([(large, 132), (small, 4 * 132)], x) == large
    assert cheapest([(large, 133), (small, 4 * 133)], x) == small


@pytest.mark.parametrize(
    ("x", "fits"),
    [
        (torch.empty(2, 3, 8, dtype=torch.bfloat16), True),
        (torch.empty(2, 3, 4, dtype=torch.float32), True),
        (torch.empty(2, 3, 7, dtype=torch.bfloat16), False),
        (torch.empty(2, 3, 16, dtype=torch.bfloat16)[..., :7], True),
        (torch.empty(2, 3, 16, dtype=torch.bfloat16)[..., 1:9], False),
        (torch.empty(2, 3, 16, dtype=torch.bfloat16)[..., ::2], False),
        (torch.empty(3, 2, 8, dtype=torch.bfloat16).transpose(0, 1), False),
        (torch.empty(1, 3, 8, dtype=torch.bfloat16).expand(2, 3, 8), False),
        (torch.empty(1, 1, 7, dtype=torch.bfloat16), True),
    ],
)
def test_a_layout_fits_a_descriptor_if_rows_begin_on_16_bytes_and_samples_follow_each_other(x, fits):
    assert fits_descriptor(x) is fits
