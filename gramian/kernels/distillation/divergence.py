"""Divergences between teacher and student distributions per token, with derivatives, accurate where both nearly agree.

Legend: N tokens, K outcomes. a = u s are the student's logits over the temperature, b = u t the teacher's, u = 1/T;
q = softmax(a), p = softmax(b).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

DIRECTIONS = ("forward", "reverse", "jsd")

EMPTY = -1e30
"""Logit of an outcome without probability mass: finite, so that 0 · log 0 is 0."""


@dataclass(frozen=True)
class Divergence:
    """The divergence D between the teacher's p and the student's q for N rows, its derivatives, and both entropies."""

    value_N: Tensor
    gradient_NK: Tensor
    """∂D/∂a, the gradient with respect to the student's logits over the temperature, [N, K]."""
    slope_N: Tensor
    """dD/du, u = 1/temperature, through the student's and the teacher's logits, [N]."""
    teacher_entropy_N: Tensor
    student_entropy_N: Tensor


def divergence(a_NK: Tensor, b_NK: Tensor, s_NK: Tensor, t_NK: Tensor, direction: str, beta: float = 0.5) -> Divergence:
    """The divergence D of each row, and its derivatives with respect to the student's logits and to u = 1/temperature.

    With the teacher's p = softmax(b), the student's q = softmax(a), x = log p − log q, m = βp + (1−β)q:

        forward  KL(p‖q) = Σ p x                           ∂D/∂a = q − p               dD/du = Σ (q−p) s + Cov_p(t, x)
        reverse  KL(q‖p) = −Σ q x                          ∂D/∂a = −q (x + D)          dD/du = Σ (p−q) t − Cov_q(s, x)
        jsd      β KL(p‖m) + (1−β) KL(q‖m)                 ∂D/∂a = (1−β) q (log(q/m) − KL(q‖m))
                                                           dD/du = (1−β) Cov_q(s, log(q/m)) + β Cov_p(t, log(p/m))

    KL(p‖q) is summed as Σ (p x − p + q), whose terms are not negative. Rounding errors of the normalisers then enter only
    squared; in Σ p x they would dominate where p ≈ q.

    Cost: about fourteen passes over N·K.

    Args:
        a_NK: The student's logits over the temperature, float32 or float64; `EMPTY` for an outcome without probability.
        b_NK: The teacher's logits over the temperature, likewise.
        s_NK: da/du, finite: the student's logits.
        t_NK: db/du, finite: the teacher's logits.
        direction: One of `DIRECTIONS`.
        beta: Weight β of "jsd", between 0 and 1, both excluded; not used otherwise.
    """
    log_q_NK, log_p_NK = log_probabilities(a_NK), log_probabilities(b_NK)
    q_NK, p_NK = log_q_NK.exp(), log_p_NK.exp()
    s_NK, t_NK = _centred(s_NK, q_NK), _centred(t_NK, p_NK)
    x_NK = log_p_NK - log_q_NK
    if direction == "forward":
        value_N = _excess(p_NK, q_NK, x_NK).sum(1)
        gradient_NK = q_NK - p_NK
        slope_N = (gradient_NK * s_NK).sum(1) + (p_NK * x_NK * t_NK).sum(1)
    elif direction == "reverse":
        value_N = _excess(q_NK, p_NK, -x_NK).sum(1)
        gradient_NK = -q_NK * (x_NK + value_N[:, None])
        slope_N = ((p_NK - q_NK) * t_NK).sum(1) - (q_NK * x_NK * s_NK).sum(1)
    else:
        log_pm_NK, log_qm_NK = _to_mixture(x_NK, beta)
        m_NK = beta * p_NK + (1 - beta) * q_NK
        of_p_N = _excess(p_NK, m_NK, log_pm_NK).sum(1)
        of_q_N = _excess(q_NK, m_NK, log_qm_NK).sum(1)
        value_N = beta * of_p_N + (1 - beta) * of_q_N
        gradient_NK = (1 - beta) * q_NK * (log_qm_NK - of_q_N[:, None])
        slope_N = (1 - beta) * (q_NK * log_qm_NK * s_NK).sum(1) + beta * (p_NK * log_pm_NK * t_NK).sum(1)
    return Divergence(value_N, gradient_NK, slope_N, -(p_NK * log_p_NK).sum(1), -(q_NK * log_q_NK).sum(1))


def log_probabilities(z_NK: Tensor) -> Tensor:
    """log_softmax along dim 1 of logits [N, K], computed relative to the largest logit, so that rounding errors are small.

    torch's own log_softmax adds the exponentials one after another, and loses two digits over 100,000 of them.
    """
    z_NK = z_NK - z_NK.amax(1, keepdim=True)
    return z_NK - z_NK.logsumexp(1, keepdim=True)


def _centred(s_NK: Tensor, q_NK: Tensor) -> Tensor:
    """s − Σ q s per row, for s and probabilities q [N, K]; the largest s is subtracted first against rounding of Σ q."""
    s_NK = s_NK - s_NK.amax(1, keepdim=True)
    return s_NK - (q_NK * s_NK).sum(1, keepdim=True)


def _excess(p_NK: Tensor, q_NK: Tensor, x_NK: Tensor) -> Tensor:
    """p x − p + q for probabilities p, q and x = log(p/q), a term of KL(p‖q); by expm1 where x is small."""
    near_NK = p_NK * (x_NK + torch.expm1(-x_NK))
    return torch.where(x_NK.abs() < 0.5, near_NK, p_NK * x_NK - p_NK + q_NK)


def _to_mixture(x_NK: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """log(p/m) and log(q/m), m = βp + (1−β)q, from x = log(p/q), without a difference of nearly equal numbers."""
    small_NK = torch.expm1(-x_NK.abs())
    of_p_NK = -torch.log1p((1 - beta) * small_NK)
    of_q_NK = -torch.log1p(beta * small_NK)
    ahead_NK = x_NK >= 0
    return torch.where(ahead_NK, of_p_NK, of_q_NK + x_NK), torch.where(ahead_NK, of_p_NK - x_NK, of_q_NK)
