"""Numeric precision of a run: dtype of weights, autocast, loss scaling, TF32."""

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from gramian.core.errors import GramianError
from gramian.train.config.config_sections import PrecisionSection

AMPERE = (8, 0)


@dataclass(frozen=True)
class Precision:
    """Numeric precision of a run on a device type: dtypes, autocast and loss scaling."""

    kind: str
    """Name of the precision: "bf16", "fp16", "fp32" or "fp64"."""
    device: str

    @property
    def weights(self) -> torch.dtype:
        """Dtype of parameters and optimizer state: float64 for "fp64", else float32."""
        return torch.float64 if self.kind == "fp64" else torch.float32

    @property
    def activations(self) -> torch.dtype:
        """Dtype in which matrix products are computed."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}[self.kind]

    @property
    def scales(self) -> bool:
        """Whether the precision needs a loss scale, because gradients would underflow: "fp16"."""
        return self.kind == "fp16"

    def autocast(self) -> AbstractContextManager[Any]:
        """Context manager for forward and loss: torch.autocast for "bf16" and "fp16", else empty."""
        if self.kind not in ("bf16", "fp16"):
            return nullcontext()
        return torch.autocast(self.device, dtype=self.activations)

    def scaler(self) -> "torch.amp.GradScaler | None":
        """A new loss scaler; None if the precision needs none."""
        return torch.amp.GradScaler(self.device) if self.scales else None


def resolve_precision(
    precision: PrecisionSection, device: torch.device, capability: tuple[int, int] | None = None
) -> Precision:
    """The precision that a config asks for on a device; `capability` None: the compute capability of that GPU.

    "auto" is fp32 on a CPU, bf16 on Ampere and later, fp16 with a loss scaler on older GPUs. Raises a GramianError if the
    config asks for bf16 and the GPU is older than Ampere.
    """
    if device.type != "cuda":
        return Precision("fp32" if precision.kind == "auto" else precision.kind, device.type)
    capability = capability or torch.cuda.get_device_capability(device)
    if precision.kind == "bf16" and capability < AMPERE:
        raise GramianError("precision.kind: this GPU has no bf16; expected fp16, fp32 or auto")
    kind = precision.kind if precision.kind != "auto" else ("bf16" if capability >= AMPERE else "fp16")
    return Precision(kind, device.type)


def set_globals(precision: PrecisionSection, deterministic: bool) -> None:
    """Set TF32 and deterministic kernels for the whole process."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
    torch.set_float32_matmul_precision("high" if precision.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = precision.tf32
    set_deterministic(deterministic)
    torch.backends.cudnn.benchmark = False


def set_deterministic(deterministic: bool, warn_only: bool = False) -> None:
    """Switch deterministic kernels on or off for the process, in compiled graphs too; `warn_only`: warn where there is none.

    `torch.use_deterministic_algorithms` imports the compiler, two seconds, also where nothing is compiled; here the compiler
    reads the choice when it is imported.
    """
    if "torch._inductor.config" in sys.modules:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        return
    torch.set_deterministic_debug_mode(("warn" if warn_only else "error") if deterministic else "default")
    os.environ["TORCHINDUCTOR_DETERMINISTIC"] = str(int(deterministic))
