"""Models and batches on which DP-SGD clipping is checked, and their loss.

Legend: B samples, T tokens, D width, V classes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gramian.verify.check_models import draw_batch, perturbed, tiny_gpt


class _Text(nn.Module):
    """A model of an embedding with a padding row, layer norm, RMS norm and linear layers on [B, T, D]; then a mean over T."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(11, 6, padding_idx=0), nn.LayerNorm(6)
        self.inner, self.scale, self.head = nn.Linear(6, 9), nn.RMSNorm(9), nn.Linear(9, 5)

    def forward(self, ids_BT: Tensor) -> Tensor:
        h_BTD = self.scale(torch.tanh(self.inner(self.norm(self.table(ids_BT)))))
        return self.head(h_BTD.mean(1))  # type: ignore[no-any-return]


class _Reused(nn.Module):
    """A model in which one linear layer is called three times, and another one never."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.shared, self.head, self.spare = (nn.Linear(*io) for io in ((7, 9), (9, 9), (9, 5), (3, 4)))

    def forward(self, x_BTD: Tensor) -> Tensor:
        h = self.inner(x_BTD)
        for _ in range(3):
            h = h + torch.tanh(self.shared(h))
        return self.head(h.mean(1))  # type: ignore[no-any-return]


class _Adapted(nn.Module):
    """A model of frozen linear layers with trained low-rank adapters beside them, and a trained bias beside a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(7, 9), nn.Linear(7, 2, bias=False), nn.Linear(2, 9, bias=False)
        self.head = nn.Linear(9, 5)
        self.base.weight.requires_grad_(False)
        self.head.weight.requires_grad_(False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.head(torch.tanh(self.base(x_BTD) + self.up(self.down(x_BTD))).mean(1))  # type: ignore[no-any-return]


class _Raw(nn.Module):
    """A model with parameters that do not belong to a layer, so no norm formula covers them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(7, 9), nn.Linear(9, 5)
        self.token, self.gain = nn.Parameter(torch.zeros(1, 1, 9)), nn.Parameter(torch.ones(9))

    def forward(self, x_BTD: Tensor) -> Tensor:
        h = self.inner(x_BTD) * self.gain
        h = torch.cat([self.token.expand(len(h), -1, -1), h], dim=1)
        return self.head(torch.tanh(h).mean(1))  # type: ignore[no-any-return]


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 10, bias=False), nn.Tanh(), nn.Linear(10, 5))


def _convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, padding=1),
        nn.GroupNorm(3, 6),
        nn.Tanh(),
        nn.Conv2d(6, 4, 2, groups=2, bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16, 5),
    )


def _checkpointed() -> nn.Module:
    model = tiny_gpt(2, tied=True)
    for block in model.blocks:
        run = type(block).forward.__get__(block)
        block.forward = partial(checkpoint, run, use_reentrant=False)
    return model


@dataclass(frozen=True)
class ClippingSubject:
    """A model whose clipping is checked, and the shape of its inputs.

    There is one label per sample; a language model, whose `classes` are its token ids (`ids` of them), has one per token.
    """

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    """Shape of one sample."""
    ids: int = 0
    """Number of token ids; 0: inputs are normal numbers."""
    classes: int = 5
    shards: bool = True
    """Whether the model can be run with `fully_shard`."""

    def model(self, dtype: torch.dtype) -> nn.Module:
        """Build the model, with the same weights every time."""
        return perturbed(self.build, 0.2).to(dtype)

    def batch(self, samples: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Draw `samples` inputs and labels, the same every time."""
        x, y = draw_batch(samples, self.shape, self.ids, self.classes)
        return (x if self.ids else x.to(dtype)), y


SUBJECTS = {
    subject.name: subject
    for subject in (
        ClippingSubject("mlp", _mlp, (7,)),
        ClippingSubject("text", _Text, (6,), ids=11),
        ClippingSubject("gpt", lambda: tiny_gpt(2, tied=False), (6,), ids=24, classes=24),
        ClippingSubject("tied gpt", lambda: tiny_gpt(2, tied=True), (6,), ids=24, classes=24),
        ClippingSubject("checkpointed", _checkpointed, (6,), ids=24, classes=24),
        ClippingSubject("conv net", _convnet, (3, 5, 5)),
        ClippingSubject("reused", _Reused, (6, 7)),
        ClippingSubject("adapters", _Adapted, (6, 7)),
        ClippingSubject("raw", _Raw, (6, 7), shards=False),
    )
}


def loss_terms(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Cross entropy of every sample, [B]; the mean over its tokens if there is one label per token."""
    logits = model(x)
    terms = F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="none").view(y.shape)
    return terms.flatten(1).mean(1) if terms.dim() > 1 else terms


def loss_of(model: nn.Module, x: Tensor, y: Tensor, reduction: str | float = "sum") -> Tensor:
    """Loss of a batch: the "mean" or "sum" of the samples' losses, or a number times their sum."""
    terms_B = loss_terms(model, x, y)
    if isinstance(reduction, str):
        return {"mean": terms_B.mean, "sum": terms_B.sum}[reduction]()
    return reduction * terms_B.sum()
