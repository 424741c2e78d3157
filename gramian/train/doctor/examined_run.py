"""The run that the doctor examines: models, steppers and batches, built from a config as its training would build them."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from gramian.data import Batches, StepBatch, Windows
from gramian.parallel.process_grid import ProcessGrid
from gramian.train.build.build_model import set_recomputation
from gramian.train.build.build_optimizer import build_optimizer
from gramian.train.build.run_parts import build_stepper
from gramian.train.config.config import Config
from gramian.train.loop.objective import Objective
from gramian.train.loop.plain_stepper import PlainStepper
from gramian.train.loop.precision import Precision

ROWS = 16
"""Number of windows of an examined batch."""
BATCHES = 3
"""Number of batches that checks share."""


@dataclass(eq=False)
class ExaminedRun:
    """A config, and the data, models and steppers of its run: the argument of every check."""

    config: Config
    numbers: Precision
    grid: ProcessGrid
    """The process grid, of one process."""
    windows: Windows
    """The training windows."""
    make: Callable[[], nn.Module]
    """Function that builds a model with its initial weights."""
    on_step: Callable[[str], None] = lambda message: None
    """Called with a progress message by checks that take many steps."""

    @property
    def backward_windows(self) -> int:
        """Number of windows per backward pass of the run: no check stores activations of more; 2 if the run plans it."""
        planned = self.config.privacy is not None and self.config.privacy.max_physical_batch
        return self.config.data.micro_batch or (min(2, self.config.data.batch) if planned else self.config.data.batch)

    @property
    def loaded(self) -> bool:
        """Whether the model starts from trained weights."""
        return self.config.model.kind == "huggingface" and not self.config.model.fresh

    @cached_property
    def trial_stepper(self) -> PlainStepper:
        """Plain stepper that consecutive checks share: its model has initial weights at first; later checks take some steps."""
        return self.stepper(self.model())

    @property
    def trial_model(self) -> nn.Module:
        """The model that `trial_stepper` trains."""
        model: nn.Module = self.trial_stepper.module.model  # type: ignore[assignment]
        return model

    @cached_property
    def batches(self) -> list[StepBatch]:
        """The first `BATCHES` batches of the run."""
        return [self.batch(position=position) for position in range(BATCHES)]

    @property
    def rows(self) -> dict[str, Tensor]:
        """All windows of the first batch, {name: [windows, T]}."""
        return rows_of(self.batches[0])

    def model(self) -> nn.Module:
        """Build a new model on the run's device and in its precision, without dropout and not compiled."""
        model = self.make().to(device=self.grid.device, dtype=self.numbers.weights)
        set_recomputation(model, self.config.parallel.checkpoint_blocks)
        without_dropout(model)
        return model.train()

    def stepper(self, model: nn.Module, rate: float | None = None, natural: bool = False) -> PlainStepper:
        """Build a stepper with the config's optimizer, without weight decay and without [privacy].

        `rate` is its initial learning rate (None: the config's); `natural` gradients need [kfac] and no [privacy].
        """
        config, module = self.config, Objective(model)
        options = dataclasses.replace(config.optimizer, weight_decay=0.0, lr=rate or config.optimizer.lr)
        optimizer = build_optimizer(module, options, self.grid.device, config.kfac, config.run.seed)
        kfac = config.kfac if natural and not config.privacy else None
        plain = dataclasses.replace(config, privacy=None, kfac=kfac, data=dataclasses.replace(config.data, user=""))
        found = build_stepper(plain, self.grid, self.numbers, self.windows, module, optimizer)
        assert isinstance(found, PlainStepper)
        return found

    def batch(self, rows: int = ROWS, position: int = 0) -> StepBatch:
        """Return batch number `position` of `rows` windows, in the run's data order and micro-batches, on its device."""
        batches = Batches(
            self.windows,
            batch=rows,
            micro_batch=min(self.backward_windows, rows),
            seed=self.config.run.seed,
            device=self.grid.device,
        )
        return next(batches.from_position(position))


def without_dropout(model: nn.Module) -> None:
    """Turn dropout off in training mode: in modules, and where modules and their configs store a probability as a number."""
    configs = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None
    }
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
    for owner in (*model.modules(), *configs.values()):
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop") or name == "layerdrop"):
                object.__setattr__(owner, name, 0.0)  # the config may be frozen


def rows_of(batch: StepBatch) -> dict[str, torch.Tensor]:
    """Concatenate all micro-batches of a batch: {name: [windows, T]}, without the window indices."""
    return {name: torch.cat([micro[name] for micro in batch.micro]) for name in batch.micro[0] if name != "windows"}
