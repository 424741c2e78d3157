"""What the tests of spectra share: symmetric matrices with known eigenvalues, and operators that go wrong."""

import torch
from torch import Tensor

from gramian.linalg import DenseOperator, Operator
from tests.linalg.matrices import normal


def symmetric(values: Tensor, seed: int = 0) -> Tensor:
    """A float64 matrix with these eigenvalues in a random basis."""
    q = torch.linalg.qr(normal(len(values), len(values), seed=seed)).Q
    m = q @ torch.diag(values) @ q.mT
    return (m + m.mT) / 2


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def spread(low: float, high: float, n: int) -> Tensor:
    return torch.linspace(low, high, n, dtype=torch.float64)


SPECTRA: dict[str, Tensor] = {
    "decaying": 10 ** spread(1, -7, 90),
    "evenly spaced": spread(0, 1, 70),
    "clustered": torch.cat([1 + 1e-6 * spread(0, 4, 5), 1e-3 * spread(0, 1, 65) ** 2]),
    "repeated 2 to 10 times": torch.cat([numbers(*[12 - m] * m) for m in range(2, 11)]),
    "top repeated": torch.cat([numbers(*[5.0] * 10), spread(0, 1, 60)]),
    "rank 1": torch.cat([numbers(3), torch.zeros(79, dtype=torch.float64)]),
    "zero": torch.zeros(40, dtype=torch.float64),
    "identity": torch.ones(60, dtype=torch.float64),
    "indefinite": torch.cat([numbers(-50), spread(0, 9.99, 69)]),
    "projection": torch.cat([torch.ones(40, dtype=torch.float64), torch.zeros(50, dtype=torch.float64)]),
    "small": numbers(-1, 2, 2),
    "one": numbers(-2),
}


class Broken(Operator):
    """A diagonal matrix until a product that is `how`: "nan", "inf", of another "shape", or an "oom" error."""

    def __init__(self, how: str, after: int = 3, n: int = 30) -> None:
        self.how, self.left = how, after
        self.dim, self.dtype, self.device = n, torch.float64, torch.device("cpu")
        self.values = spread(1, 2, n)[:, None]

    def matmat(self, y_NK: Tensor) -> Tensor:
        self.left -= y_NK.shape[1]
        product = self.values * y_NK
        if self.left < 0:
            if self.how == "oom":
                raise torch.OutOfMemoryError("no memory left")
            if self.how == "shape":
                return product[:-1]
            product[0, 0] = float(self.how)
        return product


def dense(values: Tensor, dtype: torch.dtype = torch.float64) -> DenseOperator:
    return DenseOperator(symmetric(values).to(dtype))
