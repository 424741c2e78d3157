"""The loss before the first step must be that of an untrained model.

The logits z of an untrained model are independent of the target y: with mean μ and variance σ² over the vocabulary,

    E[−log p(y)] = E[log Σ_v exp z_v − z_y] ≈ (ln V + μ + ½σ²) − μ = ln V + ½σ².

This holds for targets that are independent of the inputs. In text they are not: tokens repeat, and an untrained model with tied
embeddings favours repetition, by up to a tenth of the loss. So an untrained model is measured on uniformly drawn tokens.

Legend: B windows, T tokens, V vocabulary.
"""

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from gramian.data import StepBatch
from gramian.linalg.wide import wide
from gramian.models.token_sampling import evaluation_mode
from gramian.train.doctor.check import Check
from gramian.train.doctor.examined_run import ExaminedRun
from gramian.train.loop.objective import IGNORED, logits_of
from gramian.train.loop.plain_stepper import PlainStepper

NEAR = 0.02
"""Maximum relative distance of an untrained model's loss from ln V + ½σ²: V ids, σ² the variance of the logits."""
SPREAD = 0.2
"""Maximum of ½σ² / ln V, V ids, σ² the variance of the logits: an untrained model must not prefer some tokens by more."""
SAME = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 1e-5, "fp16": 1e-5}
"""Maximum relative difference of the run's loss and the same cross-entropy computed by this check, by precision."""


@dataclass(frozen=True)
class _First:
    """Loss and logits of the first forward pass, as means per token that has a target."""

    loss: float
    """Loss that the run's objective computes, in nats per token."""
    plain: float
    """Mean −log softmax(logits) at the next token, computed from the logits by this check."""
    variance: float
    """Variance σ² of the logits over the vocabulary."""
    vocabulary: int


def initial_loss(run: ExaminedRun) -> list[Check]:
    """Check the loss and the variance of the logits before the first step, in at most four forward passes."""
    stepper, batch = run.trial_stepper, run.batches[0]
    first = _first(stepper, batch)
    off = abs(first.loss - first.plain) / max(first.plain, 1e-30)
    allowed = SAME[stepper.numbers.kind]
    ok = off <= allowed
    hint = "" if ok else "the loss is not the cross-entropy of the next token: shifted twice, or padding is counted"
    objective = Check("objective", f"{off:.1e} off", f"{allowed:g}", ok, hint, off)
    if run.loaded:
        return [objective, _trained(first)]
    return [objective, *_untrained(_first(stepper, _uniform(batch, run.windows.vocabulary)), first.loss)]


def _uniform(batch: StepBatch, vocabulary: int) -> StepBatch:
    """A copy of a batch whose tokens are drawn uniformly from the vocabulary; ignored targets stay ignored."""
    generator, micro = torch.Generator().manual_seed(0), []
    for rows in batch.micro:
        B, T = rows["tokens"].shape
        tokens_BS = torch.randint(vocabulary, (B, T + 1), generator=generator).to(rows["tokens"].device)
        targets_BT = tokens_BS[:, 1:].masked_fill(rows["targets"] == IGNORED, IGNORED)
        micro.append(rows | {"tokens": tokens_BS[:, :-1], "targets": targets_BT})
    return dataclasses.replace(batch, micro=micro)


def _untrained(first: _First, loss_on_data: float) -> list[Check]:
    uniform = math.log(first.vocabulary)
    expected = uniform + 0.5 * first.variance
    away, share = abs(first.loss - expected) / expected, 0.5 * first.variance / uniform
    near, small = away <= NEAR, share <= SPREAD
    loss_hint = f"{loss_on_data:.3f} nat on the data"
    if not near:
        loss_hint = (
            "not ln V + ½ Var(logits): check the head's initial weights and bias, and what the loss is averaged over"
        )
    logits_hint = "" if small else "smaller initial weights of the embedding and the head, or a norm before the head"
    measured, threshold = f"{first.loss:.3f} nat, {away:.1%} off", f"{NEAR:.0%} of {expected:.3f}"
    variance = f"½ Var {0.5 * first.variance:.3f} nat"
    return [
        Check("initial loss", measured, threshold, near, loss_hint, away),
        Check("initial logits", variance, f"{SPREAD:.0%} of ln V", small, logits_hint, share),
    ]


def _trained(first: _First) -> Check:
    uniform = math.log(first.vocabulary)
    ok = first.loss < uniform
    hint = "" if ok else "weights, tokenizer and vocabulary do not belong together, or the weights were not loaded"
    return Check("initial loss", f"{first.loss:.3f} nat", f"below ln V = {uniform:.3f}", ok, hint, first.loss)


def _first(stepper: PlainStepper, batch: StepBatch) -> _First:
    sums = torch.zeros(3, dtype=torch.float64)
    count = vocabulary = 0
    with evaluation_mode(stepper.module):
        for micro in batch.micro:
            nats, plain, variance, vocabulary = _of_micro(stepper, micro)
            sums += torch.tensor([nats, plain, variance], dtype=torch.float64)
            count += int((micro["targets"] != IGNORED).sum())
    loss, plain, variance = (sums / max(1, count)).tolist()
    return _First(loss, plain, variance, vocabulary)


def _of_micro(stepper: PlainStepper, micro: dict[str, Tensor]) -> tuple[float, float, float, int]:
    tokens_BT, targets_BT, documents_BT = micro["tokens"], micro["targets"], micro.get("documents")
    with stepper.numbers.autocast():
        _, nats = stepper.module(tokens_BT, targets_BT, 1.0, documents_BT)
        logits_BTV = wide(logits_of(stepper.module.model, tokens_BT, documents_BT))  # type: ignore[arg-type]
    counts_BT = targets_BT != IGNORED
    next_BT = torch.cat([tokens_BT[:, 1:], targets_BT[:, -1:]], dim=1).masked_fill(~counts_BT, IGNORED)
    plain = F.cross_entropy(logits_BTV.flatten(0, 1), next_BT.flatten(), ignore_index=IGNORED, reduction="sum")
    variance = logits_BTV.var(dim=-1, correction=0)[counts_BT].double().sum()
    return float(nats), float(plain), float(variance), logits_BTV.shape[-1]
