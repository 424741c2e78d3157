"""The end of a refresh: processes compare their reports, add their sums, and replace the old factors all at once.

The input is the sums of a capture on every process; the output is new blocks in the state or, if anything is wrong, a dropped
refresh, which leaves the old factors. Collective: all processes that share the capture finish it together.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.curvature.blocks.block import Block
from gramian.curvature.blocks.consistency import Agreed, agree, fingerprint
from gramian.curvature.estimate import ekfac_sums
from gramian.curvature.estimate.kfac_capture import KFACCapture
from gramian.curvature.estimate.kronecker_sums import BlockSums, KroneckerSums
from gramian.curvature.persist import curvature_record
from gramian.curvature.refresh.build_factors import Builder, NotFinite, Placement, free_memory, make_blocks
from gramian.curvature.refresh.join_sums import Join
from gramian.curvature.refresh.process_report import sums_report
from gramian.curvature.refresh.refresh_schedule import drop_refresh, fail_refresh, refresh_rendezvous
from gramian.curvature.refresh.shared_factorisation import SharedFactorisation
from gramian.curvature.state import CurvatureState


def finish(state: CurvatureState, cap: KFACCapture) -> None:
    """Join the sums of a capture over processes, build factors, and replace those in `state` all at once. Collective.

    Without loss terms, with sums that are not finite, or after a backward that failed, the refresh is dropped (with the option
    `strict` a GramianError); other problems are raised on all processes. In each case the old factors stay.
    """
    state.capturing = False
    started = time.perf_counter()
    statistic = cap.kronecker
    assert isinstance(statistic, KroneckerSums)
    kronecker, remainder = cap.collected()
    reports = gather_reports(state, cap, kronecker, remainder)
    try:
        agreed = agree(reports)
        if not agreed.passes and not agreed.problem:
            raise GramianError(cap.no_backward)
        if statistic.exact_head and agreed.head is None and not agreed.problem and agreed.terms > 0:
            raise GramianError("head: was not found; expected head= with the name of the model's output layer")
    except GramianError as error:
        drop_refresh(state, str(error))
        raise
    if agreed.problem or not agreed.terms > 0:
        drop_refresh(state, agreed.problem or "no loss terms", lenient=True)
        return
    _note_padding(state, agreed.padded)
    _observe(state, agreed.observed)
    state.coefficient_checked = True
    note_coefficient(state, reports, "every G is")
    reduction = "" if cap.exchange is None else "dense"
    before = {name: block.correction for name, block in state.blocks.items() if block.correction is not None}
    likelihood = cap.kronecker.likelihood.name
    builder = Builder(state.options, agreed.terms, agreed.samples, cap.estimate, cap.samples, reduction, likelihood)
    join = Join(state.options, kronecker, remainder, reports, cap.exchange)
    place = Placement(state.options, agreed.free)
    factorisations = SharedFactorisation(cap.exchange)
    activity = "factors were made"
    try:
        fresh = make_blocks(state.options, state.specs, builder, join, place, state.blocks)
        _note_counts(fresh.values(), agreed, statistic.stores_samples)
        if statistic.stores_samples:
            activity = "eigenvalues were corrected"
            samples = {name: sums.samples for name, sums in kronecker.items()}
            ekfac_sums.correct(state.options, fresh, samples, before, factorisations)
            refuse_not_finite(fresh)
        elif state.options.ekfac:
            _leave_uncorrected(fresh.values())
    except NotFinite as problem:
        drop_refresh(state, str(problem), lenient=True)
        return
    except BaseException as error:
        drop_refresh(state, f"{type(error).__name__} while {activity}")
        raise
    _refuse_uncovered(state, fresh)
    state.head = agreed.head or state.head  # an optimizer leaves its layer out of later refreshes, which cannot see it
    state.refreshes += 1
    state.last_refresh = state.steps - 1
    for block in fresh.values():
        block.facts.step = state.last_refresh
    state.blocks, state.ready = {**state.blocks, **fresh}, None  # operators hold the factors that they were made of
    state.earlier = before if state.options.ema_decay else {}
    state.softmax_checked = state.softmax_checked or not statistic.check_softmax
    state.seconds = {"build": time.perf_counter() - started}
    state.factorisations = factorisations
    state.sent = {} if cap.exchange is None else dict(cap.exchange.sent)
    curvature_record.log_refresh(state)


def gather_reports(
    state: CurvatureState,
    cap: KFACCapture,
    kronecker: Mapping[str, BlockSums],
    remainder: Mapping[str, Tensor],
    reached: Mapping[str, int] | None = None,
) -> list[Any]:
    """The reports of all processes on their sums of the refresh, in the order of ranks. Collective.

    `reached`: {block: number of samples} of a second pass, which has no sums of tokens; None: a refresh.
    A GramianError is raised if another process has left the capture with an error.
    """
    statistic = cap.kronecker
    try:
        report = {
            "model": fingerprint(state.specs),
            "options": asdict(state.options),
            "seed": cap.kronecker.seed,
            "step": state.steps - 1,
            "estimate": [cap.estimate, cap.kronecker.exact_head],
            "problem": cap.problem,
            "passes": cap.passes,
            "terms": cap.terms,
            "samples": cap.samples,
            "head": cap.kronecker.head,
            "padded": cap.kronecker.selection.padded,
            "coefficient": cap.kronecker.coefficient.seen,
            "observed": statistic.observed if isinstance(statistic, KroneckerSums) else {},
            "reached": None if reached is None else dict(reached),
            "free": free_memory(next(iter(state.specs.values())).device),
            **sums_report(kronecker, remainder),
        }
    except BaseException as error:  # of a device, for one: the other processes must not wait for this one
        fail_refresh(state, cap.exchange, f"{type(error).__name__} while its sums were looked at", f" ({error})")
        raise
    if cap.exchange is None:
        return [report]
    before = refresh_rendezvous(state, cap.exchange, back=1)
    absent = refresh_rendezvous(state, cap.exchange).wait_for_all(before)
    if absent:
        drop_refresh(state, absent)
        raise GramianError(f"{absent}; expected every process to leave the capture without an error")
    return cap.exchange.gather_messages(report)


def _observe(state: CurvatureState, observed: Mapping[str, str]) -> None:
    """Take over what processes have seen of assumed matrices: `state.specs` have layouts as seen, and diagonals of the others.

    A GramianError is raised for a matrix that has factors from earlier refreshes and has not been seen as one now.
    """
    new = {name: seen for name, seen in observed.items() if state.observed.get(name) != seen}
    if not new:
        return
    for name, seen in new.items():
        if name in state.observed:
            drop_refresh(state, f"{name}: {seen}")
            raise GramianError(f"{name}: {seen}; expected its layer to use it as at the first refresh")
    state.observed = {**state.observed, **new}
    if state.model is not None:
        state.specs = state.checked_specs(state.model)


def _note_counts(blocks: Iterable[Block], agreed: Agreed, corrected: bool) -> None:
    """Record how many samples and backwards the blocks of a refresh are made of; `corrected`: their eigenvalues too."""
    for block in blocks:
        block.facts.samples, block.facts.backwards = agreed.samples, agreed.passes
        if corrected and block.A is not None:
            block.facts.ekfac_samples, block.facts.ekfac_terms = agreed.samples, agreed.terms
            block.facts.ekfac_backwards = agreed.passes


def _leave_uncorrected(blocks: Iterable[Block]) -> None:
    for block in blocks:
        if block.A is not None:
            block.facts.reason_ekfac = "its eigenvalues are K-FAC's until a second pass (kfac.correct) measures them"


def _note_padding(state: CurvatureState, padded: Mapping[str, tuple[int, float]]) -> None:
    """Record and log the layers whose A contains padding because its tokens cannot be recognised; an error under `strict`.

    `padded` is {layer: (tokens counted, loss terms)}.
    """
    if padded:
        layer, (tokens, terms) = next(iter(padded.items()))
        if state.options.strict:
            drop_refresh(state, f"{layer} counts {tokens} tokens for {terms:g} loss terms")
        curvature_record.log_padding(layer, tokens, terms, again=bool(state.padding), strict=state.options.strict)
    state.padding = {layer: list(counts) for layer, counts in padded.items()}


def note_coefficient(state: CurvatureState, reports: Iterable[Any], what: str) -> None:
    """Record and log that loss terms have another coefficient than stated, if a process reports one; an error under `strict`.

    `what` the square of the coefficient multiplies, as text, such as "every G is".
    """
    coefficient = next((report["coefficient"] for report in reports if report["coefficient"] is not None), None)
    if coefficient is None:
        return
    state.loss_coefficient = coefficient
    if state.options.strict:
        drop_refresh(state, f"a loss term has {coefficient:.4g} times the stated coefficient")
    curvature_record.log_coefficient(coefficient, what, state.options.strict)


def _refuse_uncovered(state: CurvatureState, fresh: Mapping[str, Block]) -> None:
    missing = [spec for name, spec in state.specs.items() if name not in fresh and name not in state.blocks]
    if missing and state.options.strict:
        parameter = missing[0].parameters[0]
        drop_refresh(state, f"{parameter} took no part in it")
        raise GramianError(
            f"{parameter}: took no part in the captured backward; expected every trainable parameter to (strict=True)"
        )


def refuse_not_finite(fresh: Mapping[str, Block]) -> None:
    """Raise `NotFinite` for the first block whose EK-FAC eigenvalues have NaN or infinity, although its factors are finite.

    Causes: a sample outside the token subset of the factors, or a square beyond the range of float32.
    """
    corrected = {name: block.correction.values_RS for name, block in fresh.items() if block.correction is not None}
    if not corrected:
        return
    device = next(iter(corrected.values())).device
    finite = torch.stack([values.isfinite().all().to(device) for values in corrected.values()])  # one wait for all
    for name, fine in zip(corrected, finite.tolist(), strict=True):
        if not fine:
            raise NotFinite(f"{name}: its corrected eigenvalues are not finite")
