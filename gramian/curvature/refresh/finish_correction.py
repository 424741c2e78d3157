"""The end of EK-FAC's second pass: processes add their sums, and all blocks get their new eigenvalues at once.

Without loss terms, with sums that are not finite, or after a backward that failed, the blocks stay as they were. Collective.
"""

from dataclasses import replace

from gramian.core.errors import GramianError
from gramian.curvature.blocks.block import Block
from gramian.curvature.blocks.consistency import agree
from gramian.curvature.blocks.eigenvalue_correction import Correction
from gramian.curvature.estimate.eigenvalue_sums import EigenvalueSums
from gramian.curvature.estimate.ekfac_sums import averaged
from gramian.curvature.estimate.kfac_capture import KFACCapture
from gramian.curvature.refresh.build_factors import NotFinite
from gramian.curvature.refresh.finish_refresh import gather_reports, note_coefficient, refuse_not_finite
from gramian.curvature.refresh.refresh_schedule import drop_refresh
from gramian.curvature.state import CurvatureState

UNREACHED = "no sample reached it in the second pass: K-FAC's eigenvalues are kept"


def finish(state: CurvatureState, cap: KFACCapture) -> None:
    """Set the eigenvalues that a second pass measured on the blocks of `state`, all at once. Collective.

    A pass that cannot be used is dropped (with the option `strict` a GramianError), other problems are raised on all processes.
    """
    state.capturing = False
    eigenvalues = cap.kronecker
    assert isinstance(eigenvalues, EigenvalueSums)
    samples = {name: sums.samples for name, sums in eigenvalues.sums.items()}
    reports = gather_reports(state, cap, {}, {}, samples)
    try:
        agreed = agree(reports)
        if not agreed.passes and not agreed.problem:
            raise GramianError(cap.no_backward)
    except GramianError as error:
        drop_refresh(state, f"second pass: {error}")
        raise
    if agreed.problem or not agreed.terms > 0:
        drop_refresh(state, f"second pass: {agreed.problem or 'no loss terms'}", lenient=True)
        return
    state.correction_checked = True
    note_coefficient(state, reports, "every eigenvalue of EK-FAC is")
    corrected: dict[str, Block] = {}
    earlier: dict[str, Correction] = {}
    for name, sums in eigenvalues.sums.items():
        block = state.blocks[name]
        reached = sum(report["reached"][name] for report in reports)
        if not reached:
            facts = replace(block.facts, reason_ekfac="" if block.correction else UNREACHED)
            corrected[name] = replace(block, facts=facts)
            continue
        bases = eigenvalues.bases[name]
        new = sums.correction(agreed.terms, bases, cap.exchange)
        old = state.earlier.get(name)
        if old is not None:  # in the new basis, so that the old one is freed
            old = earlier[name] = replace(old, values_RS=old.seen_in(*bases), G=bases[0], A=bases[1])
        new = averaged(new, block, old, state.options.ema_decay)
        facts = replace(
            block.facts,
            reason_ekfac="",
            ekfac_samples=agreed.samples,
            ekfac_terms=agreed.terms,
            ekfac_backwards=agreed.passes,
        )
        corrected[name] = replace(block, correction=new, facts=facts, clips={})
    try:
        refuse_not_finite(corrected)
    except NotFinite as problem:
        drop_refresh(state, f"second pass: {problem}", lenient=True)
        return
    state.blocks, state.earlier = {**state.blocks, **corrected}, {**state.earlier, **earlier}
