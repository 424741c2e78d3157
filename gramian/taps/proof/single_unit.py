"""A unit (a sample, or a group of rows that counts as one) must have the same gradient alone as is attributed to it in a batch.

Only this run finds samples that depend on padding to the longest sample: batches of equal shape have the same padding.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.taps.proof.proof_runs import ProofRuns, Refuted, TappedRun
from gramian.taps.proof.row_comparison import half_precision
from gramian.taps.proof.row_recorder import Sketch, disagreement, sketches_of
from gramian.taps.proof.sample_arguments import SampleArguments

ALONE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 3e-2}
"""Largest relative difference between a unit's gradient in a batch and alone, by dtype."""

Region = tuple[slice, ...]
"""Slices, one per axis after the first, that cut a row of the batch's output to the size of the unit's output alone."""


@dataclass(frozen=True)
class SampleAlone:
    """One sample, row `row` of the batch, with the model's arguments as a loader collates them from this sample alone."""

    row: int
    arguments: Any
    padded_left: bool
    """True if the batch has its padding before the sample's tokens."""


FindAlone = Callable[[Collection[int]], list[SampleAlone]]
"""Function that returns some of the given samples, each collated alone by a loader; empty if no loader is known."""


@dataclass(frozen=True)
class UnitAlone:
    """A unit to run alone: its number, its rows in the batch, and the loader's arguments for it (None: batch slices)."""

    number: int
    rows: list[int]
    collated: SampleAlone | None


def compare_alone(
    runs: ProofRuns, samples: SampleArguments, base: TappedRun, units: Sequence[UnitAlone], chosen: Sequence[int]
) -> str:
    """Compare the gradients attributed to units in the batch with autograd's for each unit alone.

    If a model does not run on one sample, or then returns other shapes (`squeeze()`), the unit runs beside a copy of itself.
    The gradient of a scalar output may be the same alone as in the batch (a sum over samples) or larger by the ratio of their
    rows (a mean). Cost: one or two runs of each unit, and one of the batch if a unit has fewer tokens alone.

    Args:
        runs: makes the runs.
        samples: the arguments of the batch by sample.
        base: the run of the batch, which recorded the gradients of these units.
        units: the units to run alone.
        chosen: indices of the outputs through which the backward goes.

    Returns:
        How the units ran: "slice" or "collated", perhaps with ", beside a copy of itself"; or why they did not.

    Raises:
        Refuted: if the gradients differ.
    """
    found: list[tuple[UnitAlone, dict[str, Sketch], int]] = []
    narrowed = False
    for unit in units:
        regions: dict[int, Region] = {}
        gradients = _gradients_alone(runs, samples, unit, chosen, regions, 1)
        copies = 2 if isinstance(gradients, str) else 1
        if isinstance(gradients, str):
            reason = gradients
            gradients = _gradients_alone(runs, samples, unit, chosen, regions, 2)
            if isinstance(gradients, str):
                return reason
        found.append((unit, sketches_of(gradients), copies))
        for number, region in regions.items():
            narrowed |= _narrow(runs, number, unit.rows, region, samples.batch)
    if narrowed:
        base = runs.tapped(runs.everyone, alone=[unit.number for unit in units])
    scalar = any(number not in runs.row_outputs for number in chosen)
    for unit, alone, copies in found:
        mine = base.recorder.own.get(unit.number, {})
        factors = (float(copies), samples.batch / len(unit.rows)) if scalar else (1.0,)
        bad = disagreement(mine, alone, ALONE, floor=base.rounding, factors=factors, half=half_precision(runs, base))
        if bad is not None:
            raise Refuted(
                f"{bad[0]}: sample {unit.rows[0]} alone has a gradient of norm {bad[2]:.4g}, and in the batch one of norm "
                f"{bad[1]:.4g}; expected samples that do not depend on each other (padding that is masked)"
            )
    how = "slice" if units[0].collated is None else "collated"
    return how if all(copies == 1 for _, _, copies in found) else f"{how}, beside a copy of itself"


