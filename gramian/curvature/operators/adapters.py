"""Conversion to and from the linear operators of curvlinops; for SciPy's there is `Operator.to_scipy`."""

from typing import Any

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.linalg.spectra.operator import Operator, check_operator


def to_curvlinops(operator: Operator) -> Any:
    """Convert an operator to a `curvlinops` `PyTorchLinearOperator`; a GramianError if curvlinops is not installed.

    If the operator acts on parameters, the result multiplies lists of tensors in their shapes as well as flat tensors.
    """
    check_operator(operator)
    try:
        from curvlinops._torch_base import PyTorchLinearOperator
    except ImportError as error:
        raise GramianError("curvlinops: is not installed; expected `pip install curvlinops-for-pytorch`") from error
    space = getattr(operator, "space", None)
    shapes = [torch.Size([operator.dim])] if space is None else [*space.shapes.values()]

    class Adapted(PyTorchLinearOperator):  # type: ignore[misc]
        SELF_ADJOINT = True
        device = property(lambda self: operator.device)
        dtype = property(lambda self: operator.dtype)

        def _matmat(self, X: list[Tensor]) -> list[Tensor]:
            k = X[0].shape[-1]
            product_NK = operator.matmat(torch.cat([x.reshape(-1, k) for x in X]))
            parts = product_NK.split([shape.numel() for shape in shapes])
            return [part.reshape(*shape, k) for part, shape in zip(parts, shapes, strict=True)]

    return Adapted(shapes, shapes)


def from_curvlinops(operator: Any) -> Operator:
    """Convert a symmetric operator of curvlinops to an `Operator`; a GramianError if it is not square."""
    rows, columns = operator.shape
    if rows != columns:
        raise GramianError(f"operator: has shape {[rows, columns]}; expected a square one")
    return _FromCurvlinops(operator)


class _FromCurvlinops(Operator):
    def __init__(self, operator: Any) -> None:
        self.operator = operator
        self.dim, self.dtype, self.device = operator.shape[0], operator.dtype, operator.device

    def matmat(self, y_NK: Tensor) -> Tensor:
        """The wrapped curvlinops operator times Y [n, k]: [n, k]."""
        product: Tensor = self.operator @ y_NK.to(self.device, self.dtype)
        return product
