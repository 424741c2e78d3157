r"""The reference for EK-FAC: the Fisher of per-sample gradients, written out, and its diagonal in K-FAC's eigenbasis.

For a block with per-sample gradients :math:`Y_b` [O, M] of a loss with N terms,

.. math:: F = \frac{1}{N} \sum_b \operatorname{vec}(Y_b) \operatorname{vec}(Y_b)^\top, \quad
          F_{EK} = V \operatorname{diag}(V^\top F V) V^\top, \quad V = Q_G \otimes Q_A,

with row-major vec and the eigenvectors of K-FAC's G and A. Everything is float64 and as slow as it is plain.
"""

import torch
from torch import Tensor


def block_fisher(gradients_BOM: Tensor, terms: float) -> Tensor:
    """F, sample by sample, [O·M, O·M]."""
    size = gradients_BOM[0].numel()
    F = torch.zeros(size, size, dtype=torch.float64)
    for y in gradients_BOM:
        F += torch.outer(y.reshape(-1), y.reshape(-1))
    return F / terms


def softmax_block_fisher(inputs_TM: Tensor, logits_TV: Tensor, terms: float) -> Tensor:
    """F of a softmax head: class by class, token by token, [V·M, V·M]."""
    classes = logits_TV.shape[1]
    size = classes * inputs_TM.shape[1]
    F = torch.zeros(size, size, dtype=torch.float64)
    for a, p in zip(inputs_TM, logits_TV.double().softmax(-1), strict=True):
        for k in range(classes):
            e = -p.clone()
            e[k] += 1
            y = torch.outer(e, a).reshape(-1)
            F += p[k] * torch.outer(y, y)
    return F / terms


def corrected(F: Tensor, A: Tensor, G: Tensor) -> Tensor:
    """The Fisher that is diagonal in the eigenbasis of G ⊗ A and closest to F."""
    V = torch.kron(torch.linalg.eigh(G).eigenvectors, torch.linalg.eigh(A).eigenvectors)
    diagonal = torch.stack([v @ F @ v for v in V.mT])
    return V @ torch.diag(diagonal) @ V.mT
