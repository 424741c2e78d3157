"""K-FAC on compiled models: the same factors as in eager mode, and nothing of the graph's memory is kept."""

import pytest
import torch
import torch.nn.functional as F

import gramian
from gramian.models import GPT, GPTConfig
from tests.kit.refusals import refusal


def captured(model, call, tokens, **settings):
    kfac = gramian.KFACNaturalGradient(update_freq=1, **settings)
    with kfac.capture(model, num_terms=tokens[:, 1:].numel()):
        F.cross_entropy(call(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return kfac


@pytest.mark.parametrize(
    ("length", "backend"),
    [
        pytest.param(5, "aot_eager", id="low rank", marks=pytest.mark.full),
        pytest.param(40, "aot_eager", id="dense", marks=pytest.mark.full),
        pytest.param(40, "inductor", id="dense, inductor", marks=pytest.mark.full),
        pytest.param(5, "inductor", id="low rank, inductor", marks=pytest.mark.full),
    ],
)
def test_a_compiled_model_gives_the_factors_of_the_eager_one(backend, length):
    torch._dynamo.reset()
    model = GPT(GPTConfig(vocabulary=40, context=64, layers=2, width=16, heads=2)).double()
    tokens = torch.randint(40, (2, length + 1), generator=torch.Generator().manual_seed(0))
    eager = captured(model, model, tokens)
    model.zero_grad()
    compiled = captured(model, torch.compile(model, backend=backend, fullgraph=True), tokens)
    assert compiled.kfac_factors.keys() == eager.kfac_factors.keys()
    for name, block in eager.kfac_factors.items():
        for side, factor in block.factors.items():
            other = compiled.kfac_factors[name].factors[side]
            torch.testing.assert_close(other.to_dense(), factor.to_dense(), rtol=1e-9, atol=1e-12, msg=f"{name} {side}")


@pytest.mark.full
def test_a_compiled_model_without_a_known_head_asks_for_it():
    torch._dynamo.reset()
    model = GPT(GPTConfig(vocabulary=40, context=8, layers=1, width=8, heads=2)).double()
    tokens = torch.randint(40, (2, 9))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with refusal("head: .*expected head="):
        captured(model, compiled, tokens, kfac_true_fisher_head=True)
