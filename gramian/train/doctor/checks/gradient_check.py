"""Every trained parameter must get a finite gradient that is not zero.

A gradient may be zero at first for a good reason: behind a gate or an adapter that starts at zero, or in an expert that got no
token. So a few batches are examined with an optimizer step between them, and a parameter fails if it never gets a gradient. An
embedding is one parameter: rows of tokens that do not occur do not count.
"""

from torch import nn

from gramian.train.doctor.check import Check, named
from gramian.train.doctor.examined_run import ExaminedRun
from gramian.train.loop.schedule import learning_rate

SETTLES = 24
"""Maximum number of steps in which the loss scaler may search for a scale that does not overflow."""

NOT_FINITE = "not finite"


def gradients(run: ExaminedRun) -> list[Check]:
    """Check that every trained parameter gets a finite gradient that is not zero in one of a few batches.

    Afterwards the trial model has taken a step for each batch but the last.
    """
    stepper, batches, config = run.trial_stepper, run.batches, run.config
    rate = learning_rate(0, config.run.steps, config.schedule, config.optimizer)
    if stepper.scaler is not None:
        for _ in range(SETTLES):
            if stepper.take(batches[0], rate).stepped:
                break
    problems: dict[str, str] = {}
    for number, batch in enumerate(batches):
        stepper.watch(batch)
        now = {name: _problem(p) for name, p in run.trial_model.named_parameters() if p.requires_grad}
        if NOT_FINITE in now.values():  # a step with it would spoil the other parameters
            problems = {name: problem if problem == NOT_FINITE else "" for name, problem in now.items()}
            break
        problems = {name: problem and problems.get(name, problem) for name, problem in now.items()}
        if number < len(batches) - 1:
            stepper.take(batch, rate)
    found = {name: problem for name, problem in problems.items() if problem}
    hint = ""
    if found:
        first = named([f"{name} ({problem})" for name, problem in found.items()])
        hint = f"detached, unused or overflowing; freeze what is not to be trained (requires_grad=False): {first}"
    details = tuple(f"gradient of {name}: {problem}" for name, problem in found.items())
    return [Check("gradients", f"{len(found)} of {len(problems)} without", "0", not found, hint, len(found), details)]


def _problem(parameter: nn.Parameter) -> str:
    """What is wrong with a parameter's gradient: "none", "zero" or "not finite"; "" if nothing is."""
    gradient = parameter.grad
    if gradient is None:
        return "none"
    if not bool(gradient.isfinite().all()):
        return NOT_FINITE
    return "" if bool(gradient.any()) else "zero"
