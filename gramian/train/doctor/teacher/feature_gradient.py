"""The loss on hidden features must have a gradient in the student."""

import math

import torch

from gramian.distill.distill_objective import REPORTED_SUMS, DistillObjective
from gramian.distill.teaching import Teaching
from gramian.kernels.distillation.distill_rows import RowObjective
from gramian.train.doctor.check import Check
from gramian.train.doctor.examined_run import ExaminedRun
from gramian.train.doctor.teacher.first_distance import ROWS
from gramian.train.loop.objective import IGNORED


def feature_gradient(run: ExaminedRun, objective: DistillObjective, teaching: Teaching) -> Check:
    """Check that the feature loss, without the losses on logits, has a gradient above 0 in the student."""
    micro = run.batch(ROWS).micro[0]
    alone = DistillObjective(objective.model, RowObjective(kd_weight=0.0, ce_weight=0.0), objective.features)
    arguments = teaching.arguments(micro) | {"feature_weight": 1.0}
    counted = max(1, int((micro["targets"] != IGNORED).sum()))
    with run.numbers.autocast():
        loss, metrics = alone(micro["tokens"], micro["targets"], 1.0 / counted, micro.get("documents"), **arguments)
    trained = [p for p in alone.model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, trained, allow_unused=True)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in found if g is not None))
    distance = float(metrics[REPORTED_SUMS.index("feature_loss")]) / counted
    ok = norm > 0 and math.isfinite(norm)
    hint = "" if ok else "no gradient of the feature loss reaches the student: are its features detached?"
    return Check("feature gradient", f"{norm:.3g} at distance {distance:.3g}", "> 0", ok, hint, norm)
