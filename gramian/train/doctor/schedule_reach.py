"""How far the schedule can take a parameter: where it ends, and whether scalars get anywhere.

A step of AdamW moves a parameter by about one learning rate, whatever the size of its gradient, so that Σ lr over the run
bounds the way of a scalar: one that starts at 2 and can move by 0.01 is a constant, whatever the loss says. A matrix turns by
many small steps; a scalar has only this one direction. Scaling its gradient does not help, a rate of its own does.
"""

import math

from torch import nn

from gramian.train.config.config import Config
from gramian.train.doctor.check import Check, named
from gramian.train.loop.schedule import learning_rate

FAR = 0.1
"""Share of its initial value that a scalar must be able to move."""


def schedule_end(config: Config) -> Check:
    """The last step has the rate that the schedule says: the floor, or the peak of "constant"."""
    schedule, steps = config.schedule, config.run.steps
    last = learning_rate(steps - 1, steps, schedule, config.optimizer)
    end = config.optimizer.lr if schedule.kind == "constant" else schedule.floor
    ok = math.isclose(last, end, rel_tol=1e-12, abs_tol=0.0)
    hint = "" if ok else "the schedule does not end where it says: warm-up and decay do not fit into run.steps"
    return Check("schedule", f"ends at lr {last:g}", f"{end:g}", ok, hint, last)


def reach(config: Config, model: nn.Module) -> Check:
    """Σ lr against the initial value of every scalar parameter.

    Args:
        config: of the run.
        model: with its initial weights.
    """
    scalars = {n: float(p.detach()) for n, p in model.named_parameters() if p.requires_grad and p.numel() == 1}
    steps = config.run.steps
    total = math.fsum(learning_rate(step, steps, config.schedule, config.optimizer) for step in range(steps))
    told = f"Σ lr = {total:.3g}"
    if not scalars:
        return Check("scalars", f"none; {told}", "-", True, "", total)
    if config.optimizer.kind != "adamw" or config.kfac is not None:
        details = tuple(f"{name} = {value:g}: moves by lr times its gradient" for name, value in scalars.items())
        hint = "how far they move depends on their gradients: watch them"
        return Check("scalars", f"{len(scalars)}; {told}", "-", True, hint, total, details)
    details = tuple(f"{name} = {value:g}: moves by at most about {total:.3g}" for name, value in scalars.items())
    short = [name for name, value in scalars.items() if total < FAR * abs(value)]
    hint = ""
    if short:
        hint = f"more steps, a higher rate, or a parameter that is a multiple of a unit: {named(short)}"
    threshold = f"{FAR:.0%} of each"
    return Check("scalars", f"{len(scalars)}; {told}", threshold, not short, hint, total, details)
