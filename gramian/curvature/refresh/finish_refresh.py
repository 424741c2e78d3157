"""The end of a refresh: processes agree on what they saw, join their sums, and put new factors in place of the old ones."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.curvature.blocks.block import Block
from gramian.curvature.blocks.consistency import agree, fingerprint
from gramian.curvature.estimate import ekfac_sums
from gramian.curvature.estimate.kfac_capture import KFACCapture
from gramian.curvature.estimate.refresh_sums import BlockSums
from gramian.curvature.persist import curvature_record
from gramian.curvature.refresh.build_factors import Builder, NotFinite, Placement, free_memory, make_blocks
from gramian.curvature.refresh.join_sums import Join, word_of
from gramian.curvature.refresh.refresh_schedule import meeting
from gramian.curvature.refresh.shared_factorisation import SharedFactorisation

if TYPE_CHECKING:
    from gramian.curvature.kfac import KFACNaturalGradient


def finish(kfac: KFACNaturalGradient, cap: KFACCapture) -> None:
    """Join the sums, make factors of them, and put these in place of the old ones all at once. Collective."""
    kfac._open = False
    started = time.perf_counter()
    kronecker, remainder = cap.collected()
    words = _words(kfac, cap, kronecker, remainder)
    try:
        agreed = agree(words)
        if not agreed.passes and not agreed.problem:
            raise GramianError(cap.silence)
        if cap.kronecker.exact_head and agreed.head is None and not agreed.problem and agreed.terms > 0:
            raise GramianError("head: was not found; expected head= with the name of the model's output layer")
    except GramianError as error:
        abandon(kfac, str(error))
        raise
    if agreed.problem or not agreed.terms > 0:
        abandon(kfac, agreed.problem or "no loss terms", lenient=True)
        return
    _note_padding(kfac, agreed.padded)
    _note_coefficient(kfac, next((word["coefficient"] for word in words if word["coefficient"] is not None), None))
    reduction = "" if cap.others is None else "dense"
    builder = Builder(kfac.options, agreed.terms, agreed.samples, cap.estimate, cap.samples, reduction)
    place = Placement(kfac.options, agreed.free)
    join = Join(kfac.options, kronecker, remainder, words, cap.others)
    try:
        fresh = make_blocks(kfac.options, kfac._specs, builder, join, place, kfac.kfac_factors)
    except NotFinite as problem:
        abandon(kfac, str(problem), lenient=True)
        return
    except BaseException as error:
        abandon(kfac, f"{type(error).__name__} while factors were made")
        raise
    _refuse_uncovered(kfac, fresh)
    spread = SharedFactorisation(cap.others)
    if kfac.options.ekfac:
        try:
            seen = {name: sums.samples for name, sums in kronecker.items()}
            ekfac_sums.correct(kfac.options, fresh, seen, kfac.kfac_factors, spread)
            _refuse_not_finite(fresh)
        except NotFinite as problem:
            abandon(kfac, str(problem), lenient=True)
            return
        except BaseException as error:
            abandon(kfac, f"{type(error).__name__} while eigenvalues were corrected")
            raise
    kfac.head = agreed.head
    kfac.refreshes += 1
    kfac._last_refresh = kfac.steps - 1
    for block in fresh.values():
        block.facts.step = kfac._last_refresh
    kfac.kfac_factors = {**kfac.kfac_factors, **fresh}
    kfac._softmax_checked = kfac._softmax_checked or not cap.kronecker.check_softmax
    kfac._seconds = {"build": time.perf_counter() - started}
    kfac._spread = spread
    kfac._sent = {} if cap.others is None else dict(cap.others.sent)
    curvature_record.log_refresh(kfac)


def _words(
    kfac: KFACNaturalGradient, cap: KFACCapture, kronecker: Mapping[str, BlockSums], remainder: Mapping[str, Tensor]
) -> list[Any]:
    """What every process says of its part of the refresh.

    Raises:
        GramianError: if one of them does not come because of an error.
    """
    try:
        word = _word(kfac, cap, kronecker, remainder)
    except BaseException as error:  # of a device, for one: the others do not wait for this process
        kfac._fail(cap, f"{type(error).__name__} while its sums were looked at", f" ({error})")
        raise
    if cap.others is None:
        return [word]
    absent = meeting(kfac, cap.others).come(meeting(kfac, cap.others, back=1))
    if absent:
        abandon(kfac, absent)
        raise GramianError(f"{absent}; expected every process to leave the capture without an error")
    return cap.others.tell(word)


def _word(
    kfac: KFACNaturalGradient, cap: KFACCapture, kronecker: Mapping[str, BlockSums], remainder: Mapping[str, Tensor]
) -> dict[str, Any]:
    """What this process says."""
    return {
        "model": fingerprint(kfac._specs),
        "options": asdict(kfac.options),
        "seed": cap.kronecker.seed,
        "step": kfac.steps - 1,
        "estimate": [cap.estimate, cap.kronecker.exact_head],
        "problem": cap.problem,
        "passes": cap.passes,
        "terms": cap.terms,
        "samples": cap.samples,
        "head": cap.kronecker.head,
        "padded": cap.kronecker.padded,
        "coefficient": cap.kronecker.coefficient,
        "free": free_memory(next(iter(kfac._specs.values())).device),
        **word_of(kronecker, remainder),
    }


def _note_padding(kfac: KFACNaturalGradient, padded: Mapping[str, tuple[int, float]]) -> None:
    """Say where padding is part of A because nobody knows which tokens it is."""
    if padded:
        layer, (tokens, terms) = next(iter(padded.items()))
        if kfac.options.strict:
            abandon(kfac, f"{layer} counts {tokens} tokens for {terms:g} loss terms")
        curvature_record.log_padding(layer, tokens, terms, again=bool(kfac.padding), strict=kfac.options.strict)
    kfac.padding = {layer: list(counts) for layer, counts in padded.items()}


def _note_coefficient(kfac: KFACNaturalGradient, coefficient: float | None) -> None:
    """Say that the loss is multiplied by something else than was stated; once, since it is looked at once."""
    kfac._coefficient_checked = True
    if coefficient is None:
        return
    kfac._coefficient = coefficient
    if kfac.options.strict:
        abandon(kfac, f"a loss term has {coefficient:.4g} times the stated coefficient")
    curvature_record.log_coefficient(coefficient, kfac.options.strict)


def _refuse_uncovered(kfac: KFACNaturalGradient, fresh: Mapping[str, Block]) -> None:
    missing = [spec for name, spec in kfac._specs.items() if name not in fresh and name not in kfac.kfac_factors]
    if missing and kfac.options.strict:
        abandon(kfac, f"{missing[0].parameters[0]} took no part in it")
        raise GramianError(
            f"{missing[0].parameters[0]}: took no part in the captured backward; expected every trainable parameter to "
            "(strict=True)"
        )


def _refuse_not_finite(fresh: Mapping[str, Block]) -> None:
    """A sample that no factor has seen (`max_tokens`), or a square beyond float32. One wait for the device for all blocks."""
    corrected = {name: block.correction.values_RS for name, block in fresh.items() if block.correction is not None}
    if not corrected:
        return
    device = next(iter(corrected.values())).device
    finite = torch.stack([values.isfinite().all().to(device) for values in corrected.values()])
    for name, fine in zip(corrected, finite.tolist(), strict=True):
        if not fine:
            raise NotFinite(f"{name}: its corrected eigenvalues are not finite")


def abandon(kfac: KFACNaturalGradient, reason: str, lenient: bool = False) -> None:
    """A refresh came to nothing; the factors are those from before."""
    kfac._open = False
    again = bool(kfac.dropped) and kfac.dropped[-1]["step"] == kfac.steps - 2
    kfac.dropped.append({"step": kfac.steps - 1, "reason": reason})
    curvature_record.log_dropped(kfac.steps - 1, reason, again)
    if lenient and kfac.options.strict:
        raise GramianError(f"refresh: {reason}; expected none to be dropped (strict=True)")
