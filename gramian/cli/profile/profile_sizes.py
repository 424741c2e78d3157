"""Sizes that `gramian profile clipping` and `kfac` measure, from the command line or a config, and the loop over lengths."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from gramian.cli.config_arguments import check_device
from gramian.core.errors import GramianError

if TYPE_CHECKING:
    from gramian.cli.terminal import Update
    from gramian.parallel.process_grid import ProcessGrid
    from gramian.verify.profiles.profiled_model import ProfiledModel

SIZES = ("layers", "width", "vocabulary")
"""Names of the options that set the size of the reference GPT."""
P = TypeVar("P")


@dataclass(frozen=True)
class ProfileSizes:
    """The model that a profile measures, and the shapes of its batches."""

    model: ProfiledModel
    seq_lengths: list[int]
    """Tokens per sequence of each measurement, ascending."""
    batch_size: int
    """Sequences per step on each process."""
    cpu: bool
    """Whether to measure on the CPU even if there is a GPU."""


def read_sizes(arguments: argparse.Namespace, defaults: Mapping[str, Any]) -> ProfileSizes:
    """Sizes from the command line; missing ones are those of CONFIG or, without a config, the `defaults` of the reference GPT.

    Raises:
        GramianError: if an argument or a field of the config does not fit; the message names it.
    """
    from gramian.train.config.config import load_config
    from gramian.verify.profiles.profiled_model import model_of_config, reference_gpt

    given = {name: getattr(arguments, name) for name in ("seq_lengths", "batch_size", *SIZES)}
    given = {name: value for name, value in given.items() if value is not None}
    if arguments.config is None:
        chosen = {**defaults, **given}
        lengths = sorted(set(chosen["seq_lengths"]))
        try:
            model = reference_gpt(chosen["layers"], chosen["width"], chosen["vocabulary"], lengths[-1])
        except GramianError as problem:
            raise GramianError(f"argument --{problem}") from None
        return ProfileSizes(model, lengths, chosen["batch_size"], arguments.cpu)
    if arguments.tp:
        raise GramianError("argument --tp: spreads linears of the reference GPT; expected it without CONFIG.toml")
    for name in SIZES:
        if name in given:
            raise GramianError(f"argument --{name}: is for the reference GPT; expected it without CONFIG.toml")
    config = load_config(arguments.config, arguments.overrides)
    check_device(config)
    lengths = sorted(set(given.get("seq_lengths", [config.data.length])))
    batch_size = given.get("batch_size", config.data.batch)
    cpu = arguments.cpu or config.run.device == "cpu"
    return ProfileSizes(model_of_config(config, lengths[-1]), lengths, batch_size, cpu)


@contextmanager
def profile_world(sizes: ProfileSizes, arguments: argparse.Namespace) -> Iterator[ProcessGrid]:
    """Context manager that starts the process group of torchrun, or of one process, and yields the grid of --fsdp and --tp."""
    from gramian.parallel.world import world
    from gramian.verify.model_layouts import with_tensor_parallel

    with world(sizes.cpu, arguments.fsdp or arguments.tp) as grid:
        yield with_tensor_parallel(grid, arguments.fsdp) if arguments.tp else grid


def measure_lengths(
    lengths: Sequence[int],
    grid: ProcessGrid,
    bar: AbstractContextManager[Update],
    steps: int,
    measure: Callable[[int, Callable[[], None]], P],
) -> tuple[list[P], str]:
    """Call `measure(length, on_progress)` for one sequence length after another, until one fails on any process. Collective.

    `bar` is a context manager with the progress callback, `steps` the number of calls of `on_progress` at each length. Returns
    the results, and why it ended early ("" if it did not).
    """
    from gramian.verify.profiles.measurements import first_line

    profiles: list[P] = []
    done = 0

    def advance(length: int) -> None:
        nonlocal done
        done += 1
        update(done, steps * len(lengths), f"sequence length {length}")

    with bar as update:
        for length in lengths:
            try:
                measured = measure(length, partial(advance, length))
                grid.wait()
            except (RuntimeError, MemoryError, GramianError) as problem:  # out of memory is a RuntimeError in torch
                return profiles, grid.first_failure(f"sequence length {length}: {first_line(problem)}")
            profiles.append(measured)
    return profiles, ""