def _gradients_alone(
    runs: ProofRuns,
    samples: SampleArguments,
    unit: UnitAlone,
    chosen: Sequence[int],
    regions: dict[int, Region],
    copies: int,
) -> dict[str, Tensor | None] | str:
    """Autograd's gradients {parameter: tensor} of a unit alone, or in a batch of `copies` of it; or text why there are none.

    Fills `regions` as `_cotangents` does.
    """
    try:
        gradients = runs.on(
            _arguments(samples, unit, copies),
            partial(_cotangents, runs, samples.batch, unit, chosen, regions, copies=copies),
        )
    except GramianError:
        raise
    except Exception as error:  # the user's own code may fail in any way on one sample
        return f"the model does not run on it ({type(error).__name__})"
    return "outputs of another shape" if gradients is None else gradients


def _arguments(samples: SampleArguments, unit: UnitAlone, copies: int) -> Any:
    if unit.collated is None:
        return samples.take(unit.rows * copies)
    if copies == 1:
        return unit.collated.arguments
    return samples.of_one(unit.collated.arguments).take([0] * copies)


def fits_alone(runs: ProofRuns, samples: SampleArguments, unit: UnitAlone, chosen: Sequence[int]) -> bool:
    """True if the model runs on a unit alone and its outputs have the expected shapes; values are not compared. One run."""
    arguments = samples.take(unit.rows) if unit.collated is None else unit.collated.arguments
    try:
        return runs.on(arguments, partial(_cotangents, runs, samples.batch, unit, chosen, {})) is not None
    except GramianError:
        raise
    except Exception:  # the user's own code may fail in any way on a batch that it does not fit
        return False


def _cotangents(
    runs: ProofRuns,
    batch: int,
    unit: UnitAlone,
    chosen: Sequence[int],
    regions: dict[int, Region],
    outputs: list[Tensor],
    copies: int = 1,
) -> list[tuple[Tensor, Tensor]] | None:
    """(output, cotangent) of a unit alone, cut from the batch's cotangents; None if an output has an unexpected shape.

    Fills `regions` with {index of an output: its `Region`}. Of several copies of the unit, the first gets the cotangent and the
    others zeros.
    """
    pairs = []
    for number in chosen:
        whole = runs.cotangents[number]
        assert whole is not None
        if number not in runs.row_outputs:
            pairs.append((outputs[number], torch.ones_like(outputs[number])))
            continue
        region = _region(outputs[number], whole, len(unit.rows) * copies, batch, unit.collated)
        if region is None:
            return None
        regions[number] = region
        own = runs.samples_of(whole, unit.rows)[(slice(None), *region)]
        pairs.append((outputs[number], torch.cat([own, *[torch.zeros_like(own)] * (copies - 1)])))
    return pairs


def _region(output: Tensor, whole: Tensor, rows: int, batch: int, lone: SampleAlone | None) -> Region | None:
    """Slices, one for each axis after the first, that cut a row of `whole` to the size of a row of `output`; None: no fit.

    `output` is that of one unit (a sample, or rows that count as one) run by itself in `rows` rows, `whole` the cotangent of
    the same output for a batch of `batch` samples. Only a sample that a loader collated by itself (`lone`) may be
    shorter there.
    """
    if output.dim() != whole.dim() or output.shape[0] != whole.shape[0] // batch * rows:
        return None
    found = []
    for here, there in zip(output.shape[1:], whole.shape[1:], strict=True):
        if here > there or (here < there and lone is None):
            return None
        found.append(slice(there - here, there) if lone is not None and lone.padded_left else slice(0, here))
    return tuple(found)


def _narrow(runs: ProofRuns, number: int, rows: list[int], region: Region, batch: int) -> bool:
    """Set the cotangent of output `number` to zero outside `region` in the unit's rows; False if the region is all of a row."""
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
