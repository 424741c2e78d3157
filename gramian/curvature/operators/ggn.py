"""The generalised Gauss-Newton matrix of a model's loss as an operator."""

from torch import Tensor

from gramian.curvature.operators.jacobian import JacobianOperator
from gramian.linalg.wide import pieces


class GGNOperator(JacobianOperator):
    """(1/N) Σ_t w_t J_tᵀ H_t J_t over positions t; for cross entropy this is the Fisher of the model's own distribution.

    J_t is the Jacobian of the outputs f_t by the parameters, H_t the Hessian of the loss by f_t, w_t a weight, N the number
    of loss terms. Softmax cross entropy: H u = p ⊙ u − p (pᵀu), p = softmax(f). Squared error: H u = 2u.

    ```python
    ggn = GGNOperator(model, [(x, y)])
    product_NK = ggn.matmat(torch.randn(ggn.dim, 2))
    ```
    """

    def _curve(self, outputs_RV: Tensor, tangents_RV: Tensor, targets: Tensor, weights_R: Tensor, samples: int) -> None:
        if self.loss == "mse":
            tangents_RV.mul_(2 * weights_R[:, None])
            return
        for rows in pieces(*outputs_RV.shape):
            p_CV, u_CV = outputs_RV[rows].softmax(-1), tangents_RV[rows]
            u_CV.mul_(p_CV)
            u_CV.sub_(p_CV.mul_(u_CV.sum(-1, keepdim=True))).mul_(weights_R[rows, None])
