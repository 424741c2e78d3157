"""Models and batches on which K-FAC is checked.

Legend: B samples, T tokens, V classes.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gramian.verify.check_models import draw_batch, perturbed, tiny_gpt

IGNORE = -100
"""Label of a position without a loss term."""


@dataclass(frozen=True)
class KFACSubject:
    """A model to check and one batch for it; the loss is a cross entropy with one term per label."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    """Shape of one sample."""
    samples: int
    head: str
    """Name of the layer that returns the logits."""
    classes: int
    ids: int = 0
    """Number of token ids; 0: inputs are normal numbers."""
    causal: bool = False
    """Whether position t predicts the label of t+1 in a Hugging Face style batch."""

    def model(self, device: torch.device, dtype: torch.dtype = torch.float64) -> nn.Module:
        """Build the model on a device and in a dtype, with the same weights every time."""
        return perturbed(self.build, 0.3).to(device, dtype)

    def batch(self, device: torch.device, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """Draw the batch's inputs and labels, the same every time."""
        x, y = draw_batch(self.samples, self.shape, self.ids, self.classes)
        return x.to(device) if self.ids else x.to(device, dtype), y.to(device)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 5))


def _convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(6, 5, 2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(20, 4),
    )


def _deep_linear() -> nn.Module:
    widths = (6, 9, 9, 9, 4)
    return nn.Sequential(*(nn.Linear(i, o, bias=False) for i, o in itertools.pairwise(widths)))


SUBJECTS = {
    subject.name: subject
    for subject in (
        KFACSubject("mlp", _mlp, (7,), samples=6, head="4", classes=5),
        KFACSubject(
            "gpt", lambda: tiny_gpt(1, tied=False), (5,), samples=3, head="head", classes=24, ids=24, causal=True
        ),
        KFACSubject(
            "tied gpt", lambda: tiny_gpt(1, tied=True), (5,), samples=3, head="head", classes=24, ids=24, causal=True
        ),
        KFACSubject("conv net", _convnet, (3, 5, 5), samples=3, head="5", classes=4),
        KFACSubject("deep linear", _deep_linear, (6,), samples=5, head="3", classes=4),
    )
}


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    """Cross entropy of a model over all labels that are not −100, with torch's `reduction`: the loss of all checks."""
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten(), ignore_index=IGNORE, reduction=reduction)
