"""`gramian train CONFIG.toml [section.key=value …]`: train, or resume what the folder holds."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from gramian.cli import RunFailed
from gramian.errors import GramianError

if TYPE_CHECKING:
    from gramian.train.config import Config


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
    from gramian.train.config import load_config

    config = load_config(arguments.config, arguments.overrides)
    first = os.environ.get("RANK", "0") == "0"
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
    from gramian.train.run_folder import RunFolder

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


def _train(config: Config, where: Any, folder: Any, first: bool) -> int:
    import torch
    from rich.console import Console

    from gramian.cli.train_progress import Progress
    from gramian.train.build import build
    from gramian.train.data import DataWorkerDied
    from gramian.train.record import write_record
    from gramian.train.trainer import Trainer

    console = Console(quiet=not first)
    try:
        parts = build(config, where)
    except (torch.OutOfMemoryError, MemoryError) as problem:
        raise _out_of_memory(problem) from None
    if first:
        write_record(folder.path, parts)
    with Progress(console, config) as progress:
        trainer = Trainer(parts, folder, progress.show, progress.tell)
        try:
            ended = trainer.run()
        except DataWorkerDied as problem:
            raise RunFailed(str(problem)) from None
        except (torch.OutOfMemoryError, MemoryError) as problem:
            raise _out_of_memory(problem) from None
        except RuntimeError as problem:
            if "can't allocate memory" in str(problem):  # the host's
                raise _out_of_memory(problem) from None
            if where.size == 1 or not any(
                word in str(problem).lower() for word in ("gloo", "nccl", "connection", "peer")
            ):
                raise
            raise RunFailed(
                f"process {where.rank} lost another one ({str(problem).splitlines()[0][:200]}); expected all of them to go on: "
                "torchrun --max-restarts resumes"
            ) from None
    if ended.reason == "stopped":
        raise RunFailed(ended.report)
    progress.end(trainer, ended.reason)
    return 0


def _out_of_memory(problem: Exception) -> RunFailed:
    told = (str(problem).splitlines() or ["of the host"])[0]
    return RunFailed(
        f"out of memory ({told[:200]}); expected a smaller data.micro_batch or model, or parallel.checkpoint_blocks"
    )


def sharded(config: Config) -> bool:
    """Whether the model is sharded: as the config says, or as the planner finds that it must be."""
    import torch

    from gramian.parallel.strategy import decide
    from gramian.parallel.world import started_by_torchrun
    from gramian.train.needs import needs_of, vocabulary_of
    from gramian.train.precision import numbers_for

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
