"""Examine a run before it starts: its data, model, loss and gradients, schedule, memory and time.

`examine` runs the checks listed below, cheapest first. A check is a function from an `ExaminedRun` to a list of `Check`; adding
one takes its file and one line of the list. Checks run on models of their own, on the config's device and in its precision, and
write nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from gramian.core.errors import GramianError
from gramian.data.data_files import find_files
from gramian.parallel.process_grid import ProcessGrid
from gramian.train.build.build_model import build_model
from gramian.train.config.config import Config
from gramian.train.doctor.check import Check
from gramian.train.doctor.checks.causality import causality
from gramian.train.doctor.checks.curvature_coverage import curvature_coverage
from gramian.train.doctor.checks.device_memory import device_memory
from gramian.train.doctor.checks.goose_scan import goose_scan
from gramian.train.doctor.checks.gradient_check import gradients
from gramian.train.doctor.checks.graph_breaks import graph_breaks
from gramian.train.doctor.checks.host_copies import host_copies
from gramian.train.doctor.checks.initial_loss import initial_loss
from gramian.train.doctor.checks.overfit import overfit
from gramian.train.doctor.checks.private_windows import private_windows
from gramian.train.doctor.checks.scalar_reach import scalar_reach
from gramian.train.doctor.checks.schedule_end import schedule_end
from gramian.train.doctor.checks.split_invariance import split_invariance
from gramian.train.doctor.checks.step_time import step_time
from gramian.train.doctor.checks.target_tokens import target_tokens
from gramian.train.doctor.data_checks import examine_data
from gramian.train.doctor.examined_run import ExaminedRun
from gramian.train.doctor.teacher.teacher_checks import teacher
from gramian.train.loop.precision import resolve_precision, set_deterministic, set_globals

OnProgress = Callable[[int, int, str], None]
"""Callback for a progress bar: (units done, total units, current activity); a unit is a check or a step of overfitting."""


@dataclass(frozen=True)
class CheckStage:
    """A check, its name in progress messages and failures, and a function that says which configs it applies to."""

    name: str
    check: Callable[[ExaminedRun], list[Check]]
    applies: Callable[[Config], bool] = lambda config: True


WITHOUT_MODEL = (CheckStage("memory", device_memory),)
ON_TRIAL_MODEL = (  # in this order: with initial weights, then after the steps that "gradients" takes
    CheckStage("host memory", host_copies),
    CheckStage("scalars", scalar_reach),
    CheckStage("targets", target_tokens),
    CheckStage("initial loss", initial_loss),
    CheckStage("graph breaks", graph_breaks),
    CheckStage("gradients", gradients),
    CheckStage("causality", causality),
    CheckStage("scan", goose_scan, lambda config: config.model.kind == "goose"),
    CheckStage("micro-batches", split_invariance),
    CheckStage("time", step_time),
)
ON_NEW_MODELS = (
    CheckStage("teacher", teacher, lambda config: config.teacher is not None),
    CheckStage("curvature", curvature_coverage, lambda config: config.has_curvature),
    CheckStage("private windows", private_windows, lambda config: config.privacy is not None),
    CheckStage("overfit", overfit),
)


def examine(
    config: Config,
    *,
    make: Callable[[], nn.Module] | None = None,
    on_progress: OnProgress = lambda done, total, message: None,
) -> list[Check]:
    """Run all checks of a run in order and return their results; a check that crashes has failed.

    Takes half a minute on a CPU for the default config, mostly for overfitting a few windows.

    Args:
        config: the run's config.
        make: builds a model with its initial weights; None: the config's model.
        on_progress: called for a progress bar.

    Returns:
        Results; the run is sound if all are `ok`. If a truncated data file cannot be read, later checks are left out.

    Raises:
        GramianError: naming the field that does not fit the data, the model or the machine.
    """
    device = device_of(config)
    with _settings_of_a_run(config, device):
        units = len(WITHOUT_MODEL + ON_TRIAL_MODEL) + 2
        progress = _Progress(on_progress, units + config.doctor.overfit_steps)
        checks = schedule_end(config)
        progress.next("data")
        _refuse_missing_files(config)
        found, windows = examine_data(config.data)
        checks += found
        if windows is None:
            return checks
        make = make or partial(build_model, config, windows.vocabulary)
        numbers, grid = resolve_precision(config.precision, device), ProcessGrid(0, 1, device)
        run = ExaminedRun(config, numbers, grid, windows, make, progress.next)
        checks += _results(WITHOUT_MODEL, run, progress)
        try:
            _ = run.trial_stepper, run.batches  # built here: an error of the model itself is not a failed check
        except torch.OutOfMemoryError:
            return [*checks, _out_of_memory("model")]
        checks += _results(ON_TRIAL_MODEL, run, progress)
        del run.trial_stepper
        checks += _results(ON_NEW_MODELS, run, progress)
    return checks


def device_of(config: Config) -> torch.device:
    """Return the device that the run would use; raises if the config asks for a GPU and there is none."""
    available = torch.cuda.is_available()
    if config.run.device == "cuda" and not available:
        raise GramianError("run.device: there is no CUDA device here; expected auto or cpu")
    if available and config.run.device != "cpu":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _refuse_missing_files(config: Config) -> None:
    """Raise if a file of kfac.public_files does not exist, before a late check needs it."""
    if config.kfac is not None and config.kfac.public_files:
        source = "text" if config.data.source == "embedded" else config.data.source
        find_files(config.kfac.public_files, source, "kfac.public_files")


def _results(stages: tuple[CheckStage, ...], run: ExaminedRun, progress: "_Progress") -> list[Check]:
    checks = []
    for stage in stages:
        if stage.applies(run.config):
            progress.next(stage.name)
            checks += _run(stage, run)
    return checks


def _run(stage: CheckStage, run: ExaminedRun) -> list[Check]:
    try:
        return stage.check(run)
    except torch.OutOfMemoryError:
        return [_out_of_memory(stage.name)]
    except GramianError as problem:
        return [Check(stage.name, "refused", "-", False, str(problem))]
    except Exception as problem:  # a model may raise anything
        message = " ".join(f"{type(problem).__name__}: {problem}".split())
        return [Check(stage.name, "crashed", "-", False, message[:300])]


def _out_of_memory(name: str) -> Check:
    hint = "gramian plan shows what would fit, such as a smaller data.micro_batch"
    return Check(name, "out of memory", "-", False, hint)


@contextmanager
def _settings_of_a_run(config: Config, device: torch.device) -> Iterator[None]:
    """Context manager that sets TF32, determinism and random generators as a run does, and restores them."""
    precision, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.benchmark
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            set_globals(config.precision, config.run.deterministic)
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        cudnn.allow_tf32, cudnn.benchmark = before
        set_deterministic(deterministic, warn_only)


@dataclass
class _Progress:
    """Counts units of progress: one per check, and one per step of the overfit check."""

    on_progress: OnProgress
    total: int
    done: int = 0

    def next(self, message: str) -> None:
        """Report that the activity `message` begins, then count one more unit as done."""
        self.on_progress(self.done, self.total, message)
        self.done = min(self.done + 1, self.total)
