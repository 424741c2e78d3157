"""With [teacher], check the teacher, its cache, and the first loss of the student."""

from gramian.distill.teacher.live_teacher import LiveTeacher
from gramian.train.build import build_teacher
from gramian.train.doctor.check import Check, named
from gramian.train.doctor.examined_run import ExaminedRun
from gramian.train.doctor.teacher.cache_checks import cache_files, cache_rows
from gramian.train.doctor.teacher.feature_gradient import feature_gradient
from gramian.train.doctor.teacher.first_distance import first_distance


def teacher(run: ExaminedRun) -> list[Check]:
    """Run all checks of [teacher], which share one teacher and one student.

    Cost: a forward pass of a few windows by teacher and student, a backward pass if there are features, and 8 cached windows.
    """
    config = run.config
    assert config.teacher is not None
    source = build_teacher.build_source(config, run.grid, run.numbers, run.windows)
    if isinstance(source, LiveTeacher):
        checks = [frozen_teacher(source)]
    elif not (files := cache_files(source)).ok:
        return [files]  # every other check reads rows
    else:
        checks = [files, cache_rows(run, source)]
    objective = build_teacher.build_objective(config, run.model(), source)
    teaching = build_teacher.build_teaching(config, run.grid, run.numbers, run.windows, source)
    teaching.begin(0)
    checks.append(first_distance(run, objective, teaching))
    if config.teacher.features != "none":
        checks.append(feature_gradient(run, objective, teaching))
    return checks


def frozen_teacher(live: LiveTeacher) -> Check:
    """Check that no parameter of a live teacher is trainable and no module of it is in training mode."""
    trained = [name for name, p in live.model.named_parameters() if p.requires_grad]
    trained += [name for name, module in live.model.named_modules() if module.training]
    hint = f"teacher.path: these parts of its model are not frozen: {named(trained)}" if trained else ""
    return Check("teacher frozen", f"{len(trained)} parts not frozen", "0", not trained, hint, len(trained))
