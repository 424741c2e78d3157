r"""The reference for curvature operators: matrices written out, one derivative after another.

A loss is :math:`\frac{1}{N} \sum_t w_t \ell_t`, where position :math:`t` of the outputs :math:`f` has the term

- cross entropy: :math:`\ell_t = -\log \mathrm{softmax}(f_t)_{y_t}`, :math:`N = \sum_t w_t`;
- squared error: :math:`\ell_t = \sum_c (f_{tc} - y_{tc})^2`, :math:`N = C \sum_t w_t`.

With :math:`J_t = \partial f_t / \partial \theta` the matrices are

.. math::
    \nabla^2 L, \qquad
    \mathrm{GGN} = \frac{1}{N} \sum_t w_t J_t^\top (\nabla^2_f \ell_t) J_t, \qquad
    \mathrm{EF}_{token} = \frac{1}{N} \sum_t w_t \nabla\ell_t \nabla\ell_t^\top, \qquad
    \mathrm{EF}_{sequence} = \frac{1}{N} \sum_i \frac{1}{\max_{t \in i} w_t} g_i g_i^\top, \quad
    g_i = \sum_{t \in i} w_t \nabla\ell_t .

(A sample whose terms all weigh 2 counts as two samples.) Everything is float64, nothing is in closed form, and every entry has
a backward of its own: networks must be small. ``forward(model)`` returns outputs [*positions, V] whose positions are aligned
with ``targets``; the first axis is the sample. The model is copied, in evaluation mode, and stays as it is.

Legend: P entries of all named parameters together, one after another, each row by row.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

Forward = Callable[[nn.Module], Tensor]
Loss = Literal["cross_entropy", "mse"]


def dense_hessian(
    model: nn.Module,
    forward: Forward,
    targets: Tensor,
    weights: Tensor | None = None,
    loss: Loss = "cross_entropy",
    params: Sequence[str] | None = None,
) -> Tensor:
    """Return the Hessian of the loss, [P, P]: one backward for every entry of the gradient.

    Args:
        model: the module to differentiate.
        forward: gives the outputs.
        targets: classes [*positions], or numbers like the outputs.
        weights: [*positions], 0 for positions without a term; None: 1 everywhere.
        loss: which of the two.
        params: names; None: all trainable ones.
    """
    copy, named = _copied(model, params)
    terms, terms_count, _ = _terms(_outputs(copy, forward), targets, weights, loss)
    total = torch.stack([w * term for w, term in terms]).sum() / terms_count
    gradient_P = _flat(torch.autograd.grad(total, named, create_graph=True, materialize_grads=True))
    rows = [
        _flat(torch.autograd.grad(entry, named, retain_graph=True, materialize_grads=True))
        if entry.requires_grad
        else torch.zeros_like(gradient_P)
        for entry in gradient_P
    ]
    return torch.stack(rows).detach()


def dense_ggn(
    model: nn.Module,
    forward: Forward,
    targets: Tensor,
    weights: Tensor | None = None,
    loss: Loss = "cross_entropy",
    params: Sequence[str] | None = None,
) -> Tensor:
    """Return the generalised Gauss-Newton matrix, [P, P]: one backward for every output. Arguments as above."""
    copy, named = _copied(model, params)
    outputs = _outputs(copy, forward)
    rows, wanted, weights_R = _rows(outputs, targets, weights, loss)
    size = sum(p.numel() for p in named)
    ggn_PP = torch.zeros(size, size, dtype=torch.float64)
    for row, y, w in zip(rows, wanted, weights_R, strict=True):
        if w == 0:
            continue
        jacobian_VP = torch.stack(
            [_flat(torch.autograd.grad(f, named, retain_graph=True, materialize_grads=True)) for f in row]
        )
        curvature_VV = torch.autograd.functional.hessian(lambda f, y=y: _term(f, y, loss), row.detach())
        ggn_PP += w * jacobian_VP.T @ curvature_VV @ jacobian_VP
    return ggn_PP / _count(weights_R, rows, loss)


def dense_empirical_fisher(
    model: nn.Module,
    forward: Forward,
    targets: Tensor,
    weights: Tensor | None = None,
    loss: Loss = "cross_entropy",
    params: Sequence[str] | None = None,
    per: Literal["sequence", "token"] = "sequence",
) -> Tensor:
    """Return the empirical Fisher, [P, P]: one backward for every sequence, or for every token. Arguments as above."""
    copy, named = _copied(model, params)
    outputs = _outputs(copy, forward)
    terms, terms_count, samples = _terms(outputs, targets, weights, loss)
    if per == "token":
        groups = [[t] for t in range(len(terms))]
    else:
        groups = [[t for t, sample in enumerate(samples) if sample == i] for i in range(len(outputs))]
    size = sum(p.numel() for p in named)
    fisher_PP = torch.zeros(size, size, dtype=torch.float64)
    for group in groups:
        heaviest = max((terms[t][0] for t in group), default=0.0)
        if heaviest == 0:
            continue
        summed = torch.stack([terms[t][0] * terms[t][1] for t in group]).sum()
        g_P = _flat(torch.autograd.grad(summed, named, retain_graph=True, materialize_grads=True))
        fisher_PP += torch.outer(g_P, g_P) / heaviest
    return fisher_PP / terms_count


def _copied(model: nn.Module, params: Sequence[str] | None) -> tuple[nn.Module, list[nn.Parameter]]:
    copy = deepcopy(model).double().eval()
    trained = {name: p for name, p in copy.named_parameters() if p.requires_grad}
    return copy, [trained[name] for name in (trained if params is None else params)]


def _outputs(model: nn.Module, forward: Forward) -> Tensor:
    """Attention written out: fused kernels have no second derivative."""
    with sdpa_kernel(SDPBackend.MATH):
        return forward(model)


def _rows(outputs: Tensor, targets: Tensor, weights: Tensor | None, loss: Loss) -> tuple[Tensor, Tensor, list[float]]:
    positions = outputs.shape[:-1]
    weights = torch.ones(positions) if weights is None else weights
    wanted = targets.reshape(-1) if loss == "cross_entropy" else targets.double().reshape(-1, outputs.shape[-1])
    return outputs.reshape(-1, outputs.shape[-1]), wanted, [float(w) for w in weights.reshape(-1)]


def _terms(
    outputs: Tensor, targets: Tensor, weights: Tensor | None, loss: Loss
) -> tuple[list[tuple[float, Tensor]], float, list[int]]:
    """(w_t, ℓ_t) of every position that counts, N, and the sample of each."""
    rows, wanted, weights_R = _rows(outputs, targets, weights, loss)
    per_sample = len(rows) // len(outputs)
    counted = [t for t, w in enumerate(weights_R) if w != 0]
    terms = [(weights_R[t], _term(rows[t], wanted[t], loss)) for t in counted]
    return terms, _count(weights_R, rows, loss), [t // per_sample for t in counted]


def _term(f_V: Tensor, y: Tensor, loss: Loss) -> Tensor:
    return -F.log_softmax(f_V, 0)[y] if loss == "cross_entropy" else (f_V - y).pow(2).sum()


def _count(weights_R: list[float], rows: Tensor, loss: Loss) -> float:
    return sum(weights_R) * (rows.shape[1] if loss == "mse" else 1)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])
