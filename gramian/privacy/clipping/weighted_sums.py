"""Clipped sums Σ_i c_i g_i (clip factors c_i) of a backward, by parameter, from the gradients saved with its norms."""

from typing import Any

import torch
from torch import Tensor

from gramian.core.dtypes import wide_dtype
from gramian.kernels.launch import layout
from gramian.kernels.sums.weighted_product import products_of_one_launch
from gramian.privacy.clipping.clipping_work import ClippingWork
from gramian.taps.gradients import ExplicitGradient, Outer, PerSampleGradient
from gramian.taps.gradients.outer import weighted_totals
from gramian.taps.records import ParameterRecord


def sum_small(work: ClippingWork) -> None:
    """Compute the clipped sums of all biases and norm layers into `work.totals`, with one sum for each device and dtype."""
    for gradients_BN, names in work.small_groups:
        with work.stopwatch.time("clip", "biases and norms", "sum", cuda=gradients_BN.is_cuda):
            total_N = _weighted_sum(work, wide_dtype(work.trained[names[0]]), ExplicitGradient(gradients_BN), names[0])
        sizes = [work.small_gradients[name].shape[1] for name in names]
        for name, total in zip(names, total_N.split(sizes), strict=True):
            work.totals[name] = total.reshape(work.trained[name].shape)


def take_sum(work: ClippingWork, name: str) -> Tensor | None:
    """A parameter's clipped sum, computed now unless it was before; None if it got no gradient."""
    if name in work.saved:
        _sum_saved(work, name)
    return work.totals.pop(name, None)


def _sum_saved(work: ClippingWork, name: str) -> None:
    """Compute the clipped sum of a parameter, and of others in the same launch, into `work.totals`; frees what was saved."""
    names = _of_one_launch(work, name)
    saved = [work.saved.pop(other) for other in names]
    for other, one in zip(names, saved, strict=True):
        one.check(other)
    gradient, dtype = saved[0].gradient, wide_dtype(work.trained[name])
    with work.time("clip", name, gradient, work.rows[name].way):
        if len(names) == 1:
            work.totals[name] = _weighted_sum(work, dtype, gradient, name)
        else:
            outers = [one.gradient for one in saved if isinstance(one.gradient, Outer)]
            work.totals.update(zip(names, weighted_totals(outers, _weights(work, gradient, name), dtype), strict=True))


def _of_one_launch(work: ClippingWork, name: str) -> list[str]:
    """A parameter and those after it whose clipped sums are products of one layout, as many as one launch should form."""
    if work.stopwatch.on or work.finite_runs is not None:
        return [name]
    if work.launches is None:
        work.launches = _planned_launches(work)
    return work.launches.get(name, [name])


def _planned_launches(work: ClippingWork) -> dict[str, list[str]]:
    """{parameter: it and others of one launch}; sums with samples whose gradients were formed again are made by themselves."""
    launches: dict[str, list[str]] = {}
    alike: dict[Any, list[str]] = {}
    for name, saved in work.saved.items():
        if isinstance(saved.gradient, Outer) and name not in work.recomputed:
            key = (layout(*saved.gradient.tensors()), wide_dtype(work.trained[name]), work.clip.groups[name])
            alike.setdefault(key, []).append(name)
    for names in alike.values():
        first = work.saved[names[0]].gradient
        assert isinstance(first, Outer)
        size = products_of_one_launch(first.left_BTM, first.right_BTN)
        for begin in range(0, len(names), size):
            together = names[begin : begin + size]
            launches |= dict.fromkeys(together, together)
    return launches


def sum_in_second_pass(work: ClippingWork, record: ParameterRecord) -> None:
    """Compute a parameter's clipped sum when the second of two backwards reaches its layer."""
    with work.time("clip", record.parameter, record.gradient, "two_pass"):
        dtype = wide_dtype(work.trained[record.parameter])
        work.totals[record.parameter] = _weighted_sum(work, dtype, record.gradient, record.parameter)


def _weighted_sum(work: ClippingWork, dtype: torch.dtype, gradient: PerSampleGradient, name: str) -> Tensor:
    """Σ_i c_i g_i times the loss scale, in `dtype`: the gradients in `gradient`, weighted with c_i (times B for a mean loss).

    Samples that are not finite are left out; recomputed gradients of parameter `name` replace those whose norms lost digits.
    """
    weights_B = _weights(work, gradient, name)
    if name in work.recomputed:
        return _sum_with_recomputed(work, dtype, gradient, name)
    if work.finite_runs is None:
        return gradient.weighted_total(weights_B, dtype)
    total = torch.zeros(gradient.shape, dtype=dtype, device=weights_B.device)
    for start, stop in work.finite_runs:
        total += gradient.select(start, stop).weighted_total(weights_B[start:stop], dtype)
    return total


def _weights(work: ClippingWork, gradient: PerSampleGradient, name: str) -> Tensor:
    """Weights [B] of the gradients of a parameter, on their device: clip factor times the factor of the loss reduction."""
    assert work.factors is not None
    device, group = gradient.tensors()[0].device, work.clip.groups[name]
    if (device, group) not in work.weights:
        work.weights[device, group] = (work.factors[group] * work.info.factor).to(device)
    return work.weights[device, group]


def _sum_with_recomputed(work: ClippingWork, dtype: torch.dtype, gradient: PerSampleGradient, name: str) -> Tensor:
    """Clipped sum with recomputed gradients of the samples whose norms lost digits; rounded to `dtype` at the end."""
    chosen, explicit = work.recomputed.pop(name)
    if explicit is None:
        explicit = ExplicitGradient(gradient.picked(chosen).per_sample())
    weights_B = work.weights[chosen.device, work.clip.groups[name]]
    total = explicit.weighted_total(weights_B[chosen], explicit.gradients_B.dtype)
    sure = torch.ones(gradient.batch, dtype=torch.bool, device=chosen.device)
    sure[chosen] = False
    for start, stop in work.finite_runs if work.finite_runs is not None else [(0, gradient.batch)]:
        weights = torch.where(sure, weights_B, 0.0)[start:stop]
        total += gradient.select(start, stop).weighted_total(weights, total.dtype)
    return total.to(dtype)
