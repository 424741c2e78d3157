"""The base class of steppers, which take the optimizer steps of a run: all methods that the training loop calls.

A stepper owns the model, the optimizer and the loss scaler of a run and takes one optimizer step per call. There are three:
`PlainStepper` (also along natural gradients), `DistillingStepper` (a student with a teacher) and `PrivateStepper` (DP-SGD).
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gramian.curvature import KFACNaturalGradient
from gramian.data import StepBatch
from gramian.optim.kfac_optimizer import KFAC
from gramian.parallel.process_grid import ProcessGrid
from gramian.privacy.clipping.step_timing import Stopwatch
from gramian.train.loop.deferred_metrics import StepOutcome
from gramian.train.loop.objective import IGNORED
from gramian.train.loop.precision import Precision

Event = dict[str, Any]
TRUST_REGION = ("trust_region",)
"""Name of the value that a step along natural gradients reports: the factor, at most 1, of its trust region."""


@dataclass(frozen=True)
class TakenStep:
    """The result of one optimizer step; its values stay on the device, so that nothing waits for them."""

    values: Tensor
    """[Σ −log p(target) over all processes, number of processes that raised the flag, tokens of the loss, gradient norm, then
    one value for each name in `Stepper.extra`], float64."""
    stepped: bool
    """Whether the optimizer stepped; False if the loss scaler skipped the step."""


class Stepper:
    """Takes the optimizer steps of a run; saves the state and reports the metrics and events of its kind of training.

    The methods defined here are those of a run without a teacher and without privacy.
    """

    module: nn.Module
    """Model and loss as one module, wrapped for several processes."""
    optimizer: Optimizer
    numbers: Precision
    grid: ProcessGrid
    scaler: torch.amp.GradScaler | None
    kfac: KFACNaturalGradient | None
    stopwatch: Stopwatch
    """Times of the parts of a step; recorded if the environment has GRAMIAN_PROFILE=1."""
    captured: nn.Module
    """The module whose backward passes K-FAC observes."""
    extra: tuple[str, ...] = ()
    """Names of the values that a step reports after loss, flags, tokens and gradient norm."""
    repeatable: bool = True
    """Whether steps can be computed again on the same batches; not in a private run: each step publishes a new noised sum."""

    def take(self, batch: Any, rate: float, flag: bool = False) -> TakenStep:
        """Take one optimizer step on `batch` at learning rate `rate`; a `flag` raised on one process is reported to all."""
        raise NotImplementedError

    def watch(self, batch: Any) -> None:
        """Run forward and backward of a batch without an optimizer step; only for steppers that are `repeatable`.

        `p.grad` is then the gradient of the step times the loss scale, not clipped.
        """
        raise AssertionError("the steps of this run are not repeated")

    def prepare(self) -> None:
        """Run the checks of this kind of training that must pass before the first step; raises if one fails."""

    def begin(self, step: int) -> None:
        """Called with the index of the optimizer step that is taken next."""

    def teacher(self) -> str | None:
        """Hash of the teacher's weights, which a resumed run must have again; None without one. Collective if it is sharded."""
        return None

    def close(self) -> None:
        """End the data workers of the stepper, if it has any."""

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of all parameter groups of the optimizer to `rate`."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def _step(self) -> bool:
        """Step the optimizer, through the loss scaler if there is one; returns False if the scaler skipped the step."""
        if self.scaler is None:
            self.optimizer.step()
            return True
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale() >= before

    # ---- data --------------------------------------------------------------------------------------------------------

    def draws(self) -> Iterator[Any] | None:
        """Iterator of batches that the stepper draws itself; None if it takes those of the data loader."""
        return None

    def data_digests(self) -> dict[str, str]:
        """{name: digest} of data that the stepper reads in addition to training and validation data."""
        return {}

    # ---- state -------------------------------------------------------------------------------------------------------

    def sections(self) -> dict[str, Any]:
        """State to save, {section: nested dicts and lists of tensors and plain values}; here K-FAC's."""
        return {} if self.kfac is None else {"kfac": self.kfac.state_dict()}

    def judged_sections(self) -> dict[str, Any]:
        """The part of the state that depends on metrics of past steps, which arrive later than the steps are taken."""
        return {}

    def load_sections(self, sections: Mapping[str, Any], validated: int | None = None) -> None:
        """Restore the state that `sections` and `judged_sections` returned, except what a rollback must not take back.

        For a rollback, `validated` is the step up to which evaluations are not repeated; else None.
        """
        if self.kfac is not None:
            self.kfac.load_state_dict(sections["kfac"], self.captured)

    # ---- metrics -----------------------------------------------------------------------------------------------------

    def metrics(self, outcome: StepOutcome) -> dict[str, Any]:
        """Metrics of a step for `metrics.jsonl` in addition to loss and gradient norm, {name: value}."""
        return {name: outcome.extra[name] for name in TRUST_REGION if name in outcome.extra}

    def _trust_region(self, like: Tensor) -> Tensor:
        """[1], or [] without natural gradients: the factor of the last step's trust region, NaN where there was no step.

        In the dtype and on the device of `like`; nothing waits for it.
        """
        if TRUST_REGION[0] not in self.extra:
            return like.new_empty(0)
        assert self.kfac is not None
        scale, self.kfac.state.trust_region = self.kfac.state.trust_region, None
        return like.new_full((1,), math.nan) if scale is None else scale.to(like)[None]

    def curvature_record(self) -> dict[str, Any] | None:
        """`KFACNaturalGradient.record` with the damping that steps use; None before the first refresh, or without curvature.

        Of all processes together.
        """
        if self.kfac is None or not self.kfac.refreshes:
            return None
        return self.optimizer.record() if isinstance(self.optimizer, KFAC) else self.kfac.record()

    def plans(self) -> dict[str, Any]:
        """Plans that are known only after the first step, {name: `PlanTable.facts()`}; none without privacy."""
        return {}

    def observe(self, outcome: StepOutcome) -> list[Event]:
        """Called with the metrics of every step; returns events for the log."""
        return []

    def validated(self, step: int, loss: float) -> list[Event]:
        """Called with the validation loss after `step` steps; returns events for the log."""
        return []

    # ---- privacy -----------------------------------------------------------------------------------------------------

    def attach(self, folder: Path, *, resumed: bool) -> None:
        """Store the count of releases (published noised sums) in the run folder; the file must exist if the run is resumed."""

    def resume(self, sections: Mapping[str, Any], *, replay: bool) -> str | None:
        """Restore from a checkpoint what `load_sections` does not: the state that a rollback must not take back.

        With `replay` the run continues exactly as it did after the checkpoint, where that is possible. Returns why its steps
        are not replayed; None if they are, or if that does not matter.
        """
        return None

    def exhausted(self, steps: int) -> bool:
        """Whether the privacy budget of a run of `steps` steps is spent; False without privacy."""
        return False

    def epsilon(self) -> float | None:
        """ε of all releases (published noised sums) so far; None without privacy."""
        return None

    def privacy_record(self) -> dict[str, Any] | None:
        """Parameters of the DP mechanism; "proof": whether each row of a layer depends on one sample; None if not private."""
        return None


def seed_all(seed: int, *place: int) -> None:
    """Seed torch's generators from `seed` and the place in the run (step, micro-batch, rank): no generator state is saved."""
    key = hashlib.blake2b(repr((seed, *place)).encode(), digest_size=8, person=b"dropout").digest()
    torch.manual_seed(int.from_bytes(key, "little") >> 1)


def terms_and_ids(batch: StepBatch, i: int) -> dict[str, Any]:
    """K-FAC capture arguments for micro-batch `i`: its number of targets, and the indices of its rows in the step."""
    sizes, targets_BT = [len(micro["targets"]) for micro in batch.micro], batch.micro[i]["targets"]
    first = batch.first + sum(sizes[:i])
    return {"num_terms": int((targets_BT != IGNORED).sum()), "sample_ids": torch.arange(first, first + sizes[i])}
