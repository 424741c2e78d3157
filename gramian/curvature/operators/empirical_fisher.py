"""The empirical Fisher (from gradients with the data's own labels) as an operator that stores no per-sample gradients."""

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.curvature.operators.jacobian import JacobianOperator
from gramian.curvature.operators.loss_terms import LossName
from gramian.curvature.operators.parameter_space import Selection
from gramian.linalg.wide import pieces


class EmpiricalFisherOperator(JacobianOperator):
    """(1/N) Σ g gᵀ over the gradients g of tokens, or of sequences; N is the number of loss terms.

    Let f_t be the outputs of token t, J_t = ∂f_t/∂θ, and r_t the gradient of its loss by f_t: softmax(f_t) − e_y for cross
    entropy with label y, 2(f_t − y_t) for the squared error. A token's gradient is g_t = J_tᵀ r_t; that of a sequence i is
    g_i = Σ_t w_t g_t over its tokens with weights w_t. The matrix is (1/N) Σ_t w_t g_t g_tᵀ, or (1/N) Σ_i g_i g_iᵀ / max_t w_t:
    a sequence of weight 2 counts as two, as in K-FAC. A product with v needs g_tᵀ v = r_tᵀ (J v)_t, from one forward in forward
    mode, and a sum Σ_t c_t g_t with coefficients c_t from these, by one backward that starts at c_t r_t.

    ```python
    fisher = EmpiricalFisherOperator(model, [(x, y)], per="token")
    product_NK = fisher.matmat(torch.randn(fisher.dim, 2))
    ```
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        parameters: Selection = None,
        *,
        per: Literal["sequence", "token"] = "sequence",
        loss: LossName = "cross_entropy",
        causal_shift: bool | None = None,
    ) -> None:
        """Read the batches; `per`: g is the gradient of a complete "sequence" (one sample), or of a "token".

        The other arguments are those of `JacobianOperator`.
        """
        if per not in ("sequence", "token"):
            raise GramianError(f'per: got {per!r}; expected "sequence" or "token"')
        super().__init__(model, batches, parameters, loss=loss, causal_shift=causal_shift)
        self.per = per

    def _curve(self, outputs_RV: Tensor, tangents_RV: Tensor, targets: Tensor, weights_R: Tensor, samples: int) -> None:
        if self.per == "token":
            for rows in pieces(*outputs_RV.shape):
                r_CV, u_CV = self._residual(outputs_RV[rows], targets[rows]), tangents_RV[rows]
                along_C = torch.linalg.vecdot(r_CV, u_CV) * weights_R[rows]
                torch.mul(r_CV, along_C[:, None], out=u_CV)
            return
        along_R = torch.empty_like(weights_R)
        for rows in pieces(*outputs_RV.shape):
            along_R[rows] = torch.linalg.vecdot(self._residual(outputs_RV[rows], targets[rows]), tangents_RV[rows])
        weights_BT = weights_R.reshape(samples, -1)
        heaviest_B1 = weights_BT.amax(1, keepdim=True)
        along_B1 = (along_R.reshape(samples, -1) * weights_BT).sum(1, keepdim=True)
        along_B1 /= torch.where(heaviest_B1 > 0, heaviest_B1, 1.0)
        coefficients_R = (weights_BT * along_B1).reshape(-1)
        for rows in pieces(*outputs_RV.shape):
            r_CV = self._residual(outputs_RV[rows], targets[rows])
            torch.mul(r_CV, coefficients_R[rows, None], out=tangents_RV[rows])

    def _residual(self, outputs_CV: Tensor, targets: Tensor) -> Tensor:
        """Gradient of each row's loss by its outputs f [C, V], for targets [C] (classes) or [C, V] (numbers): [C, V]."""
        if self.loss == "mse":
            return (outputs_CV - targets).mul_(2)
        r_CV = outputs_CV.softmax(-1)
        return r_CV.scatter_add_(1, targets[:, None], r_CV.new_full((len(r_CV), 1), -1.0))
