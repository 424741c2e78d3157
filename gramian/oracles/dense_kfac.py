r"""The reference for K-FAC: tokens from plain hooks, factors as sums of outer products, powers of the full matrix.

For a layer :math:`y_t = W a_t + b` of a loss :math:`L = \sum_t c\,\ell_t` with N terms,

.. math:: A = \frac{1}{T} \sum_t \tilde a_t \tilde a_t^\top, \quad
          G = \frac{1}{N} \sum_t g_t g_t^\top, \quad g_t = \frac{1}{c} \frac{\partial L}{\partial y_t},
          \quad \tilde a = [a; 1],

and :math:`F = G \otimes A` acts on the row-major vector of :math:`[W | b]`. Everything is float64 and as slow as it is plain:
:math:`F` is written out, so sides must be small.

Legend: T tokens, I inputs (M with the bias), O outputs.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn


class ReferenceTokens(NamedTuple):
    """Inputs [T, I] and output gradients [T, O] of all calls of a layer, concatenated."""

    inputs_TI: Tensor
    gradients_TO: Tensor


def layer_tokens(model: nn.Module, backward: Callable[[], None], layers: Sequence[str]) -> dict[str, ReferenceTokens]:
    """Call `backward`, which runs a forward and a backward, and return {layer: tokens of all its calls}, float64, in order.

    The named layers must have features last in input and output, and be called as modules, in eager mode, without
    checkpointing.
    """
    modules = dict(model.named_modules())
    calls: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in layers}
    handles = []
    for name in layers:

        def note(module: nn.Module, args: tuple[Tensor, ...], output: Tensor, name: str = name) -> None:
            if output.requires_grad:
                output.retain_grad()
                calls[name].append((args[0].detach(), output))

        handles.append(modules[name].register_forward_hook(note))
    try:
        backward()
    finally:
        for handle in handles:
            handle.remove()
    found = {}
    for name, uses in calls.items():
        inputs = [a.reshape(-1, a.shape[-1]).double() for a, _ in uses]
        gradients = []
        for _, y in uses:
            gradient = y.grad if y.grad is not None else torch.zeros_like(y)
            gradients.append(gradient.reshape(-1, y.shape[-1]).double())
        found[name] = ReferenceTokens(torch.cat(inputs), torch.cat(gradients))
    return found


def factors(
    tokens: ReferenceTokens, terms: float, coefficient: float, bias: bool, weights_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The K-FAC factors A [M, M] and G [O, O] of a layer from its tokens, one outer product after another.

    `terms` is the number N of loss terms, `coefficient` the factor c of one term in the loss that was differentiated (loss
    scale included); `bias` adds a last input of 1 to A. With weights w the terms of the loss were c·w_t: gradients are divided
    by c·w_t, outer products weighted with w_t, and A is divided by Σ w. Tokens of weight 0 are left out; None: all are 1.
    """
    a_TI, g_TO = tokens
    A = a_TI.new_zeros(a_TI.shape[1] + bias, a_TI.shape[1] + bias)
    G = g_TO.new_zeros(g_TO.shape[1], g_TO.shape[1])
    total = 0.0
    for t in range(len(a_TI)):
        weight = 1.0 if weights_T is None else float(weights_T[t])
        if weight == 0:
            continue
        a = torch.cat([a_TI[t], a_TI.new_ones(1)]) if bias else a_TI[t]
        g = g_TO[t] / (coefficient * weight)
        A += weight * torch.outer(a, a)
        G += weight * torch.outer(g, g)
        total += weight
    return A / total, G / terms


def softmax_fisher(logits_TV: Tensor, terms: float, weights_T: Tensor | None = None) -> Tensor:
    r"""Softmax Fisher [V, V], class by class: :math:`\frac{1}{N} \sum_t w_t \sum_k p_{tk} (e_k - p_t)(e_k - p_t)^\top`.

    p_t are the probabilities of the logits of token t, e_k unit vectors, N = `terms`, w = `weights_T`; None: all weights are 1.
    """
    p_TV = logits_TV.double().softmax(-1)
    classes = p_TV.shape[1]
    F = p_TV.new_zeros(classes, classes)
    for t, p in enumerate(p_TV):
        weight = 1.0 if weights_T is None else float(weights_T[t])
        for k in range(classes):
            e = -p.clone()
            e[k] += 1
            F += weight * p[k] * torch.outer(e, e)
    return F / terms


def matrix_power(M: Tensor, p: float, damping: float, max_condition: float | None = None) -> Tensor:
    """(M + λI)^p of a symmetric M, λ = `damping`; negative eigenvalues of M count as 0.

    With κ = `max_condition`, eigenvalues of M + λI are raised to at least (σ_max+λ)/κ, σ_max the largest of M; None: they are
    not.
    """
    values, vectors = torch.linalg.eigh(M)
    values = values.clamp(min=0) + damping
    if max_condition is not None:
        values = values.clamp(min=float(values.max()) / max_condition)
    power: Tensor = vectors @ torch.diag(values**p) @ vectors.mT
    return power


def natural(
    A: Tensor,
    G: Tensor,
    Y_OM: Tensor,
    p: float,
    mode: str,
    damping: float,
    damping_A: float | None = None,
    damping_G: float | None = None,
    max_condition: float | None = None,
) -> Tensor:
    """(F + damping)^p Y for F = G ⊗ A and a gradient Y [O, M] with the bias as last column: [O, M].

    `mode` "joint": powers of F + λI with λ = `damping`. Otherwise of (G + λ_G I) ⊗ (A + λ_A I): "factored" with λ_A =
    `damping_A` and λ_G = `damping_G` (None: λ); "pi" with λ_A = π√λ, λ_G = √λ/π and π² = mean eigenvalue of A / that of G.
    `max_condition` bounds the condition number of each matrix (see `matrix_power`); None: no bound.
    """
    if mode == "joint":
        F = torch.kron(G, A)
        return (matrix_power(F, p, damping, max_condition) @ Y_OM.reshape(-1)).reshape(Y_OM.shape)
    if mode == "pi":
        pi = ((A.trace() / len(A)) / (G.trace() / len(G))).sqrt()
        damping_A, damping_G = float(pi * damping**0.5), float(damping**0.5 / pi)
    left = matrix_power(G, p, damping if damping_G is None else damping_G, max_condition)
    right = matrix_power(A, p, damping if damping_A is None else damping_A, max_condition)
    return left @ Y_OM @ right
