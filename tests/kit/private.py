"""Private training as most tests want it."""

from typing import Any

import torch
from torch import Tensor, nn

import gramian
from gramian.privacy.noise.element_noise import Box, NoisePlan


def attach(engine: gramian.PrivacyEngine, module: nn.Module, data_loader: Any, **options: Any) -> tuple[Any, Any, Any]:
    """`engine.make_private` with SGD at lr 0.1, noise 1, clip norm 1 and the loader's own batches unless options differ."""
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(module.parameters(), lr=0.1)
    usual = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "poisson_sampling": False}
    return engine.make_private(module=module, optimizer=optimizer, data_loader=data_loader, **{**usual, **options})


def add_noise(plan: NoisePlan, t: Tensor, name: str, std: Any, release: int, box: Box | None = None) -> Tensor:
    """Add the noise of a release to one parameter's contiguous tensor, or to its `box`, in place; returns it."""
    plan.add_noise_to([t], [t], [plan.place(name, t.shape, box)], std, release)
    return t
