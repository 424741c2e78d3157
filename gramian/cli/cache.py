"""`gramian cache CONFIG.toml [--tokens] [section.key=value …]`: write a teacher's signal for a config's windows, or its tokens.

An interrupted build continues where it stopped. A teacher's signal also under torchrun; tokens on all cores of one machine.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from gramian.cli.command_errors import is_first_process, refuse_torchrun
from gramian.cli.config_arguments import add_config_arguments, check_device
from gramian.cli.terminal import later_progress_bar, make_console, progress_bar, show
from gramian.core.errors import GramianError

if TYPE_CHECKING:
    from gramian.cli.terminal import Update
    from gramian.distill.cache.manifest import Manifest
    from gramian.parallel.process_grid import ProcessGrid
    from gramian.train.config.config import Config
    from gramian.train.loop.precision import Precision


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `gramian cache` to a parser."""
    add_config_arguments(parser)
    parser.add_argument(
        "--tokens", action="store_true", help="tokenise the files of the config into data.cache, and nothing else"
    )


def run(arguments: argparse.Namespace) -> int:
    """Build the teacher's cache of a config; the first process prints a summary. Returns the exit code."""
    from gramian.parallel.world import world
    from gramian.train.config.config import load_config

    config = load_config(arguments.config, arguments.overrides)
    if arguments.tokens:
        return _write_tokens(config)
    if config.teacher is None:
        raise GramianError("teacher: expected a config with [teacher], or --tokens")
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


def _write_tokens(config: Config) -> int:
    """Tokenise a config's files; prints the folders and what they hold."""
    from gramian.data import load_tokenizer
    from gramian.data.documents import write_tokens

    refuse_torchrun("cache --tokens")
    console = make_console()
    with later_progress_bar(console, "bytes tokenised") as update:
        for folder, (documents, tokens, seconds) in write_tokens(
            config.data, load_tokenizer(config.data.tokenizer), update
        ).items():
            show(console, f"{folder}: {documents:,} documents, {tokens:,} tokens; {seconds:.0f} s")
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
