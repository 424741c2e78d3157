"""The loss before the first step: of the right tokens, and of a model that knows nothing yet.

A fresh model's logits z do not know the target y: with mean μ and variance σ² over the vocabulary,

    E[−log p(y)] = E[log Σ_v exp z_v − z_y] ≈ (ln V + μ + ½σ²) − μ = ln V + ½σ².

That holds for targets that have nothing to do with the inputs. In text they do: tokens repeat, and a fresh model with tied
embeddings favours repetition, by up to a tenth of the loss. So a fresh model is measured on tokens that are drawn uniformly.

Legend: B windows, T tokens, V vocabulary.
"""

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from gramian.data import StepBatch
from gramian.train.doctor.check import Check
from gramian.train.loop.objective import IGNORED, logits_of
from gramian.train.loop.stepper import Stepper, evaluating

NEAR = 0.02
"""Relative distance of a fresh model's loss from what it should be."""
SPREAD = 0.2
"""½·Var(logits) of a fresh model, as a share of ln V: more is knowledge it cannot have."""
SAME = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 1e-5, "fp16": 1e-5}
"""Relative difference of two ways to sum the same cross-entropies, in float32 or wider."""


def targets(batch: StepBatch) -> Check:
    """Every counted target is the token that its row goes on with, and as many are counted as the loss is divided by."""
    wrong = seen = counted = 0
    for micro in batch.micro:
        tokens_BT, targets_BT = micro["tokens"], micro["targets"]
        counts_BT = targets_BT != IGNORED
        wrong += int((counts_BT[:, :-1] & (targets_BT[:, :-1] != tokens_BT[:, 1:])).sum())
        seen += int(counts_BT[:, :-1].sum())
        counted += int(counts_BT.sum())
    share = wrong / max(1, seen)
    measured = f"{wrong:,} of {seen:,} not the next token"
    hint = ""
    if wrong:
        hint = "targets must be the tokens shifted by one: a model that is shown its target learns to copy it"
    elif counted != batch.tokens:
        measured = f"{counted:,} counted, divided by {batch.tokens:,}"
        hint = "the mean must be over the targets that count: padding among them, or some left out"
    return Check("targets", measured, "0", not wrong and counted == batch.tokens, hint, share)


@dataclass(frozen=True)
class _First:
    """What the first forward gives, means per counted token."""

    loss: float
    """As the objective has it."""
    plain: float
    """−log softmax(logits) at the token that follows, computed here."""
    variance: float
    """Of logits over the vocabulary."""
    vocabulary: int


def initial_loss(stepper: Stepper, batch: StepBatch, vocabulary: int, loaded: bool) -> list[Check]:
    """Loss and spread of logits before the first step. Four forwards at most.

    Args:
        stepper: of the model, which has its initial weights.
        batch: some windows.
        vocabulary: of the tokens.
        loaded: the weights were trained before.
    """
    first = _first(stepper, batch)
    off = abs(first.loss - first.plain) / max(first.plain, 1e-30)
    allowed = SAME[stepper.numbers.kind]
    objective = Check(
        "objective",
        f"{off:.1e} off",
        f"{allowed:g}",
        off <= allowed,
        ""
        if off <= allowed
        else "the loss is no cross-entropy of the next token: shifted twice, or padding is counted",
        off,
    )
    if loaded:
        return [objective, _loaded(first)]
    return [objective, *_fresh(_first(stepper, drawn(batch, vocabulary)), first.loss)]


def drawn(batch: StepBatch, vocabulary: int) -> StepBatch:
    """A batch of the same shape whose tokens are drawn uniformly."""
    generator, micro = torch.Generator().manual_seed(0), []
    for rows in batch.micro:
        B, T = rows["tokens"].shape
        tokens_BS = torch.randint(vocabulary, (B, T + 1), generator=generator).to(rows["tokens"].device)
        targets_BT = tokens_BS[:, 1:].masked_fill(rows["targets"] == IGNORED, IGNORED)
        micro.append(rows | {"tokens": tokens_BS[:, :-1], "targets": targets_BT})
    return dataclasses.replace(batch, micro=micro)


def _fresh(first: _First, of_text: float) -> list[Check]:
    uniform = math.log(first.vocabulary)
    expected = uniform + 0.5 * first.variance
    away, share = abs(first.loss - expected) / expected, 0.5 * first.variance / uniform
    near, small = away <= NEAR, share <= SPREAD
    return [
        Check(
            "initial loss",
            f"{first.loss:.3f} nat, {away:.1%} off",
            f"{NEAR:.0%} of {expected:.3f}",
            near,
            f"{of_text:.3f} nat on the data"
            if near
            else "not ln V + ½ Var(logits): look at the head's initial weights and bias, and what the loss is averaged over",
            away,
        ),
        Check(
            "initial logits",
            f"½ Var {0.5 * first.variance:.3f} nat",
            f"{SPREAD:.0%} of ln V",
            small,
            "" if small else "smaller initial weights of the embedding and the head, or a norm before the head",
            share,
        ),
    ]


def _loaded(first: _First) -> Check:
    uniform = math.log(first.vocabulary)
    ok = first.loss < uniform
    hint = "" if ok else "weights, tokenizer and vocabulary do not belong together, or the weights were not loaded"
    return Check("initial loss", f"{first.loss:.3f} nat", f"below ln V = {uniform:.3f}", ok, hint, first.loss)


def _first(stepper: Stepper, batch: StepBatch) -> _First:
    sums = torch.zeros(3, dtype=torch.float64)
    count = vocabulary = 0
    with evaluating(stepper.module):
        for micro in batch.micro:
            nats, plain, variance, vocabulary = _of_micro(stepper, micro)
            sums += torch.tensor([nats, plain, variance], dtype=torch.float64)
            count += int((micro["targets"] != IGNORED).sum())
    loss, plain, variance = (sums / max(1, count)).tolist()
    return _First(loss, plain, variance, vocabulary)


def _of_micro(stepper: Stepper, micro: dict[str, Tensor]) -> tuple[float, float, float, int]:
    tokens_BT, targets_BT, documents_BT = micro["tokens"], micro["targets"], micro.get("documents")
    with stepper.numbers.autocast():
        _, nats = stepper.module(tokens_BT, targets_BT, 1.0, documents_BT)
        logits_BTV = logits_of(stepper.module.model, tokens_BT, documents_BT)  # type: ignore[arg-type]
    logits_BTV = logits_BTV if logits_BTV.dtype == torch.float64 else logits_BTV.float()
    counts_BT = targets_BT != IGNORED
    next_BT = torch.cat([tokens_BT[:, 1:], targets_BT[:, -1:]], dim=1).masked_fill(~counts_BT, IGNORED)
    plain = F.cross_entropy(logits_BTV.flatten(0, 1), next_BT.flatten(), ignore_index=IGNORED, reduction="sum")
    variance = logits_BTV.var(dim=-1, correction=0)[counts_BT].double().sum()
    return float(nats), float(plain), float(variance), logits_BTV.shape[-1]
