"""Clipped sums Σ_i c_i g_i of a backward, parameter by parameter, from what was saved while its norms were taken."""

import torch
from torch import Tensor

from gramian.core.dtypes import wide_dtype
from gramian.privacy.clipping.clipping_work import ClippingWork
from gramian.taps.gradients import ExplicitGradient, Outer, PerSampleGradient
from gramian.taps.records import ParameterRecord

PRODUCTS_AHEAD = 4
EXPLICIT_SHARE_AHEAD = 0.5
"""Sums that are begun before it is known whether a sample is doubtful, for the device to work on meanwhile: so many products,
and those of explicit gradients, which are quick, as long as they take no more than this share of those gradients' bytes."""


def sum_small(work: ClippingWork) -> None:
    """Form the sums of all biases and norms at once, as views of one tensor."""
    for gradients_BN, names in work.small_groups:
        with work.stopwatch.time("clip", "biases and norms", "sum", cuda=gradients_BN.is_cuda):
            total_N = _weighted_sum(work, wide_dtype(work.trained[names[0]]), ExplicitGradient(gradients_BN))
        sizes = [work.small_gradients[name].shape[1] for name in names]
        for name, total in zip(names, total_N.split(sizes), strict=True):
            work.totals[name] = total.reshape(work.trained[name].shape)


def sum_ahead(work: ClippingWork) -> list[str]:
    """Form sums, in the order in which they are passed on, while the host waits for whether c is right; return their names."""
    ahead, products = [], PRODUCTS_AHEAD
    explicit = [saved.gradient for saved in work.saved.values() if isinstance(saved.gradient, ExplicitGradient)]
    room = EXPLICIT_SHARE_AHEAD * sum(gradient.gradients_B.nbytes for gradient in explicit)
    for name, p in work.trained.items():
        if name in work.saved:
            if isinstance(work.saved[name].gradient, ExplicitGradient):
                room -= p.numel() * wide_dtype(p).itemsize
            else:
                products -= 1
            if min(products, room) < 0:
                break
            work.totals[name] = _sum_saved(work, name)
            ahead.append(name)
    return ahead


def take_sum(work: ClippingWork, name: str, *, release: bool) -> Tensor | None:
    """A parameter's sum, formed now unless it was before; None if it got no gradient. `release` frees its inputs."""
    if name in work.totals:
        return work.totals.pop(name)
    if name not in work.saved:
        return None
    total = _sum_saved(work, name)
    if release:
        del work.saved[name]
    return total


def _sum_saved(work: ClippingWork, name: str) -> Tensor:
    saved = work.saved[name]
    saved.check(name)
    with work.time("clip", name, saved.gradient, work.rows[name].way):
        return _weighted_sum(work, wide_dtype(work.trained[name]), saved.gradient, name)


def sum_in_second_pass(work: ClippingWork, record: ParameterRecord) -> None:
    """Form a parameter's sum as the second of two backwards passes its layer."""
    with work.time("clip", record.parameter, record.gradient, "two_pass"):
        dtype = wide_dtype(work.trained[record.parameter])
        work.totals[record.parameter] = _weighted_sum(work, dtype, record.gradient, record.parameter)


def _weighted_sum(work: ClippingWork, dtype: torch.dtype, gradient: PerSampleGradient, name: str = "") -> Tensor:
    """Σ c_i g_i times the loss scale: the carried gradients, weighted with c_i·B for a mean loss."""
    assert work.factors_B is not None
    device = gradient.tensors()[0].device
    if device not in work.weights:
        work.weights[device] = (work.factors_B * work.info.factor).to(device)
    weights_B = work.weights[device]
    if name in work.recomputed:
        return _sum_with_recomputed(work, dtype, gradient, name)
    if work.finite_runs is None:
        return gradient.weighted_total(weights_B, dtype)
    total = torch.zeros(gradient.shape, dtype=dtype, device=device)
    for start, stop in work.finite_runs:
        total += gradient.select(start, stop).weighted_total(weights_B[start:stop], dtype)
    return total


def _sum_with_recomputed(work: ClippingWork, dtype: torch.dtype, gradient: PerSampleGradient, name: str) -> Tensor:
    """Doubtful samples from their recomputed gradients, the rest as usual; summed in a wide dtype and rounded at the end."""
    assert isinstance(gradient, Outer)
    chosen, explicit = work.recomputed.pop(name)
    if explicit is None:
        explicit = ExplicitGradient(Outer(gradient.left_BTM[chosen], gradient.right_BTN[chosen]).per_sample())
    weights_B = work.weights[chosen.device]
    total = explicit.weighted_total(weights_B[chosen], explicit.gradients_B.dtype)
    sure = torch.ones(gradient.batch, dtype=torch.bool, device=chosen.device)
    sure[chosen] = False
    for start, stop in work.finite_runs if work.finite_runs is not None else [(0, gradient.batch)]:
        weights = torch.where(sure, weights_B, 0.0)[start:stop]
        total += gradient.select(start, stop).weighted_total(weights, total.dtype)
    return total.to(dtype)
