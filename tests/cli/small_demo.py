"""A demo of seconds."""

from typing import Any

from gramian.analysis.options import Settings
from gramian.cli.demo.demo_plan import DemoPlan
from gramian.data.options import DataSection
from gramian.train.config.config_sections import DoctorSection, ModelSection, PrivacySection


def small(**changes: Any) -> DemoPlan:
    options: dict[str, Any] = {
        "teacher": ModelSection(layers=2, width=32, heads=2),
        "student": ModelSection(layers=1, width=16, heads=2),
        "teacher_steps": 24,
        "student_steps": 12,
        "data": DataSection(limit_bytes=200_000, length=48, batch=4, workers=0),
        "private_steps": 4,
        "private_batch": 4,
        "privacy": PrivacySection(target_epsilon=3.0, accountant="rdp"),
        "curvature_tokens": 32,
        "curvature": Settings(eigenvalues=1, probes=2, steps=2),
        "warmup": 2,
        "eval_every": 6,
        "doctor": DoctorSection(overfit_steps=200, overfit_windows=1),
        "scored_windows": 20,
        "sample_tokens": 20,
    }
    return DemoPlan(**(options | changes))
