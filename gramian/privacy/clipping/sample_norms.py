"""Per-sample gradient norms of a backward, and the clip factors that follow from them.

Each parameter adds its squared norms [B] as the backward passes its layer. Where the gradients of a sample's tokens cancel, a
norm from Gram matrices, or a direct one, may have lost its digits: such samples are doubtful. Reading whether there are any
makes the host wait for the device. So the factors are first guessed as if there were none, sums are begun with them, and the
guess is confirmed later.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import Tensor

from gramian.kernels.launch import layout
from gramian.kernels.sums.weighted_sum import row_squares
from gramian.privacy.clipping.clip_factors import ClippedBatch
from gramian.privacy.clipping.clipping_plan import ClippingRow
from gramian.privacy.clipping.clipping_work import ClippingWork, DoubtfulNorms
from gramian.privacy.clipping.deferred_read import read_later
from gramian.privacy.metric.metric_block import MetricBlock
from gramian.taps.gradients import ExplicitGradient, GroupedOuter, Joined, Outer, PerSampleGradient
from gramian.taps.gradients.outer import direct_of, gram_of, gram_sides, same_tensor
from gramian.taps.records import ParameterRecord

LARGEST_GRAM_GROUP = 4
"""Largest number of layers with a common input or output gradient whose norms are computed together."""


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
        _add_product_norms(work, name, gradient, row.way, at_once=record.borrowed)
        return gradient
    if record.borrowed and not work.norms_only:
        gradient = gradient.copy()
    work.add(name, gradient.squared_norms())
    return gradient


def add_waiting(work: ClippingWork) -> None:
    """Add the norms of the products that waited for the end of the backward, and of the last group of layers.

    Gram matrices of groups of layers whose sides have one layout, such as those of all blocks of a transformer, are one launch.
    """
    alike: dict[Any, list[dict[str, Outer]]] = {}
    for group in _gram_groups(work):
        alone = next(iter(group)) if work.stopwatch.on else ""  # what is timed is timed one by one
        key = (layout(*gram_sides([*group.values()])), alone)
        alike.setdefault(key, []).append(group)
    for groups in alike.values():
        name, gradient = next(iter(groups[0].items()))
        with work.time("norm", name, gradient, "gram"):
            squares_KB, doubtful_KB = gram_of([[*group.values()] for group in groups])
        for group, squares_B, doubtful_B in zip(groups, squares_KB, doubtful_KB, strict=True):
            _add_doubtful(work, group, squares_B, doubtful_B)
    flush_gram_group(work)


def _gram_groups(work: ClippingWork) -> list[dict[str, Outer]]:
    """The products that waited, in groups of consecutive ones that share a side; those without Gram matrices are done now."""
    groups: list[dict[str, Outer]] = []
    for name, gradient in work.waiting.items():
        way = work.rows[name].way
        if way == "gram" and isinstance(gradient, Outer):
            if not (groups and _joins(work, groups[-1], name, gradient)):
                groups.append({})
            groups[-1][name] = gradient
        else:
            with work.time("norm", name, gradient, way):
                _add_product_norms(work, name, gradient, way, at_once=False)
    work.waiting.clear()
    return groups


def _add_product_norms(
    work: ClippingWork, name: str, gradient: Outer | GroupedOuter | Joined, way: str, *, at_once: bool
) -> None:
    """Add squared norms [B] of LᵀR by Gram matrices, with layers that share a side, or directly, or of a sum of such uses."""
    if isinstance(gradient, Joined):
        squares_B, doubtful_B = gradient.squares()
        _add_doubtful(work, {name: gradient}, squares_B, doubtful_B, exact=gradient.exact_squares)
    elif isinstance(gradient, GroupedOuter):
        way = way if way in ("gram", "direct") else gradient.algorithm("auto")
        _add_doubtful(work, {name: gradient}, *gradient.squares_by(way))
    elif way == "gram":
        _join_gram_group(work, name, gradient, at_once)
    else:
        _add_doubtful(work, {name: gradient}, *direct_of(gradient))


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
    way = way if way in ("gram", "direct") else outer.algorithm("auto")
    if way == "gram":
        (squares_B,), (doubtful_B,) = gram_of([[outer]])
    else:
        squares_B, doubtful_B = direct_of(outer)
    _add_doubtful(work, gradients, squares_B, doubtful_B, block.squares)


def _per_sample_in_own_dtype(gradient: PerSampleGradient) -> Tensor:
    """Per-sample gradients [B, *shape] in the narrowest dtype that they were computed from."""
    if isinstance(gradient, Outer) and gradient.left_BTM.dtype == gradient.right_BTN.dtype:
        return torch.bmm(gradient.left_BTM.mT, gradient.right_BTN)  # accumulated wide, rounded once
    return gradient.per_sample().to(gradient.dtype)


def _join_gram_group(work: ClippingWork, name: str, gradient: Outer, at_once: bool) -> None:
    """Add a layer to the group whose norms are computed together, if it shares an input or output gradient (q/k/v, gate/up).

    A group that is full or shares nothing with the layer is computed first; with `at_once` the new group is computed now.
    """
    if work.gram_group and not _joins(work, work.gram_group, name, gradient):
        flush_gram_group(work)
    work.gram_group[name] = gradient
    if at_once:
        flush_gram_group(work)


def _joins(work: ClippingWork, group: Mapping[str, Outer], name: str, gradient: Outer) -> bool:
    """True if a group is not full, and a layer shares an input or output gradient and the norm with all of it."""
    of_norm = work.clip.groups
    one_norm = all(of_norm[other] == of_norm[name] for other in group)
    return one_norm and len(group) < LARGEST_GRAM_GROUP and _share_a_side([*group.values(), gradient])


def _share_a_side(outers: Sequence[Outer]) -> bool:
    first, rest = outers[0], outers[1:]
    return all(same_tensor(first.right_BTN, outer.right_BTN) for outer in rest) or all(
        same_tensor(first.left_BTM, outer.left_BTM) for outer in rest
    )


def flush_gram_group(work: ClippingWork) -> None:
    """Compute the norms of the layers in `work.gram_group`, and empty it."""
    if work.gram_group:
        outers, work.gram_group = work.gram_group, {}
        (squares_B,), (doubtful_B,) = gram_of([[*outers.values()]])
        _add_doubtful(work, outers, squares_B, doubtful_B)


def _sum_of_squares(gradients: Mapping[str, PerSampleGradient]) -> Tensor:
    return torch.stack([gradient.squared_norms() for gradient in gradients.values()]).sum(0)


def _add_doubtful(
    work: ClippingWork,
    gradients: Mapping[str, PerSampleGradient],
    squares_B: Tensor,
    doubtful_B: Tensor,
    measure: Callable[[Mapping[str, PerSampleGradient]], Tensor] = _sum_of_squares,
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


def guess_factors(work: ClippingWork) -> tuple[ClippedBatch, dict[int, Tensor], Callable[[], list[bool]]]:
    """Set the clip factors as if no norm were doubtful (digits lost) and all were finite; does not wait for the device.

    Returns:
        The clipped batch; the squared norms [B] of those parameters whose norms cannot be doubtful; and a function
        that waits for the device and returns the flags for `confirm_factors`.
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
    for norms in work.doubtful:
        work.add(next(iter(norms.gradients)), norms.squares_B)
    return set_factors(work), sure, flags


def confirm_factors(work: ClippingWork, sure: Mapping[int, Tensor], flags: Sequence[bool]) -> ClippedBatch | None:
    """Correct guessed clip factors where `flags` say that norms lost digits or are not finite.

    Doubtful samples are computed again, samples that are not finite are left out, and the factors are set anew from `sure`,
    the squared norms [B] that cannot be doubtful.

    Returns:
        None if the guess was right (no flag is set); otherwise the corrected batch.
    """
    if not any(flags):
        return None
    work.totals.clear()
    work.launches = None
    work.squares = dict(sure)
    for norms, doubtful in zip(work.doubtful, flags, strict=False):
        _recompute(work, norms, doubtful)
        work.add(next(iter(norms.gradients)), norms.squares_B)
    clipped = set_factors(work)
    finite_B = clipped.norms_B.isfinite()
    if bool(finite_B.all()):
        return clipped
    work.finite_runs = _runs(finite_B.tolist())
    left_out = len(finite_B) - sum(stop - start for start, stop in work.finite_runs)
    return replace(clipped, nonfinite=left_out)


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
