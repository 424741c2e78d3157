"""The base of all operators of a model: the parameters they act on, and one sum over batches per product.

Legend: n parameters, k columns.
"""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gramian.core.errors import GramianError
from gramian.curvature.blocks.consistency import module_of
from gramian.curvature.operators.parameter_space import ParameterSpace, Selection, first_names
from gramian.curvature.operators.side_effect_free import side_effect_free
from gramian.linalg.spectra.operator import Operator


class ModelOperator(Operator):
    """Base of operators M = (Σ_b M_b)/N: M_b is the curvature summed over the loss terms of batch b, N the number of all terms.

    It is evaluated at the parameters that the model has when a product is computed.
    """

    num_terms: float
    """N, the number of loss terms of all batches."""

    def __init__(self, model: nn.Module, parameters: Selection) -> None:
        """Choose the parameters that the operator acts on; a GramianError for a model in half precision, or a sharded one."""
        self.model = module_of(model)
        parameters = first_names(self.model, parameters)
        self.space = ParameterSpace.of(self.model, parameters)
        self.dim, self.dtype, self.device = self.space.dim, self.space.dtype, self.space.device
        if any(isinstance(p, DTensor) for p in self.model.parameters()):
            raise GramianError("model: is sharded; expected one that is whole on this process")
        if self.dtype not in (torch.float32, torch.float64):
            raise GramianError(f"model: is in {self.dtype}, too coarse for spectra; expected float32 or float64")

    def matmat(self, y_NK: Tensor) -> Tensor:
        """M Y for Y [n, k]: [n, k], in one loop over all batches. The model's gradients, mode and random state are restored."""
        with side_effect_free(self.model):
            columns = self.space.columns(y_NK)
            total_KN = torch.zeros(len(columns), self.dim, dtype=self.dtype, device=self.device)
            for batch in self._batches():
                self._add(batch, columns, total_KN)
            return total_KN.div_(self.num_terms).mT

    @abstractmethod
    def _batches(self) -> Any:
        """All batches, each in the form that `_add` expects."""

    @abstractmethod
    def _add(self, batch: Any, columns: list[Tensor], total_KN: Tensor) -> None:
        """Add M_b v for `batch` b, not divided by N, to row j of `total_KN` [k, n], for each vector v [n] = `columns[j]`."""
