"""One batch, cut into micro-batches in several ways, has one gradient.

The windows have unequal numbers of counted targets, so that a mean of the micro-batches' means is not their mean.
"""

import math

import torch
from torch import Tensor

from gramian.data import StepBatch
from gramian.train.doctor.check import Check
from gramian.train.loop.objective import IGNORED
from gramian.train.loop.precision import Numbers
from gramian.train.loop.stepper import Stepper

CUTS = (1, 2, 4)
"""Micro-batches that the batch is cut into."""
EQUAL = {"fp64": 1e-12, "fp32": 1e-6, "tf32": 1e-3, "bf16": 2e-2, "fp16": 2e-2}
"""Largest ‖g − g'‖ / ‖g‖, by precision; under autocast each micro-batch's gradient of a matrix is rounded."""
SHORTEST = 4
"""Tokens of a window."""


def invariance(stepper: Stepper, rows: dict[str, Tensor], room: int) -> Check:
    """Gradients of 1×N, 2×N/2 and 4×N/4 windows, by the run's own stepper. Three backwards, no step.

    Args:
        stepper: of a model without dropout.
        rows: N windows, [N, T] under each name; N a multiple of 4.
        room: windows of T tokens that fit into one backward; longer ones than fit N at a time are cut off.
    """
    rows = unequal(shortened(rows, room))
    count = len(rows["tokens"])
    found = [_gradient(stepper, cut(rows, pieces)) for pieces in CUTS]
    whole = found[0]
    norm = _norm(whole)
    differences = {
        f"{pieces}×{count // pieces}": _norm({name: whole[name] - other[name] for name in whole}) / max(norm, 1e-30)
        for pieces, other in zip(CUTS[1:], found[1:], strict=True)
    }
    worst = max(differences, key=lambda how: (math.isnan(differences[how]), differences[how]))
    value, allowed = differences[worst], EQUAL[_numbers(stepper.numbers)]
    ok = value <= allowed
    hint = ""
    if not ok:
        hint = (
            "divide by the counted tokens of the whole step, not by micro-batches; no randomness or batch norm inside"
        )
    return Check("micro-batches", f"{value:.1e} (1×{count}, {worst})", f"{allowed:g}", ok, hint, value)


def shortened(rows: dict[str, Tensor], room: int) -> dict[str, Tensor]:
    """Windows cut off so that all of them hold no more tokens than so many whole ones."""
    count, length = rows["tokens"].shape
    return {name: values[:, : max(SHORTEST, length * min(room, count) // count)] for name, values in rows.items()}


def unequal(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """Window r of N counts the first (r + 1)/N of its targets, one at least."""
    count, length = rows["tokens"].shape
    device = rows["tokens"].device
    kept_N = (torch.arange(1, count + 1, device=device) * length // count).clamp(min=1)
    kept_NT = torch.arange(length, device=device) < kept_N[:, None]
    return rows | {"targets": rows["targets"].masked_fill(~kept_NT, IGNORED)}


def cut(rows: dict[str, Tensor], pieces: int) -> StepBatch:
    """The rows as a step of so many micro-batches."""
    parts = {name: values.chunk(pieces) for name, values in rows.items()}
    micro = [{name: values[number] for name, values in parts.items()} for number in range(pieces)]
    tokens = int((rows["targets"] != IGNORED).sum())
    return StepBatch(0, micro, tokens)


def _gradient(stepper: Stepper, batch: StepBatch) -> dict[str, Tensor]:
    stepper.watch(batch)
    gradients = {name: p.grad.detach().clone() for name, p in stepper.module.named_parameters() if p.grad is not None}
    stepper.optimizer.zero_grad(set_to_none=True)
    return gradients


def _norm(tensors: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors.values()))


def _numbers(numbers: Numbers) -> str:
    rounds = numbers.kind == "fp32" and numbers.device == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return "tf32" if rounds else numbers.kind
