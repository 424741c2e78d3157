"""With [privacy], each row of a layer's tensors and each window's loss must depend on one window, whose gradient is clipped."""

import dataclasses

from gramian.core.errors import GramianError
from gramian.train.build.build_optimizer import build_optimizer
from gramian.train.doctor.check import Check
from gramian.train.doctor.examined_run import ExaminedRun
from gramian.train.loop.objective import Objective
from gramian.train.loop.private_stepper import PrivateStepper

FEW = 4
"""Number of windows whose losses are checked for independence."""


def private_windows(run: ExaminedRun) -> list[Check]:
    """Check that each row of a layer's tensors (the row proof), and each window's loss, depends on one window only.

    Works on a private copy of the model: nothing is released, no sample is drawn and no key is stored.
    """
    assert run.config.privacy is not None
    # Amount and metric of the noise do not matter here, and computing them takes time.
    options = dataclasses.replace(
        run.config.privacy, noise_multiplier=1.0, target_epsilon=None, metric="plain", max_physical_batch=""
    )
    data = dataclasses.replace(run.config.data, workers=0)
    config = dataclasses.replace(run.config, privacy=options, data=data, kfac=None)
    module = Objective(run.model())
    optimizer = build_optimizer(module, config.optimizer, run.grid.device)
    stepper = PrivateStepper(module, optimizer, run.numbers, run.grid, config, run.windows)
    return [_row_proof(run, stepper), _independence(run, stepper)]


def _row_proof(run: ExaminedRun, stepper: PrivateStepper) -> Check:
    """Check by the row proof, as before the first private step, that each row of a layer's tensors depends on one window."""
    try:
        stepper.loss(stepper.module, stepper.some_rows(run.backward_windows))
    except GramianError as problem:
        return Check("row proof", "refused", "proven", False, str(problem))
    proof = stepper.engine.proof
    if proof["rows"] != "proven":
        hint = "the sample of each row is taken from shapes, and ε depends on it" if proof["rows"] == "off" else ""
        return Check("row proof", proof["rows"], "-", True, hint)
    runs = sum(structure["runs"] for structure in proof["structures"])
    return Check("row proof", f"proven, {runs} runs of {run.backward_windows} windows", "proven", True)


def _independence(run: ExaminedRun, stepper: PrivateStepper) -> Check:
    try:
        stepper.prove_loss(stepper.some_rows(FEW))
    except GramianError as problem:
        return Check("private windows", "depend on each other", "independent", False, str(problem))
    return Check("private windows", "independent", "independent", True)
