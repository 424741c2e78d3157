"""What [privacy] and [kfac] ask of a model."""

import copy
import dataclasses

from torch import Tensor, nn

from gramian.errors import GramianError
from gramian.train.build import build_kfac
from gramian.train.checks.check import Check, named
from gramian.train.checks.subject import Subject, rows_of
from gramian.train.objective import Objective
from gramian.train.optimizers import build_optimizer
from gramian.train.private import PrivateStepper
from gramian.train.public import PublicCurvature
from gramian.train.stepper import Stepper

FEW = 4
"""Windows that are enough."""


def privacy(subject: Subject) -> Check:
    """Windows of a batch do not depend on each other: each has a gradient of its own to clip.

    A private copy of the model; nothing is released, no draw is made and no key is kept. At most nine passes.
    """
    assert subject.config.privacy is not None
    # The noise does not matter here, and finding it takes time.
    options = dataclasses.replace(subject.config.privacy, noise_multiplier=1.0, target_epsilon=None)
    data = dataclasses.replace(subject.config.data, workers=0)
    config = dataclasses.replace(subject.config, privacy=options, data=data, kfac=None)
    module = Objective(subject.model())
    optimizer = build_optimizer(module, config.optimizer, subject.world.device)
    stepper = PrivateStepper(module, optimizer, subject.numbers, subject.world, config, subject.windows)
    rows = rows_of(subject.batch(FEW))

    def loss_of(model: nn.Module, rows: dict[str, Tensor]) -> Tensor:
        with subject.numbers.autocast():
            loss, _ = model(rows["tokens"], rows["targets"], 1.0 / data.length, rows.get("documents"))
        found: Tensor = loss if stepper.scaler is None else stepper.scaler.scale(loss)
        return found

    try:
        stepper.engine.check_independence(loss_of, rows)
    except GramianError as problem:
        return Check("private windows", "depend on each other", "independent", False, str(problem))
    return Check("private windows", "independent", "independent", True)


def kfac(subject: Subject) -> Check:
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
