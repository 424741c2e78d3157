"""What the demo runs: sizes, steps and the configs that follow from them.

The three runs are ordinary ones: their folders hold a `config.toml` that `gramian train` takes, with or without overrides.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gramian.train.config.config import (
    CheckpointSection,
    Config,
    DataSection,
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
    """All that decides the demo's numbers, beside the corpus and the machine."""

    teacher: ModelSection = field(default_factory=lambda: ModelSection(layers=2, width=128, heads=4))
    student: ModelSection = field(default_factory=lambda: ModelSection(layers=2, width=64, heads=4))
    teacher_steps: int = 800
    student_steps: int = 600
    """Of both students."""
    data: DataSection = field(
        default_factory=lambda: DataSection(limit_bytes=600_000, length=64, batch=16, micro_batch=16, workers=0)
    )
    """One for all three: the cache holds the teacher's signal of every training window, computed by micro-batches."""
    optimizer: OptimizerSection = field(default_factory=lambda: OptimizerSection(lr=4e-3))
    """Of 2e-3 to 6e-3, close to the best for the student without a teacher."""
    warmup: int = 50
    eval_every: int = 100
    """Steps from one look at the validation loss to the next."""
    teaching: TeacherSection = field(default_factory=lambda: TeacherSection(source="hidden", temperature=2.0))
    doctor: DoctorSection = field(default_factory=lambda: DoctorSection(overfit_steps=200, overfit_windows=4))
    scored_windows: int = 512
    """Of the validation data, from the first on, on which the three models are compared."""
    sample_tokens: int = 200
    """Of a text."""
    threads: int = 1
    """On a CPU. A second one saves a fifth of the time on an idle machine, and where others compute too, threads that wait
    for each other make steps ten times slower. One also gives the same numbers on any number of cores."""
    seed: int = 0
    """Of weights, data order and texts."""


DEFAULT = DemoPlan()
"""About 80 s on a CPU: half of it for the teacher, a third for the students."""


@dataclass(frozen=True)
class DemoRuns:
    """The configs of the three runs, each with a folder of its own below the demo's."""

    teacher: Config
    distilled: Config
    alone: Config
    """The distilled student's twin: cross entropy only."""


def runs_of(plan: DemoPlan, out: Path) -> DemoRuns:
    """The three runs.

    Args:
        plan: of the demo.
        out: its folder; runs lie in `teacher`, `distilled` and `ce-only` below it, the cache in `teacher-cache`.
    """
    teaching = replace(plan.teaching, path=str(out / "teacher"), cache=str(out / "teacher-cache"))
    teacher = _config(plan, out / "teacher", plan.teacher, plan.teacher_steps)
    alone = _config(plan, out / "ce-only", plan.student, plan.student_steps)
    distilled = _config(plan, out / "distilled", plan.student, plan.student_steps, teacher=teaching)
    return DemoRuns(teacher, distilled, alone)


def hashes_of(plan: DemoPlan) -> dict[str, str]:
    """Of the three configs, wherever their folder is: equal ones mean equal numbers."""
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
