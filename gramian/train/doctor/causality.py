"""A prediction must not depend on tokens that come after it, nor on the other rows of its batch.

Tokens are replaced and the logits compared: those that must not change, Δ before, against those that may, Δ after. The ratio
max |Δ before| / max |Δ after| is 0 but for rounding, whatever the scale of the logits; a leak shows as 1e-3 to 1.

Legend: B rows, T tokens, V vocabulary.
"""

import torch
from torch import Tensor, nn

from gramian.train.doctor.check import Check
from gramian.train.loop.objective import logits_of
from gramian.train.loop.precision import Numbers
from gramian.train.loop.stepper import seed_all

UNCHANGED = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 1e-3, "fp16": 1e-3}
"""Largest ratio, by precision. The same kernels see the same shapes, so that what is left is not even rounding, mostly."""
ROWS = 4
"""Of the batch that is looked at."""
CUTS = 5
"""Places from which tokens are replaced."""


class _Probe:
    """Forwards of one batch with some tokens replaced, in both modes of the model."""

    def __init__(self, model: nn.Module, numbers: Numbers, rows: dict[str, Tensor], vocabulary: int) -> None:
        self._model, self._numbers = model, numbers
        self.tokens_BT = rows["tokens"][:ROWS]
        documents_BT = rows.get("documents")
        self._documents_BT = None if documents_BT is None else documents_BT[:ROWS]
        # Another token everywhere: never the same one, spread over the vocabulary.
        spread_BT = torch.arange(self.tokens_BT.numel(), device=self.tokens_BT.device).view_as(self.tokens_BT)
        self._other_BT = (self.tokens_BT + 1 + spread_BT % max(1, vocabulary - 1)) % vocabulary

    def changes(self, places: list[tuple[slice, slice]]) -> list[Tensor]:
        """For every (rows, columns) whose tokens are replaced: largest |Δ logit| [B, T], the larger one of both modes."""
        found = [torch.zeros(self.tokens_BT.shape, dtype=torch.float64)] * len(places)
        training = self._model.training
        try:
            for mode in (True, False):
                self._model.train(mode)
                before_BTV = self._logits(self.tokens_BT)
                for number, place in enumerate(places):
                    tokens_BT = self.tokens_BT.clone()
                    tokens_BT[place] = self._other_BT[place]
                    change_BT = (self._logits(tokens_BT) - before_BTV).abs().amax(dim=-1)
                    found[number] = torch.maximum(found[number], change_BT.double().cpu())
        finally:
            self._model.train(training)
        return found

    @torch.no_grad()
    def _logits(self, tokens_BT: Tensor) -> Tensor:
        seed_all(0)  # what is random is the same every time
        with self._numbers.autocast():
            return logits_of(self._model, tokens_BT, self._documents_BT)


def causality(model: nn.Module, numbers: Numbers, rows: dict[str, Tensor], vocabulary: int) -> list[Check]:
    """Replace what comes after, then another row. 2·(1 + 5 + 1) forwards of four rows.

    Args:
        model: best after a step or two: what starts at zero hides leaks behind it.
        numbers: of the run.
        rows: "tokens" [B, T], and "documents" where they are kept apart.
        vocabulary: of the tokens.
    """
    probe = _Probe(model, numbers, rows, vocabulary)
    count, length = probe.tokens_BT.shape
    cuts = sorted({max(1, number * (length - 1) // (CUTS - 1)) for number in range(CUTS)}) if length > 1 else []
    everything = slice(None)
    changes = probe.changes([*((everything, slice(cut, None)) for cut in cuts), (slice(0, 1), everything)])
    worst = max(
        ((_ratio(change_BT[:, :cut], change_BT[:, cut:]), cut) for cut, change_BT in zip(cuts, changes, strict=False)),
        default=(0.0, 0),
        key=lambda found: (found[0] != found[0], found[0]),  # not a number is worst
    )
    others = _ratio(changes[-1][1:], changes[-1][:1]) if count > 1 else 0.0
    allowed = UNCHANGED[numbers.kind]
    blind = "the logits do not depend on the tokens: look at gradients and initial weights"
    later = f"logits before token {worst[1]} see it or later ones: attention without its mask, a norm or mean over time"
    rest = "rows of a batch see each other: a norm or mean over the batch"
    told = []
    for name, ratio, leak in (("causality", worst[0], later), ("rows apart", others, rest)):
        ok = ratio <= allowed
        hint = "" if ok else (leak if ratio < float("inf") else blind)
        told.append(Check(name, f"{ratio:.1e} leaks", f"{allowed:g}", ok, hint, ratio))
    return told


def _ratio(fixed: Tensor, free: Tensor) -> float:
    """max |Δ| of what must not change over that of what may; infinite if nothing changes at all."""
    if not fixed.numel():
        return 0.0
    moved = float(free.max())
    return float(fixed.max()) / moved if moved else float("inf")
