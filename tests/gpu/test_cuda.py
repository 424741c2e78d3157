"""The same answers on a GPU: every case against the float64 loop, bits of p.grad, compile, autocast, GradScaler, memory."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

import gramian
from gramian.models.gpt import GPT, GPTConfig
from gramian.oracles import single_sample
from tests.kit.models import CASES
from tests.oracles import sample_statistics

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def no_tf32():
    """Models compute in float32 proper, so that they can be held to it."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}


def on_gpu(case, dtype, batch=5):
    model = case.make(dtype).cuda()
    data = tuple(t.cuda() for t in case.make_batch(batch, dtype, torch.Generator().manual_seed(7)))
    return model, data


def oracle(case, batch=5):
    """Float64 on the CPU."""
    data = case.make_batch(batch, torch.float64, torch.Generator().manual_seed(7))
    return sample_statistics.per_sample_norms(case.make(torch.float64), partial(case.loss, reduction="sum"), data)


def relative(values, expected):
    return float(((values.cpu().double() - expected).abs() / expected).max())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("algorithm", ["auto", "direct", "gram"])
@pytest.mark.parametrize("name", CASES)
def test_norms_on_the_gpu_are_those_of_the_float64_loop(name, algorithm, dtype):
    case = CASES[name]
    model, data = on_gpu(case, dtype)
    with gramian.per_sample_norms(model, "mean", algorithm=algorithm) as norms:
        case.loss(model, *data, reduction="mean").backward()
    assert norms.values.is_cuda and norms.values.dtype == dtype
    loose = 1e-6 if case.computes_in_float32 else 0
    assert relative(norms.values, oracle(case)) < max(TOLERANCE[dtype], loose)


@pytest.mark.parametrize("name", ["mlp", "gpt", "tied_gpt", "hf_gpt2", "hf_llama", "convnet", "reused"])
def test_gradients_are_bit_for_bit_those_without_a_capture(name):
    case = CASES[name]
    model, data = on_gpu(case, torch.float32)
    twin, _ = on_gpu(case, torch.float32)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with gramian.per_sample_norms(model):
            case.loss(model, *data, reduction="mean").backward()
        case.loss(twin, *data, reduction="mean").backward()
    finally:
        torch.use_deterministic_algorithms(False)
    for (key, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert p.grad is None and q.grad is None or torch.equal(p.grad, q.grad), key


@pytest.mark.parametrize("name", ["mlp", "gpt", "tied_gpt", "reused", "convnet", "hf_gpt2", "hf_llama"])
def test_compiled_norms_on_the_gpu_are_those_of_the_float64_loop(name):
    torch._dynamo.reset()
    case = CASES[name]
    model, data = on_gpu(case, torch.float32)
    compiled = torch.compile(model, fullgraph=True)
    for _ in range(2):
        with gramian.per_sample_norms(model) as norms:
            case.loss(compiled, *data, reduction="mean").backward()
        assert relative(norms.values, oracle(case)) < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("algorithm", ["direct", "gram"])
@pytest.mark.parametrize("name", ["mlp", "gpt", "tied_gpt", "hf_gpt2", "convnet"])
def test_autocast_norms_are_right_to_the_precision_of_the_activations(name, algorithm, dtype):
    case = CASES[name]
    model, data = on_gpu(case, torch.float32)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    with gramian.per_sample_norms(model, algorithm=algorithm, loss_scale=scaler) as norms:
        with torch.autocast("cuda", dtype):
            loss = case.loss(model, *data, reduction="mean")
        scaler.scale(loss).backward()
    assert norms.values.dtype == torch.float32
    assert relative(norms.values, oracle(case)) < (2e-2 if dtype == torch.bfloat16 else 1e-2)


def test_half_weights_accumulate_in_float32():
    case = CASES["gpt"]
    model, data = on_gpu(case, torch.bfloat16)
    with gramian.per_sample_norms(model) as norms:
        case.loss(model, *data, reduction="mean").backward()
    assert norms.values.dtype == torch.float32
    assert relative(norms.values, oracle(case)) < 5e-2


@pytest.mark.parametrize("statistics", ["none", "norms"])
def test_taps_keep_no_activation_that_autograd_does_not_keep(statistics):
    """Peak memory between the end of the forward and the start of the backward: kept inputs are autograd's own."""
    config = GPTConfig(vocabulary=512, context=256, layers=4, width=256, heads=4)
    tokens = torch.randint(512, (16, 256), device="cuda")

    def held(tapped):
        model = GPT(config).cuda()
        capture = gramian.per_sample_norms(model)
        if tapped:
            capture.__enter__()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        torch.cuda.synchronize()
        kept = torch.cuda.memory_allocated() - before
        loss.backward()
        if tapped:
            capture.__exit__(None, None, None)
        return kept

    plain = held(False)
    assert held(statistics == "norms") <= plain * 1.01


def test_statistics_on_the_gpu_match_the_float64_loop():
    case = CASES["gpt"]
    model, data = on_gpu(case, torch.float64)
    fisher, noise, health = gramian.DiagonalFisher(), gramian.NoiseScale(), gramian.Health()
    with gramian.observe(model, fisher, noise, health, loss_reduction="mean") as seen:
        case.loss(model, *data, reduction="mean").backward()
    cpu = case.make_batch(5, torch.float64, torch.Generator().manual_seed(7))
    loss = partial(case.loss, reduction="sum")
    expected = sample_statistics.diagonal_fisher(case.make(torch.float64), loss, cpu)
    for name, value in seen[fisher].items():
        torch.testing.assert_close(value.cpu() * 5, expected[name], rtol=1e-9, atol=1e-15)
    reference = sample_statistics.noise_scale(single_sample.per_sample_gradients(case.make(torch.float64), loss, cpu))
    assert seen[noise].unbiased == pytest.approx(reference.simple, rel=1e-8)
    assert all(entry.nonfinite == 0 for entry in seen[health].values())
