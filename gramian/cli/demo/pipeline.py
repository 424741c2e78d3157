"""The stages of the demo in order: doctor, teacher, cache, three students, curvature, evaluation, texts.

In: a `DemoPlan` and a folder. Out: a `Result`. Finished work is not repeated: a run continues from its last checkpoint, a cache
from its last shard.
"""

import platform
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from gramian.analysis import plots
from gramian.analysis.measure import analyse
from gramian.analysis.result_file import write_result
from gramian.analysis.subject import from_config
from gramian.cli.cache import write_cache
from gramian.cli.curvature.curvature import STAGE_NAMES as CURVATURE_NAMES
from gramian.cli.demo.demo_plan import DemoPlan, DemoRuns, hashes_of, runs_of
from gramian.cli.demo.demo_result import Cached, Checked, Curved, DemoRow, Result, Sample, Spent
from gramian.cli.demo.score import score, work
from gramian.cli.terminal import Update, in_parts, progress_bar, show
from gramian.cli.train import end_with_report
from gramian.core.errors import GramianError
from gramian.core.version import VERSION
from gramian.data import load_tokenizer, load_windows
from gramian.distill.teacher.live_teacher import LiveTeacher
from gramian.models.text_generation import generate_text_tokens
from gramian.parallel.process_grid import ProcessGrid
from gramian.train.build.build_model import build_model
from gramian.train.build.build_teacher import cache_folder
from gramian.train.build.run_parts import build
from gramian.train.config.config import Config
from gramian.train.doctor.check import Check
from gramian.train.doctor.examine import examine
from gramian.train.doctor.examined_run import ExaminedRun
from gramian.train.doctor.teacher import teacher_checks
from gramian.train.loop.deferred_metrics import StepOutcome
from gramian.train.loop.precision import Precision, resolve_precision, set_globals
from gramian.train.loop.trainer import Trainer
from gramian.train.state.run_folder import RunFolder, read_lines
from gramian.train.state.saved_run import load_run
from gramian.verify.checks import torch_threads

PROMPT = "def "
TEMPERATURE = 0.8
"""Sampling temperature of the generated texts."""
PARTS = 4
"""Number of progress lines that a stage prints if the output is not a terminal."""
STAGE_NAMES = {
    "doctor": "doctor",
    "teacher": "teacher",
    "cache": "cache of the teacher",
    "alone": "student, CE only",
    "distilled": "student, distilled",
    "private": "student, private",
    "curvature": "curvature of the teacher",
    "evaluation": "evaluation",
    "texts": "texts",
}
"""{stage or run: its printed name}."""


class Stopped(Exception):
    """A stage that did not reach its end; the message says which and why."""


def run_demo(plan: DemoPlan, out: Path, grid: ProcessGrid, console: Console) -> Result:
    """Run all stages of the demo on one process, in the existing folder `out`, and return their results.

    Raises:
        GramianError: if the folder is in use, or holds runs of other settings.
        Stopped: if a check failed, or a run was ended by its guard (which watches the loss) or by a signal.
    """
    runs = runs_of(plan, out)
    with torch_threads(plan.threads), ExitStack() as open_folders:
        folders = {name: open_folders.enter_context(_open_folder(config)) for name, config in vars(runs).items()}
        return _Demo(plan, runs, folders, grid, console).run()


@contextmanager
def _open_folder(config: Config) -> Iterator[RunFolder]:
    """Context manager: lock the folder of a run; errors name the demo's argument `--out` in place of `run.folder`."""
    folder = RunFolder(config)
    try:
        folder.__enter__()
    except GramianError as problem:
        raise GramianError(f"argument --out: {str(problem).removeprefix('run.folder: ')}") from None
    try:
        yield folder
    finally:
        folder.__exit__(None, None, None)


