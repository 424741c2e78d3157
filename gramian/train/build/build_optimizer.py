"""Build the optimizer of a config, with weight decay for matrices but not for biases and norms, and the curvature of a run."""

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW
from torch.optim.optimizer import Optimizer

from gramian.core.errors import GramianError
from gramian.curvature import KFACNaturalGradient
from gramian.optim.kfac_optimizer import KFAC
from gramian.train.config.config import Config
from gramian.train.config.config_sections import KFACSection, OptimizerSection


def build_optimizer(
    model: nn.Module,
    options: OptimizerSection,
    device: torch.device,
    kfac: KFACSection | None = None,
    seed: int = 0,
) -> Optimizer:
    """Build AdamW, SGD or KFAC over the model's trainable parameters; weight decay applies to those of two or more dimensions.

    The implementation "auto" is fused if there is such a kernel for the device, else foreach. `kfac` and `seed` are for KFAC
    alone. Raises a GramianError if no parameter is trainable, or if fused SGD is asked for sharded parameters.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise GramianError("model: has no trainable parameter; expected at least one with requires_grad=True")
    if options.kind == "kfac":
        return _build_kfac_optimizer(model, options, kfac, seed)
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


def build_curvature(config: Config, model: nn.Module) -> KFACNaturalGradient | None:
    """Build the K-FAC object that a run estimates its curvature with; None without [kfac] and without the optimizer "kfac".

    `model` may be on the meta device: nothing is computed.
    """
    if config.optimizer.kind == "kfac":
        return _build_kfac_optimizer(model, config.optimizer, config.kfac, config.run.seed).kfac
    if config.kfac is None:
        return None
    names = {field.name for field in dataclasses.fields(config.kfac)} - {"kl_clip", "public_files", "precondition"}
    try:
        return KFACNaturalGradient(seed=config.run.seed, **_given(config.kfac, tuple(sorted(names))))
    except GramianError as error:  # options that do not fit together, or the machine
        raise GramianError(f"kfac.{error}") from None


def _build_kfac_optimizer(model: nn.Module, options: OptimizerSection, kfac: KFACSection | None, seed: int) -> KFAC:
    given = {} if kfac is None else _given(kfac, ("update_freq", "damping", "ema_decay", "max_tokens"))
    steps: dict[str, Any] = {"momentum": options.betas[0], "betas": options.betas, "eps": options.eps}
    return KFAC(model, options.lr, options.weight_decay, seed=seed, **steps, **given)


def _given(section: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """{name: value} of the options that are set; those that are None have the library's defaults."""
    return {name: value for name in names if (value := getattr(section, name)) is not None}
