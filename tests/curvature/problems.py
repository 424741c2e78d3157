"""What the tests of K-FAC share: small float64 models with data, their tokens from plain hooks, and how close is close enough.

Sizes are odd and unequal, so that a transposed factor cannot fit. Legend: B samples, T tokens, D width, V classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramian
from gramian.models import GPT, GPTConfig
from gramian.oracles import dense_kfac
from gramian.oracles.dense_kfac import ReferenceTokens
from tests.kit import models, networks

IGNORE = -100
TOLERANCE = 1e-10


def kfac(**options: Any) -> gramian.KFACNaturalGradient:
    """Fresh factors at every capture, unless the options say otherwise."""
    return gramian.KFACNaturalGradient(**{"update_freq": 1, "ema_decay": 0.0, **options})


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers, float64."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def classes(count: int, *shape: int, seed: int = 1) -> Tensor:
    """Integers below `count`."""
    return torch.randint(count, shape, generator=torch.Generator().manual_seed(seed))


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """The same float64 weights every time."""
    return models.seeded(lambda: build().double(), 0.2)


def logits_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """What the model predicts, whether or not it is from Hugging Face."""
    output = model(inputs)
    return getattr(output, "logits", output)


def cross_entropy(model: nn.Module, inputs: Tensor, targets: Tensor, reduction: str = "sum") -> Tensor:
    """Over every target that is not ignored."""
    logits = logits_of(model, inputs)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction=reduction)


# ---- models ----------------------------------------------------------------------------------------------------------


def mlp() -> nn.Module:
    """A bias that trains, none, a frozen one, and a head."""
    net = nn.Sequential(
        nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 11, bias=False), nn.Tanh(), nn.Linear(11, 6), nn.Tanh(),
        nn.Linear(6, 5),
    )  # fmt: skip
    net[4].bias.requires_grad_(False)
    return net


def gpt() -> nn.Module:
    """Position ids are one row for all samples."""
    return GPT(GPTConfig(vocabulary=13, context=6, layers=1, width=8, heads=2))


def conv2d() -> nn.Module:
    """Strides, paddings and dilations that differ by axis."""
    return nn.Sequential(
        nn.Conv2d(3, 6, (3, 2), stride=(2, 1), padding=(1, 2)), nn.Tanh(),
        nn.Conv2d(6, 4, 2, dilation=(1, 2), bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(40, 5),
    )  # fmt: skip


def conv1d() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(3, 6, 3, stride=2, padding=2), nn.Tanh(), nn.Conv1d(6, 4, 2, dilation=2), nn.Tanh(), nn.Flatten(),
        nn.Linear(20, 5),
    )  # fmt: skip


def embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(13, 9), nn.Tanh(), nn.Linear(9, 5))


class QKV(nn.Module):
    """q, k and v read one tensor; `other` reads one of the same shape, `out` what becomes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(9, 9) for _ in range(3))
        self.other, self.out = nn.Linear(9, 9), nn.Linear(9, 5)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = torch.tanh(x_BTD)
        mixed = F.scaled_dot_product_attention(self.q(x_BTD), self.k(x_BTD), self.v(x_BTD), is_causal=True)
        return self.out(mixed + self.other(torch.sin(x_BTD)))


@dataclass(frozen=True)
class Problem:
    """A model and a batch of which every target is one loss term."""

    build: Callable[[], nn.Module]
    inputs: Tensor
    targets: Tensor
    layers: tuple[str, ...]
    """Those that get K-FAC factors."""
    head: str

    def model(self) -> nn.Module:
        """The same weights every time."""
        return seeded(self.build)

    @property
    def terms(self) -> int:
        """N."""
        return int((self.targets != IGNORE).sum())

    def loss(self, model: nn.Module, rows: Any = slice(None), reduction: str = "sum") -> Tensor:
        """Of some of the samples."""
        return cross_entropy(model, self.inputs[rows], self.targets[rows], reduction)

    def captured(self, model: nn.Module | None = None, **options: Any) -> gramian.KFACNaturalGradient:
        """Factors of one capture over the whole batch."""
        model, found = model or self.model(), kfac(**options)
        with found.capture(model, loss_reduction="sum", num_terms=self.terms):
            self.loss(model).backward()
        return found


_TEXT = (classes(13, 3, 6), classes(13, 3, 6, seed=2))

PROBLEMS: dict[str, Problem] = {
    "mlp": Problem(mlp, normal(8, 7), classes(5, 8), ("0", "2", "4", "6"), "6"),
    "mlp_tokens": Problem(mlp, normal(3, 3, 7), classes(5, 3, 3), ("0", "2", "4", "6"), "6"),
    "gpt": Problem(
        gpt, *_TEXT,
        ("token_embedding", "position_embedding", "blocks.0.qkv", "blocks.0.attention_out", "blocks.0.fc",
         "blocks.0.mlp_out", "head"), "head",
    ),
    "hf_gpt2": Problem(
        networks.hf_gpt2, *_TEXT,
        tuple(f"transformer.h.{i}.{name}" for i in range(2) for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc",
              "mlp.c_proj")) + ("transformer.wpe",), "lm_head",
    ),
    "conv2d": Problem(conv2d, normal(2, 3, 5, 4), classes(5, 2), ("0", "2", "5"), "5"),
    "conv1d": Problem(conv1d, normal(2, 3, 11), classes(5, 2), ("0", "2", "5"), "5"),
    "embedding": Problem(embedding, classes(13, 4, 2), classes(5, 4, 2), ("0", "2"), "2"),
}  # fmt: skip


# ---- what plain hooks see --------------------------------------------------------------------------------------------


