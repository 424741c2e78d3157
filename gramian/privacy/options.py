"""Options of `make_private`, checked before anything is installed."""

import inspect
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer, SparseAdam

from gramian.core.byte_amounts import parse_bytes
from gramian.core.errors import GramianError
from gramian.optim.kfac_optimizer import KFAC
from gramian.privacy.clipping.clip_factors import FunctionName
from gramian.privacy.noise.noise_strategy import NoiseName, check_noise, is_correlated
from gramian.privacy.sampling.population import batch_size_of, population
from gramian.privacy.sampling.record_units import RecordUnits
from gramian.taps.capture import check_arguments

Storage = Literal["auto", "bookkeeping", "keep", "two_pass"]
NormAlgorithm = Literal["auto", "gram", "direct"]
GRAD_SAMPLE_MODES = ("hooks", "functorch", "ew")
"""Values of Opacus' `grad_sample_mode` that are accepted, because they differ in speed alone."""
SMALLEST_NORM = 1e-20
"""Smallest max_grad_norm: below it, clipped gradients would underflow float32."""


@dataclass(frozen=True)
class PrivacyOptions:
    """Options of one private model, as `make_private` documents them."""

    noise_multiplier: float
    max_grad_norm: float | tuple[float, ...]
    clip_function: FunctionName
    clipping: Storage
    norm_algorithm: NormAlgorithm
    loss_reduction: str | float
    poisson_sampling: bool | str
    max_draw: int | None
    max_physical_batch: int | None
    memory_budget: int | str | None
    loss_scale: "float | torch.amp.GradScaler"
    noise: NoiseName
    bands: int | None
    releases: int | None

    def __post_init__(self) -> None:
        """Check all fields; raises a `GramianError` that names the first one with an invalid value."""
        if not is_number(self.noise_multiplier) or self.noise_multiplier < 0:
            raise GramianError(f"noise_multiplier: expected a number of at least 0, got {self.noise_multiplier!r}")
        given = self.max_grad_norm
        several: Any = given if isinstance(given, tuple) and self.clip_function == "per_layer" else (given,)
        if not several or not all(is_number(limit) and limit >= SMALLEST_NORM for limit in several):
            lists = ', or a list of such for clip_function="per_layer"' if isinstance(given, tuple) else ""
            raise GramianError(
                f"max_grad_norm: expected a number above 0 ({SMALLEST_NORM:g} at least){lists}, got {given!r}"
            )
        if self.clipping in get_args(FunctionName):
            raise GramianError(
                f'clipping: "{self.clipping}" is a clipping function; expected it as clip_function="{self.clipping}"'
            )
        for field, value, known in (
            ("clipping", self.clipping, get_args(Storage)),
            ("clip_function", self.clip_function, get_args(FunctionName)),
            ("norm_algorithm", self.norm_algorithm, get_args(NormAlgorithm)),
        ):
            if value not in known:
                names = ", ".join(f'"{name}"' for name in known)
                raise GramianError(f"{field}: expected one of {names}, got {value!r}")
        if not isinstance(self.poisson_sampling, bool) and self.poisson_sampling != "truncated":
            raise GramianError(f'poisson_sampling: expected True, False or "truncated", got {self.poisson_sampling!r}')
        physical: Any = self.max_physical_batch
        if isinstance(physical, str):  # to be planned
            if physical != "auto":
                parse_bytes("max_physical_batch", physical)
            if not self.poisson_sampling:
                raise GramianError(f"max_physical_batch: {physical!r} splits Poisson draws; expected a number or None")
            physical = None
        for field, size in (("max_physical_batch", physical), ("max_draw", self.max_draw)):
            if size is not None and (not isinstance(size, numbers.Integral) or isinstance(size, bool) or size < 1):
                raise GramianError(f"{field}: expected a number of samples or None, got {size!r}")
        if (self.poisson_sampling == "truncated") != (self.max_draw is not None):
            raise GramianError(
                f"max_draw: is {self.max_draw} with poisson_sampling={self.poisson_sampling!r}; expected a number of samples "
                'with "truncated", and None otherwise'
            )
        check_noise(self.noise, self.bands, self.releases)
        if is_correlated(self.noise) and self.poisson_sampling is not True:
            raise GramianError(
                f'poisson_sampling: is {self.poisson_sampling!r}, and noise="{self.noise}" counts on the draws of cyclic '
                "sampling; expected True"
            )
        if is_correlated(self.noise) and self.clip_function == "adaptive":
            raise GramianError(
                f'clip_function: "adaptive" changes the scale of the noise with every release, so that noise="{self.noise}" '
                "does not cancel, and its count would need a share of the sensitivity; expected another function"
            )
        check_arguments(self.loss_reduction, None, None, None, self.loss_scale)
        if not isinstance(self.loss_reduction, str) and self.loss_reduction < 0:
            raise GramianError(f"loss_reduction: expected a coefficient above 0, got {self.loss_reduction!r}")
        _ = self.budget

    @property
    def budget(self) -> int | None:
        """`memory_budget` in bytes; None if it is not set."""
        return parse_bytes("memory_budget", self.memory_budget)


