"""One unit alone: the gradient that it has in a batch must be the one that it has by itself.

This sees what no batch of equal shape can: padding to the longest sample that leaks into the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gramian.errors import GramianError
from gramian.taps.proof.recorder import disagreement
from gramian.taps.proof.runs import Refuted, Runs, TappedRun
from gramian.taps.proof.samples import Samples

ALONE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 3e-2}
"""Largest relative difference between a unit's gradient in a batch and alone, by dtype."""

Region = tuple[slice, ...]
"""Where the entries of the unit alone lie in its rows of the batch's output."""


@dataclass(frozen=True)
class Lone:
    """One sample of the batch as a loader would collate it alone."""

    row: int
    arguments: Any
    padded_left: bool
    """True if the batch has its padding before the sample's tokens."""


def compare_alone(
    runs: Runs, samples: Samples, base: TappedRun, rows: list[int], chosen: Sequence[int], lone: Lone | None
) -> str:
    """Compare a unit's gradient in the batch with autograd's for the unit alone. One run, two where shapes differ.

    Args:
        runs: of the model.
        samples: the batch.
        base: the run of the batch, which sketched the unit's gradient.
        rows: the unit's.
        chosen: outputs that the backward went through.
        lone: the unit as a loader collates it; None: a slice of the batch.

    Returns:
        How it was done, in words.

    Raises:
        Refuted: if they differ. Gradients of scalar outputs may differ by a factor, which depends on the reduction.
    """
    if not rows:
        return "tokens of several units share rows"
    regions: dict[int, Region] = {}

    def cotangents(outputs: list[Tensor]) -> list[tuple[Tensor, Tensor]] | None:
        pairs = []
        for number in chosen:
            whole = runs.cotangents[number]
            assert whole is not None
            if number not in runs.row_outputs:
                pairs.append((outputs[number], torch.ones_like(outputs[number])))
                continue
            region = _region(outputs[number], whole, len(rows), samples.batch, lone)
            if region is None:
                return None
            regions[number] = region
            pairs.append((outputs[number], runs.samples_of(whole, rows)[(slice(None), *region)]))
        return pairs

    try:
        gradients = runs.on(samples.take(rows) if lone is None else lone.arguments, cotangents)
    except GramianError:
        raise
    except Exception as error:
        return f"the model does not run on it ({type(error).__name__})"
    if gradients is None:
        return "outputs of another shape"
    own = base.recorder.own
    narrowed = [number for number, region in regions.items() if _narrow(runs, number, rows, region, samples.batch)]
    if narrowed:
        own = runs.tapped(runs.everyone, alone=base.recorder.alone).recorder.own
    scaled = any(number not in runs.row_outputs for number in chosen)
    bad = disagreement(own, gradients, ALONE, floor=base.rounding, scaled=scaled)
    if bad is not None:
        raise Refuted(
            f"{bad[0]}: sample {rows[0]} alone has a gradient of norm {bad[2]:.4g}, and in the batch one of norm "
            f"{bad[1]:.4g}; expected samples that do not depend on each other (padding that is masked)"
        )
    return "slice" if lone is None else "collated"


def _region(output: Tensor, whole: Tensor, rows: int, batch: int, lone: Lone | None) -> Region | None:
    """Where an output of the unit alone lies in its rows of the batch's; None if that cannot be said."""
    if output.dim() != whole.dim() or output.shape[0] != whole.shape[0] // batch * rows:
        return None
    found = []
    for here, there in zip(output.shape[1:], whole.shape[1:], strict=True):
        if here > there or (here < there and lone is None):
            return None
        found.append(slice(there - here, there) if lone is not None and lone.padded_left else slice(0, here))
    return tuple(found)


def _narrow(runs: Runs, number: int, rows: list[int], region: Region, batch: int) -> bool:
    """Let a unit's cotangent vanish outside of a region; True if that changes it."""
    whole = runs.cotangents[number]
    assert whole is not None
    if all(part == slice(0, size) for part, size in zip(region, whole.shape[1:], strict=True)):
        return False
    each = whole.shape[0] // batch
    mine = slice(rows[0] * each, (rows[-1] + 1) * each)
    narrowed = whole.clone()
    narrowed[mine] = 0
    narrowed[(mine, *region)] = whole[(mine, *region)]
    runs.cotangents[number] = narrowed
    return True
