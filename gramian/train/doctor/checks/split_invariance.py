"""A batch must have the same gradient however it is split into micro-batches.

The windows have unequal numbers of counted targets, so that the mean of the micro-batches' means would be a different number.
"""

import math

import torch
from torch import Tensor

from gramian.data import StepBatch
from gramian.train.doctor.check import Check
from gramian.train.doctor.examined_run import ExaminedRun
from gramian.train.loop.objective import IGNORED
from gramian.train.loop.plain_stepper import PlainStepper
from gramian.train.loop.precision import Precision

CUTS = (1, 2, 4)
"""Numbers of micro-batches that the same batch is split into."""
EQUAL = {"fp64": 1e-12, "fp32": 1e-6, "tf32": 1e-3, "bf16": 2e-2, "fp16": 2e-2}
"""Maximum ‖g − g'‖ / ‖g‖ of the gradients g, g' of two splits, by precision; autocast rounds each micro-batch's gradient."""
SHORTEST = 4
"""Minimum number of tokens of a shortened window."""


def split_invariance(run: ExaminedRun) -> list[Check]:
    """Compare the gradients of one batch in 1, 2 and 4 micro-batches: three backward passes of the trial model, no step."""
    stepper, rows = run.trial_stepper, unequal(shortened(run.rows, run.backward_windows))
    count = len(rows["tokens"])
    reference, *found = [_gradient(stepper, split(rows, pieces)) for pieces in CUTS]
    norm = _norm(reference)
    differences = {
        f"{pieces}×{count // pieces}": _norm({name: reference[name] - gradient[name] for name in reference})
        / max(norm, 1e-30)
        for pieces, gradient in zip(CUTS[1:], found, strict=True)
    }
    worst = max(differences, key=lambda name: (math.isnan(differences[name]), differences[name]))
    value, allowed = differences[worst], EQUAL[_precision(stepper.numbers)]
    ok, hint = value <= allowed, ""
    if not ok:
        hint = "divide by the counted tokens of the step, not of a micro-batch; use no randomness and no batch norm"
    return [Check("micro-batches", f"{value:.1e} (1×{count}, {worst})", f"{allowed:g}", ok, hint, value)]


def shortened(rows: dict[str, Tensor], windows: int) -> dict[str, Tensor]:
    """Shorten all rows so that together they have no more tokens than `windows` full windows."""
    count, length = rows["tokens"].shape
    return {name: values[:, : max(SHORTEST, length * min(windows, count) // count)] for name, values in rows.items()}


def unequal(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give windows unequal numbers of targets: window r of N counts the first (r + 1)/N of them, at least one."""
    count, length = rows["tokens"].shape
    device = rows["tokens"].device
    counted_N = (torch.arange(1, count + 1, device=device) * length // count).clamp(min=1)
    counted_NT = torch.arange(length, device=device) < counted_N[:, None]
    return rows | {"targets": rows["targets"].masked_fill(~counted_NT, IGNORED)}


def split(rows: dict[str, Tensor], pieces: int) -> StepBatch:
    """Split rows, {name: [N, T]}, into a step of `pieces` micro-batches."""
    parts = {name: values.chunk(pieces) for name, values in rows.items()}
    micro = [{name: values[number] for name, values in parts.items()} for number in range(pieces)]
    return StepBatch(0, micro, tokens=int((rows["targets"] != IGNORED).sum()))


def _gradient(stepper: PlainStepper, batch: StepBatch) -> dict[str, Tensor]:
    stepper.watch(batch)
    gradients = {name: p.grad.detach().clone() for name, p in stepper.module.named_parameters() if p.grad is not None}
    stepper.optimizer.zero_grad(set_to_none=True)
    return gradients


def _norm(tensors: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors.values()))


def _precision(numbers: Precision) -> str:
    rounds = numbers.kind == "fp32" and numbers.device == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return "tf32" if rounds else numbers.kind
