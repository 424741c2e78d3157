"""What is examined: fresh models, steppers and batches of a config, as its run would build them."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from gramian.data import Batches, StepBatch, Windows
from gramian.parallel.world import World
from gramian.train.build.build_model import recompute
from gramian.train.build.build_optimizer import build_optimizer
from gramian.train.build.run_parts import build_stepper
from gramian.train.config.config import Config
from gramian.train.loop.objective import Objective
from gramian.train.loop.precision import Numbers
from gramian.train.loop.stepper import Stepper

ROWS = 16
"""Windows of a batch that is looked at."""


@dataclass(frozen=True, eq=False)
class ExaminedRun:
    """A config and what its run is made of."""

    config: Config
    numbers: Numbers
    world: World
    """Of one process."""
    windows: Windows
    """To train on."""
    make: Callable[[], nn.Module]
    """A model with its initial weights."""

    @property
    def room(self) -> int:
        """Windows of one backward in the run: no check holds activations of more."""
        return self.config.data.micro_batch or self.config.data.batch

    def model(self) -> nn.Module:
        """One of its own, where and in which numbers the run has it; without dropout, not compiled."""
        model = self.make().to(device=self.world.device, dtype=self.numbers.weights)
        recompute(model, self.config.parallel.checkpoint_blocks)
        without_dropout(model)
        return model.train()

    def stepper(self, model: nn.Module, rate: float | None = None, natural: bool = False) -> Stepper:
        """Steps of the config's optimizer, without weight decay; plain ones, whatever [privacy] says.

        Args:
            model: whose.
            rate: learning rate that the optimizer is built with; None: the config's.
            natural: along natural gradients, where there is [kfac] without [privacy].
        """
        config, module = self.config, Objective(model)
        options = dataclasses.replace(config.optimizer, weight_decay=0.0, lr=rate or config.optimizer.lr)
        optimizer = build_optimizer(module, options, self.world.device)
        plain = dataclasses.replace(config, privacy=None, kfac=config.kfac if natural and not config.privacy else None)
        found = build_stepper(plain, self.world, self.numbers, self.windows, module, optimizer)
        assert isinstance(found, Stepper)
        return found

    def batch(self, rows: int = ROWS, position: int = 0) -> StepBatch:
        """So many windows in the run's order, in its micro-batches, on its device."""
        batches = Batches(
            self.windows,
            batch=rows,
            micro_batch=min(self.room, rows),
            seed=self.config.run.seed,
            device=self.world.device,
        )
        return next(batches.from_position(position))


def without_dropout(model: nn.Module) -> None:
    """Drop nothing in training mode: modules, and the probabilities that modules and their configs hold as numbers."""
    holders = {id(held): held for module in model.modules() if (held := getattr(module, "config", None)) is not None}
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
    for holder in (*model.modules(), *holders.values()):
        for name, value in list(getattr(holder, "__dict__", {}).items()):
            if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop") or name == "layerdrop"):
                object.__setattr__(holder, name, 0.0)  # the config may be frozen


def rows_of(batch: StepBatch) -> dict[str, torch.Tensor]:
    """All micro-batches as one, [R, T] under each name."""
    return {name: torch.cat([micro[name] for micro in batch.micro]) for name in batch.micro[0] if name != "windows"}
