"""Per-sample gradient norms of a backward, and the clip factors that follow from them.

Each parameter adds its squared norms [B] as the backward passes its layer. Where the gradients of a sample's tokens cancel, a
norm from Gram matrices, or a direct one, may have lost its digits: such samples are doubtful, and are computed again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import Tensor

from gramian.core.deferred_read import read_later
from gramian.kernels.launch import layout
from gramian.kernels.sums.weighted_sum import row_squares
from gramian.privacy.clipping.clip_factors import ClippedBatch
from gramian.privacy.clipping.clipping_plan import ClippingRow
from gramian.privacy.clipping.clipping_work import ClippingWork, DoubtfulNorms
from gramian.privacy.metric.metric_block import MetricBlock
from gramian.taps.gradients import ExplicitGradient, GroupedOuter, Joined, Outer, PerSampleGradient
from gramian.taps.gradients.outer import gram_of
from gramian.taps.records import ParameterRecord


def let_wait(work: ClippingWork, record: ParameterRecord, row: ClippingRow) -> PerSampleGradient | None:
    """Let the norms of a product that is saved for its sum anyway wait for the end of the backward (`add_waiting`).

    The backward itself is then almost as quick for the host as autograd's own, and the device has work while norms are begun.

    Returns:
        The gradient that is saved; None: not such a product, whose norms are to be added now (`add_norms`).
    """
    if work.norms_only or row.way == "keep" or not _is_product(record.gradient):
        return None
    gradient = record.gradient.copy() if record.borrowed else record.gradient
    work.waiting[record.parameter] = gradient
    return gradient


def _is_product(gradient: PerSampleGradient) -> TypeGuard[Outer | GroupedOuter | Joined]:
    return isinstance(gradient, GroupedOuter | Joined) or (isinstance(gradient, Outer) and gradient.tokens > 1)


def add_norms(work: ClippingWork, record: ParameterRecord, row: ClippingRow) -> PerSampleGradient:
    """Add a parameter's squared per-sample norms to `work`, as its line `row` of the plan says.

    Returns:
        The gradient from which its clipped sum will be formed.
    """
    gradient, name = record.gradient, record.parameter
    if row.way == "keep" and not work.norms_only:
        explicit = ExplicitGradient(_per_sample_in_own_dtype(gradient), gradient.dtype)
        work.add(name, explicit.squared_norms())
        return explicit
    if _is_product(gradient):
        _add_product_norms(work, name, gradient, row.way)
        return gradient
    if record.borrowed and not work.norms_only:
        gradient = gradient.copy()
    work.add(name, gradient.squared_norms())
    return gradient


def add_waiting(work: ClippingWork) -> None:
    """Add the norms of the products that waited for the end of the backward.

    Gram matrices of layers whose sides have one layout, such as those of all blocks of a transformer, are one launch.
    """
    alike: dict[Any, dict[str, Outer]] = {}
    for name, gradient in work.waiting.items():
        way = work.rows[name].way
        if way == "gram" and isinstance(gradient, Outer):
            alone = name if work.stopwatch.on else ""  # what is timed is timed one by one
            alike.setdefault((layout(*gradient.tensors()), alone), {})[name] = gradient
        else:
            with work.time("norm", name, gradient, way):
                _add_product_norms(work, name, gradient, way)
    work.waiting.clear()
    for layers in alike.values():
        name, gradient = next(iter(layers.items()))
        with work.time("norm", name, gradient, "gram"):
            squares_KB, doubtful_KB = gram_of([*layers.values()])
        for layer, squares_B, doubtful_B in zip(layers, squares_KB, doubtful_KB, strict=True):
            _add_doubtful(work, {layer: layers[layer]}, squares_B, doubtful_B)


def _add_product_norms(work: ClippingWork, name: str, gradient: Outer | GroupedOuter | Joined, way: str) -> None:
    """Add squared norms [B] of LᵀR by Gram matrices or directly, or of a sum of such uses."""
    if isinstance(gradient, Joined):
        squares_B, doubtful_B = gradient.squares()
        _add_doubtful(work, {name: gradient}, squares_B, doubtful_B, exact=gradient.exact_squares)
    else:
        _add_doubtful(work, {name: gradient}, *_squares_by(gradient, way))


def _squares_by(gradient: Outer | GroupedOuter, way: str) -> tuple[Tensor, Tensor]:
    """Squared norms [B] as planned, or by the faster algorithm where that is none; and a mask of the doubtful ones."""
    return gradient.squares_by(way if way in ("gram", "direct") else gradient.algorithm("auto"))


def add_metric_norms(
    work: ClippingWork, record: ParameterRecord, row: ClippingRow, block: MetricBlock
) -> PerSampleGradient:
    """`add_norms` in a metric, whose block has this parameter: norms are added once the backward has reached all of the block.

    Returns:
        The gradient, not whitened, from which the clipped sum will be formed.
    """
    gradient, parts = record.gradient, work.incomplete.setdefault(block.spec.name, {})
    if row.way == "keep" and not work.norms_only:
        gradient = ExplicitGradient(_per_sample_in_own_dtype(gradient), gradient.dtype)
    elif record.borrowed:
        gradient = gradient.copy()
    parts[record.parameter] = gradient
    if len(parts) == len(block.spec.parameters):
        _measure_in_metric(work, block, work.incomplete.pop(block.spec.name), row.way)
    return gradient


def _measure_in_metric(
    work: ClippingWork, block: MetricBlock, gradients: Mapping[str, PerSampleGradient], way: str
) -> None:
    """Add ‖W g_i‖² of one block of the metric W, from the gradients of those of its parameters that have one."""
    outer = block.whitened_tokens(gradients)
    if not isinstance(outer, Outer) or outer.tokens == 1:
        work.add(next(iter(gradients)), block.squares(gradients) if outer is None else outer.squared_norms())
        return
    _add_doubtful(work, gradients, *_squares_by(outer, way), block.squares)


def _per_sample_in_own_dtype(gradient: PerSampleGradient) -> Tensor:
    """Per-sample gradients [B, *shape] in the narrowest dtype that they were computed from."""
    if isinstance(gradient, Outer) and gradient.left_BTM.dtype == gradient.right_BTN.dtype:
        return torch.bmm(gradient.left_BTM.mT, gradient.right_BTN)  # accumulated wide, rounded once
    return gradient.per_sample().to(gradient.dtype)


def _squared_norms(gradients: Mapping[str, PerSampleGradient]) -> Tensor:
    (gradient,) = gradients.values()
    return gradient.squared_norms()


def _add_doubtful(
    work: ClippingWork,
    gradients: Mapping[str, PerSampleGradient],
    squares_B: Tensor,
    doubtful_B: Tensor,
    measure: Callable[[Mapping[str, PerSampleGradient]], Tensor] = _squared_norms,
    exact: Callable[[Tensor], Tensor] | None = None,
) -> None:
    norms = DoubtfulNorms(gradients, squares_B, doubtful_B, measure, exact)
    if work.norms_only:  # the tensors will not be there later
        _recompute(work, norms, bool(doubtful_B.any()))
        work.add(next(iter(gradients)), norms.squares_B)
    else:
        work.doubtful.append(norms)


def _recompute(work: ClippingWork, norms: DoubtfulNorms, doubtful: bool) -> None:
    """Where norms are doubtful (digits lost), form those gradients in float32 or float64 and set exact squared norms."""
    if not doubtful:
        return
    chosen = norms.doubtful_B.nonzero()[:, 0]
    if norms.exact is not None:
        norms.squares_B[chosen] = norms.exact(chosen).to(norms.squares_B)
        return
    explicit = {name: ExplicitGradient(g.picked(chosen).per_sample()) for name, g in norms.gradients.items()}
    for name, gradient in explicit.items():
        work.recomputed[name] = (chosen, None if work.norms_only else gradient)
    norms.squares_B[chosen] = norms.measure(explicit).to(norms.squares_B)


def find_factors(work: ClippingWork) -> ClippedBatch:
    """Set the clip factors of a backward from all its norms; waits for the device once.

    Factors are first set as if no norm were doubtful (digits lost) and all were finite, while the device says whether that is
    so. If it is not, doubtful samples are computed again, and samples that are not finite are left out.
    """
    add_waiting(work)
    for gradients in work.incomplete.values():  # their other parameters got no gradient
        assert work.metric is not None
        _measure_in_metric(work, work.metric.blocks[next(iter(gradients))], gradients, "auto")
    work.incomplete.clear()
    work.small_groups = _group_small_gradients(work)
    for gradients_BN, names in work.small_groups:
        work.add(names[0], row_squares(gradients_BN))
    if not work.squares:
        work.squares[0] = torch.zeros(0 if work.placeholder else work.info.count)
    sure, flags = dict(work.squares), _flags(work)
    clipped = _with_doubtful(work, sure)
    if any(found := flags()):
        for norms, doubtful in zip(work.doubtful, found, strict=False):
            _recompute(work, norms, doubtful)
        clipped = _without_nonfinite(work, _with_doubtful(work, sure))
    work.doubtful.clear()
    return clipped


def _with_doubtful(work: ClippingWork, sure: Mapping[int, Tensor]) -> ClippedBatch:
    """Set the clip factors from the squared norms that cannot be doubtful, `sure`, and those that can."""
    work.squares = dict(sure)
    for norms in work.doubtful:
        work.add(next(iter(norms.gradients)), norms.squares_B)
    return set_factors(work)


def _without_nonfinite(work: ClippingWork, clipped: ClippedBatch) -> ClippedBatch:
    """The batch, with samples that are not finite counted and left out of the sums."""
    finite_B = clipped.norms_B.isfinite()
    if bool(finite_B.all()):
        return clipped
    work.finite_runs = _runs(finite_B.tolist())
    return replace(clipped, nonfinite=int((~finite_B).sum()))


def set_factors(work: ClippingWork) -> ClippedBatch:
    """Set the clip factors [B] of `work` from its squared norms, 0 where these are not finite; returns norms and factors."""
    device = next(iter(work.squares.values())).device
    norms = {
        group: squares_B.to(device).clamp(min=0).sqrt() * work.info.scale for group, squares_B in work.squares.items()
    }
    total_B = next(iter(norms.values())) if len(norms) == 1 else torch.stack([*norms.values()]).norm(dim=0)
    slack = work.slack if work.metric is None else work.slack + work.metric.rounding
    factors = {group: work.clip.factors(norms_B, slack, group) for group, norms_B in norms.items()}
    if len(norms) > 1:  # a sample that is not finite in one layer is left out of all
        factors = {group: torch.where(total_B.isfinite(), factors_B, 0.0) for group, factors_B in factors.items()}
    factors_B = work.clip.columns(factors)
    if work.info.units is not None and work.info.units.padded:  # the last unit
        work.padding, total_B, factors_B = total_B[-1], total_B[:-1], factors_B[:-1]
        for column_B in factors.values():
            column_B[-1] = 0
    work.factors = factors
    work.weights.clear()
    return ClippedBatch(total_B, factors_B, nonfinite=0)


def _group_small_gradients(work: ClippingWork) -> list[tuple[Tensor, list[str]]]:
    """Small per-sample gradients concatenated: ([B, N], parameter names) for each device, dtype and norm."""
    groups: dict[Any, list[str]] = {}
    for name, gradient_BN in work.small_gradients.items():
        key = (gradient_BN.device, gradient_BN.dtype, work.trained[name].dtype, work.clip.groups[name])
        groups.setdefault(key, []).append(name)
    return [(torch.cat([work.small_gradients[name] for name in names], dim=1), names) for names in groups.values()]


def _flags(work: ClippingWork) -> Callable[[], list[bool]]:
    """Function that returns, per group of norms, True if a sample lost digits, and, last, True if any norm is not finite."""
    first = next(iter(work.squares.values()))
    device = first.device
    parts = [*work.squares.values(), *(norms.squares_B for norms in work.doubtful)]
    squares_KB = torch.stack([squares_B.to(first) for squares_B in parts])
    finite = squares_KB.isfinite().all()[None]
    doubtful = [norms.doubtful_B.to(device) for norms in work.doubtful]
    return read_later(torch.cat([torch.stack(doubtful).any(1), ~finite] if doubtful else [~finite]))


def _runs(flags: Sequence[bool]) -> list[tuple[int, int]]:
    """Ranges [start, stop) of every run of True in `flags`."""
    runs, start = [], None
    for i, flag in enumerate([*flags, False]):
        if flag and start is None:
            start = i
        elif not flag and start is not None:
            runs.append((start, i))
            start = None
    return runs
