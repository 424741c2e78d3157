"""The optimizer of a config: matrices decay, biases and norms do not; the fastest implementation there is."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW
from torch.optim.optimizer import Optimizer

from gramian.core.errors import GramianError
from gramian.train.config import config


def build_optimizer(model: nn.Module, options: config.OptimizerSection, device: torch.device) -> Optimizer:
    """AdamW or SGD over the model's trainable parameters.

    Args:
        model: whose parameters; shared ones once.
        options: of the config.
        device: decides what "auto" means: fused where there is such a kernel, else foreach.

    Raises:
        GramianError: if nothing is trained, or what is asked for does not exist.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise GramianError("model: has no trainable parameter; expected at least one with requires_grad=True")
    chosen = options.implementation
    no_kernel = options.kind == "sgd" and any(isinstance(p, DTensor) for p in trained)
    if chosen == "fused" and no_kernel:
        raise GramianError(
            'optimizer.implementation: torch has no fused SGD of sharded parameters; expected "auto", "foreach" or "loop"'
        )
    if chosen == "auto":
        chosen = "fused" if device.type in ("cuda", "cpu") and not no_kernel else "foreach"
    how = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False, "fused": False}}[chosen]
    if options.kind == "sgd":
        return SGD(groups, lr=options.lr, momentum=options.momentum, **how)
    return AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps, **how)
