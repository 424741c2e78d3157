"""Products with a matrix that is a mean over loss terms, of which each process has a part."""

from collections.abc import Callable

import torch
from torch import Tensor

from gramian.curvature.operators.model_operator import ModelOperator
from gramian.curvature.operators.parameter_space import ParameterSpace
from gramian.linalg.spectra.operator import Operator
from gramian.parallel.exchange import Exchange


class JoinedProducts(Operator):
    """M = (Σ_r N_r M_r)/N of all processes r, where M_r is the mean of N_r loss terms and N = Σ_r N_r.

    Every process multiplies the same vectors and gets the same results. A product costs that of this process's own part, and
    one all-reduce of a vector for each column.

    Args:
        operator: M_r of this process; None: it has no loss term.
        space: the parameters that M acts on.
        exchange: the other processes; None: this one has all terms.
        update: progress callback, called with (products done, products in total).
        total: number of products that are expected.
    """

    def __init__(
        self,
        operator: ModelOperator | None,
        space: ParameterSpace,
        exchange: Exchange | None,
        update: Callable[[int, int], None],
        total: int,
    ) -> None:
        self._operator, self._exchange, self._update = operator, exchange, update
        self.dim, self.dtype, self.device = space.dim, space.dtype, space.device
        self.total, self.products = total, 0
        self._mine = 0.0 if operator is None else operator.num_terms
        self.num_terms = self._mine
        """N, the number of loss terms of all processes."""
        if exchange is not None:
            self.num_terms = float(exchange.sum(torch.tensor(self._mine, dtype=torch.float64)))

    def matmat(self, y_NK: Tensor) -> Tensor:
        """M Y for Y [n, k], [n, k]; reports k more products."""
        if self._operator is None:
            found = torch.zeros(y_NK.shape, dtype=self.dtype, device=self.device)
        else:
            found = self._operator.matmat(y_NK)
        if self._exchange is not None:
            found = self._exchange.sum(found * (self._mine / self.num_terms))
        self.products += y_NK.shape[1]
        self._update(self.products, max(self.total, self.products))
        return found
