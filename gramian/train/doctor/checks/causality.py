"""A prediction must not depend on later tokens, nor on the other rows of its batch.

Tokens are replaced and the logits compared: those that must not change, Δ before, with those that may, Δ after. The ratio
max |Δ before| / max |Δ after| is 0 up to rounding, whatever the scale of the logits; a leak gives 1e-3 to 1.

Legend: B rows, T tokens, V vocabulary.
"""

import torch
from torch import Tensor

from gramian.train.doctor.check import Check
from gramian.train.doctor.examined_run import ExaminedRun
from gramian.train.loop.objective import logits_of
from gramian.train.loop.stepper import seed_all

UNCHANGED = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 1e-3, "fp16": 1e-3}
"""Maximum ratio of logit changes that must not happen to those that may, by precision; without a leak it is mostly 0."""
ROWS = 4
"""Number of rows of the batch whose tokens are replaced."""
CUTS = 5
"""Number of positions from which on the tokens are replaced, one forward pass for each."""


class _Probe:
    """Forward passes of one batch with some of its tokens replaced, in training and evaluation mode."""

    def __init__(self, run: ExaminedRun) -> None:
        self._model, self._numbers = run.trial_model, run.numbers
        rows, vocabulary = run.rows, run.windows.vocabulary
        self.tokens_BT = rows["tokens"][:ROWS]
        documents_BT = rows.get("documents")
        self._documents_BT = None if documents_BT is None else documents_BT[:ROWS]
        # A different token at every place, with offsets that run through the vocabulary.
        offset_BT = torch.arange(self.tokens_BT.numel(), device=self.tokens_BT.device).view_as(self.tokens_BT)
        self._replaced_BT = (self.tokens_BT + 1 + offset_BT % max(1, vocabulary - 1)) % vocabulary

    def changes(self, places: list[tuple[slice, slice]]) -> list[Tensor]:
        """For every (rows, columns) whose tokens are replaced: largest |Δ logit| per token [B, T], maximum of both modes."""
        found = [torch.zeros(self.tokens_BT.shape, dtype=torch.float64)] * len(places)
        training = self._model.training
        try:
            for mode in (True, False):
                self._model.train(mode)
                before_BTV = self._logits(self.tokens_BT)
                for number, place in enumerate(places):
                    tokens_BT = self.tokens_BT.clone()
                    tokens_BT[place] = self._replaced_BT[place]
                    change_BT = (self._logits(tokens_BT) - before_BTV).abs().amax(dim=-1)
                    found[number] = torch.maximum(found[number], change_BT.double().cpu())
        finally:
            self._model.train(training)
        return found

    @torch.no_grad()
    def _logits(self, tokens_BT: Tensor) -> Tensor:
        seed_all(0)  # the same random numbers in every forward pass
        with self._numbers.autocast():
            return logits_of(self._model, tokens_BT, self._documents_BT)


def causality(run: ExaminedRun) -> list[Check]:
    """Check that logits depend neither on later tokens nor on other rows: 2·(1 + 5 + 1) forward passes of four rows.

    The trial model should have taken a step or two: weights that start at zero hide leaks behind them.
    """
    probe = _Probe(run)
    count, length = probe.tokens_BT.shape
    cuts = sorted({max(1, number * (length - 1) // (CUTS - 1)) for number in range(CUTS)}) if length > 1 else []
    everything = slice(None)
    changes = probe.changes([*((everything, slice(cut, None)) for cut in cuts), (slice(0, 1), everything)])
    over_time, cut = max(
        ((_ratio(change_BT[:, :cut], change_BT[:, cut:]), cut) for cut, change_BT in zip(cuts, changes, strict=False)),
        default=(0.0, 0),
        key=lambda found: (found[0] != found[0], found[0]),  # NaN is worst
    )
    over_rows = _ratio(changes[-1][1:], changes[-1][:1]) if count > 1 else 0.0
    allowed = UNCHANGED[run.numbers.kind]
    blind = "the logits do not depend on the tokens: check gradients and initial weights"
    checks = []
    for name, ratio, leak in (
        (
            "causality",
            over_time,
            f"logits before token {cut} depend on it or later ones: attention without its mask, a norm or mean over time",
        ),
        ("rows apart", over_rows, "rows of a batch depend on each other: a norm or mean over the batch"),
    ):
        ok = ratio <= allowed
        hint = "" if ok else (leak if ratio < float("inf") else blind)
        checks.append(Check(name, f"{ratio:.1e} leaks", f"{allowed:g}", ok, hint, ratio))
    return checks


def _ratio(fixed: Tensor, free: Tensor) -> float:
    """max |Δ| of the logits that must not change over max |Δ| of those that may; infinite if nothing changes at all."""
    if not fixed.numel():
        return 0.0
    moved = float(free.max())
    return float(fixed.max()) / moved if moved else float("inf")
