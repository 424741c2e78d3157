r"""The reference for capacity metrics: every eigenvalue of the written-out Fisher, and each metric by its definition.

A block :math:`F = G \otimes A` is written out, so sides must be small. A model is block-diagonal: its eigenvalues are those of
all its blocks. Everything is float64.
"""

import torch
from torch import Tensor


def eigenvalues(A: Tensor | None, G: Tensor) -> Tensor:
    """All eigenvalues of G ⊗ A (of G where A is None), ascending; rounding below zero is taken as zero."""
    G = G.double()
    F = G if A is None else torch.kron(G, A.double())
    values: Tensor = torch.linalg.eigvalsh((F + F.mT) / 2)
    return values.clamp(min=0)


def metrics(eigenvalues_N: Tensor, damping: float, n: float | None = None) -> dict[str, float]:
    r"""Every metric of a spectrum :math:`\lambda_1, \dots, \lambda_N`, with :math:`p_i = \lambda_i / \sum \lambda`.

    Args:
        eigenvalues_N: all of them, zeros included.
        damping: :math:`\lambda`, of the metrics of :math:`F + \lambda I`.
        n: samples, for the PAC-Bayes proxy; None: leave it out.

    Returns:
        {metric: value}; ranks of a zero matrix are 0.
    """
    values = eigenvalues_N.double()
    trace, squares, top = float(values.sum()), float((values * values).sum()), float(values.max())
    damped = values + damping
    p = values / trace
    entropy = -sum(float(x) * float(x.log()) for x in p if x > 0)
    found = {
        "trace": trace,
        "frobenius": squares**0.5,
        "max_eigenvalue": top,
        "participation_ratio": trace**2 / squares if top else 0.0,
        "entropy_rank": float(torch.tensor(entropy, dtype=torch.float64).exp()) if top else 0.0,
        "stable_rank": squares / top**2 if top else 0.0,
        "log_det": float(damped.log().sum()),
        "effective_dimension": float((values / damped).sum()),
        "condition_number": float(damped.max() / damped.min()),
    }
    if n is not None:
        found["pac_bayes"] = (trace / n) ** 0.5
    return found


def top_eigenvalues(blocks: list[tuple[Tensor | None, Tensor]], k: int) -> Tensor:
    """The k largest eigenvalues of all blocks together, descending."""
    everything = torch.cat([eigenvalues(A, G) for A, G in blocks])
    return everything.sort(descending=True).values[:k]
