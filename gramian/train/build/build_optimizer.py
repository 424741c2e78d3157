"""Build the optimizer of a config: weight decay for matrices but not for biases and norms, in the fastest implementation."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW
from torch.optim.optimizer import Optimizer

from gramian.core.errors import GramianError
from gramian.train.config.config_sections import OptimizerSection


def build_optimizer(model: nn.Module, options: OptimizerSection, device: torch.device) -> Optimizer:
    """Build AdamW or SGD over the model's trainable parameters; weight decay applies to those of two or more dimensions.

    The implementation "auto" is fused if there is such a kernel for the device, else foreach. Raises a GramianError if no
    parameter is trainable, or if fused SGD is asked for sharded parameters.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise GramianError("model: has no trainable parameter; expected at least one with requires_grad=True")
    implementation = options.implementation
    no_kernel = options.kind == "sgd" and any(isinstance(p, DTensor) for p in trained)
    if implementation == "fused" and no_kernel:
        raise GramianError(
            'optimizer.implementation: torch has no fused SGD for sharded parameters; expected "auto", "foreach" or "loop"'
        )
    if implementation == "auto":
        implementation = "fused" if device.type in ("cuda", "cpu") and not no_kernel else "foreach"
    flags = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False, "fused": False}}
    how = flags[implementation]
    if options.kind == "sgd":
        return SGD(groups, lr=options.lr, momentum=options.momentum, **how)
    return AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps, **how)
