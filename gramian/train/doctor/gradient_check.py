"""Every parameter that is trained gets a gradient: finite, and not zero.

A gradient may be zero at first for a good reason: behind a gate or an adapter that starts at zero, of an expert that no token
went to. So a few batches are looked at with an optimizer step between them, and what counts is a parameter that never gets
one. Rows of an embedding that do not occur are part of a parameter that does.
"""

from collections.abc import Sequence

from torch import nn

from gramian.data import StepBatch
from gramian.train.doctor.check import Check, named
from gramian.train.loop.stepper import Stepper

SETTLES = 24
"""Steps in which a loss scale comes down to where nothing overflows."""

NOT_FINITE = "not finite"


def gradients(stepper: Stepper, batches: Sequence[StepBatch], rate: float) -> Check:
    """Look for parameters without a gradient. Afterwards the model has taken a step for each batch but the last.

    Args:
        stepper: plain steps of a model.
        batches: at least one.
        rate: learning rate of the steps between.
    """
    settle(stepper, batches[0], rate)
    states: dict[str, str] = {}
    for number, batch in enumerate(batches):
        stepper.watch(batch)
        now = {name: _state(parameter) for name, parameter in _trained(stepper.module)}
        if NOT_FINITE in now.values():  # a step along it would spoil the rest
            states = {name: state if state == NOT_FINITE else "" for name, state in now.items()}
            break
        states = {name: state and states.get(name, state) for name, state in now.items()}
        if number < len(batches) - 1:
            stepper.take(batch, rate)
    found = {name: state for name, state in states.items() if state}
    hint = ""
    if found:
        first = named([f"{name} ({state})" for name, state in found.items()])
        hint = f"detached, unused or overflowing; freeze what is not to be trained (requires_grad=False): {first}"
    details = tuple(f"gradient of {name}: {state}" for name, state in found.items())
    return Check("gradients", f"{len(found)} of {len(states)} without", "0", not found, hint, len(found), details)


def settle(stepper: Stepper, batch: StepBatch, rate: float) -> None:
    """Take steps until the loss scale, where there is one, is low enough for one that counts."""
    if stepper.scaler is not None:
        for _ in range(SETTLES):
            if stepper.take(batch, rate).stepped:
                return


def _trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name.removeprefix("model."), p) for name, p in module.named_parameters() if p.requires_grad]


def _state(parameter: nn.Parameter) -> str:
    """What is wrong with its gradient; "": nothing."""
    gradient = parameter.grad
    if gradient is None:
        return "none"
    if not bool(gradient.isfinite().all()):
        return NOT_FINITE
    return "" if bool(gradient.any()) else "zero"
