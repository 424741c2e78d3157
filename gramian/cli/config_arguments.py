"""Command-line arguments that several commands share: a config with overrides, integers, TARGET; and checks of the device."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gramian.core.bounded_numbers import LARGEST_INTEGER
from gramian.core.errors import GramianError

if TYPE_CHECKING:
    from gramian.train.config.config import Config


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the positional arguments CONFIG.toml and section.key=value (overrides of the config) to a parser."""
    parser.add_argument("config", metavar="CONFIG.toml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")


def positive_integer(text: str) -> int:
    """Parse the text of an argument as an integer from 1 to 2**31 - 1; raises argparse's ArgumentTypeError otherwise."""
    return _integer(text, 1, LARGEST_INTEGER, "of at least 1, and below 2**31")


def seed_number(text: str) -> int:
    """Parse the text of an argument as an integer from 0 to 2**63 - 1; raises argparse's ArgumentTypeError otherwise."""
    return _integer(text, 0, 2**63 - 1, "from 0 to 2**63 - 1")


def _integer(text: str, least: int, most: int, expected: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected an integer {expected}")
    return number


def check_target(
    command: str, arguments: argparse.Namespace, usages: Mapping[str, str], foreign: Mapping[str, Sequence[str]]
) -> None:
    """Check the argument TARGET (what a command works on), and that no option is given that belongs to other targets only.

    `usages` is {target: its usage}, `foreign` is {target: names of arguments that it does not have}.

    Raises:
        GramianError: its message names the argument, and what is expected.
    """
    target, expected = arguments.target, f"expected {', '.join(usages)}"
    if target is None:
        raise GramianError(f"argument TARGET: none given; {expected}")
    if target not in usages:
        raise GramianError(f"argument TARGET: {target!r} is unknown; {expected}")
    for name in foreign[target]:
        value = getattr(arguments, name)
        if value:
            option = {"config": "CONFIG", "overrides": "section.key=value"}.get(name, f"--{name.replace('_', '-')}")
            given = "" if value is True else f" {value!r}"
            raise GramianError(f"argument {option}:{given} is not for {command} {target}; expected {usages[target]}")


def check_device(config: Config) -> None:
    """Raise a GramianError if a config asks for a GPU and this machine has none.

    Raises:
        GramianError: for `run.device = "cuda"` without a CUDA device.
    """
    import torch

    if config.run.device == "cuda" and not torch.cuda.is_available():
        raise GramianError("run.device: there is no CUDA device here; expected auto or cpu")


def is_sharded(config: Config) -> bool:
    """Whether FSDP2 shards the model of a config.

    With the strategy "auto" the memory planner chooses if torchrun started this process and it has a GPU; otherwise False.
    """
    import torch

    from gramian.parallel.world import started_by_torchrun
    from gramian.plan.parallel_strategy import decide
    from gramian.train.build.memory_needs import needs_of, vocabulary_of
    from gramian.train.loop.precision import resolve_precision

    if config.parallel.strategy != "auto":
        return config.parallel.strategy == "fsdp2"
    if not started_by_torchrun() or config.run.device == "cpu" or not torch.cuda.is_available():
        return False
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    kind: Any = resolve_precision(config.precision, device).kind
    needs = needs_of(config, vocabulary_of(config.data), kind, "cuda")
    memory = torch.cuda.get_device_properties(device).total_memory
    return decide(needs, int(os.environ["WORLD_SIZE"]), memory).student == "fsdp2"
