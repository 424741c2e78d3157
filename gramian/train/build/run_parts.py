"""Build the parts of a run from its config: windows, model, objective, optimizer, stepper."""

import copy
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from gramian.data import Batches, StepBatch, Windows, load_windows
from gramian.data.token_store.build_store import Progress, no_progress
from gramian.distill.cache.reader import Cache
from gramian.distill.teaching import Teaching
from gramian.models.goose import Goose
from gramian.models.gpt import GPT
from gramian.optim.kfac_optimizer import KFAC
from gramian.optim.precondition import KL_CLIP, precondition
from gramian.parallel.process_grid import ProcessGrid
from gramian.parallel.wrap_data_parallel import wrap_data_parallel
from gramian.plan.host_memory import HostPlan
from gramian.train.build.build_model import build_model, set_recomputation
from gramian.train.build.build_optimizer import build_curvature, build_optimizer
from gramian.train.build.snapshot_budget import plan_snapshots
from gramian.train.config.config import Config
from gramian.train.loop.distilling_stepper import DistillingStepper
from gramian.train.loop.lookahead import announced
from gramian.train.loop.objective import Objective
from gramian.train.loop.plain_stepper import PlainStepper
from gramian.train.loop.precision import Precision, resolve_precision, set_globals
from gramian.train.loop.private_stepper import Draw, PrivateStepper
from gramian.train.loop.public_curvature import PublicCurvature
from gramian.train.loop.stepper import Stepper


@dataclass(frozen=True)
class Parts:
    """All parts of a run: config, data, model, loss, optimizer and stepper."""

    config: Config
    grid: ProcessGrid
    numbers: Precision
    training: Windows
    validation: Windows
    model: nn.Module
    module: nn.Module
    """Model and loss as one module, distributed over processes."""
    teaching: Teaching | None
    optimizer: Optimizer
    stepper: Stepper
    batches: Batches | None
    """The batches of training data; None if the run is private, because its stepper draws its own."""
    host: HostPlan
    """Plan of the snapshots of the state in host memory."""

    def batches_from(self, position: int, skipped: Collection[int]) -> Iterator[StepBatch] | Iterator[Draw]:
        """Iterate over the batches from data position (batch index) `position` on, without the positions in `skipped`.

        A private run ignores both arguments: its stepper continues to draw random batches.
        """
        if self.batches is not None:
            batches = self.batches.from_position(position, skipped)
            source = None if self.teaching is None else self.teaching.source
            return announced(batches, source) if isinstance(source, Cache) else batches
        draws = self.stepper.draws()
        assert draws is not None
        return draws

    @property
    def digests(self) -> dict[str, str]:
        """{part of the data: its digest} of all data that affects training; a run is resumed only on the same data."""
        found = {"training": self.training.digest, "validation": self.validation.digest}
        return {**found, **self.stepper.data_digests()}

    def field_of(self, part: str) -> str:
        """Return the config key that names a part of the data: "training", "validation" or "curvature"."""
        data = self.config.data
        if part == "curvature":
            return "kfac.public_files"
        if part == "validation" and data.validation_files:
            return "data.validation_files"
        return "data.source" if data.source == "embedded" else "data.files"

    def close(self) -> None:
        """Stop the data workers, and close the teacher's files."""
        for part in (self.batches, self.stepper, self.teaching):
            if part is not None:
                part.close()


def build(config: Config, grid: ProcessGrid, progress: Progress = no_progress) -> Parts:
    """Build all parts of a new run; `progress` is told how far a large corpus is tokenised, which the first start does.

    Raises:
        GramianError: one line that names a field that does not fit the data, model or machine.
    """
    set_globals(config.precision, config.run.deterministic)
    numbers = resolve_precision(config.precision, grid.device)
    training, validation = load_windows(config.data, progress)
    model = build_model(config, training.vocabulary).to(device=grid.device, dtype=numbers.weights)
    host = plan_snapshots(config, grid, numbers, model, build_curvature(config, model))
    set_recomputation(model, config.parallel.checkpoint_blocks)
    if config.compile.mode != "off":
        compile_model(model, config.compile.mode, hidden=config.teacher is not None)
    objective, teaching = build_objective(config, grid, numbers, training, model)
    public = None
    if config.kfac is not None and config.privacy is not None:  # without DDP: gradients of the copy are not reduced
        public = wrap_data_parallel(copy.deepcopy(objective), grid, ddp=False)
    module = wrap_data_parallel(objective, grid)
    optimizer = build_optimizer(module, config.optimizer, grid.device, config.kfac, config.run.seed)
    stepper = build_stepper(config, grid, numbers, training, module, optimizer, teaching, public)
    data, batches = config.data, None
    if config.privacy is None:
        batches = Batches(
            training,
            batch=data.batch,
            micro_batch=data.micro_batch,
            seed=config.run.seed,
            rank=grid.rank,
            world_size=grid.size,
            workers=data.workers,
            prefetch=data.prefetch,
            device=grid.device,
        )
    return Parts(
        config, grid, numbers, training, validation, model, module, teaching, optimizer, stepper, batches, host
    )


def build_objective(
    config: Config, grid: ProcessGrid, numbers: Precision, training: Windows, model: nn.Module
) -> tuple[nn.Module, Teaching | None]:
    """Build the loss around `model`, and the teacher if the config has one; returns (model and loss, teacher or None)."""
    if config.teacher is None:
        return Objective(model), None
    from gramian.train.build import build_teacher

    teaching = build_teacher.build_teaching(config, grid, numbers, training)
    return build_teacher.build_objective(config, model, teaching.source), teaching


def compile_model(model: nn.Module, mode: str, hidden: bool) -> None:
    """Compile the forward pass of a model; with `hidden` that of its body only, because a student's loss applies the head."""
    how: Any = None if mode == "default" else mode
    if not hidden:
        model.compile(mode=how)
    elif isinstance(model, GPT | Goose):
        model.hidden = torch.compile(model.hidden, mode=how)  # type: ignore[method-assign]
    else:
        from gramian.distill.teacher.language_model import body_of

        body_of(model).compile(mode=how)


def build_stepper(
    config: Config,
    grid: ProcessGrid,
    numbers: Precision,
    training: Windows,
    module: nn.Module,
    optimizer: Optimizer,
    teaching: Teaching | None = None,
    public: nn.Module | None = None,
) -> Stepper:
    """Build the stepper, which takes the optimizer steps of a run: plain, with natural gradients, distilling, or private.

    `module` is model and loss, distributed over processes. `public` is a copy of it that estimates curvature on public data,
    for a run with both [kfac] and [privacy]; else None.
    """
    kfac = optimizer.kfac if isinstance(optimizer, KFAC) else build_curvature(config, module)
    options: dict[str, Any] = {"max_norm": config.optimizer.max_norm, "seed": config.run.seed, "kfac": kfac}
    stepper: Stepper
    if config.privacy is not None:
        curvature = None
        if kfac is not None and public is not None:
            curvature = PublicCurvature(module, public, kfac, config, numbers, grid)
        stepper = PrivateStepper(module, optimizer, numbers, grid, config, training, curvature)
    elif teaching is not None:
        stepper = DistillingStepper(module, optimizer, numbers, grid, teaching=teaching, **options)
    else:
        stepper = PlainStepper(module, optimizer, numbers, grid, **options)
    if (
        config.kfac is not None and config.kfac.precondition and kfac is not None and not isinstance(optimizer, KFAC)
    ):  # after the private engine's hook: its gradients have their noise
        precondition(optimizer, module, kfac, kl_clip=config.kfac.kl_clip or KL_CLIP)
    return stepper
