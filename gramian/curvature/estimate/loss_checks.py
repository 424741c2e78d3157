"""Checks, at a softmax head, that the loss is the one that the arguments of a capture describe.

Legend: T tokens, V classes, p [T, V] softmax of the head's outputs, g [T, V] gradients of these outputs divided by the
coefficient of a loss term that the arguments `loss_reduction` and `num_terms` give (the stated coefficient).

Cross entropy of the head's outputs has g = c (p − q), q the target's distribution and c the true coefficient divided by the
stated one, so c = 1 is right. `(loss / accum).backward()` under "mean" has c = 1/accum, and every G would be too small by
a factor of accum².
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.curvature.estimate.likelihood import Likelihood, Softmax
from gramian.curvature.estimate.refresh_pass import RefreshPass
from gramian.curvature.estimate.token_moments import Tokens
from gramian.curvature.estimate.token_selection import ChosenTokens
from gramian.linalg.wide import pieces, wide
from gramian.parallel.tensor_parallel import TensorParallel
from gramian.taps.products.sides import Sides

MOST_TOKENS = 64
"""Largest number of tokens from which the coefficient of a loss term is measured."""
DIFFERS = 0.02
"""A measured coefficient c (true coefficient of a loss term / that of the arguments) this close to 1 counts as right."""
AGREES = 0.05
"""Largest relative difference between the coefficient measured on one token and the median of all tokens."""
UNIFORM = 1e-3
"""Probabilities of the classes other than the label that differ by less than this, relatively, count as uniform."""


@dataclass
class CoefficientCheck:
    """Compares, once, the gradients at a softmax head with those of a cross entropy that has the stated coefficient."""

    due: bool = True
    """True while nothing was compared."""
    seen: float | None = None
    """Measured coefficient of one loss term divided by the stated one; None: equal, unknown or not measured."""

    def compare(
        self,
        sides: Sides,
        chosen: ChosenTokens,
        gradients: Tokens,
        info: RefreshPass,
        likelihood: Likelihood,
        p_TV: Tensor | None = None,
    ) -> None:
        """Compare the `gradients` of the `chosen` tokens of a call of the head, whose inputs are in `sides`.

        `p_TV`: the softmax of their outputs, where it is there already.

        Nothing is compared where the outputs cannot be recomputed from the inputs, are sharded over processes, or are not the
        logits of a softmax.
        """
        softmax = isinstance(likelihood, Softmax) and likelihood.at_head
        if not self.due or sides.outputs is None or info.tensor_parallel is not None or not softmax:
            return
        if p_TV is None:
            rows_TI = chosen.tokens(sides.inputs_BT, borrowed=True).rows_TN[:MOST_TOKENS]
            p_TV = sides.outputs(rows_TI).softmax(dim=-1)
        self.due, self.seen = False, stated_coefficient_error(p_TV[:MOST_TOKENS], gradients)


def stated_coefficient_error(p_TV: Tensor, gradients: Tokens) -> float | None:
    """Coefficient of a loss term, divided by that of the capture's arguments, from `MOST_TOKENS` tokens; None: 1 or unknown.

    `p_TV` are the head's probabilities of these tokens, `gradients` its output gradients with weights and scale to multiply in.
    """
    g_TV = wide(gradients.rows_TN[:MOST_TOKENS]) * gradients.scale
    if gradients.weights_T is not None:
        g_TV = g_TV * gradients.weights_T[:MOST_TOKENS, None].to(g_TV)
    return seen_coefficient(p_TV, g_TV.to(p_TV))


def seen_coefficient(p_TV: Tensor, g_TV: Tensor) -> float | None:
    """c if the gradient of every token is c (p − e_y), p its probabilities, y its label, and c ≠ 1; None if c is 1 or unknown.

    e_y is the one-hot label. For token t, y is the smallest entry of its gradient g in `g_TV`, and c_t = −g_y/(1 − p_y); the
    median is returned if all c_t agree. Soft targets q (label smoothing, a teacher) have g = p − q, and c_t ≠ 1 too. To tell
    them apart, c_t p − g is computed at the classes other than y: it is 0 for hard targets, and for soft ones only if q is
    proportional to p there. Its norm over all tokens must be below a quarter of what uniform smoothing would leave: the norm of
    |1 − c_t| · ‖p − mean p‖ over these classes. If p is uniform there (two classes, a head of zeros), both are 0 for hard and
    soft targets, and the result is None, as it is for fewer than two different labels. Cost: a few passes over T·V entries.
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


def check_softmax(layer: str, p_TV: Tensor, gradients: Tokens, tensor_parallel: TensorParallel | None) -> bool:
    """Check that the loss is the cross entropy of the logits with probabilities `p_TV`; True if some token has a gradient.

    If it is not, or num_terms or loss_reduction is wrong, a GramianError that names `layer` is raised: on all processes of
    `tensor_parallel`, which see the same samples (collective); None: on this one.
    """
    if tensor_parallel is None:
        return _check_softmax(layer, p_TV, gradients)
    problem, seen = "", False
    try:
        seen = _check_softmax(layer, p_TV, gradients)
    except GramianError as error:
        problem = str(error)
    reports = tensor_parallel.gather_messages([problem, seen])
    problem = next((text for text, _ in reports if text), "")
    if problem:
        raise GramianError(problem)
    return any(seen for _, seen in reports)


def _check_softmax(layer: str, p_TV: Tensor, gradients: Tokens) -> bool:
    """Raise a GramianError unless p − g (probabilities minus logit gradients) is a distribution for each token with a gradient.

    Returns True if there is such a token; tokens are checked a chunk at a time.
    """
    g_TV, seen = gradients.rows_TN, False
    slack = {torch.float64: 1e-6, torch.float32: 1e-3}.get(g_TV.dtype, 5e-2)
    for piece in pieces(*g_TV.shape):
        inverse = 1.0 if gradients.weights_T is None else gradients.weights_T[piece].to(p_TV)[:, None]
        g_CV = wide(g_TV[piece]) * gradients.scale * inverse
        target = p_TV[piece] - g_CV
        live = (g_CV != 0).any(1)
        bad = live & ((target.sum(1) - 1).abs().gt(slack) | target.amin(1).lt(-slack))
        if bool(bad.any()):
            row = int(bad.nonzero()[0, 0])
            raise GramianError(
                f"{layer}: the gradient of token {piece.start + row} is not that of a cross entropy of this layer's outputs "
                f"(targets sum to {float(target[row].sum()):.4g}, smallest {float(target[row].min()):.4g}); expected softmax "
                "cross entropy on the head itself, with the right loss_reduction, num_terms and loss_scale, "
                'collect_kfac_factors(..., loss="mse" or "bce"), or kfac_true_fisher_head=False'
            )
        seen = seen or bool(live.any())
    return seen
