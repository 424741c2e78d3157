"""Is one loss term multiplied by what the arguments say? Read off the softmax head, where labels are hard.

Legend: T tokens, V classes.

A cross entropy of the head's outputs with the coefficient c has the output gradient g = c (p − e_y). Captures divide by the
coefficient that `loss_reduction` and `num_terms` state, so c = 1 is right; `(loss / accum).backward()` under "mean" leaves
c = 1/accum, and every G would be 1/accum² of what it is.
"""

import torch
from torch import Tensor

LOOKED = 64
"""Most tokens that are looked at."""
DIFFERS = 0.02
"""A coefficient that is closer to 1 than that is right."""
AGREES = 0.05
"""Largest spread of the tokens' own coefficients, relatively."""
UNIFORM = 1e-3
"""Predictions that differ by less beside the label are all equal."""


def seen_coefficient(p_TV: Tensor, g_TV: Tensor) -> float | None:
    """c ≠ 1 if every token's gradient is c (p − e_y); None if c is 1, or if it cannot be told. Cost: passes over T·V.

    c_t = −g_y/(1 − p_y), y the only negative entry. Soft targets q (label smoothing, a teacher) give g = p − q, for which
    c_t p − g = c_t p − (p − q) vanishes beside the label only if q is proportional to p there: over all tokens it may be
    a quarter of what uniform smoothing of that size would leave, |1 − c_t| · ‖p − mean p‖ over the classes beside y. Where p is
    uniform (two classes, a head of zeros) both are 0 for hard and for soft targets, so the answer is None.

    Args:
        p_TV: probabilities of the head's outputs.
        g_TV: their gradients, divided by the stated coefficient.
    """
    y_T1 = g_TV.argmin(1, keepdim=True)
    left_T = 1 - p_TV.gather(1, y_T1)[:, 0]
    live_T = (g_TV != 0).any(1) & (left_T > AGREES)
    p_TV, g_TV, y_T1, left_T = p_TV[live_T], g_TV[live_T], y_T1[live_T], left_T[live_T]
    if len(y_T1.unique()) < 2:
        return None
    c_T = -g_TV.gather(1, y_T1)[:, 0] / left_T
    rest_TV = (c_T[:, None] * p_TV - g_TV).scatter(1, y_T1, 0.0)
    mean_T1 = left_T[:, None] / (p_TV.shape[1] - 1)
    spread_T = (p_TV - mean_T1).scatter(1, y_T1, 0.0).norm(dim=1)
    wrong_T = (c_T - 1).abs() > DIFFERS
    hard = (rest_TV.norm() < ((c_T - 1) * spread_T).norm() / 4) & (spread_T.norm() > UNIFORM * left_T.norm())
    c = c_T.median()
    agree = ((c_T - c).abs() <= AGREES * c.abs()).all()
    return float(c) if bool(wrong_T.all() & hard & agree & torch.isfinite(c)) else None
