"""Sizes and steps of the demo, and the configs of its three runs.

The runs are ordinary: their folders hold a `config.toml` that `gramian train` accepts, with or without overrides.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gramian.data.options import DataSection
from gramian.train.config.config import Config
from gramian.train.config.config_sections import (
    CheckpointSection,
    DoctorSection,
    EvalSection,
    ModelSection,
    OptimizerSection,
    RunSection,
    ScheduleSection,
    TeacherSection,
)


@dataclass(frozen=True)
class DemoPlan:
    """Everything that determines the demo's numbers, except the corpus and the machine."""

    teacher: ModelSection = field(default_factory=lambda: ModelSection(layers=2, width=128, heads=4))
    student: ModelSection = field(default_factory=lambda: ModelSection(layers=2, width=64, heads=4))
    teacher_steps: int = 800
    student_steps: int = 600
    """Training steps of each of the two students."""
    data: DataSection = field(
        default_factory=lambda: DataSection(limit_bytes=600_000, length=64, batch=16, micro_batch=16, workers=0)
    )
    """Data of all three runs; the teacher's cache covers every training window."""
    optimizer: OptimizerSection = field(default_factory=lambda: OptimizerSection(lr=4e-3))
    """Optimizer of all three runs; the learning rate is close to the best of 2e-3 to 6e-3 for the student without a teacher."""
    warmup: int = 50
    eval_every: int = 100
    """Training steps between two evaluations."""
    teaching: TeacherSection = field(default_factory=lambda: TeacherSection(source="hidden", temperature=2.0))
    doctor: DoctorSection = field(default_factory=lambda: DoctorSection(overfit_steps=200, overfit_windows=4))
    scored_windows: int = 512
    """Number of windows of the validation data, from its first on, on which the three models are compared."""
    sample_tokens: int = 200
    """Number of tokens of each text that a model generates."""
    threads: int = 1
    """CPU threads of torch. A second one saves a fifth of the time on an idle machine; on a busy one, threads that wait for
    each other make steps ten times slower. With one, the numbers are the same on any number of cores.
    """
    seed: int = 0
    """Seed of weights, data order and texts."""


DEFAULT = DemoPlan()
"""The demo of the command line: about 80 s on a CPU, half of it for the teacher, a third for the students."""


@dataclass(frozen=True)
class DemoRuns:
    """The configs of the three training runs of the demo, each with a folder of its own below the demo's."""

    teacher: Config
    distilled: Config
    alone: Config
    """Config of the second student, equal to the distilled one except that it learns by cross entropy alone."""


def runs_of(plan: DemoPlan, out: Path) -> DemoRuns:
    """Make the configs of the three runs, with the folders `teacher`, `distilled` and `ce-only` below `out`.

    The teacher's cache is the folder `teacher-cache` beside them.
    """
    teaching = replace(plan.teaching, path=str(out / "teacher"), cache=str(out / "teacher-cache"))
    teacher = _config(plan, out / "teacher", plan.teacher, plan.teacher_steps)
    alone = _config(plan, out / "ce-only", plan.student, plan.student_steps)
    distilled = _config(plan, out / "distilled", plan.student, plan.student_steps, teacher=teaching)
    return DemoRuns(teacher, distilled, alone)


def hashes_of(plan: DemoPlan) -> dict[str, str]:
    """{run: hash of its config} of the three runs, independent of their folders: equal hashes mean equal numbers."""
    return {name: config.hash for name, config in vars(runs_of(plan, Path("demo"))).items()}


def _config(plan: DemoPlan, folder: Path, model: ModelSection, steps: int, **sections: Any) -> Config:
    return Config(
        run=RunSection(folder=str(folder), seed=plan.seed, steps=steps, log_every=min(10, steps)),
        model=model,
        data=plan.data,
        optimizer=plan.optimizer,
        schedule=ScheduleSection(warmup=plan.warmup),
        eval=EvalSection(every=plan.eval_every),
        checkpoint=CheckpointSection(every=100, keep=1),
        doctor=plan.doctor,
        **sections,
    )
