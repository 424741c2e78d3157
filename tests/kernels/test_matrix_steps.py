"""Both ends of an optimizer's step: kernels and twins against the formulas in float64."""

import pytest
import torch

from gramian.kernels.matrix_steps import (
    direction_scales_kernel,
    direction_scales_twin,
    nesterov_averages_kernel,
    nesterov_averages_twin,
    scaled_in_parts_kernel,
    scaled_in_parts_twin,
    scaled_stack,
    scaled_stack_kernel,
    scaled_stack_twin,
    scaled_steps_kernel,
    scaled_steps_twin,
)
from tests.kernels import interpreted, random

SHAPES = [(3, 5), (7, 2, 3, 3), (40, 70), (0, 4)]


def changed(function, tensors, *arguments):
    """The result of a function that changes tensors in place, and the tensors."""
    return function(tensors, *arguments), tensors


def run(function, tensors, *arguments):
    kernel = function in (nesterov_averages_kernel, scaled_steps_kernel)
    return (interpreted if kernel else lambda f, *a: f(*a))(changed, function, tensors, *arguments)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("function", [nesterov_averages_kernel, nesterov_averages_twin])
def test_momenta_and_averages(function, dtype, tolerance, shape):
    momenta, gradients = ([random(*shape, seed=seed + k).to(dtype) for k in range(3)] for seed in (0, 10))
    want = [0.8 * m.double() + 0.2 * g.double() for m, g in zip(momenta, gradients, strict=True)]
    averages = [0.8 * m + 0.2 * g.double() for m, g in zip(want, gradients, strict=True)]
    n, momenta = run(function, momenta, gradients, 0.8, torch.bfloat16)
    assert n.dtype == torch.bfloat16 and n.shape == (3, *shape)
    torch.testing.assert_close(torch.stack(momenta).double(), torch.stack(want), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(n.double(), torch.stack(averages), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("one_for", ["all", "a matrix", "a row", "a column", "an entry"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("function", [scaled_steps_kernel, scaled_steps_twin])
def test_steps(function, shape, one_for):
    weights, u = [random(*shape, seed=k) for k in range(3)], random(3, *shape, seed=20).half()
    rows, columns = shape[0], torch.Size(shape[1:]).numel()
    sizes = {"all": (1, 1, 1), "a matrix": (3, 1, 1), "a row": (3, rows, 1), "a column": (3, 1, columns)}
    scale = random(*sizes.get(one_for, (3, rows, columns)), seed=30)
    steps = (u.double().view(3, rows, columns) * scale.double()).view_as(u)
    want = 0.9 * torch.stack(weights).double() - 0.3 * steps
    _, weights = run(function, weights, u, scale, torch.tensor([-0.3, 0.9], dtype=torch.float64))
    torch.testing.assert_close(torch.stack(weights).double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(2, 3, 5), (1, 40, 70)])
@pytest.mark.parametrize("size", [None, (1, 1), (1, None), (None, 1)])
def test_scaled_stacks(shape, size):
    x, over = random(*shape, seed=1).bfloat16(), random(shape[0], 1, 1, seed=3).abs() + 0.5
    scale, want = None, 1.5 * x.double() / over.double()
    if size is not None:
        sides = (full if place is None else place for place, full in zip(size, shape[1:], strict=True))
        scale = random(shape[0], *sides).half()
        want *= scale.double()
    for found in (
        interpreted(scaled_stack_kernel, x, 1.5, over, torch.float16, scale),
        scaled_stack_twin(x, 1.5, over, torch.float16, scale),
        scaled_stack(x.mT.contiguous().mT, 1.5, over, torch.float16, scale),
    ):
        assert found.dtype == torch.float16
        torch.testing.assert_close(found.double(), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("function", [scaled_in_parts_kernel, scaled_in_parts_twin])
def test_two_parts_have_twice_the_bits(function):
    x, over = random(2, 40, 30, seed=1), random(2, 1, 1, seed=2).abs() + 0.5
    call = interpreted if function is scaled_in_parts_kernel else lambda f, *arguments: f(*arguments)
    high, low = call(function, x, 1.5, over, torch.float16)
    want = 1.5 * x.double() / over.double()
    torch.testing.assert_close(high.double(), want, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(high.double() + low.double(), want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("columns", [1, 5, 3000])
@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("function", [direction_scales_kernel, direction_scales_twin])
def test_scales_of_a_direction(function, diagonal, columns):
    norms, D = random(3, 1, columns, seed=1).abs(), (random(3, 1, columns, seed=2).abs() + 0.1).half()
    sizes, least = torch.tensor([0.5, 2.0, 0.0])[:, None, None], torch.ones(3, 1, 1)
    norms[2] = 0  # no gradient: any number times zero, but a number
    call = interpreted if function is direction_scales_kernel else lambda f, *arguments: f(*arguments)
    found = call(function, norms, D if diagonal else None, sizes, least, 7.0)
    own = D.double() if diagonal else torch.ones(3, 1, columns, dtype=torch.float64)
    want = 7.0 * own * torch.tensor([0.5, 1.0, 0.0])[:, None, None] / (norms.double() * own).norm(dim=-1, keepdim=True)
    assert found.dtype == torch.float32 and found.isfinite().all()
    torch.testing.assert_close(found[:2].double(), want[:2], rtol=1e-5, atol=1e-7)


@pytest.mark.gpu
def test_scales_of_kernels_are_those_of_their_twins_on_a_gpu():
    x, D = (random(3, *shape, seed=seed, device="cuda") for seed, shape in ((1, (300, 700)), (2, (1, 700))))
    sizes, least = x.norm(dim=(1, 2), keepdim=True), torch.full((3, 1, 1), 1e-3, device="cuda")
    pairs = [
        [f(x.bfloat16(), 2.0, sizes, torch.float16, D.half()) for f in (scaled_stack_kernel, scaled_stack_twin)],
        *zip(*(f(x, 2.0, sizes, torch.float16) for f in (scaled_in_parts_kernel, scaled_in_parts_twin)), strict=True),
        [
            f(x.norm(dim=1, keepdim=True), D.half(), sizes, least, 7.0)
            for f in (direction_scales_kernel, direction_scales_twin)
        ],
    ]
    for found, want in pairs:
        torch.testing.assert_close(found, want, rtol=2e-3, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5), (64, 8, 3, 3), (300, 700)])
def test_kernels_are_their_twins_on_a_gpu(shape, dtype, offset):
    """Also for tensors that begin at no multiple of 16 bytes."""

    def tensors(seed):
        size = torch.Size(shape).numel()
        return [random(size + offset, seed=seed + k, device="cuda").to(dtype)[offset:].view(shape) for k in range(3)]

    gradients, u = tensors(10), random(3, *shape, seed=20, device="cuda").half()
    scale = random(3, 1, torch.Size(shape[1:]).numel(), seed=30, device="cuda")
    found = []
    for averages, steps in (
        (nesterov_averages_kernel, scaled_steps_kernel),
        (nesterov_averages_twin, scaled_steps_twin),
    ):
        momenta, weights = tensors(0), tensors(5)
        n = averages(momenta, gradients, 0.8, torch.bfloat16)
        steps(weights, u, scale, torch.tensor([-0.3, 0.9], dtype=torch.float64, device="cuda"))
        found.append(torch.stack([n, *(torch.stack(one) for one in (momenta, weights))]).float())
    torch.testing.assert_close(*found, rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-2)
