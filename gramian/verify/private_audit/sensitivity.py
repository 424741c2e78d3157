"""Sensitivity: the clipped sum with and without one record differs by at most the clip norm C, for real and crafted records.

Accountants know nothing of a model but this. It is measured on the run's model, through the run's own taps, clip factors and
sums, but without the row proof, which would refuse some of what is looked for before it is summed. What it can see: a norm that
is too small (a broken formula, the cross term of tied weights), factors that go to other records, records that are not clipped.
A model that draws random numbers would draw others for a smaller batch; there a record is not left out, but loses its targets.

Legend: R records, T tokens.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from gramian.train.loop.objective import IGNORED
from gramian.train.loop.private_stepper import PrivateStepper
from gramian.train.loop.stepper import seed_all
from gramian.verify.private_audit.audit_finding import AuditFinding
from gramian.verify.private_audit.audited_run import AuditedRun

REAL = 4
"""Number of records of the run that are taken."""
SCALES = (1e4, 1e-4, math.inf)
"""Multiples of the loss that crafted records ask for."""
ALLOWED = {"fp64": 1e-9, "fp32": 1e-4, "fp16": 5e-2, "bf16": 5e-2}
"""{precision: relative excess over C that is allowed}: rounding of two sums, of which one is subtracted from the other."""

Rows = dict[str, Tensor]


def crafted_records(real: Mapping[str, Tensor], vocabulary: int) -> tuple[list[str], Rows]:
    """Names and rows [R, T] of records to audit with: real ones first, then crafted from them.

    Crafted are a copy, gradients of 10⁴ and 10⁻⁴ times the size, padding in part and alone, one token in all places (where
    uses of a tied table add up, in either direction), and a loss that is not finite.
    """
    count, T = real["tokens"].shape
    names, rows = [f"real {i}" for i in range(count)], [{name: t[i] for name, t in real.items()} for i in range(count)]

    def add(
        name: str, source: int, tokens: int | None = None, target: int | None = None, scale: int | None = None
    ) -> None:
        row = {key: value.clone() for key, value in rows[source % count].items()}
        if tokens is not None:
            row["tokens"].fill_(tokens)
        if target is not None:
            row["targets"].fill_(target)
        if scale is not None:
            row["targets"][0] = IGNORED - 1 - scale
        names.append(name)
        rows.append(row)

    add("a copy of real 0", 0)
    add("loss × 10⁴", 1, scale=0)
    add("loss × 10⁻⁴", 2, scale=1)
    add("padding alone", 0, target=IGNORED)
    add("padding in the second half", 3)
    rows[-1]["targets"][T // 2 :] = IGNORED
    for token in (0, vocabulary // 2):
        other = (token + 1) % vocabulary
        add(f"token {token} alone, predicting itself, loss × 10⁴", 0, token, token, 0)
        add(f"token {token} alone, predicting {other}, loss × 10⁴", 0, token, other, 0)
    add("a loss that is not finite", 3, scale=2)
    return names, {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def check_sensitivity(run: AuditedRun) -> AuditFinding:
    """Measure how far each record moves the clipped sum of all. Cost: R + 1 backwards of R records."""
    limit, allowed = run.privacy.max_grad_norm, ALLOWED[run.numbers.kind]
    places = np.linspace(0, len(run.windows) - 1, min(REAL, len(run.windows))).astype(np.int64)
    names, rows = crafted_records(run.windows.stack(places), run.windows.vocabulary)
    with run.private(scales=SCALES, proof="off") as stepper:
        everything, pieces = list(range(len(names))), stepper.engine.max_physical_batch or len(names)
        whole = _clipped_sum(stepper, rows, everything, pieces)
        moved, draws = {}, _draws_numbers(stepper, rows)
        for left_out, name in enumerate(names):
            if draws:
                emptied = rows["targets"].clone()
                emptied[left_out] = IGNORED
                without = _clipped_sum(stepper, {**rows, "targets": emptied}, everything, pieces)
            else:
                without = _clipped_sum(stepper, rows, [i for i in everything if i != left_out], pieces)
            change = stepper.engine.whitened({p: whole[p] - without[p] for p in whole})
            moved[name] = math.sqrt(sum(float(t.square().sum()) for t in change.values())) / limit
    worst = max(moved, key=lambda name: math.inf if math.isnan(moved[name]) else moved[name])
    passed = all(value <= 1 + allowed for value in moved.values())
    verb = "moved" if passed else "MOVED"
    says = (
        f"{'emptying' if draws else 'leaving out'} one of {len(names)} records, real or crafted, {verb} the clipped sum by at "
        f"most {moved[worst]:.6g} C (allowed: {1 + allowed:g} C){'' if passed else f', at: {worst}'}"
    )
    facts = {"records": len(names), "largest_move_over_C": _finite(moved[worst]), "allowed": 1 + allowed, "at": worst}
    return AuditFinding("sensitivity", passed, says, facts, on_private_data=True)


def _clipped_sum(stepper: PrivateStepper, rows: Rows, chosen: list[int], pieces: int) -> dict[str, Tensor]:
    """{parameter: Σ_i min(1, C/‖g_i‖) g_i} of some records, in float64, `pieces` records a backward."""
    trained = {name: p for name, p in stepper.module.named_parameters() if p.requires_grad}
    totals = {name: torch.zeros(p.shape, dtype=torch.float64, device=p.device) for name, p in trained.items()}
    for start in range(0, len(chosen), pieces):
        seed_all(0, start)
        piece = chosen[start : start + pieces]
        stepper.optimizer.zero_grad(set_to_none=True)
        loss, _ = stepper.loss(stepper.module, {name: t[piece].to(stepper.grid.device) for name, t in rows.items()})
        stepper.engine.backward(loss)
        for name, p in trained.items():
            if p.grad is not None:
                totals[name] += p.grad.detach().double().to(totals[name].device)
    stepper.optimizer.zero_grad(set_to_none=True)
    return totals


def _draws_numbers(stepper: PrivateStepper, rows: Rows) -> bool:
    """Whether the model's forward draws random numbers, as dropout does."""
    device = stepper.grid.device
    state = torch.cuda.get_rng_state if device.type == "cuda" else torch.get_rng_state
    before = state()
    with torch.no_grad():
        stepper.loss(stepper.module, {name: t[:1].to(device) for name, t in rows.items()})
    return not torch.equal(before, state())


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
