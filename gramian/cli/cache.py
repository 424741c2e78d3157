"""`gramian cache CONFIG.toml [section.key=value …]`: write a teacher's signal for the training windows of a config to disk.

An interrupted build continues where it stopped. Also under torchrun.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from gramian.cli.command_errors import is_first_process
from gramian.cli.config_arguments import add_config_arguments, check_device
from gramian.cli.terminal import make_console, progress_bar, show
from gramian.core.errors import GramianError

if TYPE_CHECKING:
    from gramian.cli.terminal import Update
    from gramian.distill.cache.manifest import Manifest
    from gramian.parallel.process_grid import ProcessGrid
    from gramian.train.config.config import Config
    from gramian.train.loop.precision import Precision

add_arguments = add_config_arguments


def run(arguments: argparse.Namespace) -> int:
    """Build the teacher's cache of a config; the first process prints a summary. Returns the exit code."""
    from gramian.parallel.world import world
    from gramian.train.config.config import load_config

    config = load_config(arguments.config, arguments.overrides)
    if config.teacher is None:
        raise GramianError("teacher: expected a config with [teacher]")
    check_device(config)
    console, started = make_console(quiet=not is_first_process()), time.perf_counter()
    with world(config.run.device == "cpu", False) as grid:
        from gramian.distill.teacher.teacher_origin import write_origin
        from gramian.train.build.build_teacher import cache_folder, teacher_fingerprint
        from gramian.train.loop.precision import resolve_precision, set_globals

        set_globals(config.precision, config.run.deterministic)
        with progress_bar(console, "teacher") as update:
            manifest = write_cache(config, grid, resolve_precision(config.precision, grid.device), update)
        if grid.rank == 0:
            write_origin(cache_folder(config), teacher_fingerprint(config.teacher.path))
        show(console, _summary(manifest, str(cache_folder(config)), time.perf_counter() - started))
    return 0


def write_cache(config: Config, grid: ProcessGrid, numbers: Precision, update: Update) -> Manifest:
    """Compute the teacher's signal for a config's training windows and write the missing part of its cache. Collective."""
    from gramian.data import load_windows
    from gramian.distill.cache.builder import build_cache
    from gramian.train.build.build_teacher import cache_folder, cache_options, live_teacher

    training, _ = load_windows(config.data)
    options = cache_options(config, training.vocabulary)
    teacher = live_teacher(config, grid, numbers, training)
    return build_cache(cache_folder(config), teacher, training, options, grid, update)


def _summary(manifest: Manifest, folder: str, seconds: float) -> str:
    identity = manifest.identity
    size = identity.count * identity.length * manifest.bytes_per_token
    errors = ", ".join(f"{name} {value:.2g}" for name, value in manifest.errors.worst.items())
    return (
        f"{folder}: {identity.kind}, {identity.count:,} windows of {identity.length} tokens, {manifest.bytes_per_token} bytes "
        f"a token, {size / 2**20:,.1f} MiB; largest errors: {errors or 'none'}; {seconds:.0f} s"
    )
