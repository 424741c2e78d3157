"""Fused experts on CUDA: kernels over ragged segments in half precision, and private sums of a small Mixtral."""

import copy

import pytest
import torch
from torch.nn import functional as F

import gramian
from gramian.kernels.norms.ragged_squares import (
    _HALF,
    ragged_direct_squares,
    ragged_direct_squares_kernel,
    ragged_gram_squares,
    ragged_gram_squares_kernel,
)
from gramian.kernels.sums.ragged_products import ragged_products, ragged_products_kernel
from gramian.oracles.single_sample import per_sample_gradients
from tests.gpu.test_private import error, private

pytestmark = pytest.mark.gpu

LENGTHS = [[0, 3, 300, 64, 0, 129], [1000, 2], [0, 0], [128, 64, 1, 5000]]


def case(lengths, dtype, rows, columns):
    generator = torch.Generator("cuda").manual_seed(sum(lengths))
    count = sum(lengths) + 5
    left, right = (torch.randn(count, n, device="cuda", generator=generator).to(dtype) for n in (rows, columns))
    order = torch.randperm(count, device="cuda", generator=generator)
    return left, right, order, torch.tensor([0, *lengths], device="cuda").cumsum(0)


def products(left, right, order, offsets):
    ends = offsets.tolist()
    parts = [order[a:b] for a, b in zip(ends, ends[1:], strict=False)]
    return torch.stack([left[part].double().mT @ right[part].double() for part in parts])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [(136, 520), (33, 65), (1024, 256)])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_ragged_kernels_give_float64s_answers_and_the_same_bits_twice(lengths, size, dtype):
    sides = case(lengths, dtype, *size)
    found = products(*sides)
    want, tolerance = found.square().sum((1, 2)), {"rtol": 2e-3, "atol": 1e-3}
    torch.testing.assert_close(ragged_direct_squares(*sides).double(), want, **tolerance)
    torch.testing.assert_close(ragged_gram_squares(*sides)[0].double(), want, **tolerance)
    for tiles in _HALF if dtype != torch.float32 else ():
        direct = ragged_direct_squares_kernel(*sides, tiles=tiles)
        gram = ragged_gram_squares_kernel(*sides, tiles=tiles)[0]
        torch.testing.assert_close(direct.double(), want, **tolerance)
        torch.testing.assert_close(gram.double(), want, **tolerance)
        assert torch.equal(gram, ragged_gram_squares_kernel(*sides, tiles=tiles)[0])
    weights = torch.tensor([0.5, 2.0], device="cuda")
    sums = ragged_products(*sides, weights, torch.float32)
    assert torch.equal(sums, ragged_products_kernel(*sides, weights, torch.float32))
    apart = found.reshape(2, -1, *size) * weights.double()[:, None, None, None]
    torch.testing.assert_close(sums.double(), apart.sum(0), rtol=2e-3, atol=1e-2)


def mixtral(**options):
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, use_cache=False, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(config).cuda().train()


def loss_of(model, x):
    return F.cross_entropy(model(x).logits.flatten(0, 1).float(), x.flatten())


@pytest.mark.parametrize("algorithm", ["auto", "gram", "direct"])
@pytest.mark.parametrize("kernel", ["eager", "batched_mm"])
def test_private_sums_of_a_small_mixtral_are_the_loops(kernel, algorithm):
    model = mixtral()
    model.set_experts_implementation(kernel)
    x = torch.randint(96, (4, 24), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    exact = copy.deepcopy(model)
    found = per_sample_gradients(exact, loss_of, (x,))
    norms = torch.stack([g.double().flatten(1).square().sum(1) for g in found.values()]).sum(0).sqrt()
    limit = float(norms.median())
    factors = (limit / norms).clamp(max=1)
    sums = {n: (g.double() * factors.reshape(-1, *[1] * (g.dim() - 1))).sum(0) for n, g in found.items()}
    _, tapped, _ = private(model, max_grad_norm=limit, norm_algorithm=algorithm)
    loss_of(tapped, x).backward()
    assert error(tapped, sums) < 2e-3


def test_norms_of_a_bfloat16_mixtral_with_grouped_products():
    model = mixtral().bfloat16()
    model.set_experts_implementation("grouped_mm")
    x = torch.randint(96, (4, 24), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    want = []
    for one in x:
        model.zero_grad()
        loss_of(model, one[None]).backward()
        want.append(torch.stack([p.grad.double().square().sum() for p in model.parameters()]).sum().sqrt())
    model.zero_grad()
    with gramian.per_sample_norms(model, proof="off") as norms:  # rounding may send a token elsewhere
        loss_of(model, x).backward()
    torch.testing.assert_close(norms.values.double(), torch.stack(want), rtol=0.1, atol=0)
    kinds = {norms.coverage[n].kind for n, _ in model.named_parameters() if ".experts." in n}
    assert kinds == {"products"}
