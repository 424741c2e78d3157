"""What [privacy] and [kfac] ask of a model."""

import copy
import dataclasses

from gramian.core.errors import GramianError
from gramian.train.build.build_optimizer import build_optimizer
from gramian.train.build.run_parts import build_kfac
from gramian.train.doctor.check import Check, named
from gramian.train.doctor.examined_run import ExaminedRun, rows_of
from gramian.train.loop.objective import Objective
from gramian.train.loop.private_stepper import PrivateStepper
from gramian.train.loop.public_curvature import PublicCurvature
from gramian.train.loop.stepper import Stepper

FEW = 4
"""Windows that are enough."""


def privacy(subject: ExaminedRun) -> list[Check]:
    """Rows of every window depend on that window alone, and so does its loss: each has a gradient of its own to clip.

    A private copy of the model; nothing is released, no draw is made and no key is kept. Cost: a row proof on as many windows
    as a backward takes, and one with the loss on four.
    """
    assert subject.config.privacy is not None
    # The noise does not matter here, and finding it takes time.
    options = dataclasses.replace(subject.config.privacy, noise_multiplier=1.0, target_epsilon=None)
    data = dataclasses.replace(subject.config.data, workers=0)
    config = dataclasses.replace(subject.config, privacy=options, data=data, kfac=None)
    module = Objective(subject.model())
    optimizer = build_optimizer(module, config.optimizer, subject.world.device)
    stepper = PrivateStepper(module, optimizer, subject.numbers, subject.world, config, subject.windows)
    return [_row_proof(subject, stepper), _private_windows(subject, stepper)]


def _row_proof(subject: ExaminedRun, stepper: PrivateStepper) -> Check:
    """The proof that runs before the first step, on the first windows in the run's order."""
    try:
        stepper.loss(stepper.module, rows_of(subject.batch(subject.room)))
    except GramianError as problem:
        return Check("row proof", "refused", "proven", False, str(problem))
    proof = stepper.engine.proof
    if proof["rows"] != "proven":
        hint = "whose row is which is taken from shapes, and ε rests on that" if proof["rows"] == "off" else ""
        return Check("row proof", proof["rows"], "-", True, hint)
    runs = sum(structure["runs"] for structure in proof["structures"])
    return Check("row proof", f"proven, {runs} runs of {subject.room} windows", "proven", True)


def _private_windows(subject: ExaminedRun, stepper: PrivateStepper) -> Check:
    try:
        stepper.engine.check_independence(lambda model, rows: stepper.loss(model, rows)[0], rows_of(subject.batch(FEW)))
    except GramianError as problem:
        return Check("private windows", "depend on each other", "independent", False, str(problem))
    return Check("private windows", "independent", "independent", True)


def kfac(subject: ExaminedRun) -> Check:
    """Curvature of every trained parameter comes from one batch, of public data beside [privacy]. One backward."""
    config, numbers, world, module = subject.config, subject.numbers, subject.world, Objective(subject.model())
    found = build_kfac(config)
    if config.privacy is not None:
        public = PublicCurvature(module, copy.deepcopy(module), found, config, numbers, world)
        public.refresh(0)
        covers = found.coverage
    else:
        optimizer = build_optimizer(module, config.optimizer, world.device)
        Stepper(module, optimizer, numbers, world, max_norm=0.0, seed=config.run.seed, kfac=found).watch(
            subject.batch()
        )
        covers = found.coverage
    missing = [name.removeprefix("model.") for name, cover in covers.items() if cover.status == "unused"]
    hint = f"they get plain gradients: {named(missing)}" if missing else ""
    details = tuple(f"no curvature of {name}" for name in missing)
    measured = f"{len(missing)} of {len(covers)} parameters not covered"
    return Check("curvature", measured, "0", not missing, hint, len(missing), details)
