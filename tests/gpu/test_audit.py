"""The audit of every backward on CUDA: no false alarm in any precision, and a penalty that enters later is named."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gramian
from gramian.models.gpt import GPT, GPTConfig
from tests.kit.refusals import refusal

pytestmark = pytest.mark.gpu

SETTINGS = {
    "float64": (torch.float64, None, "highest"),
    "float32": (torch.float32, None, "highest"),
    "tf32": (torch.float32, None, "high"),
    "bf16": (torch.bfloat16, None, "highest"),
    "bf16 autocast": (torch.float32, torch.bfloat16, "highest"),
    "fp16 autocast": (torch.float32, torch.float16, "highest"),
}


class Pictures(nn.Module):
    """Convolutions, plain and in groups, and norms."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 32, 3, stride=2, groups=4)
        self.norm, self.head = nn.GroupNorm(4, 32), nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.norm(self.second(self.first(x).relu())).relu().mean((2, 3)))


def _batches(kind, dtype):
    for number in range(12):
        generator = torch.Generator("cuda").manual_seed(number)
        if kind == "gpt":
            yield torch.randint(96, (1 + number % 5, 8 * (1 + number)), generator=generator, device="cuda")
        else:
            yield torch.randn(2 + number, 3, 12, 12, generator=generator, device="cuda").to(dtype)


def _model(kind, dtype):
    torch.manual_seed(0)
    model = (
        GPT(GPTConfig(vocabulary=96, context=96, layers=2, width=64, heads=4, tied=True))
        if kind == "gpt"
        else Pictures()
    )
    return model.to("cuda", dtype)


def _loss(model, x, autocast):
    with torch.autocast("cuda", autocast) if autocast else contextlib.nullcontext():
        logits = model(x)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits.flatten(0, 1), x.flatten()) if logits.dim() == 3 else logits.logsumexp(1).mean()


@pytest.mark.parametrize("kind", ["gpt", "pictures"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_ordinary_batches_pass_and_a_penalty_is_named(kind, setting):
    dtype, autocast, precision = SETTINGS[setting]
    model, before = _model(kind, dtype), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        with gramian.per_sample_norms(model) as norms:
            for x in _batches(kind, dtype):
                _loss(model, x, autocast).backward()
        assert norms.values.isfinite().all()
        with refusal("penalty"), gramian.per_sample_norms(model):
            penalty = sum(p.double().square().sum() for p in model.parameters())
            (_loss(model, x, autocast) + 0.1 * penalty.to(torch.float32)).backward()
    finally:
        torch.set_float32_matmul_precision(before)
