"""The probability mass of the ids outside a sparse teacher's top k, at any temperature, from its tail curve.

Legend: Q knots (values of u = 1/T at which the curve is stored), … dimensions of tokens.
"""

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.distill.teacher.signal import Tail

EDGE = 1e-6
"""Relative distance outside the stored knots at which a float temperature is still accepted: 1/5 in float32 is not 1/5."""


def tail_at(tail: Tail, u: float | Tensor) -> tuple[Tensor, Tensor]:
    """l(u) = log Σ exp(u z) over the logits z outside the top k, and its slope l'(u), by cubic Hermite interpolation.

    With s = (u − u₀)/h in the interval [u₀, u₀ + h] of knots around u:

        l = (1 + 2s)(1 − s)² l₀ + s²(3 − 2s) l₁ + h s(1 − s)² l'₀ − h s²(1 − s) l'₁.

    The slope is the derivative of that polynomial, so a gradient through l is exact for the interpolated l. Outside the knots l
    continues along its tangent: l is convex, so this is the largest straight line below it. A float outside is an error; the
    value of a tensor is not read, since that would wait for its device.

    Cost: O(tokens). The knots are read on the host, so they should be on the CPU.

    Args:
        tail: the curve; values and slopes [..., Q].
        u: 1/T, a number or a 0-dim tensor.

    Returns:
        l and l', [...], in the dtype of the values, at least float32.
    """
    knots = tail.knots_Q.tolist()
    if len(knots) < 2:
        raise GramianError(f"tail: {len(knots)} knots; expected at least 2")
    device = tail.values_BTQ.device
    wide = torch.promote_types(tail.values_BTQ.dtype, torch.float32)
    if isinstance(u, Tensor):
        u = u.detach().to(device=device, dtype=wide)
    else:
        if not knots[0] * (1 - EDGE) <= u <= knots[-1] * (1 + EDGE):
            raise GramianError(
                f"temperature: {1 / u:g}; expected {1 / knots[-1]:.6g} to {1 / knots[0]:.6g}, which the tail curve covers"
            )
        u = torch.full((), u, device=device, dtype=wide)
    knots_Q = tail.knots_Q.to(device=device, dtype=wide, non_blocking=True)
    left = torch.bucketize(u, knots_Q[1:-1], right=True).reshape(1)
    u_0, u_1 = knots_Q.index_select(0, left), knots_Q.index_select(0, left + 1)
    l_0, l_1, slope_0, slope_1 = (
        curve.index_select(-1, left + end).squeeze(-1).to(wide)
        for curve in (tail.values_BTQ, tail.slopes_BTQ)
        for end in (0, 1)
    )
    h = u_1 - u_0
    s = ((u - u_0) / h).clamp(0, 1)
    chord = (l_1 - l_0) / h
    # Written as l₀ plus a correction: l is large beside its changes.
    value = l_0 + h * s * (slope_0 + s * (3 * chord - 2 * slope_0 - slope_1 + s * (slope_0 + slope_1 - 2 * chord)))
    slope = slope_0 + s * (2 * (3 * chord - 2 * slope_0 - slope_1) + 3 * s * (slope_0 + slope_1 - 2 * chord))
    beyond = (u - u_0) - h * s
    return value + beyond * slope, slope
