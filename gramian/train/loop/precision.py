"""In which numbers a run computes: weights, autocast, loss scaling, TF32."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from gramian.core.errors import GramianError
from gramian.train.config.config import PrecisionSection

AMPERE = (8, 0)


@dataclass(frozen=True)
class Numbers:
    """What a precision means on a device."""

    kind: str
    """"bf16", "fp16", "fp32" or "fp64"."""
    device: str

    @property
    def weights(self) -> torch.dtype:
        """Of parameters and optimizer states."""
        return torch.float64 if self.kind == "fp64" else torch.float32

    @property
    def activations(self) -> torch.dtype:
        """Of matrix products."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}[self.kind]

    @property
    def scales(self) -> bool:
        """True if gradients would underflow without a loss scale."""
        return self.kind == "fp16"

    def autocast(self) -> AbstractContextManager[Any]:
        """Around forward and loss."""
        if self.kind not in ("bf16", "fp16"):
            return nullcontext()
        return torch.autocast(self.device, dtype=self.activations)

    def scaler(self) -> "torch.amp.GradScaler | None":
        """A fresh one, where one is needed."""
        return torch.amp.GradScaler(self.device) if self.scales else None


def numbers_for(
    precision: PrecisionSection, device: torch.device, capability: tuple[int, int] | None = None
) -> Numbers:
    """What a config's precision means here.

    Args:
        precision: of the config; "auto": fp32 on a CPU, bf16 from Ampere on, fp16 with a scaler before.
        device: of the run.
        capability: of the GPU; None: asked for.

    Raises:
        GramianError: if the GPU cannot do it.
    """
    if device.type != "cuda":
        return Numbers("fp32" if precision.kind == "auto" else precision.kind, device.type)
    capability = capability or torch.cuda.get_device_capability(device)
    if precision.kind == "bf16" and capability < AMPERE:
        raise GramianError("precision.kind: this GPU has no bf16; expected fp16, fp32 or auto")
    kind = precision.kind if precision.kind != "auto" else ("bf16" if capability >= AMPERE else "fp16")
    return Numbers(kind, device.type)


def set_globals(precision: PrecisionSection, deterministic: bool) -> None:
    """TF32 and deterministic kernels: set for the process, explicitly, whatever they were."""
    torch.set_float32_matmul_precision("high" if precision.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = precision.tf32
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = False