def check_optimizer(module: Any, optimizer: Any) -> None:
    """Check that the optimizer's step can be made private.

    Raises:
        GramianError: for LBFGS, KFAC, an optimizer that requires a closure, SparseAdam, an optimizer that steps inside the
            backward, or arguments of another type.
    """
    if not isinstance(module, nn.Module):
        raise GramianError(f"module: expected an nn.Module, got {type(module).__name__}")
    if not isinstance(optimizer, Optimizer):
        raise GramianError(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    optimizer = innermost(optimizer)
    if isinstance(optimizer, LBFGS):
        raise GramianError(
            "optimizer: LBFGS evaluates the loss several times in one step; expected one backward a step"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise GramianError(
            f"optimizer: {type(optimizer).__name__} asks for a closure, to evaluate the loss several times in one step; "
            "expected one backward a step"
        )
    if isinstance(optimizer, KFAC):
        raise GramianError(
            "optimizer: gramian.optim.KFAC takes its curvature from the private batches, which is outside the accountant; "
            "expected another optimizer, with gramian.precondition and public factors if wanted"
        )
    if isinstance(optimizer, SparseAdam):
        raise GramianError("optimizer: SparseAdam wants sparse gradients, noise is dense; expected Adam")
    for name, p in module.named_parameters():
        if getattr(p, "_post_accumulate_grad_hooks", None):
            raise GramianError(
                f"optimizer: {name} has a hook that acts on its gradient inside the backward (optimizer-in-backward); "
                "expected step() after it"
            )


def innermost(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside of wrappers such as Accelerate's, which have it as `optimizer` and no hooks of their own."""
    while not hasattr(optimizer, "_optimizer_step_pre_hooks") and isinstance(
        inner := getattr(optimizer, "optimizer", None), Optimizer
    ):
        optimizer = inner
    return optimizer


def check_opacus(given: Mapping[str, Any], loss_reduction: str | float) -> None:
    """Check arguments of Opacus' `make_private`: accepted if they ask for what gramian does anyway.

    Args:
        given: the arguments that were given, of `grad_sample_mode`, `secure_mode`, `noise_generator`, `criterion`,
            `batch_first`.
        loss_reduction: argument of gramian's `make_private`, which must equal the criterion's reduction.

    Raises:
        TypeError: for an argument of another name.
        GramianError: for a value that asks for something else, naming what to use instead.
    """
    criterion = given.get("criterion")
    counterparts = {
        "grad_sample_mode": (
            given.get("grad_sample_mode") in GRAD_SAMPLE_MODES,
            'clipping="two_pass" with engine.backward(loss) for "ghost" modes, else the default',
        ),
        "secure_mode": (
            isinstance(given.get("secure_mode"), bool),
            "True or False; the key is the operating system's in any case",
        ),
        "noise_generator": (
            given.get("noise_generator") is None,
            "PrivacyEngine(insecure_reproducible=True, seed=...) for noise that a test can repeat",
        ),
        "criterion": (
            criterion is None or getattr(criterion, "reduction", None) == loss_reduction,
            f"loss_reduction= as the loop reduces its loss (it is {loss_reduction!r}); no criterion is wrapped",
        ),
        "batch_first": (
            given.get("batch_first") is True,
            "True: the batch on the first axis of the model's first tensor (transpose inside the model)",
        ),
    }
    for field, value in given.items():
        if field not in counterparts:
            raise TypeError(f"make_private() got an unexpected keyword argument {field!r}")
        fits, counterpart = counterparts[field]
        if not fits:
            shown = repr(value) if isinstance(value, str | bool | int | float) else type(value).__name__
            raise GramianError(
                f"{field}: {shown} means something else in Opacus than happens here; expected {counterpart}"
            )


@dataclass(frozen=True)
class SamplingRate:
    """Expected batch size and sample rate of the steps of a private run, and the records that they are drawn from."""

    expected_batch: float
    """Average number of samples of a step over all processes; the noised sum is divided by it."""
    sample_rate: float
    """Probability that a record takes part in a step."""
    given: bool
    """True if the user gave the sample rate."""
    records: int | None
    """Number of records, or of units, that batches come from; None: not known."""


def sampling_rate(
    loader: Any,
    world_size: int,
    expected_batch: float | None,
    sample_rate: float | None,
    poisson: bool,
    units: RecordUnits | None = None,
) -> SamplingRate:
    """Expected batch size and sample rate of a private run: as given, otherwise computed from the loader.

    expected_batch None: the loader's batch size times `world_size` processes. sample_rate None: expected_batch / number of
    records, which depends on `poisson` (see `population`). With `units`, both count units. A sample rate without expected_batch
    is refused: the step would divide by rate × records, which reveals whether a record is there.

    Raises:
        GramianError: if a value is not above 0, cannot be computed from the loader, or gives a sample rate above 1.
    """
    for field, value in (("expected_batch", expected_batch), ("sample_rate", sample_rate)):
        if value is not None and not (is_number(value) and value > 0):
            raise GramianError(f"{field}: expected a number above 0, got {value!r}")
    if sample_rate is not None and expected_batch is None:
        raise GramianError(
            "expected_batch: is not given, and sample_rate × records, by which a step would divide, changes with every record; "
            "expected it as an argument beside sample_rate"
        )
    if not hasattr(loader, "__iter__"):
        raise GramianError(f"data_loader: expected a DataLoader, got {type(loader).__name__}")
    given = sample_rate is not None
    size = population(loader, world_size, poisson=poisson, rate_given=given, units=units)
    if size == 0:
        raise GramianError("data_loader: its data set is empty; expected at least one record")
    per_process = batch_size_of(loader)
    if expected_batch is None:
        if per_process is None:
            raise GramianError("expected_batch: the loader has no batch_size; expected it as an argument")
        expected_batch = float(per_process * world_size)
    if sample_rate is None:
        if size is None:
            raise GramianError("sample_rate: the data set has no length; expected it, and expected_batch, as arguments")
        sample_rate = expected_batch / size
    if sample_rate > 1:
        raise GramianError(
            f"sample_rate: is {sample_rate:.4g}; expected at most 1 (a batch no larger than the data set)"
        )
    return SamplingRate(float(expected_batch), float(sample_rate), given, size)


def is_number(value: Any) -> bool:
    """True for a finite real number of Python or NumPy; False for True and False."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
