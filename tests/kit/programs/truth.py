r"""What the samples of a program contribute to its gradient, by plain loops in float64.

With loss :math:`c \sum_i \ell_i` (c = 1/B or 1), sample i contributes :math:`c\, g_i`. Three measurements decide whether
:math:`g_i` is a property of sample i alone:

1. the gradients of single samples sum to the gradient of the batch;
2. the gradient of the i-th term inside the batch is the gradient of sample i alone;
3. the gradient of the i-th term inside the batch stays as it is when all other samples are replaced.

Where the forward draws random numbers a sample alone draws other ones: then the terms inside the batch are the reference,
the same random state is used in 3, and 2 is measured without dropout, for samples that are padded as a loader pads them alone.
3 is measured at several random states: a random permutation of two samples is the identity every other time.
"""

from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.kit.programs.program import Program

TOLERANCE = 1e-9
"""Relative to the largest entry of the gradients that are compared or summed."""
REPLACED = 4
"""Samples for which measurement 3 is made where 1 and 2 look at all of them."""

STATES = 8
"""Random states at which measurement 3 is made where a program is random."""


@dataclass(frozen=True)
class Truth:
    """The contributions, and whether they are well defined."""

    g_BP: Tensor
    """Gradient of each sample's own loss, float64."""
    separable: bool
    shown: bool
    """False: samples are coupled, but not with the contents of this batch in each other's places (two rows that a sort by size
    leaves in order, and its copies too)."""


def truth(program: Program, collate: bool = False) -> Truth:
    """Measure a program. Cost: about 3·B forwards and backwards.

    Args:
        program: what to measure.
        collate: a sample alone is padded as a loader pads it alone; False: as in its batch.
    """
    samples, root = range(program.samples), program.root(torch.float64)
    parameters = [p for p in root.parameters() if p.requires_grad]

    def forward(
        records: list[int], collate: bool = collate and not program.is_random, state: int = 0
    ) -> tuple[Tensor, Tensor]:
        return program.forward(root, program.batch(records, torch.float64, collate), state)

    def gradient(value: Tensor) -> Tensor:
        if not value.requires_grad:
            return torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
        found = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True, materialize_grads=True)
        return torch.cat([g.flatten() for g in found])

    terms_B, scalar = forward([*samples])
    coefficient = 1 / program.samples if program.draft.reduction == "mean" else 1.0
    whole_P = gradient(coefficient * terms_B.sum() + scalar)
    inside_BP = torch.stack([gradient(term) for term in terms_B])
    if program.is_random:
        g_BP, agree = inside_BP, True
        if collate:
            with patch.object(F, "dropout", lambda h, *options: h):
                terms = forward([*samples], True)[0]
                agree = all(_close(gradient(forward([i], True)[0].sum()), gradient(terms[i])) for i in samples)
    else:
        try:
            alone = [forward([i]) for i in samples]
        except (RuntimeError, ValueError):  # BatchNorm on one value
            return Truth(inside_BP, separable=False, shown=True)
        alone_BP = torch.stack([gradient(term.sum()) for term, _ in alone])
        g_BP = alone_BP + torch.stack([gradient(scalar) for _, scalar in alone])
        agree = _close(alone_BP, inside_BP)
    agree = agree and _close(coefficient * g_BP.sum(0), whole_P, coefficient * g_BP.abs().sum(0))
    shown = not agree
    for i in samples if program.is_random else samples[:: -(-program.samples // REPLACED)]:
        others, own = [program.samples + j for j in samples], [samples[(j + 1) % program.samples] for j in samples]
        others[i] = own[i] = i
        shown = shown or program.is_random or not _close(gradient(forward(own)[0][i]), inside_BP[i])
        agree = agree and _close(gradient(forward(others)[0][i]), inside_BP[i])
        for state in range(1, STATES) if program.is_random else ():
            there, here = forward(others, state=state)[0][i], forward([*samples], state=state)[0][i]
            agree = agree and _close(gradient(there), gradient(here))
    return Truth(g_BP, agree, shown)


def _close(a: Tensor, b: Tensor, terms: Tensor | None = None) -> bool:
    """Equal up to rounding of the largest entry, or of the largest sum of absolute terms."""
    scale = torch.stack([t.abs().max() for t in (a, b, *([] if terms is None else [terms]))]).max()
    return bool((a - b).abs().max() <= TOLERANCE * scale)
