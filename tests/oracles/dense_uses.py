r"""The reference for uses of a Fisher (EWC, averaging, Laplace, influence): F, its inverse and eigenvectors, written out.

Vectors over parameters are flat, in the order of the names that :func:`fisher` is given. Everything is float64 and as slow
as it is plain.

Legend: P entries of all parameters together, B samples, Q queries, O×M a block's matrix [W | b].
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class LayerBlock(NamedTuple):
    """A layer: F on the row-major vector of [W | b], G ⊗ A for K-FAC."""

    F: Tensor
    """[O·M, O·M]."""
    weight: str
    bias: str | None
    transposed: bool
    """True if the weight is stored as [in, out]."""


def flatten(tensors: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """[P] from {name: tensor}."""
    return torch.cat([tensors[name].detach().double().reshape(-1) for name in names])


def fisher(shapes: Mapping[str, torch.Size], layers: Sequence[LayerBlock], rest: Mapping[str, Tensor]) -> Tensor:
    """F [P, P], block by block; parameters of no block have rows of zeros.

    Args:
        shapes: of every parameter, in order.
        layers: blocks of a weight and its bias.
        rest: {parameter of no layer: its block [n, n]}.
    """
    positions, start = {}, 0
    for name, shape in shapes.items():
        positions[name] = torch.arange(start, start + shape.numel()).reshape(shape)
        start += shape.numel()
    F_PP = torch.zeros(start, start, dtype=torch.float64)
    for F, weight, bias, transposed in layers:
        where = positions[weight].mT if transposed else positions[weight].flatten(1)
        if bias is not None:
            where = torch.cat([where, positions[bias][:, None]], dim=1)
        flat = where.reshape(-1)
        F_PP[flat[:, None], flat] = F.double()
    for name, block in rest.items():
        flat = positions[name].reshape(-1)
        F_PP[flat[:, None], flat] = block.double()
    return F_PP


def ewc(tasks: Sequence[tuple[Tensor, Tensor, float]], theta_P: Tensor) -> tuple[float, Tensor]:
    r"""Penalty and gradient of :math:`\sum_k \frac{s_k}{2} (\theta - \theta_k)^\top F_k (\theta - \theta_k)`.

    Args:
        tasks: (F_k, θ_k, s_k).
        theta_P: θ.
    """
    value, gradient_P = 0.0, torch.zeros_like(theta_P)
    for F_PP, theta_k, strength in tasks:
        delta = theta_P - theta_k
        value += 0.5 * strength * float(delta @ F_PP @ delta)
        gradient_P += strength * (F_PP @ delta)
    return value, gradient_P


def average(fishers: Sequence[Tensor], thetas: Sequence[Tensor], weights: Sequence[float], damping: float) -> Tensor:
    r""":math:`\left(\sum_k w_k (F_k + \lambda I)\right)^{-1} \sum_k w_k (F_k + \lambda I)\, \theta_k`."""
    eye = torch.eye(len(thetas[0]), dtype=torch.float64)
    left = sum((w * (F + damping * eye) for F, w in zip(fishers, weights, strict=True)), torch.zeros_like(eye))
    right = sum(
        (w * (F + damping * eye) @ theta for F, theta, w in zip(fishers, thetas, weights, strict=True)),
        torch.zeros_like(thetas[0]),
    )
    solution: Tensor = torch.linalg.solve(left, right)
    return solution


def overlap(F1: Tensor, F2: Tensor) -> float:
    """tr(F1 F2) / (‖F1‖ ‖F2‖)."""
    return float(torch.trace(F1 @ F2) / (F1.norm() * F2.norm()))


def subspace_overlap(F1: Tensor, F2: Tensor, k: int) -> float:
    """‖V1ᵀV2‖² / k of the eigenvectors of the k largest eigenvalues."""
    V1, V2 = (torch.linalg.eigh(F).eigenvectors[:, -k:] for F in (F1, F2))
    return float((V1.mT @ V2).square().sum() / k)


def cosine(inverse_PP: Tensor, left_P: Tensor, right_P: Tensor) -> float:
    """The cosine of two gradients where lengths are measured by the inverse Fisher."""
    between = left_P @ inverse_PP @ right_P
    return float(between / ((left_P @ inverse_PP @ left_P) * (right_P @ inverse_PP @ right_P)).sqrt())


def posterior_covariance(F_PP: Tensor, n: float, prior_precision: float) -> Tensor:
    """(n F + τ I)⁻¹."""
    inverse: Tensor = torch.linalg.inv(n * F_PP + prior_precision * torch.eye(len(F_PP), dtype=torch.float64))
    return inverse


def log_marginal(
    F_PP: Tensor, theta_P: Tensor, mean_P: Tensor, n: float, prior_precision: float, log_likelihood: float
) -> float:
    r"""The integral of likelihood and prior by Laplace, from log-densities as textbooks write them.

    .. math:: \log p(D \mid \theta) + \log N(\theta; \mu, \tau^{-1} I) + \tfrac{P}{2} \log 2\pi
              - \tfrac{1}{2} \log \det (nF + \tau I)
    """
    P = len(theta_P)
    prior = torch.distributions.Normal(mean_P, prior_precision**-0.5).log_prob(theta_P).sum()
    precision = n * F_PP + prior_precision * torch.eye(P, dtype=torch.float64)
    volume = 0.5 * P * math.log(2 * math.pi) - 0.5 * torch.linalg.slogdet(precision).logabsdet
    return log_likelihood + float(prior) + float(volume)


def influence(inverse_PP: Tensor, queries_QP: Tensor, samples_BP: Tensor) -> Tensor:
    r""":math:`-g_q^\top (F + \lambda)^{-1} g_i`, pair by pair: [B, Q]."""
    scores_BQ = torch.zeros(len(samples_BP), len(queries_QP), dtype=torch.float64)
    for i, sample in enumerate(samples_BP):
        for q, query in enumerate(queries_QP):
            scores_BQ[i, q] = -(query @ inverse_PP @ sample)
    return scores_BQ
