"""The schedule must be able to move scalar parameters.

A step of AdamW moves a parameter by about one learning rate, whatever the size of its gradient, so Σ lr over the run bounds how
far a scalar can move: one that starts at 2 and can move by 0.01 is a constant. A matrix can turn by many small steps; a scalar
has a single direction. Scaling its gradient does not help, a separate learning rate does.
"""

import math

from gramian.train.doctor.check import Check, named
from gramian.train.doctor.examined_run import ExaminedRun
from gramian.train.loop.schedule import learning_rate

FAR = 0.1
"""Fraction of its initial value by which the schedule must be able to move a scalar parameter."""


def scalar_reach(run: ExaminedRun) -> list[Check]:
    """Compare Σ lr over the run, which bounds a scalar's movement under AdamW, with every scalar parameter's initial value."""
    config, steps = run.config, run.config.run.steps
    scalars = {
        n: float(p.detach()) for n, p in run.trial_model.named_parameters() if p.requires_grad and p.numel() == 1
    }
    total = math.fsum(learning_rate(step, steps, config.schedule, config.optimizer) for step in range(steps))
    measured = f"{len(scalars) or 'none'}; Σ lr = {total:.3g}"
    if not scalars:
        return [Check("scalars", measured, "-", True, "", total)]
    if config.optimizer.kind == "sgd" or (config.kfac is not None and config.optimizer.kind != "kfac"):
        details = tuple(f"{name} = {value:g}: moves by lr times its gradient" for name, value in scalars.items())
        hint = "how far they move depends on their gradients: watch them"
        return [Check("scalars", measured, "-", True, hint, total, details)]
    details = tuple(f"{name} = {value:g}: moves by at most about {total:.3g}" for name, value in scalars.items())
    short = [name for name, value in scalars.items() if total < FAR * abs(value)]
    hint = ""
    if short:
        hint = f"more steps, a higher rate, or a parameter that is a multiple of a unit: {named(short)}"
    return [Check("scalars", measured, f"{FAR:.0%} of each", not short, hint, total, details)]
