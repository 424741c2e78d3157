"""A symmetric linear map that is known by its products only; what spectra are computed from.

Legend: n side, k columns of Y [n, k].
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from gramian.errors import GramianError


class Operator(ABC):
    """A symmetric matrix M [n, n], positive or not."""

    dim: int
    """n."""
    dtype: torch.dtype
    """Of its products."""
    device: torch.device
    """Where its products are made."""

    @abstractmethod
    def matmat(self, y_NK: Tensor) -> Tensor:
        """M Y, [n, k]."""

    def matvec(self, y_N: Tensor) -> Tensor:
        """M y, [n]."""
        return self.matmat(y_N[:, None])[:, 0]

    def to_dense(self) -> Tensor:
        """M written out, [n, n], for tests: one product with the identity."""
        return self.matmat(torch.eye(self.dim, dtype=self.dtype, device=self.device))

    def to_scipy(self) -> Any:
        """This map as a `scipy.sparse.linalg.LinearOperator`; vectors travel through host memory."""
        from scipy.sparse.linalg import LinearOperator

        def matmat(y_NK: Any) -> Any:
            y = torch.as_tensor(y_NK).to(device=self.device, dtype=self.dtype)
            return self.matmat(y.reshape(self.dim, -1)).cpu().double().numpy().reshape(y_NK.shape)

        return LinearOperator(
            (self.dim, self.dim), matvec=matmat, rmatvec=matmat, matmat=matmat, rmatmat=matmat, dtype="f8"
        )


class DenseOperator(Operator):
    """A symmetric matrix that is there."""

    def __init__(self, matrix_NN: Tensor) -> None:
        """Take it as it is.

        Raises:
            GramianError: unless it is square.
        """
        if matrix_NN.ndim != 2 or matrix_NN.shape[0] != matrix_NN.shape[1]:
            raise GramianError(f"matrix: has shape {[*matrix_NN.shape]}; expected a square one")
        self.matrix_NN = matrix_NN
        self.dim, self.dtype, self.device = len(matrix_NN), matrix_NN.dtype, matrix_NN.device

    def matmat(self, y_NK: Tensor) -> Tensor:
        """M Y."""
        return self.matrix_NN @ y_NK