def calls_of(
    model: nn.Module, backward: Callable[[], Any], layers: Sequence[str]
) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """{layer: (input, gradient of the output) of every call}. A row of indices that all samples share is repeated."""
    modules, calls, handles = dict(model.named_modules()), {name: [] for name in layers}, []
    batch: list[int] = []
    handles.append(model.register_forward_pre_hook(lambda _, args: batch.append(len(args[0]))))

    def repeat(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0].expand(batch[-1], *args[0].shape[1:]), *args[1:])

    def note(name: str, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        output.retain_grad()
        calls[name].append((args[0].detach(), output))

    for name in layers:
        if isinstance(modules[name], nn.Embedding):
            handles.append(modules[name].register_forward_pre_hook(repeat))
        handles.append(modules[name].register_forward_hook(partial(note, name)))
    try:
        backward()
    finally:
        for handle in handles:
            handle.remove()
    return {
        name: [(a, torch.zeros_like(y) if y.grad is None else y.grad) for a, y in uses] for name, uses in calls.items()
    }


def sides(module: nn.Module, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """One call as tokens: a [B, T, I] and g [B, T, O]; patches by `F.unfold`, indices as one-hot rows."""
    if isinstance(module, nn.Embedding):
        return F.one_hot(a, module.num_embeddings).double().flatten(1, -2), g.flatten(1, -2)
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        image = a
        if module.padding_mode != "zeros" or isinstance(module.padding, str):
            mode = module.padding_mode.replace("zeros", "constant")
            image = F.pad(a, module._reversed_padding_repeated_twice, mode=mode)
        return _patches(module, image, padded=image is not a), g.flatten(2).transpose(1, 2)
    a, g = (t[:, None] if t.dim() == 2 else t for t in (a, g))
    return a.flatten(1, -2), g.flatten(1, -2)


def _patches(module: nn.Module, image: Tensor, padded: bool) -> Tensor:
    """[B, positions, channels·kernel]; in three dimensions by a convolution with the identity."""
    padding = (0,) * len(module.kernel_size) if padded else module.padding
    if isinstance(module, nn.Conv3d):
        width = module.weight[0].numel()
        kernel = torch.eye(width).to(image).reshape(width, *module.weight.shape[1:])
        found = F.conv3d(image, kernel, stride=module.stride, padding=padding, dilation=module.dilation)
        return found.flatten(2).transpose(1, 2)
    flat = isinstance(module, nn.Conv1d)
    sizes = [(1, *t) if flat else t for t in (module.kernel_size, module.dilation, module.stride)]
    padding, image = ((0, *padding), image[:, :, None]) if flat else (padding, image)
    return F.unfold(image, sizes[0], dilation=sizes[1], padding=padding, stride=sizes[2]).transpose(1, 2)


def tokens(module: nn.Module, uses: list[tuple[Tensor, Tensor]], sharing: str = "expand") -> ReferenceTokens:
    """All calls of a layer; under "reduce" a sample is one token: its mean input and its summed gradient."""
    found = [sides(module, a, g) for a, g in uses]
    if sharing == "reduce" and not isinstance(module, nn.Embedding):
        found = [(a.mean(1, keepdim=True), g.sum(1, keepdim=True)) for a, g in found]
    return ReferenceTokens(
        torch.cat([a.flatten(0, 1) for a, _ in found]), torch.cat([g.flatten(0, 1) for _, g in found])
    )


def has_bias(module: nn.Module) -> bool:
    """True if the bias is part of the block."""
    bias = getattr(module, "bias", None)
    return bias is not None and bias.requires_grad


@lru_cache
def oracle(name: str, sharing: str = "expand") -> dict[str, tuple[Tensor, Tensor]]:
    """{layer: A and G, written out} of a problem of the table."""
    p = PROBLEMS[name]
    model = p.model()
    modules = dict(model.named_modules())
    calls = calls_of(model, lambda: p.loss(model).backward(), p.layers)
    return {
        layer: dense_kfac.factors(tokens(modules[layer], uses, sharing), p.terms, 1.0, has_bias(modules[layer]))
        for layer, uses in calls.items()
    }


# ---- how close is close enough ---------------------------------------------------------------------------------------


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE, what: str = "") -> None:
    """The same shape, and a difference within a tolerance relative to the norm."""
    assert actual.shape == expected.shape, f"{what}: {list(actual.shape)} instead of {list(expected.shape)}"
    error, size = float((actual.detach().double() - expected.detach()).norm()), float(expected.detach().norm())
    assert error <= tolerance * size, f"{what}: off by {error:.3g} of {size:.3g}"


def assert_tensors(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    """The same names, and every tensor close."""
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        assert_close(actual[name], want, tolerance, name)


def written(found: gramian.KFACNaturalGradient) -> dict[str, Tensor]:
    """Every side of every block, written out."""
    return {
        f"{name} {side}": factor.dense()
        for name, block in found.kfac_factors.items()
        for side, factor in block.factors.items()
    }


def assert_same_factors(
    actual: gramian.KFACNaturalGradient, expected: gramian.KFACNaturalGradient, tolerance: float = TOLERANCE
) -> None:
    """All sides of all blocks, and N."""
    assert_tensors(written(actual), written(expected), tolerance)
    for name, block in expected.kfac_factors.items():
        assert actual.kfac_factors[name].facts.terms == pytest.approx(block.facts.terms, rel=1e-12)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """What is in `p.grad`, copied."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def narrow(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Let sides wider than `limit` count as too wide to be held whole."""
    factors = [f"linalg.factors.{name}" for name in ("factor", "dense", "merging", "diagonal_low_rank")]
    for module in ("linalg", *factors, "curvature.blocks.representation", "curvature.refresh.build_factors"):
        monkeypatch.setattr(f"gramian.{module}.WIDEST_DENSE", limit)