@dataclass
class _Demo:
    plan: DemoPlan
    runs: DemoRuns
    folders: dict[str, RunFolder]
    grid: ProcessGrid
    console: Console
    seconds: dict[str, float] = field(default_factory=dict)
    began: float = field(default_factory=time.perf_counter)

    def run(self) -> Result:
        config = self.runs.alone
        set_globals(config.precision, config.run.deterministic)
        numbers = resolve_precision(config.precision, self.grid.device)
        with self._stage(1, "doctor") as update:
            checks = self._examined(examine(config, on_progress=update))
        self._train(2, "teacher")
        with self._stage(3, "cache") as update:
            cache = self._cache(numbers, update)
            checks += self._examined(self._teacher_checks(numbers))
        self._train(4, "alone")
        self._train(5, "distilled")
        self._train(6, "private")
        with self._stage(7, "curvature") as update:
            curvature = self._curvature(update)
        with self._stage(8, "evaluation") as update:
            models = {
                name: load_run(self.folders[name].path).model.to(device=self.grid.device, dtype=numbers.weights)
                for name in vars(self.runs)
            }  # of the best checkpoints; of the private run's last, since a choice by its loss would not be covered by ε
            rows = self._score(models, numbers, update)
        with self._stage(9, "texts") as update:
            samples = []
            for done, name in enumerate(("teacher", "distilled")):
                samples.append(Sample(name, self._text(models[name])))
                update(done + 1, 2, name)
        device = self.grid.device
        return Result(
            hashes=hashes_of(self.plan),
            versions={"gramian": VERSION, "torch": str(torch.__version__), "python": platform.python_version()},
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {platform.machine()}",
            threads=torch.get_num_threads(),
            seconds=self.seconds,
            checks=tuple(checks),
            cache=cache,
            privacy=self._spent(),
            curvature=curvature,
            samples=tuple(samples),
            **rows,
        )

    @contextmanager
    def _stage(self, number: int, name: str) -> Iterator[Update]:
        """Context manager of a stage: print its title, and its progress as a bar on a terminal or as a few lines elsewhere."""
        started = time.perf_counter()
        heading = f"[{number}/{len(STAGE_NAMES)}] {STAGE_NAMES[name]}  (after {started - self.began:.0f} s)"
        show(self.console, heading)
        if self.console.is_terminal:
            with progress_bar(self.console, "     ") as update:
                yield update
        else:
            yield in_parts(PARTS, lambda done, total, text: self._print(f"{done:,} of {total:,}  {text}"))
        self.seconds[name] = time.perf_counter() - started

    def _print(self, text: str) -> None:
        """Print an indented line below the title of a stage."""
        show(self.console, f"      {text}")

    # ---- the doctor ----------------------------------------------------------------------------------------------------

    def _teacher_checks(self, numbers: Precision) -> list[Check]:
        """Run the checks of `gramian doctor` that concern a student with a teacher; returns their results."""
        config, training = self.runs.distilled, load_windows(self.runs.distilled.data)[0]
        make = partial(build_model, config, training.vocabulary)
        return teacher_checks.teacher(ExaminedRun(config, numbers, self.grid, training, make))

    def _examined(self, checks: list[Check]) -> list[Checked]:
        failed = [check for check in checks if not check.ok]
        if failed:
            raise Stopped(f"{failed[0].name}: {failed[0].measured}, expected {failed[0].threshold}; {failed[0].hint}")
        width = max(len(check.name) for check in checks)
        for check in checks:
            bound = "" if check.threshold == "-" else f" ({check.threshold})"
            self._print(f"ok  {check.name:<{width}}  {check.measured}{bound}")
        return [Checked(check.name, check.measured, check.threshold, check.ok, check.hint) for check in checks]

    # ---- training --------------------------------------------------------------------------------------------------------

    def _train(self, number: int, name: str) -> None:
        """Train a run to its last step, from its newest checkpoint if there is one."""
        folder = self.folders[name]
        config, steps = folder.config, folder.config.run.steps
        with self._stage(number, name) as update:

            def on_outcome(outcome: StepOutcome, run: Trainer) -> None:
                best = "" if run.best is None else f", validation {run.best['loss']:.3f}"
                update(outcome.attempt.step + 1, steps, f"loss {outcome.loss:.3f}{best}")

            parts = build(config, self.grid)
            trainer = Trainer(parts, folder, on_outcome)
            try:
                ended = trainer.run()
            finally:
                end_with_report(folder)
            if ended.reason != "done":
                raise Stopped(
                    f"{STAGE_NAMES[name]}: {ended.reason} at step {ended.step} of {steps}"
                    + (f": {ended.report}" if ended.report else "")
                )
            best = "" if trainer.best is None else f", best validation loss {trainer.best['loss']:.3f}"
            self._print(
                f"{sum(p.numel() for p in parts.model.parameters()):,} parameters, {steps} steps in "
                f"{training_seconds(folder.path):.0f} s{best}; {folder.path}"
            )

    def _spent(self) -> Spent:
        """The (ε, δ) of the private run, from the last evaluation in its metrics."""
        folder, privacy = self.folders["private"], self.plan.privacy
        line = [line for line in read_lines(folder.path / "metrics.jsonl") if "epsilon" in line][-1]
        return Spent(line["epsilon"], privacy.delta, not line.get("epsilon_not_valid", False))

    # ---- the curvature ---------------------------------------------------------------------------------------------------

    def _curvature(self, update: Update) -> Curved:
        """Measure the teacher's curvature into the folder `curvature` of its run, where the page finds it."""
        folder, settings = self.folders["teacher"].path / "curvature", self.plan.curvature
        folder.mkdir(exist_ok=True)
        subject = from_config(self.runs.teacher, self.grid.device, None, self.plan.curvature_tokens, None)

        @contextmanager
        def stage(name: str) -> Iterator[Callable[[int, int], None]]:
            yield lambda done, total: update(done, total, CURVATURE_NAMES[name])

        result = analyse(subject, settings, stage)
        write_result(result, folder)
        if plots.available():
            plots.draw(result, folder)
        metrics, largest = result["kfac"]["metrics"]["model"], result["ggn"]["extremes"]["largest"]
        self._print(f"{subject.tokens:,} tokens; {folder}")
        return Curved(str(folder), metrics["damping"], metrics["effective_dimension"], largest)

    # ---- the cache -------------------------------------------------------------------------------------------------------

    def _cache(self, numbers: Precision, update: Update) -> Cached:
        config, folder = self.runs.distilled, cache_folder(self.runs.distilled)
        manifest = write_cache(
            config, self.grid, numbers, lambda done, total, text="", /: update(done, total, "windows")
        )
        cache = Cached(
            str(folder),
            manifest.identity.count,
            manifest.identity.length,
            manifest.bytes_per_token,
            max(manifest.errors.worst.values(), default=0.0),
        )
        self._print(
            f"{cache.windows:,} windows of {cache.length} tokens, {cache.bytes / 2**20:,.0f} MiB, "
            f"largest error of a logit {cache.largest_logit_error:.2g}; {folder}"
        )
        return cache

    # ---- results ---------------------------------------------------------------------------------------------------------

    def _score(self, models: dict[str, nn.Module], numbers: Precision, update: Update) -> dict[str, DemoRow]:
        rows: dict[str, DemoRow] = {}
        validation, windows = load_windows(self.runs.alone.data)[1], self.plan.scored_windows
        half = numbers.activations if numbers.activations in (torch.float16, torch.bfloat16) else None
        live = LiveTeacher(models["teacher"], device=self.grid.device, autocast=half)
        works = {name: work(validation, windows, compared=name != "teacher") for name in models}
        for name, model in models.items():
            before = sum(works[earlier] for earlier in rows)

            def progress(done: int, before: int = before, name: str = name) -> None:
                update(before + done, sum(works.values()), STAGE_NAMES[name])

            other = None if name == "teacher" else live
            found = score(model, other, validation, numbers, self.grid, windows, progress)
            folder = self.folders[name]
            rows[name] = DemoRow(
                STAGE_NAMES[name],
                str(folder.path),
                sum(p.numel() for p in model.parameters()),
                folder.config.run.steps,
                training_seconds(folder.path),
                found,
            )
        return rows

    def _text(self, model: nn.Module) -> str:
        """A text with which a model continues the prompt; tabs become spaces, characters outside printable ASCII `?`."""
        tokenizer = load_tokenizer(self.plan.data.tokenizer)
        prompt_T = torch.from_numpy(tokenizer.encode(PROMPT).astype("int64")).to(self.grid.device)
        tokens_T = generate_text_tokens(model, prompt_T, self.plan.sample_tokens, TEMPERATURE, self.plan.seed)
        text = tokenizer.decode(tokens_T.tolist()).expandtabs(4)
        return "".join(c if c == "\n" or " " <= c <= "~" else "?" for c in text)


def training_seconds(folder: Path) -> float:
    """Seconds that a run spent on steps and evaluations, from its metrics.jsonl, summed over interrupted processes."""
    seconds = last = 0.0
    for line in read_lines(folder / "metrics.jsonl"):
        elapsed = line["time"].get("elapsed")
        if elapsed is None:  # of an evaluation
            continue
        if elapsed < last:  # another process continued
            seconds += last
        last = elapsed
    return seconds + last
