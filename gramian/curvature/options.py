"""The options of K-FAC as a frozen dataclass that checks each of them by name when it is created."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from gramian.core.byte_amounts import parse_bytes
from gramian.core.errors import GramianError
from gramian.curvature.blocks.damping import DAMPING_MODES, Lambdas

POLICIES = ("all", "auto", "hybrid", "small_only")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
DEVICES = ("auto", "cuda", "cpu")
REDUCTIONS = ("gram", "gather", "dense", "none")
SHARING = ("expand", "reduce")


@dataclass(frozen=True)
class Options:
    """All options of `KFACNaturalGradient`, whose constructor explains each of them."""

    damping: float
    damping_A: float | None
    damping_G: float | None
    damping_mode: str
    max_condition_number: float
    use_eigenvalue_correction: bool
    update_freq: int
    ema_decay: float
    min_layer_size: int
    weight_sharing: str
    kfac_use_woodbury: bool
    kfac_policy: str
    kfac_big_threshold: int
    kfac_true_fisher_head: bool
    kfac_eps: float
    kfac_auto_rho: float
    kfac_auto_t_max: int
    woodbury_store_device: str
    woodbury_dtype: str | None
    kfac_distributed_reduce: str
    max_tokens: int | None
    seed: int
    strict: bool
    memory_budget: int | str | None = None
    ekfac: bool = False
    one_sided: bool = False

    def __post_init__(self) -> None:
        """Raise a GramianError for the first option whose value is not allowed; the message names the values that are."""
        for name in ("damping", "damping_A", "damping_G", "kfac_eps", "kfac_auto_rho"):
            value = getattr(self, name)
            if value is None and name.startswith("damping_"):
                continue
            if not _number(value) or not value > 0:
                raise GramianError(f"{name}: expected a number above 0, got {value!r}")
        if not _number(self.max_condition_number, infinite=True) or not self.max_condition_number > 1:
            raise GramianError(f"max_condition_number: expected a number above 1, got {self.max_condition_number!r}")
        if not _number(self.ema_decay) or not 0 <= self.ema_decay < 1:
            raise GramianError(f"ema_decay: expected a number in [0, 1), got {self.ema_decay!r}")
        for name in ("update_freq", "min_layer_size", "kfac_big_threshold", "kfac_auto_t_max", "max_tokens"):
            value = getattr(self, name)
            if value is not None or name != "max_tokens":
                check_count(name, value)
        check_seed(self.seed)
        for name in (
            "use_eigenvalue_correction",
            "kfac_use_woodbury",
            "kfac_true_fisher_head",
            "strict",
            "ekfac",
            "one_sided",
        ):
            if not isinstance(getattr(self, name), bool):
                raise GramianError(f"{name}: expected True or False, got {getattr(self, name)!r}")
        for name, accepted in (
            ("kfac_policy", POLICIES),
            ("damping_mode", tuple(DAMPING_MODES)),
            ("woodbury_store_device", DEVICES),
            ("kfac_distributed_reduce", REDUCTIONS),
            ("weight_sharing", SHARING),
        ):
            _one_of(name, getattr(self, name), accepted)
        if self.woodbury_dtype is not None:
            _one_of("woodbury_dtype", self.woodbury_dtype, tuple(DTYPES))
        if self.woodbury_store_device == "cuda" and not torch.cuda.is_available():
            raise GramianError('woodbury_store_device: "cuda", but no CUDA device is here; expected "auto" or "cpu"')
        if self.budget == 0:
            raise GramianError(f"memory_budget: expected bytes above 0, got {self.memory_budget!r}")
        self._check_damping()
        if self.ekfac and not self.damps_product:
            raise GramianError(
                f'damping_mode: is "{self.damping_mode}", but ekfac=True has eigenvalues of the product alone; expected "joint"'
            )

    def _check_damping(self) -> None:
        given = [name for name in ("damping_A", "damping_G") if getattr(self, name) is not None]
        if given and not DAMPING_MODES[self.damping_mode].sides:
            raise GramianError(
                f'{given[0]}: damping_mode "{self.damping_mode}" splits damping by itself; expected damping alone, or '
                'damping_mode="factored"'
            )
        if self.damps_product and self.lambdas.A != self.lambdas.G:
            raise GramianError(
                f"damping_A, damping_G: joint damping has one λ, got {self.lambdas.A} and {self.lambdas.G}; "
                'expected equal numbers, or damping_mode="factored"'
            )

    @property
    def budget(self) -> int | None:
        """The option `memory_budget` in bytes; None: no limit."""
        return parse_bytes("memory_budget", self.memory_budget)

    @property
    def lambdas(self) -> Lambdas:
        """Options `damping`, `damping_A` and `damping_G` as `Lambdas`; `damping` replaces the last two where they are None."""
        return Lambdas(
            self.damping,
            self.damping if self.damping_A is None else self.damping_A,
            self.damping if self.damping_G is None else self.damping_G,
        )

    @property
    def damps_product(self) -> bool:
        """True if `damping_mode` is "joint": it adds λ to the product G ⊗ A, which needs the eigenvectors of A and of G."""
        return DAMPING_MODES[self.damping_mode].on_product

    @property
    def joint_lambda(self) -> float:
        """The one λ that logs and capacity metrics use: `damping_A` (if given) under joint damping, else `damping`."""
        return self.lambdas.A if self.damps_product else self.damping

    @property
    def max_condition(self) -> float | None:
        """κ of the clip, which raises damped eigenvalues to at least (largest)/κ; None if the clip is off or κ is infinite."""
        limited = self.use_eigenvalue_correction and math.isfinite(self.max_condition_number)
        return self.max_condition_number if limited else None

    @property
    def low_rank(self) -> bool:
        """True if the options allow low-rank factors: `kfac_use_woodbury` is on and `kfac_policy` is not "small_only"."""
        return self.kfac_use_woodbury and self.kfac_policy != "small_only"

    def storage_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Dtype of stored factors: `woodbury_dtype`, else float64 for float64 parameters and float16 for all others."""
        if self.woodbury_dtype is not None:
            return DTYPES[self.woodbury_dtype]
        return torch.float64 if model_dtype == torch.float64 else torch.float16


def _number(value: Any, infinite: bool = False) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and (math.isfinite(value) or (infinite and value == math.inf))


def _one_of(name: str, value: Any, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        names = ", ".join(f'"{value}"' for value in accepted)
        raise GramianError(f"{name}: expected one of {names}, got {value!r}")


def check_count(name: str, value: Any) -> None:
    """Raise a GramianError unless `value`, the argument `name`, is an integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise GramianError(f"{name}: expected an integer of at least 1, got {value!r}")


def check_seed(seed: Any) -> None:
    """Raise a GramianError unless `seed` is a signed 64-bit integer."""
    if not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**63:
        raise GramianError(f"seed: expected an integer of 64 bits, got {seed!r}")
