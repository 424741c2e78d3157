"""From a config to the parts of a run: windows, model, objective, optimizer, stepper."""

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from gramian.curvature import KFACNaturalGradient, precondition
from gramian.curvature.precondition import KL_CLIP
from gramian.errors import GramianError
from gramian.models.gpt import GPT, GPTConfig
from gramian.parallel.world import World
from gramian.parallel.wrap import spread
from gramian.train.config import Config
from gramian.train.data import Batches, StepBatch, Windows, load_windows
from gramian.train.objective import Objective
from gramian.train.optimizers import build_optimizer
from gramian.train.precision import Numbers, numbers_for, set_globals
from gramian.train.private import Draw, PrivateStepper
from gramian.train.public import PublicCurvature
from gramian.train.stepper import Stepper


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
    optimizer: Optimizer
    stepper: Stepper | PrivateStepper
    batches: Batches | None
    """None of a private run, whose stepper draws its own."""

    def batches_from(self, position: int, skipped: Collection[int]) -> Iterator[StepBatch] | Iterator[Draw]:
        """Batches from a position of the data on."""
        if self.batches is not None:
            return self.batches.from_position(position, skipped)
        assert isinstance(self.stepper, PrivateStepper)
        return self.stepper.batches()

    @property
    def digest(self) -> list[str]:
        """Of all data that decides a step: a run is resumed on the same."""
        curvature = self.stepper.curvature if isinstance(self.stepper, PrivateStepper) else None
        return [self.training.digest] + ([] if curvature is None else [curvature.windows.digest])

    def close(self) -> None:
        """End the data workers."""
        if self.batches is not None:
            self.batches.close()


def build(config: Config, world: World) -> Parts:
    """All parts of a run, fresh.

    Raises:
        GramianError: naming the field that does not fit the data, the model or the machine.
    """
    if config.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when it starts
    set_globals(config.precision, config.run.deterministic)
    if config.kfac is not None and world.size > 1:
        raise GramianError("kfac: works on one process for now; expected no torchrun, or a config without [kfac]")
    numbers = numbers_for(config.precision, world.device)
    training, validation = load_windows(config.data)
    model = build_model(config, training.vocabulary).to(device=world.device, dtype=numbers.weights)
    recompute(model, config.parallel.checkpoint_blocks)
    if config.compile.mode != "off":
        model.compile(mode=None if config.compile.mode == "default" else config.compile.mode)
    module = spread(Objective(model), world, world.kind)
    optimizer = build_optimizer(module, config.optimizer, world.device)
    stepper = build_stepper(config, world, numbers, training, module, optimizer)
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
    return Parts(config, world, numbers, training, validation, model, module, optimizer, stepper, batches)


def build_stepper(
    config: Config, world: World, numbers: Numbers, training: Windows, module: nn.Module, optimizer: Optimizer
) -> Stepper | PrivateStepper:
    """How a step is taken: plainly, along natural gradients, or privately."""
    kfac = None
    if config.kfac is not None:
        kfac = build_kfac(config)
    if config.privacy is not None:
        curvature = None if kfac is None else PublicCurvature(module, kfac, config, numbers, world)
        stepper = PrivateStepper(module, optimizer, numbers, world, config, training, curvature)
        if config.kfac is not None and kfac is not None:  # after the engine's hook: on gradients that have their noise
            precondition(optimizer, module, kfac, kl_clip=config.kfac.kl_clip or KL_CLIP)
        return stepper
    if config.kfac is not None and kfac is not None:
        precondition(optimizer, module, kfac, kl_clip=config.kfac.kl_clip or KL_CLIP)
    return Stepper(
        module, optimizer, numbers, world, max_norm=config.optimizer.max_norm, seed=config.run.seed, kfac=kfac
    )


def build_kfac(config: Config) -> KFACNaturalGradient:
    """With the options that the config names, else the library's defaults."""
    assert config.kfac is not None
    told: dict[str, Any] = {
        name: value
        for name in ("damping", "ema_decay", "kfac_policy", "max_tokens")
        if (value := getattr(config.kfac, name)) is not None
    }
    return KFACNaturalGradient(
        update_freq=config.kfac.update_freq,
        damping_mode=config.kfac.damping_mode,
        kfac_true_fisher_head=config.kfac.kfac_true_fisher_head,
        seed=config.run.seed,
        **told,
    )


def build_model(config: Config, vocabulary: int) -> nn.Module:
    """The model, with fresh or loaded weights.

    Raises:
        GramianError: naming the field that does not fit.
    """
    options, data = config.model, config.data
    if options.kind == "gpt":
        shape = GPTConfig(
            vocabulary=vocabulary,
            context=data.length,
            layers=options.layers,
            width=options.width,
            heads=options.heads,
            tied=options.tied,
            dropout=options.dropout,
        )
        return GPT(shape, seed=config.run.seed)
    return load_huggingface(str(options.path), options.fresh, vocabulary, data.length, config.run.seed)


def load_huggingface(path: str, fresh: bool, vocabulary: int, length: int, seed: int) -> nn.Module:
    """A causal language model from a folder: safetensors alone, nothing from a hub.

    Raises:
        GramianError: naming the field that does not fit.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise GramianError("model.kind: huggingface needs transformers; expected gramian[hf] installed") from None
    if not (Path(path) / "config.json").is_file():
        raise GramianError(f"model.path: {path} has no config.json; expected the folder of a Hugging Face model")
    try:
        shape = AutoConfig.from_pretrained(path, local_files_only=True)
        if fresh:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                    shape, attn_implementation="sdpa"
                )
        else:
            model = AutoModelForCausalLM.from_pretrained(
                path, local_files_only=True, use_safetensors=True, attn_implementation="sdpa", dtype=torch.float32
            )
    except (OSError, ValueError) as problem:
        raise GramianError(f"model.path: {path} cannot be loaded ({' '.join(str(problem).split())[:200]})") from None
    if shape.vocab_size < vocabulary:
        raise GramianError(
            f"model.path: its vocabulary of {shape.vocab_size} is smaller than the tokenizer's {vocabulary}; "
            "expected a tokenizer that belongs to the model"
        )
    limit = getattr(shape, "max_position_embeddings", None) or getattr(shape, "n_positions", None)
    if limit is not None and length > limit:
        raise GramianError(f"data.length: expected at most the model's context of {limit}, got {length}")
    found: nn.Module = model
    return found.train()


def recompute(model: nn.Module, blocks: int) -> None:
    """Recompute activations in segments of so many blocks.

    Raises:
        GramianError: if the model knows only one segment size.
    """
    if isinstance(model, GPT):
        model.checkpoint_blocks = blocks
    elif blocks == 1:
        model.gradient_checkpointing_enable(  # type: ignore[operator]
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    elif blocks:
        raise GramianError(f"parallel.checkpoint_blocks: expected 0 or 1 for a Hugging Face model, got {blocks}")
