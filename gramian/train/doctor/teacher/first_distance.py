"""The first distillation loss must be that of an untrained student, or below it if the student is trained.

An untrained student with logits z has T² KL(p‖q) = T² (ln V − H(p)) + ½ Var(z), where p is the teacher's distribution at
temperature T over the V ids that both heads have.
"""

import dataclasses
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from gramian.distill.cache.reader import Cache
from gramian.distill.distill_objective import DistillObjective
from gramian.distill.loss.loss_metrics import SUMS, metrics_of
from gramian.distill.teacher.language_model import linear_of
from gramian.distill.teacher.live_teacher import LiveTeacher
from gramian.distill.teacher.signal import DenseSignal
from gramian.distill.teaching import Teaching
from gramian.models.token_sampling import evaluation_mode
from gramian.train.doctor.check import Check
from gramian.train.doctor.examined_run import ExaminedRun
from gramian.train.loop.objective import IGNORED, logits_of

ROWS = 8
"""Number of examined windows."""
NEAR = 0.02
"""Maximum relative distance of the first distillation loss from its expected value."""


@dataclasses.dataclass(frozen=True)
class _FirstLoss:
    """Distillation loss and logits of a few windows before any step."""

    loss: float
    """Distillation loss, mean over tokens."""
    sums: Tensor
    """Sums over tokens that the distillation loss reports, in the order of `SUMS`."""
    variance: float
    """Variance of the student's logits over the ids that student and teacher have."""
    entropy: float
    """Entropy of the teacher at temperature T over the common ids; NaN if its full distribution is not available."""
    vocabulary: int
    """Number of ids that student and teacher have."""
    temperature: float


def first_distance(run: ExaminedRun, objective: DistillObjective, teaching: Teaching) -> Check:
    """Check the student's first divergence from the teacher against the value that an untrained student would have.

    That is T² (ln V − H(p)) + ½ Var(z): T the temperature, V common ids, p the teacher at T, z the student's logits. A trained
    student must be below T² (ln V − H(p)). A live teacher's entropy H is computed from its own logits.
    """
    options = run.config.teacher
    assert options is not None
    found = _first_loss(run, objective, teaching)
    at, metrics = found.temperature, {name: float(value) for name, value in metrics_of(found.sums).items()}
    if not (options.direction == "forward" and options.kd_weight and not math.isnan(found.entropy)):
        value = at**2 * metrics["kl"]
        return Check("first distance", f"T² D = {value:.4g}", "-", math.isfinite(found.loss), value=value)
    measured = (found.loss - options.ce_weight * metrics["ce"]) / options.kd_weight
    uniform = at**2 * (math.log(found.vocabulary) - found.entropy)
    if run.loaded:
        ok, threshold = measured < uniform, f"< {uniform:.4g}"
        hint = "the student is farther from the teacher than an untrained one: another tokenizer?"
    else:
        expected = uniform + 0.5 * found.variance
        ok, threshold = abs(measured - expected) <= NEAR * expected, f"{expected:.4g} ± {NEAR:.0%}"
        hint = "an untrained student must have T² (ln V − H(p_T)) + ½ Var(z): is the teacher's head read right?"
    return Check("first distance", f"T² KL = {measured:.4g}", threshold, ok, "" if ok else hint, measured)


def _first_loss(run: ExaminedRun, objective: DistillObjective, teaching: Teaching) -> _FirstLoss:
    batch = run.batch(ROWS)
    common = min(teaching.source.vocabulary, linear_of(objective.model).weight.shape[0])
    sums = torch.zeros(len(SUMS), dtype=torch.float64, device=run.grid.device)
    at = float(teaching.temperature.begin(0).detach())
    total, variances, entropies = 0.0, [], []
    with evaluation_mode(objective), run.numbers.autocast():
        for micro in batch.micro:
            arguments = teaching.arguments(micro) | {"feature_weight": 0.0}
            loss, metrics = objective(
                micro["tokens"], micro["targets"], 1.0 / batch.tokens, micro.get("documents"), **arguments
            )
            total += float(loss)
            sums += metrics[1 : 1 + len(SUMS)]
            logits_BTV = logits_of(objective.model, micro["tokens"], micro.get("documents"))[..., :common]
            variances.append(logits_BTV.double().var(-1).mean())
            if isinstance(signal := arguments["signal"], DenseSignal):
                teacher_BTV = _teacher_logits(teaching.source, signal, micro)[..., :common]
                log_p_BTV = (teacher_BTV.double() / at).log_softmax(-1)
                entropies.append(-(log_p_BTV.exp() * log_p_BTV).sum(-1)[micro["targets"] != IGNORED])
    entropy = float(torch.cat(entropies).mean()) if entropies else math.nan
    return _FirstLoss(total, sums, float(torch.stack(variances).mean()), entropy, common, at)


def _teacher_logits(source: LiveTeacher | Cache, signal: DenseSignal, micro: Mapping[str, Tensor]) -> Tensor:
    """Return logits of a live teacher's model, or of its head on the hidden states of a cache."""
    if isinstance(source, LiveTeacher):
        return logits_of(source.model, micro["tokens"], micro.get("documents"))
    return signal.head.logits(signal.hidden_BTD)
