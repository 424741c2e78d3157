"""`gramian train CONFIG.toml [section.key=value …]`: train, or resume what the folder holds."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gramian.cli import RunFailed
from gramian.core.errors import GramianError

if TYPE_CHECKING:
    from gramian.parallel.world import World
    from gramian.train.config.config import Config
    from gramian.train.state.run_folder import RunFolder


FAILED_ON_ONE = re.compile(r"process \d+: (?!GramianError)\w*(Error|Exception|Interrupt)\b")
"""How processes that share curvature hear of an error of one of them."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "train",
        help="train a model as a config says, or resume its run",
        description="Train; a folder that holds a run of the same config is resumed. Also under torchrun.",
        allow_abbrev=False,
    )
    add_config(parser)
    parser.set_defaults(run=run)


def add_config(parser: argparse.ArgumentParser) -> None:
    """The arguments of every command that reads a config."""
    parser.add_argument("config", metavar="CONFIG.toml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")


def run(arguments: argparse.Namespace) -> int:
    """Train."""
    from gramian.train.config.config import load_config

    first = os.environ.get("RANK", "0") == "0"
    try:
        config = load_config(arguments.config, arguments.overrides)
    except GramianError:
        if first:
            raise
        return 2  # the first process says it for all
    return train(config, first)


def train(config: Config, first: bool) -> int:
    """Train as one process of all.

    Args:
        config: of the run.
        first: True for the one that prints.

    Returns:
        The exit code: 0 if it came to its end or was told to leave, 1 if the guard stopped it.
    """
    from gramian.parallel.world import world
    from gramian.train.state.run_folder import RunFolder

    cpu = config.run.device == "cpu"
    check_device(config)
    with world(cpu, sharded(config)) as where:
        folder, problem = RunFolder(config), ""
        if where.rank == 0:
            try:
                folder.__enter__()
            except GramianError as found:
                problem = str(found)
        try:
            if where.most(float(bool(problem))):
                raise GramianError(where.first_failure(problem) if problem else "run.folder: cannot be taken")
            return _train(config, where, folder, first)
        finally:
            folder.__exit__(None, None, None)


def _train(config: Config, where: World, folder: RunFolder, first: bool) -> int:
    from rich.console import Console

    from gramian.cli.train_progress import Progress
    from gramian.train.build.run_parts import build
    from gramian.train.loop.trainer import Trainer

    console = Console(quiet=not first)
    with _in_one_line(where):
        parts = build(config, where)
        with Progress(console, config) as progress:
            trainer = Trainer(parts, folder, progress.show, progress.tell)
            ended = trainer.run()
    if ended.reason == "stopped":
        raise RunFailed(ended.report + progress.validity(trainer))
    progress.end(trainer, ended.reason)
    return 0


@contextmanager
def _in_one_line(where: World) -> Iterator[None]:
    """What a run may fail of though nothing is wrong with its config.

    Raises:
        RunFailed: for dead data workers, full memories, lost processes, and what a process failed of if it was no bad input.
    """
    import torch

    from gramian.data import DataWorkerDied

    try:
        yield
    except DataWorkerDied as problem:
        raise RunFailed(str(problem)) from None
    except GramianError as problem:
        if FAILED_ON_ONE.match(str(problem)):  # it ends with 1, and so do those that heard of it
            raise RunFailed(str(problem)) from None
        raise
    except (RuntimeError, MemoryError) as problem:
        told = (str(problem).splitlines() or ["of the host"])[0][:200]
        full = isinstance(problem, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in told
        if full:
            raise RunFailed(
                f"out of memory ({told}); expected a smaller data.micro_batch or model, or parallel.checkpoint_blocks"
            ) from None
        lost = any(word in str(problem).lower() for word in ("gloo", "nccl", "connection", "peer"))
        if where.size == 1 or not lost:
            raise
        raise RunFailed(
            f"process {where.rank} lost another one ({told}); expected all of them to go on: torchrun --max-restarts resumes"
        ) from None


def sharded(config: Config) -> bool:
    """Whether the model is sharded: as the config says, or as the planner finds that it must be."""
    import torch

    from gramian.parallel.world import started_by_torchrun
    from gramian.plan.parallel_strategy import decide
    from gramian.train.build.memory_needs import needs_of, vocabulary_of
    from gramian.train.loop.precision import numbers_for

    if config.parallel.strategy != "auto":
        return config.parallel.strategy == "fsdp2"
    if not started_by_torchrun() or config.run.device == "cpu" or not torch.cuda.is_available():
        return False
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    kind: Any = numbers_for(config.precision, device).kind
    needs = needs_of(config, vocabulary_of(config.data), kind, "cuda")
    memory = torch.cuda.get_device_properties(device).total_memory
    return decide(needs, int(os.environ["WORLD_SIZE"]), memory).student == "fsdp2"


def check_device(config: Config) -> None:
    """Refuse a GPU that is not there.

    Raises:
        GramianError: naming the key.
    """
    import torch

    if config.run.device == "cuda" and not torch.cuda.is_available():
        raise GramianError("run.device: there is no CUDA device here; expected auto or cpu")
