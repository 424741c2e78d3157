"""`gramian curvature CONFIG.toml | --model PATH --text FILE…`: capacity metrics and spectra of every layer of a model.

The model is that of a config (its run's best checkpoint, else fresh weights) on its training data, or a Hugging Face model
folder on text files. Writes a table, curvature.json, and pictures. Under torchrun the processes share the rows of every batch,
and the first one prints and writes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gramian.cli.command_errors import RunFailed, is_out_of_memory, only_first_complains
from gramian.cli.config_arguments import positive_integer
from gramian.cli.terminal import Update, in_parts, make_console, progress_bar, show
from gramian.core.errors import GramianError

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from gramian.analysis.options import Settings
    from gramian.analysis.subject import Subject
    from gramian.parallel.process_grid import ProcessGrid
    from gramian.train.config.config import Config

DEFAULT_OUT = Path("runs/curvature")
STAGE_NAMES = {"kfac": "K-FAC", "ggn": "Gauss-Newton matrix", "hessian": "Hessian"}
PARTS = 8
"""Number of progress lines that a stage prints if the output is not a terminal."""
GPU_FULL = "Moved to the CPU: the memory of the GPU was full."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `gramian curvature` to a parser."""
    add = parser.add_argument
    add("config", nargs="?", metavar="CONFIG.toml", help="a training config")
    add("overrides", nargs="*", metavar="section.key=value", help="with a config")
    add("--model", metavar="PATH", help="a Hugging Face model folder, in place of a config; nothing is downloaded")
    add("--text", nargs="+", metavar="FILE", help="text files, or folders of them, for --model")
    add("--masked", action="store_true", help="of an encoder: mask 15 %% of the tokens and score those, by the model's own "
        "head or, where it has none, against its input embeddings")  # fmt: skip
    add("--tokens", type=positive_integer, default=1024, metavar="N", help="about how many are read (default: 1024)")
    add("--length", type=positive_integer, metavar="T", help="tokens of a window, with --model (default: 128)")
    add("--batch", type=positive_integer, metavar="B", help="windows of one pass (default: about 1024 tokens)")
    add("--fisher", default="mc", metavar="KIND", help="labels of K-FAC: empirical (the data's), mc (drawn from the model, "
        "default), true (the head exact, else mc)")  # fmt: skip
    add("--damping", type=float, metavar="λ", help="of condition number, log det, effective dimension (default: 0.03)")
    add("--samples", type=float, metavar="N", help="how many the model was trained on: adds the heuristic pac_bayes = "
        "√(trace/N)")  # fmt: skip
    add("--eigenvalues", type=int, default=5, metavar="K", help="largest ones of K-FAC and Gauss-Newton (default: 5)")
    add("--probes", type=int, default=4, metavar="P", help="random vectors of the Gauss-Newton density (default: 4); 0: "
        "K-FAC alone")  # fmt: skip
    add("--steps", type=int, default=16, metavar="S", help="Lanczos steps of each probe (default: 16)")
    add("--hessian", action="store_true", help="both ends of the Hessian's spectrum, too")
    add(
        "--ekfac",
        action="store_true",
        help="EK-FAC's eigenvalues in place of K-FAC's, from a second pass over the data",
    )
    add("--policy", metavar="KIND", help="which factors are low rank: all, auto, hybrid or small_only (default: "
        "kfac.kfac_policy of the config, else all)")  # fmt: skip
    add("--memory-budget", metavar="BYTES", help="most that K-FAC's factors take on a device, such as 2GB (default: "
        "kfac.memory_budget of the config, else no limit)")  # fmt: skip
    add("--device", metavar="NAME", help="cpu or cuda (default: the config's, else cuda where there is one)")
    add("--dtype", metavar="NAME", help="fp32 or fp64 (default: fp32, and fp64 of a run in fp64)")
    add("--seed", type=int, default=0, metavar="SEED", help="of labels, masks and probes (default: 0)")
    add(
        "--methods", action="store_true", help="write methods.md: a Methods paragraph and the reproducibility checklist"
    )
    add("--out", type=Path, metavar="DIR", help=f"a new folder (default: {DEFAULT_OUT}, numbered)")


