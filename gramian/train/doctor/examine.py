"""A run, examined before it starts: its data, its model, its loss and gradients, its schedule, its memory and time.

Every check has a name, what was measured, the bound it is held to, and what to do if it is not kept. All work on models of
their own, on the config's device and in its numbers, and nothing is written.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from gramian.core.errors import GramianError
from gramian.data.data_files import find_files
from gramian.parallel.world import World
from gramian.train.build.build_model import build_model
from gramian.train.config.config import Config
from gramian.train.doctor import section_checks, teacher_checks
from gramian.train.doctor.causality import causality
from gramian.train.doctor.check import Check
from gramian.train.doctor.data_findings import look_at_data
from gramian.train.doctor.examined_run import ExaminedRun, rows_of
from gramian.train.doctor.gradient_check import gradients
from gramian.train.doctor.graph_breaks import compiled
from gramian.train.doctor.initial_loss import initial_loss, targets
from gramian.train.doctor.overfit import overfit
from gramian.train.doctor.resources import duration, host_memory, memory
from gramian.train.doctor.schedule_reach import reach, schedule_end
from gramian.train.doctor.split_invariance import invariance
from gramian.train.loop.precision import numbers_for, set_globals
from gramian.train.loop.schedule import learning_rate

LOOKS = 3
"""Batches whose gradients are looked at, with a step between them."""

OnProgress = Callable[[int, int, str], None]
"""Told (units done, units in all, what is going on)."""
Found = Check | list[Check]


def examine(
    config: Config,
    *,
    make: Callable[[], nn.Module] | None = None,
    on_progress: OnProgress = lambda done, total, told: None,
) -> list[Check]:
    """All checks, in order; one that crashes has failed.

    Half a minute on a CPU for the default config, most of it for learning a few windows by heart.

    Args:
        config: of the run.
        make: a model with its initial weights, each time it is called; None: the config's.
        on_progress: for a progress bar.

    Returns:
        Checks; the run is sound if all are `ok`. Data that is cut off so that it cannot be read leaves only those before it.

    Raises:
        GramianError: naming the field that does not fit the data, the model or the machine.
    """
    device = device_of(config)
    with _as_in_a_run(config, device):
        progress = _Progress(on_progress, 13 + config.doctor.overfit_steps)
        checks = [schedule_end(config)]
        progress.next("data")
        _refuse_missing(config)
        found, windows = look_at_data(config.data)
        checks += found
        if windows is None:
            return checks
        make = make or partial(build_model, config, windows.vocabulary)
        subject = ExaminedRun(config, numbers_for(config.precision, device), World(0, 1, device, "one"), windows, make)
        try:
            for name, stage in _stages(subject, progress):
                progress.next(name)
                checks += _run(name, stage)
        except torch.OutOfMemoryError:  # of the model alone
            checks.append(_out_of_memory("model"))
    return checks


def device_of(config: Config) -> torch.device:
    """Where the run would be.

    Raises:
        GramianError: if it asks for a GPU and there is none.
    """
    here = torch.cuda.is_available()
    if config.run.device == "cuda" and not here:
        raise GramianError("run.device: there is no CUDA device here; expected auto or cpu")
    return (
        torch.device("cuda", torch.cuda.current_device())
        if here and config.run.device != "cpu"
        else torch.device("cpu")
    )


def _refuse_missing(config: Config) -> None:
    """Files that no check before the last would miss."""
    if config.kfac is not None and config.kfac.public_files:
        source = "text" if config.data.source == "embedded" else config.data.source
        find_files(config.kfac.public_files, source, "kfac.public_files")


def _stages(subject: ExaminedRun, progress: "_Progress") -> Iterator[tuple[str, Callable[[], Found]]]:
    """Checks by name, cheapest first. They share a model, in an order: initial weights, then a few steps, then many."""
    config, numbers, vocabulary = subject.config, subject.numbers, subject.windows.vocabulary
    yield "memory", partial(memory, config, vocabulary, numbers)
    model = subject.model()
    yield "host memory", partial(host_memory, config, numbers, model)
    stepper = subject.stepper(model)
    batches = [subject.batch(position=position) for position in range(LOOKS)]
    rows = rows_of(batches[0])
    rate = learning_rate(0, config.run.steps, config.schedule, config.optimizer)
    loaded = config.model.kind == "huggingface" and not config.model.fresh
    yield "scalars", partial(reach, config, model)
    yield "targets", partial(targets, batches[0])
    yield "initial loss", partial(initial_loss, stepper, batches[0], vocabulary, loaded)
    yield "graph breaks", partial(compiled, config.compile, model, _few(rows), numbers)
    yield "gradients", partial(gradients, stepper, batches, rate)
    yield "causality", partial(causality, model, numbers, rows, vocabulary)
    if config.model.kind == "goose":
        yield "scan", partial(teacher_checks.scan, subject, model)
    yield "micro-batches", partial(invariance, stepper, rows, subject.room)
    yield "time", partial(duration, subject, stepper)
    del model, stepper
    if config.teacher is not None:
        yield "teacher", partial(teacher_checks.teacher, subject)
    if config.kfac is not None:
        yield "curvature", partial(section_checks.kfac, subject)
    if config.privacy is not None:
        yield "private windows", partial(section_checks.privacy, subject)
    yield "overfit", partial(overfit, subject, progress.step)


def _few(rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: values[:2] for name, values in rows.items()}


def _run(name: str, stage: Callable[[], Found]) -> list[Check]:
    try:
        found = stage()
    except torch.OutOfMemoryError:
        return [_out_of_memory(name)]
    except GramianError as problem:
        return [Check(name, "refused", "-", False, str(problem))]
    except Exception as problem:  # whatever a model does
        told = " ".join(f"{type(problem).__name__}: {problem}".split())
        return [Check(name, "crashed", "-", False, told[:300])]
    return found if isinstance(found, list) else [found]


def _out_of_memory(name: str) -> Check:
    return Check(
        name, "out of memory", "-", False, "gramian plan says what would fit, such as a smaller data.micro_batch"
    )


@contextmanager
def _as_in_a_run(config: Config, device: torch.device) -> Iterator[None]:
    """The process's settings and generators, as a run has them; as they were, afterwards."""
    precision, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.benchmark
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if config.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when it starts
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            set_globals(config.precision, config.run.deterministic)
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        cudnn.allow_tf32, cudnn.benchmark = before
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


@dataclass
class _Progress:
    """Units: one for each check, one for each step of learning by heart."""

    tell: OnProgress
    total: int
    done: int = 0

    def next(self, told: str) -> None:
        """Another check begins."""
        self.tell(self.done, self.total, told)
        self.done = min(self.done + 1, self.total)

    def step(self, told: str) -> None:
        """A step of the last one."""
        self.next(told)
