"""From a config to the parts of a run: windows, model, objective, optimizer, stepper."""

import copy
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from gramian.curvature import KFACNaturalGradient
from gramian.data import Batches, StepBatch, Windows, load_windows
from gramian.distill.cache.reader import Cache
from gramian.distill.teaching import Teaching
from gramian.models.goose import Goose
from gramian.models.gpt import GPT
from gramian.optim.precondition import KL_CLIP, precondition
from gramian.parallel.world import World
from gramian.parallel.wrap import spread
from gramian.plan.host_memory import HostPlan
from gramian.train.build.build_model import build_model, recompute
from gramian.train.build.build_optimizer import build_optimizer
from gramian.train.build.snapshot_budget import plan_snapshots
from gramian.train.config.config import Config
from gramian.train.loop.lookahead import announced
from gramian.train.loop.objective import Objective
from gramian.train.loop.precision import Numbers, numbers_for, set_globals
from gramian.train.loop.private_stepper import Draw, PrivateStepper
from gramian.train.loop.public_curvature import PublicCurvature
from gramian.train.loop.stepper import Stepper


@dataclass(frozen=True)
class Parts:
    """What a run consists of."""

    config: Config
    world: World
    numbers: Numbers
    training: Windows
    validation: Windows
    model: nn.Module
    module: nn.Module
    """Model and loss, spread over processes."""
    teaching: Teaching | None
    optimizer: Optimizer
    stepper: Stepper | PrivateStepper
    batches: Batches | None
    """None of a private run, whose stepper draws its own."""
    host: HostPlan
    """Copies of the state in host memory."""

    def batches_from(self, position: int, skipped: Collection[int]) -> Iterator[StepBatch] | Iterator[Draw]:
        """Batches from a position of the data on; rows of a cached teacher are read a step ahead."""
        if self.batches is not None:
            batches = self.batches.from_position(position, skipped)
            source = None if self.teaching is None else self.teaching.source
            return announced(batches, source) if isinstance(source, Cache) else batches
        assert isinstance(self.stepper, PrivateStepper)
        return self.stepper.batches()

    @property
    def digests(self) -> dict[str, str]:
        """{part of the data: its digest}, of all that decides a step or what is the best: a run is resumed on the same."""
        curvature = self.stepper.curvature if isinstance(self.stepper, PrivateStepper) else None
        found = {"training": self.training.digest, "validation": self.validation.digest}
        return found if curvature is None else {**found, "curvature": curvature.windows.digest}

    def field_of(self, part: str) -> str:
        """The key of the config that names a part of the data."""
        data = self.config.data
        if part == "curvature":
            return "kfac.public_files"
        if part == "validation" and data.validation_files:
            return "data.validation_files"
        return "data.source" if data.source == "embedded" else "data.files"

    def close(self) -> None:
        """End the data workers, and let go of the teacher's files."""
        for held in (self.batches, self.stepper, self.teaching):
            if isinstance(held, Batches | PrivateStepper | Teaching):
                held.close()


def build(config: Config, world: World) -> Parts:
    """All parts of a run, fresh.

    Raises:
        GramianError: naming the field that does not fit the data, the model or the machine.
    """
    if config.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when it starts
    set_globals(config.precision, config.run.deterministic)
    numbers = numbers_for(config.precision, world.device)
    training, validation = load_windows(config.data)
    model = build_model(config, training.vocabulary).to(device=world.device, dtype=numbers.weights)
    host = plan_snapshots(config, world, numbers, model, None if config.kfac is None else build_kfac(config))
    recompute(model, config.parallel.checkpoint_blocks)
    if config.compile.mode != "off":
        compile_model(model, config.compile.mode, hidden=config.teacher is not None)
    objective, teaching = build_objective(config, world, numbers, training, model)
    public = None
    if (
        config.kfac is not None and config.privacy is not None
    ):  # alone where the model is whole: nobody needs its gradients
        public = spread(copy.deepcopy(objective), world, "fsdp2" if world.kind == "fsdp2" else "one")
    module = spread(objective, world, world.kind)
    optimizer = build_optimizer(module, config.optimizer, world.device)
    stepper = build_stepper(config, world, numbers, training, module, optimizer, teaching, public)
    data, batches = config.data, None
    if isinstance(stepper, Stepper):
        batches = Batches(
            training,
            batch=data.batch,
            micro_batch=data.micro_batch,
            seed=config.run.seed,
            rank=world.rank,
            world=world.size,
            workers=data.workers,
            prefetch=data.prefetch,
            device=world.device,
        )
    return Parts(
        config, world, numbers, training, validation, model, module, teaching, optimizer, stepper, batches, host
    )


def build_objective(
    config: Config, world: World, numbers: Numbers, training: Windows, model: nn.Module
) -> tuple[nn.Module, Teaching | None]:
    """Model and loss, and the teacher where there is one."""
    if config.teacher is None:
        return Objective(model), None
    from gramian.train.build import build_teacher

    teaching = build_teacher.build_teaching(config, world, numbers, training)
    return build_teacher.build_objective(config, model, teaching.source), teaching


def compile_model(model: nn.Module, mode: str, hidden: bool) -> None:
    """Compile a model's call, or that of its body, which a student's loss reads without the head."""
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
    world: World,
    numbers: Numbers,
    training: Windows,
    module: nn.Module,
    optimizer: Optimizer,
    teaching: Teaching | None = None,
    public: nn.Module | None = None,
) -> Stepper | PrivateStepper:
    """How a step is taken: plainly, along natural gradients, or privately.

    Args:
        config: of the run.
        world: this process among the others.
        numbers: the precision.
        training: the windows.
        module: objective, spread over processes.
        optimizer: over its parameters.
        teaching: the teacher, where there is one.
        public: a copy of the module that sees public data, where [kfac] stands beside [privacy].
    """
    kfac = None
    if config.kfac is not None:
        kfac = build_kfac(config)
    if config.privacy is not None:
        curvature = None
        if kfac is not None and public is not None:
            curvature = PublicCurvature(module, public, kfac, config, numbers, world)
        stepper = PrivateStepper(module, optimizer, numbers, world, config, training, curvature)
        if config.kfac is not None and kfac is not None:  # after the engine's hook: on gradients that have their noise
            precondition(optimizer, module, kfac, kl_clip=config.kfac.kl_clip or KL_CLIP)
        return stepper
    if config.kfac is not None and kfac is not None:
        precondition(optimizer, module, kfac, kl_clip=config.kfac.kl_clip or KL_CLIP)
    return Stepper(
        module,
        optimizer,
        numbers,
        world,
        max_norm=config.optimizer.max_norm,
        seed=config.run.seed,
        kfac=kfac,
        teaching=teaching,
    )


def build_kfac(config: Config) -> KFACNaturalGradient:
    """With the options that the config names, else the library's defaults."""
    assert config.kfac is not None
    told: dict[str, Any] = {
        name: value
        for name in ("damping", "ema_decay", "kfac_policy", "max_tokens", "memory_budget")
        if (value := getattr(config.kfac, name)) is not None
    }
    return KFACNaturalGradient(
        update_freq=config.kfac.update_freq,
        damping_mode=config.kfac.damping_mode,
        kfac_true_fisher_head=config.kfac.kfac_true_fisher_head,
        kfac_distributed_reduce=config.kfac.kfac_distributed_reduce,
        seed=config.run.seed,
        **told,
    )
