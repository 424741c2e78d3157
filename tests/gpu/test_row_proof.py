"""The row proof on CUDA: a GPT passes in every precision and compiled, a root that sorts is refused, no trace is left."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gramian
from gramian.models.gpt import GPT, GPTConfig
from gramian.taps.hub import hub_of
from tests.kit.refusals import refusal

pytestmark = pytest.mark.gpu

CONFIG = GPTConfig(vocabulary=96, context=48, layers=2, width=64, heads=4)
PRECISIONS = {
    "float64": (torch.float64, None), "float32": (torch.float32, None), "tf32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None), "float16": (torch.float16, None),
    "bfloat16 autocast": (torch.float32, torch.bfloat16), "float16 autocast": (torch.float32, torch.float16),
}  # fmt: skip


def tokens(batch=6):
    drawn = torch.randint(CONFIG.vocabulary, (batch, CONFIG.context), generator=torch.Generator().manual_seed(1))
    return drawn.cuda()


def backward(model, x, autocast=None):
    with torch.autocast("cuda", autocast or torch.bfloat16, enabled=autocast is not None):
        logits = model(x)
    F.cross_entropy(logits.flatten(0, 1).float(), x.flatten()).backward()


def proven(model):
    return [(found.units, found.runs, found.alone) for found in hub_of(model).proof.proven.values()]


@pytest.fixture
def matmuls():
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_ordinary_model_is_proven_in_every_precision(precision, matmuls):
    dtype, autocast = PRECISIONS[precision]
    matmuls("high" if precision == "tf32" else "highest")
    plain, model, x = GPT(CONFIG).cuda().to(dtype), GPT(CONFIG).cuda().to(dtype), tokens()
    backward(plain, x, autocast)
    with gramian.per_sample_norms(model) as norms:
        backward(model, x, autocast)
    assert proven(model)[0][::2] == (6, "slice")
    assert len(norms.values) == 6 and bool(norms.values.isfinite().all())
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=2e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-4)


def test_a_compiled_model_is_proven_before_its_graph_runs():
    model, x = GPT(CONFIG).cuda(), tokens()
    with gramian.per_sample_norms(model) as eager:
        backward(model, x)
    model.zero_grad()
    fresh = GPT(CONFIG).cuda()
    with gramian.per_sample_norms(torch.compile(fresh)) as compiled:
        backward(torch.compile(fresh), x)
    assert proven(fresh) == proven(model)
    torch.testing.assert_close(compiled.values, eager.values, rtol=1e-4, atol=0)


def test_attention_that_adds_atomically_is_proven_bit_for_bit():
    config = GPTConfig(vocabulary=96, context=512, layers=6, width=256, heads=4)
    model = GPT(config).cuda().to(torch.bfloat16)
    x = torch.randint(96, (4, 512), generator=torch.Generator().manual_seed(1)).cuda()
    flags = torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cudnn.deterministic
    with gramian.per_sample_norms(model):
        backward(model, x)
    (found,) = hub_of(model).proof.proven.values()
    assert found.exact
    assert not torch.are_deterministic_algorithms_enabled()
    assert (torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cudnn.deterministic) == flags
    assert torch.utils.deterministic.fill_uninitialized_memory


class Sorted(nn.Module):
    """Encodes its samples in the order of their first number."""

    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x):
        order = x[:, 0].argsort()
        return self.head(torch.tanh(self.encoder(x[order]))[order.argsort()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_root_that_sorts_its_samples_is_refused(compiled, dtype):
    torch.manual_seed(0)
    model, x = Sorted().cuda().to(dtype), torch.randn(9, 16, device="cuda", dtype=dtype)
    called = torch.compile(model) if compiled else model
    with refusal("^encoder: the input of sample"), gramian.per_sample_norms(model):
        called(x).square().sum().backward()


class Noisy(nn.Module):
    """Dropout, noise of a generator of its own, and a buffer that counts."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 8)
        self.register_buffer("count", torch.zeros(()))
        self.generator = torch.Generator("cuda").manual_seed(3)

    def forward(self, x):
        self.count += 1
        noise = torch.randn(len(x), 8, device=x.device, generator=self.generator)
        return F.dropout(self.layer(x), 0.2) + 0.1 * noise + random.random() + np.random.rand()


def test_no_trace_is_left():
    x, states = torch.randn(7, 16, device="cuda"), []
    for captured in (False, True):
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        model = Noisy().cuda()
        model(x).sum().backward()  # what the user accumulates
        if captured:
            with gramian.per_sample_norms(model, "sum"):
                model(x).sum().backward()
            assert proven(model)[0][2] == "random operations ran, in evaluation mode too"
        else:
            model(x).sum().backward()
        states.append([
            *(p.grad for p in model.parameters()), model.count, torch.cuda.get_rng_state(), torch.get_rng_state(),
            model.generator.get_state(), torch.tensor([random.random(), np.random.rand()]),
        ])  # fmt: skip
    assert all(torch.equal(one, other) for one, other in zip(*states, strict=True))
