"""What all operators of a model have in common: the space they act on, and one sum over batches per product.

Legend: n parameters, k columns.
"""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gramian.core.errors import GramianError
from gramian.curvature.blocks.consistency import module_of
from gramian.curvature.operators.parameter_names import first_names
from gramian.curvature.operators.parameter_space import ParameterSpace, Which
from gramian.curvature.operators.traceless_passes import quiet
from gramian.linalg.spectra.operator import Operator, check_vector


class ModelOperator(Operator):
    """M = Σ_b M_b / N at the parameters that the model has when a product is asked for."""

    num_terms: float
    """N: loss terms of all batches."""

    def __init__(self, model: nn.Module, parameters: Which) -> None:
        """Find the space.

        Args:
            model: the user's model, whole on this process, in float32 or float64.
            parameters: names, any of a tied one's, or what is asked of each (name, parameter); None: all that train.

        Raises:
            GramianError: for parameters that are neither, a model in half precision, or one that is sharded.
        """
        self.model = module_of(model)
        parameters = first_names(self.model, parameters)
        self.space = ParameterSpace.of(self.model, parameters)
        self.dim, self.dtype, self.device = self.space.dim, self.space.dtype, self.space.device
        if any(isinstance(p, DTensor) for p in self.model.parameters()):
            raise GramianError("model: is sharded; expected one that is whole on this process")
        if self.dtype not in (torch.float32, torch.float64):
            raise GramianError(f"model: is in {self.dtype}, too coarse for spectra; expected float32 or float64")

    def matmat(self, y_NK: Tensor) -> Tensor:
        """M Y, [n, k]: one sum over all batches. What runs out of memory raises.

        Raises:
            GramianError: unless Y is [n, k].
        """
        check_vector(y_NK, self.dim, columns=True)
        with quiet(self.model):
            columns = self.space.columns(y_NK)
            total_KN = torch.zeros(len(columns), self.dim, dtype=self.dtype, device=self.device)
            for batch in self._batches():
                self._add(batch, columns, total_KN)
            return total_KN.div_(self.num_terms).mT

    @abstractmethod
    def _batches(self) -> Any:
        """What `_add` takes, one batch after another."""

    @abstractmethod
    def _add(self, batch: Any, columns: list[Tensor], total_KN: Tensor) -> None:
        """Add the sum over one batch's terms, not divided by N, to each column's total."""
