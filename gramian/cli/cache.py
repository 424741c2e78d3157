"""`gramian cache CONFIG.toml [section.key=value …]`: write the signal of a config's teacher to disk."""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING

from gramian.cli.train import add_config, check_device
from gramian.core.errors import GramianError

if TYPE_CHECKING:
    from gramian.distill.cache.manifest import Manifest


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "cache",
        help="write a teacher's signal to disk",
        description="Write what a config's teacher says of its training windows to disk; goes on where it was ended. "
        "Also under torchrun.",
        allow_abbrev=False,
    )
    add_config(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Build the cache."""
    from gramian.cli.terminal import bar, console
    from gramian.parallel.world import world
    from gramian.train.config.config import load_config

    config = load_config(arguments.config, arguments.overrides)
    if config.teacher is None:
        raise GramianError("teacher: expected a config with [teacher]")
    check_device(config)
    first = os.environ.get("RANK", "0") == "0"
    out, started = console(quiet=not first), time.perf_counter()
    with world(config.run.device == "cpu", False) as where:
        from gramian.data import load_windows
        from gramian.distill.cache.builder import build_cache
        from gramian.distill.teacher.teacher_origin import write_origin
        from gramian.train.build.build_teacher import cache_folder, cache_options, live_teacher, teacher_mark
        from gramian.train.loop.precision import numbers_for, set_globals

        set_globals(config.precision, config.run.deterministic)
        training, _ = load_windows(config.data)
        options = cache_options(config, training.vocabulary)
        teacher = live_teacher(config, where, numbers_for(config.precision, where.device), training)
        with bar(out, "teacher") as progress:
            manifest = build_cache(cache_folder(config), teacher, training, options, where, progress)
        if where.rank == 0:
            write_origin(cache_folder(config), teacher_mark(config.teacher.path))
        told = _told(manifest, str(cache_folder(config)), time.perf_counter() - started)
        out.print(told, markup=False, soft_wrap=True)
    return 0


def _told(manifest: Manifest, folder: str, seconds: float) -> str:
    identity = manifest.identity
    tokens = identity.count * identity.length
    size = tokens * manifest.bytes_per_token
    errors = ", ".join(f"{name} {value:.2g}" for name, value in manifest.errors.worst.items())
    return (
        f"{folder}: {identity.kind}, {identity.count:,} windows of {identity.length} tokens, {manifest.bytes_per_token} bytes "
        f"a token, {size / 2**20:,.1f} MiB; largest errors: {errors or 'none'}; {seconds:.0f} s"
    )
