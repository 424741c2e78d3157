"""What [teacher] and Goose ask of a run: a frozen teacher, a cache that is its teacher's, a loss that starts where it must."""

import dataclasses
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gramian.core.byte_amounts import format_bytes
from gramian.core.errors import GramianError
from gramian.distill.cache.reader import Cache
from gramian.distill.cache.row_check import check_rows
from gramian.distill.distill_objective import TOLD, DistillObjective, LossOptions
from gramian.distill.loss.loss_metrics import SUMS, metrics_of
from gramian.distill.teacher.language_model import linear_of
from gramian.distill.teacher.live_teacher import LiveTeacher
from gramian.distill.teacher.signal import DenseSignal
from gramian.distill.teaching import Teaching
from gramian.models.goose.goose_layers import LeakyMemory
from gramian.models.goose.scan import sequential_scan
from gramian.train.build import build_teacher
from gramian.train.build.build_teacher import vocabulary_of
from gramian.train.doctor.check import Check, named
from gramian.train.doctor.examined_run import ExaminedRun
from gramian.train.loop.objective import IGNORED, logits_of
from gramian.train.loop.stepper import evaluating

ROWS = 8
"""Windows that are looked at."""
START = 0.02
"""How far the first distillation loss may be from what it must be, relatively."""
SCAN = 1e-4
"""Relative, of float32 states."""


def teacher(subject: ExaminedRun) -> list[Check]:
    """The teacher itself, its cache, and the first loss of a student.

    One forward of a few windows by teacher and student, a backward where there are features, and 8 windows of the cache.
    """
    config = subject.config
    assert config.teacher is not None
    source = build_teacher.build_source(config, subject.world, subject.numbers, subject.windows)
    if isinstance(source, LiveTeacher):
        checks = [frozen(source)]
    elif not (whole := files(source)).ok:
        return [whole]  # every other check reads rows
    else:
        checks = [whole, cached(subject, source)]
    model = subject.model()
    objective = build_teacher.build_objective(config, model, source)
    options = dataclasses.replace(config.teacher, features="none", feature_pairs=())
    teaching = build_teacher.build_teaching(config, subject.world, subject.numbers, subject.windows, source)
    teaching.begin(0)
    loaded = config.model.kind == "huggingface" and not config.model.fresh
    checks.append(initial_distance(subject, objective, teaching, loaded))
    if options != config.teacher:
        checks.append(features(subject, objective, teaching))
    return checks


def frozen(live: LiveTeacher) -> Check:
    """Nothing of the teacher can learn or drop out."""
    loose = [name for name, p in live.model.named_parameters() if p.requires_grad]
    loose += [name for name, module in live.model.named_modules() if module.training]
    hint = f"teacher.path: its model was thawed: {named(loose)}" if loose else ""
    return Check("teacher frozen", f"{len(loose)} parts not frozen", "0", not loose, hint, len(loose))


def files(cache: Cache) -> Check:
    """Every file of the cache is as it was written. Reads all of it once, one or two GB per second."""
    size = sum(record.bytes for record in cache.manifest.files.values())
    try:
        count = cache.verify()
    except GramianError as problem:
        return Check("cache files", "damaged", "checksums", False, str(problem))
    return Check("cache files", f"{count} files, {format_bytes(size)}", "checksums", True, value=float(count))


def cached(subject: ExaminedRun, cache: Cache) -> Check:
    """Random rows of the cache are what the teacher says now."""
    config = subject.config
    assert config.teacher is not None
    if not config.teacher.path:
        return Check("cache = teacher", "not compared", "-", True, "teacher.path would let some rows be compared")
    live = build_teacher.live_teacher(config, subject.world, subject.numbers, subject.windows)
    found = check_rows(cache, live, subject.windows, seed=config.run.seed)
    told = ", ".join(f"{name} {value:.2g}" for name, value in found.worst.items())
    bound = ", ".join(f"{name} {2 * found.stated.get(name, 0.0) + 1e-3:.2g}" for name in found.worst)
    hint = "" if found.holds() else "the cache is not of this teacher and data: gramian cache into another folder"
    return Check("cache = teacher", told, bound, found.holds(), hint, max(found.worst.values(), default=0.0))


def initial_distance(subject: ExaminedRun, objective: DistillObjective, teaching: Teaching, loaded: bool) -> Check:
    """T² KL(p‖q) of a student that knows nothing is T² (ln V − H(p)) + ½ Var(z), of its logits z; a loaded one is below.

    V are the ids that both know, over which the loss compares them. The left side is what the loss adds up; on the right a
    live teacher's entropy is that of its own logits.
    """
    told = subject.config.teacher
    assert told is not None
    found = _first_loss(subject, objective, teaching)
    at, metrics = found.temperature, {name: float(value) for name, value in metrics_of(found.sums).items()}
    if not (told.direction == "forward" and told.source in ("live", "hidden") and told.kd_weight):
        value = at**2 * metrics["kl"]
        return Check("first distance", f"T² D = {value:.4g}", "-", math.isfinite(found.loss), value=value)
    measured = (found.loss - told.ce_weight * metrics["ce"]) / told.kd_weight
    uniform = at**2 * (math.log(found.vocabulary) - found.entropy)
    expected = uniform + 0.5 * found.variance
    if loaded:
        fine = measured < uniform
        hint = "" if fine else "the student is farther from the teacher than one that knows nothing: another tokenizer?"
        return Check("first distance", f"T² KL = {measured:.4g}", f"< {uniform:.4g}", fine, hint, measured)
    fine = abs(measured - expected) <= START * expected
    hint = (
        ""
        if fine
        else "T² (ln V − H(p_T)) + ½ Var(z) is what a fresh student must have: is the teacher's head read right?"
    )
    return Check("first distance", f"T² KL = {measured:.4g}", f"{expected:.4g} ± {START:.0%}", fine, hint, measured)


