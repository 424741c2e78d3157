"""Dropout inside layers that run again, on CUDA: fused dropout, attention with its weights in memory, cuDNN's layers in parts.

Attention and recurrent layers draw other numbers there than in their fused kernels, so the reference runs a copy that is not
captured in the mode that replaces these, from the same seed, and differentiates each sample's term by itself.
"""

import gc
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gramian
from gramian.taps.sites.dropout_masks import RecordedMasks, RepeatedMasks
from tests.kit.refusals import refused
from tests.kit.toys import Toy
from tests.taps.checks import assert_norms
from tests.taps.test_dropout import LAYERS, SEED, B, D, T, norms_of, recurs, terms

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:RNN module weights")]


def rows(model, x):
    copy = deepcopy(model)
    with RecordedMasks():
        terms_B, parameters = terms(copy, x), dict(copy.named_parameters())
    found = [
        torch.autograd.grad(t, list(parameters.values()), retain_graph=True, materialize_grads=True) for t in terms_B
    ]
    return dict(zip(parameters, map(torch.stack, zip(*found, strict=True)), strict=True))


@pytest.mark.parametrize("name", LAYERS)
def test_norms_are_those_of_each_samples_own_mask(name):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(D, D), LAYERS[name]()).double().cuda()
    x = torch.randn(B, T, D, dtype=torch.float64, device="cuda")
    with gramian.per_sample_norms(model, loss_reduction="sum") as norms:
        terms(model, x).sum().backward()
    assert_norms(norms.values, norms_of(rows(model, x)), 1e-10)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_have_the_terms_of_a_cpu_with_the_same_masks(kind, both, bias):
    """In a copy, in a capture, and on a CPU, which repeats the masks that the copy has drawn."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(D, D), recurs(kind, bidirectional=both, bias=bias)).double().cuda()
    x = torch.randn(B, T, D, dtype=torch.float64, device="cuda")
    with RecordedMasks() as drawn:
        alone = terms(deepcopy(model), x)
    with RepeatedMasks([mask.cpu() for mask in drawn.masks], torch.zeros(1, dtype=torch.long), 1) as repeated:
        on_cpu = terms(deepcopy(model).cpu(), x.cpu())
    repeated.refuse_unused()
    with gramian.per_sample_norms(model, loss_reduction="sum"):
        captured = terms(model, x)
        captured.sum().backward()
    torch.testing.assert_close(alone.cpu(), on_cpu, rtol=1e-10, atol=0)
    torch.testing.assert_close(captured.detach(), alone.detach(), rtol=1e-10, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["attention", "encoder layer", "LSTM", "dropout", "sdpa"])
def test_narrow_numbers_are_proven(name, dtype):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(D, D), LAYERS[name]()).cuda().to(dtype)
    x = torch.randn(B, T, D, device="cuda", dtype=dtype)
    with gramian.per_sample_norms(model, loss_reduction="sum") as norms:
        terms(model, x).sum().backward()
    assert bool(norms.values.isfinite().all())


def test_plain_dropout_draws_the_same_numbers_with_and_without_a_capture():
    model = Toy(lambda net, x: F.dropout(x, 0.3) * net.gain, gain=nn.Parameter(torch.rand(64))).cuda()
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(4, 33, 64, device="cuda", dtype=dtype)
        torch.manual_seed(SEED)
        plain = model.to(dtype)(x)
        with gramian.per_sample_norms(model, proof="off"):
            torch.manual_seed(SEED)
            seen = model(x)
            seen.square().sum().backward()
        assert torch.equal(seen, plain)


def recomputed(layer):
    return Toy(lambda net, x: checkpoint(net.layer, x, use_reentrant=False), layer=layer)


def test_checkpoints_inside_such_a_layer_recompute_plain_dropout_and_refuse_attention():
    x = torch.randn(B, T, D, device="cuda", dtype=torch.float64)
    make = partial(Toy, lambda net, x: net.inner(x) * net.gain, gain=nn.Parameter(torch.rand(D)))
    model = make(inner=recomputed(nn.Sequential(nn.Linear(D, D), nn.Dropout(0.3)))).double().cuda()
    with gramian.per_sample_norms(model, loss_reduction="sum") as norms:
        terms(model, x).sum().backward()
    assert_norms(norms.values, norms_of(rows(model, x)), 1e-10)

    def attends(net, x):
        q = net.layer(x)[:, None]
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.3)[:, 0]

    model = make(inner=recomputed(Toy(attends, layer=nn.Linear(D, D)))).double().cuda()
    with refused("model (Toy)", "attention with dropout in a checkpoint"), gramian.per_sample_norms(model):
        terms(model, x).sum().backward()
    gc.collect()  # a checkpoint that an error leaves keeps its hooks on saved tensors while its frame lives