def run(arguments: argparse.Namespace) -> int:
    """Measure the curvature of a model, print tables, and write curvature.json and pictures. Returns the exit code.

    Raises:
        RunFailed: if it is interrupted or memory is full; the message says what was written.
        GramianError: if an argument does not fit.
    """
    return only_first_complains(lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    settings, config = _settings(arguments), None
    if arguments.config is not None:
        from gramian.train.config.config import load_config

        config = load_config(arguments.config, arguments.overrides)
        settings = _with_kfac_section(settings, config, arguments)
    on_cpu = _is_cpu(arguments.device, "auto" if config is None else config.run.device)

    from gramian.parallel.world import world

    with world(on_cpu, False) as grid:
        return _measure(arguments, settings, config, grid)


def _measure(arguments: argparse.Namespace, settings: Settings, config: Config | None, grid: ProcessGrid) -> int:
    from gramian.analysis import plots
    from gramian.analysis.measure import placed
    from gramian.analysis.methods import write_methods
    from gramian.analysis.result_file import FILE, write_result
    from gramian.cli.curvature.curvature_tables import result_tables

    console = make_console(quiet=grid.rank > 0)
    loaded = _subject(arguments, config, grid)
    show(console, *_heading(loaded, grid))
    with _argument_named():
        subject, plan = placed(loaded, settings, grid)
    show(console, *plan.lines(), *subject.notes[len(loaded.notes) :])
    folder = _new_folder(arguments.out, grid)
    stored: dict[str, Any] = {}
    written: list[Path] = []

    def store(result: Mapping[str, Any]) -> None:
        if folder is not None:
            write_result(result, folder)
            stored.update(result)

    try:
        result = _analysed(subject, settings, console, store, grid)
        if folder is not None:
            written = [folder / FILE, *(plots.draw(result, folder) if plots.available() else [])]
            if arguments.methods:
                write_methods(result, folder / "methods.md")
                written.append(folder / "methods.md")
    except (KeyboardInterrupt, RuntimeError, MemoryError, GramianError) as problem:
        stored_part = _stored_part(folder, stored)
        if isinstance(problem, KeyboardInterrupt):
            raise RunFailed(f"curvature: interrupted; {stored_part}") from None
        if isinstance(problem, GramianError) or not is_out_of_memory(problem):
            raise
        full = "curvature: out of memory; expected fewer --tokens, or a smaller --batch"
        raise RunFailed(f"{full}; {stored_part}") from None
    show(console, *result_tables(result))
    if not plots.available():
        show(console, "no pictures: matplotlib is not here; expected gramian[plot]")
    show(console, "written: " + ", ".join(map(str, written)))
    return 0


def _analysed(
    subject: Subject,
    settings: Settings,
    console: Console,
    store: Callable[[Mapping[str, Any]], None],
    grid: ProcessGrid,
) -> dict[str, Any]:
    """The result of an analysis; if a GPU's memory turns out to be too small, it begins again on the CPU.

    On one process only: of several, one that moves to the CPU would be waited for by the rest.
    """
    import torch

    from gramian.analysis.measure import analyse

    def stage(name: str) -> AbstractContextManager[Update]:
        return _stage(console, STAGE_NAMES[name])

    try:
        return analyse(subject, settings, stage, store, grid)
    except torch.OutOfMemoryError:
        if grid.size > 1 or grid.device.type == "cpu" or next(subject.model.parameters()).device.type == "cpu":
            raise
        subject = subject.to(torch.device("cpu"), GPU_FULL)
    torch.cuda.empty_cache()
    show(console, GPU_FULL)
    return analyse(subject, settings, stage, store, grid)


# ---- arguments -------------------------------------------------------------------------------------------------------


def _settings(arguments: argparse.Namespace) -> Settings:
    """Make the `Settings` of the analysis; raises a GramianError for arguments that are wrong whatever the model is."""
    for name, choices in (("device", ("cpu", "cuda")), ("dtype", ("fp32", "fp64"))):
        value = getattr(arguments, name)
        if value is not None and value not in choices:
            raise GramianError(f"argument --{name}: {value!r}; expected {' or '.join(choices)}")
    if (arguments.config is None) == (arguments.model is None):
        raise GramianError("curvature: expected either CONFIG.toml or --model PATH --text FILE…")
    if arguments.model is None:
        for name in ("text", "masked", "length"):
            if getattr(arguments, name):
                raise GramianError(f"argument --{name}: is for --model; expected it without CONFIG.toml")
    elif arguments.text is None:
        raise GramianError("argument --text: none given; expected text files for --model")

    from gramian.analysis.options import Settings

    given = {field.name: getattr(arguments, field.name) for field in fields(Settings)}
    with _argument_named():
        return Settings(**{name: value for name, value in given.items() if value is not None})


@contextmanager
def _argument_named() -> Iterator[None]:
    """Context manager: an error that names a field of `Settings` names the option instead."""
    from gramian.analysis.options import Settings

    try:
        yield
    except GramianError as problem:
        name, _, rest = str(problem).partition(":")
        named = name in [field.name for field in fields(Settings)]
        raise GramianError(f"argument --{name.replace('_', '-')}:{rest}" if named else str(problem)) from None


def _with_kfac_section(settings: Settings, config: Config, arguments: argparse.Namespace) -> Settings:
    """The settings with policy and memory budget of the config's [kfac], where no option gives them."""
    kfac = config.kfac
    if kfac is not None and kfac.kfac_policy is not None and arguments.policy is None:
        settings = replace(settings, policy=kfac.kfac_policy)
    if kfac is not None and kfac.memory_budget is not None and arguments.memory_budget is None:
        settings = replace(settings, memory_budget=kfac.memory_budget)
    return settings


def _subject(arguments: argparse.Namespace, config: Config | None, grid: ProcessGrid) -> Subject:
    """Model and batches on the process's device; on the CPU if the model does not fit there."""
    import torch

    try:
        return _subject_on(arguments, config, grid.device)
    except torch.OutOfMemoryError:
        if grid.size > 1:
            raise RunFailed("curvature: the model does not fit on the GPU; expected --device cpu") from None
    torch.cuda.empty_cache()
    cpu = torch.device("cpu")
    return _subject_on(arguments, config, cpu).to(cpu, GPU_FULL)


def _subject_on(arguments: argparse.Namespace, config: Config | None, device: torch.device) -> Subject:
    if config is None:
        from gramian.analysis.model_folder import LENGTH, from_folder

        return from_folder(
            arguments.model,
            arguments.text,
            device,
            arguments.dtype,
            arguments.tokens,
            arguments.batch,
            arguments.length or LENGTH,
            arguments.masked,
            arguments.seed,
        )
    from gramian.analysis.subject import from_config

    return from_config(config, device, arguments.dtype, arguments.tokens, arguments.batch)


def _is_cpu(asked: str | None, configured: str) -> bool:
    """Whether the analysis runs on the CPU; raises a GramianError if a GPU is asked for and there is none."""
    import torch

    name = asked or configured
    if name == "cuda" and not torch.cuda.is_available():
        field = "argument --device" if asked else "run.device"
        raise GramianError(f"{field}: there is no CUDA device here; expected cpu")
    return name == "cpu" or not torch.cuda.is_available()


def _new_folder(wanted: Path | None, grid: ProcessGrid) -> Path | None:
    """The folder of the results, which process 0 makes; None on any other process. An error is raised on every process."""
    from gramian.analysis.result_file import new_folder

    folder, problem = None, ""
    if grid.rank == 0:
        try:
            folder = new_folder(wanted, DEFAULT_OUT)
        except GramianError as found:
            problem = str(found)
    if grid.most(float(bool(problem))):
        raise GramianError(problem or "argument --out: cannot be used; expected a new folder")
    return folder


# ---- output ----------------------------------------------------------------------------------------------------------


@contextmanager
def _stage(console: Console, name: str) -> Iterator[Update]:
    """Context manager that shows the progress of a stage: a bar on a terminal, elsewhere at most `PARTS` lines."""
    started = time.perf_counter()

    def line(done: int, total: int, _: str) -> None:
        show(console, f"{name}: {done:,} of {total:,}, {time.perf_counter() - started:.0f} s")

    with progress_bar(console, name) as update:
        yield update if console.is_terminal else in_parts(PARTS, line)
    show(console, f"{name}: {time.perf_counter() - started:.0f} s")


def _stored_part(folder: Path | None, stored: Mapping[str, Any]) -> str:
    """Describe what curvature.json has after an analysis that ended early; an empty folder is removed."""
    if folder is None or not stored:
        if folder is not None:
            folder.rmdir()
        return "nothing was written"
    done = " and ".join(name for stage, name in STAGE_NAMES.items() if stage in stored)
    content = "all of it" if stored["complete"] else f"{done}, and says that it is not complete"
    return f"{folder / 'curvature.json'} holds {content}"


def _heading(subject: Subject, grid: ProcessGrid) -> list[str]:
    model, data = subject.model_facts, subject.data_facts
    fresh = " (no run in run.folder: fresh weights)" if model["weights"] == "fresh" else ""
    return [
        f"{model.get('path', model['kind'])}: {subject.parameters:,} parameters, weights: {model['weights']}{fresh}, "
        f"{model['dtype']}",
        f"{data['windows']:,} of {data['windows_in_all']:,} windows of {data['length']:,}: {subject.tokens:,} tokens, "
        f"{subject.terms:,} loss terms" + f", shared by {grid.size} processes" * (grid.size > 1),
        *subject.notes,
    ]