@dataclasses.dataclass(frozen=True)
class _FirstLoss:
    """Of a few windows, before any step."""

    loss: float
    """Mean over tokens."""
    sums: Tensor
    """`SUMS`."""
    variance: float
    """Of the student's logits over the ids that both know."""
    entropy: float
    """Of the teacher over these ids, at T; not a number where its whole distribution is not known."""
    vocabulary: int
    """Those ids."""
    temperature: float


def _first_loss(subject: ExaminedRun, objective: DistillObjective, teaching: Teaching) -> _FirstLoss:
    batch = subject.batch(ROWS)
    common = min(vocabulary_of(teaching.source), linear_of(objective.model).weight.shape[0])
    sums = torch.zeros(len(SUMS), dtype=torch.float64, device=subject.world.device)
    at = float(teaching.temperature.begin(0).detach())
    total, variances, entropies = 0.0, [], []
    with evaluating(objective), subject.numbers.autocast():
        for micro in batch.micro:
            arguments = teaching.arguments(micro) | {"feature_weight": 0.0}
            loss, told = objective(
                micro["tokens"], micro["targets"], 1.0 / batch.tokens, micro.get("documents"), **arguments
            )
            total += float(loss)
            sums += told[1 : 1 + len(SUMS)]
            logits_BTV = logits_of(objective.model, micro["tokens"], micro.get("documents"))[..., :common]
            variances.append(logits_BTV.double().var(-1).mean())
            if isinstance(signal := arguments["signal"], DenseSignal):
                told_BTV = _teacher_logits(teaching.source, signal, micro)[..., :common]
                log_p_BTV = (told_BTV.double() / at).log_softmax(-1)
                entropies.append(-(log_p_BTV.exp() * log_p_BTV).sum(-1)[micro["targets"] != IGNORED])
    entropy = float(torch.cat(entropies).mean()) if entropies else math.nan
    return _FirstLoss(total, sums, float(torch.stack(variances).mean()), entropy, common, at)


def _teacher_logits(source: LiveTeacher | Cache, signal: DenseSignal, micro: Mapping[str, Tensor]) -> Tensor:
    """As the teacher's model makes them, or of a cache what its head makes of what was stored."""
    if isinstance(source, LiveTeacher):
        return logits_of(source.model, micro["tokens"], micro.get("documents"))
    return signal.head.logits(signal.hidden_BTD)


def features(subject: ExaminedRun, objective: DistillObjective, teaching: Teaching) -> Check:
    """The loss on features reaches the student: alone, without the losses on logits, it has a gradient there."""
    micro = subject.batch(ROWS).micro[0]
    alone = DistillObjective(objective.model, LossOptions(kd_weight=0.0, ce_weight=0.0), objective.features)
    arguments = teaching.arguments(micro) | {"feature_weight": 1.0}
    counted = max(1, int((micro["targets"] != IGNORED).sum()))
    with subject.numbers.autocast():
        loss, told = alone(micro["tokens"], micro["targets"], 1.0 / counted, micro.get("documents"), **arguments)
    trained = [p for p in alone.model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, trained, allow_unused=True)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in found if g is not None))
    distance = float(told[TOLD.index("feature_loss")]) / counted
    fine = norm > 0 and math.isfinite(norm)
    hint = "" if fine else "no gradient of the feature loss reaches the student: are its features detached?"
    return Check("feature gradient", f"{norm:.3g} at distance {distance:.3g}", "> 0", fine, hint, norm)


def scan(subject: ExaminedRun, model: nn.Module) -> Check:
    """Goose's memories, computed in chunks, are what one token after the other gives; on its own inputs, in float64."""
    memories = {name: module for name, module in model.named_modules() if isinstance(module, LeakyMemory)}
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def hook(name: str) -> "torch.utils.hooks.RemovableHandle":
        return memories[name].register_forward_hook(
            lambda module, inputs, output: seen.__setitem__(name, (inputs[0].detach(), output[0].detach()))
        )

    handles = [hook(name) for name in memories]
    micro = subject.batch(2).micro[0]
    try:
        with evaluating(model), subject.numbers.autocast():
            logits_of(model, micro["tokens"])
    finally:
        for handle in handles:
            handle.remove()
    worst = 0.0
    for name, (u_BTD, read_BTD) in seen.items():
        decay_D = memories[name].decay_logit.detach().double().sigmoid()
        expected_BTD = (1 - decay_D.square()).sqrt() * sequential_scan(u_BTD.double(), decay_D)
        largest = expected_BTD.abs().max().clamp(min=1e-30)
        worst = max(worst, float((read_BTD.double() - expected_BTD).abs().max() / largest))
    fine = worst <= SCAN
    hint = "" if fine else "the parallel recurrence forgets or invents: it must be the sequential one"
    return Check("scan = sequential", f"{worst:.2g}", f"≤ {SCAN:g}", fine, hint, worst)
