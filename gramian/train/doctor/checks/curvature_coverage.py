"""With curvature, every trained parameter that is to have some must get it from one batch."""

import copy

from gramian.optim.kfac_optimizer import KFAC
from gramian.train.build.build_optimizer import build_curvature, build_optimizer
from gramian.train.doctor.check import Check, named
from gramian.train.doctor.examined_run import ExaminedRun
from gramian.train.loop.objective import Objective
from gramian.train.loop.plain_stepper import PlainStepper
from gramian.train.loop.public_curvature import PublicCurvature


def curvature_coverage(run: ExaminedRun) -> list[Check]:
    """Estimate curvature in one backward pass (on public data if the run is private); fails if a parameter gets none."""
    config, numbers, grid, module = run.config, run.numbers, run.grid, Objective(run.model())
    kfac = build_curvature(config, module)
    assert kfac is not None
    if config.privacy is not None:
        public = copy.deepcopy(module)  # referenced until the coverage is read: K-FAC has a weak reference to it
        PublicCurvature(module, public, kfac, config, numbers, grid).refresh(0)
    else:
        optimizer = build_optimizer(module, config.optimizer, grid.device, config.kfac, config.run.seed)
        kfac = optimizer.kfac if isinstance(optimizer, KFAC) else kfac
        stepper = PlainStepper(module, optimizer, numbers, grid, max_norm=0.0, seed=config.run.seed, kfac=kfac)
        stepper.watch(run.batch())
    missing = [name.removeprefix("model.") for name, cover in kfac.coverage.items() if cover.status == "unused"]
    hint = f"they get plain gradients: {named(missing)}" if missing else ""
    details = tuple(f"no curvature of {name}" for name in missing)
    measured = f"{len(missing)} of {len(kfac.coverage)} parameters not covered"
    return [Check("curvature", measured, "0", not missing, hint, len(missing), details)]
