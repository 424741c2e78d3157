"""Sizes and steps of the demo, and the configs of its four runs.

The runs are ordinary: their folders hold a `config.toml` that `gramian train` accepts, with or without overrides.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gramian.analysis.options import Settings
from gramian.data.options import DataSection
from gramian.train.config.config import Config
from gramian.train.config.config_sections import (
    CheckpointSection,
    DoctorSection,
    EvalSection,
    ModelSection,
    OptimizerSection,
    PrivacySection,
    RunSection,
    ScheduleSection,
    TeacherSection,
)


@dataclass(frozen=True)
class DemoPlan:
    """Everything that determines the demo's numbers, except the corpus and the machine."""

    teacher: ModelSection = field(default_factory=lambda: ModelSection(layers=2, width=96, heads=4))
    student: ModelSection = field(default_factory=lambda: ModelSection(layers=2, width=48, heads=4))
    teacher_steps: int = 450
    student_steps: int = 400
    """Training steps of each of the two students that are compared with each other."""
    private_steps: int = 90
    private_batch: int = 32
    """Windows that a step of the private student draws, on average."""
    private_optimizer: OptimizerSection = field(
        default_factory=lambda: OptimizerSection(lr=1e-2, weight_decay=0.0, max_norm=0.0)
    )
    privacy: PrivacySection = field(default_factory=lambda: PrivacySection(target_epsilon=3.0))
    """Privacy of the third student. Its noise is secret; all other numbers of the demo are determined by the seed."""
    curvature_tokens: int = 512
    """Number of training tokens on which the teacher's curvature is measured."""
    curvature: Settings = field(default_factory=lambda: Settings(eigenvalues=1, probes=2, steps=12))
    data: DataSection = field(
        default_factory=lambda: DataSection(limit_bytes=300_000, length=32, batch=16, micro_batch=16, workers=0)
    )
    """Data of all runs; the teacher's cache covers every training window."""
    optimizer: OptimizerSection = field(default_factory=lambda: OptimizerSection(lr=4e-3))
    """Optimizer of the runs; the learning rate is close to the best of 2e-3 to 6e-3 for the student without a teacher."""
    warmup: int = 40
    eval_every: int = 100
    """Training steps between two evaluations."""
    teaching: TeacherSection = field(default_factory=lambda: TeacherSection(source="hidden", temperature=2.0))
    doctor: DoctorSection = field(default_factory=lambda: DoctorSection(overfit_steps=200, overfit_windows=4))
    scored_windows: int = 512
    """Number of windows of the validation data, from its first on, on which the models are compared."""
    sample_tokens: int = 120
    """Number of tokens of each text that a model generates."""
    threads: int = 1
    """CPU threads of torch. A second one saves a fifth of the time on an idle machine; on a busy one, threads that wait for
    each other make steps ten times slower. With one, the numbers are the same on any number of cores.
    """
    seed: int = 0
    """Seed of weights, data order and texts."""


DEFAULT = DemoPlan()
"""The demo of the command line."""


@dataclass(frozen=True)
class DemoRuns:
    """The configs of the four training runs of the demo, each with a folder of its own below the demo's."""

    teacher: Config
    distilled: Config
    alone: Config
    """Config of the second student, equal to the distilled one except that it learns by cross entropy alone."""
    private: Config
    """Config of the third student, which learns by cross entropy and with privacy, in fewer and larger steps."""


def runs_of(plan: DemoPlan, out: Path) -> DemoRuns:
    """Make the configs of the four runs, with the folders `teacher`, `distilled`, `ce-only` and `private` below `out`.

    The teacher's cache is the folder `teacher-cache` beside them.
    """
    teaching = replace(plan.teaching, path=str(out / "teacher"), cache=str(out / "teacher-cache"))
    teacher = _config(plan, out / "teacher", plan.teacher, plan.teacher_steps)
    alone = _config(plan, out / "ce-only", plan.student, plan.student_steps)
    distilled = _config(plan, out / "distilled", plan.student, plan.student_steps, teacher=teaching)
    private = replace(
        _config(plan, out / "private", plan.student, plan.private_steps, privacy=plan.privacy),
        data=replace(plan.data, batch=plan.private_batch, micro_batch=plan.private_batch),
        optimizer=plan.private_optimizer,
        eval=EvalSection(every=max(1, plan.private_steps // 3)),
    )
    return DemoRuns(teacher, distilled, alone, private)


def hashes_of(plan: DemoPlan) -> dict[str, str]:
    """{run: hash of its config} of the four runs, independent of their folders: equal hashes mean equal numbers."""
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
