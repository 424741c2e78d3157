"""Symmetric linear operators that are known only by their products with vectors, the input of all spectrum estimates.

Legend: n side of the operator, k columns of Y [n, k].
"""

import math
from abc import ABC, abstractmethod
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from gramian.core.errors import GramianError


class Operator(ABC):
    """Base of operators: a symmetric matrix M [n, n], definite or not, that is known only by its products (`matmat`)."""

    dim: int
    """Number n of rows of the operator's matrix M [n, n]."""
    dtype: torch.dtype
    """Dtype of products with the operator's matrix."""
    device: torch.device
    """Device on which products are computed."""

    @abstractmethod
    def matmat(self, y_NK: Tensor) -> Tensor:
        """M Y for the operator's matrix M [n, n] and Y [n, k]: [n, k]."""

    def matvec(self, y_N: Tensor) -> Tensor:
        """M y for the operator's matrix M [n, n] and a vector y [n]: [n]."""
        check_vector(y_N, self.dim)
        return self.matmat(y_N[:, None])[:, 0]

    def to_dense(self) -> Tensor:
        """The operator's matrix M [n, n], for tests: one product with the identity."""
        return self.matmat(torch.eye(self.dim, dtype=self.dtype, device=self.device))

    def to_scipy(self) -> Any:
        """This operator as a `scipy.sparse.linalg.LinearOperator`; vectors go through host memory."""
        try:
            from scipy.sparse.linalg import LinearOperator
        except ImportError:
            raise GramianError("to_scipy: scipy is not here; expected it installed") from None

        def matmat(y_NK: Any) -> Any:
            y = torch.as_tensor(y_NK).to(device=self.device, dtype=self.dtype)
            return self.matmat(y.reshape(self.dim, -1)).cpu().double().numpy().reshape(y_NK.shape)

        return LinearOperator(
            (self.dim, self.dim), matvec=matmat, rmatvec=matmat, matmat=matmat, rmatmat=matmat, dtype="f8"
        )

    @property
    def working_dtype(self) -> torch.dtype:
        """Dtype of the vectors that Lanczos stores: float32 if products are in half precision, else that of products.

        Raises:
            GramianError: if products are not real floating-point numbers.
        """
        if not self.dtype.is_floating_point:
            raise GramianError(
                f"{type(self).__name__}: products are {self.dtype}; expected real floating-point numbers"
            )
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def rounding(self) -> float:
        """Norm, relative to ‖M‖, below which the residual of an orthogonalised product cannot be told from rounding error."""
        return float(torch.finfo(self.dtype).eps + 20 * torch.finfo(self.working_dtype).eps)

    def checked_matmat(self, y_NK: Tensor) -> Tensor:
        """M Y in the operator's dtype and on its device, for Y of any dtype and device.

        Raises:
            GramianError: if the product is not finite or does not have the shape of Y.
        """
        product_NK = self.matmat(y_NK.to(device=self.device, dtype=self.dtype))
        if product_NK.shape != y_NK.shape:
            raise GramianError(
                f"{type(self).__name__}: a product has shape {[*product_NK.shape]}; expected {[*y_NK.shape]}"
            )
        if not bool(product_NK.isfinite().all()):
            raise GramianError(f"{type(self).__name__}: a product holds NaN or infinity; expected finite numbers")
        return product_NK


def parts(rows: int, n: int, device: torch.device) -> list[slice]:
    """Slices of the columns of a [rows, n] matrix to convert to float64 one at a time: of 2¹⁷ numbers on a CPU, else 2²⁶."""
    width = max(1, (2**17 if device.type == "cpu" else 2**26) // max(1, rows))
    return [slice(begin, begin + width) for begin in range(0, n, width)]


def check_counts(**counts: Any) -> None:
    """Raise GramianError for the first argument that is not an integer of at least 1."""
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise GramianError(f"{name}: is {value!r}; expected a whole number, 1 or more")


def check_numbers(**numbers: Any) -> None:
    """Raise GramianError for the first argument that is not a finite real number."""
    for name, value in numbers.items():
        if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value):
            raise GramianError(f"{name}: is {value!r}; expected a finite number")


def check_operator(operator: Any) -> None:
    """Raise GramianError unless the argument is an `Operator`."""
    if not isinstance(operator, Operator):
        raise GramianError(
            f"operator: is of type {type(operator).__name__}; expected an Operator such as DenseOperator(matrix)"
        )


def check_vector(y: Any, n: int, columns: bool = False) -> None:
    """Raise GramianError unless `y` is a tensor [n], or with `columns` a tensor [n, k]."""
    if not isinstance(y, Tensor) or y.dim() != 1 + columns or len(y) != n:
        raise GramianError(f"vector: {seen(y)}; expected {f'[{n}, k]' if columns else f'[{n}]'}")


def seen(value: Any) -> str:
    """Description of a wrong argument for an error message: a tensor's shape, or the type of anything else."""
    return f"has shape {[*value.shape]}" if isinstance(value, Tensor) else f"is of type {type(value).__name__}"


def basis_device_of(operator: Operator, given: Any) -> torch.device:
    """The device that stores a Lanczos basis: `given`, or the operator's for None; GramianError if `given` is not usable."""
    if given is None:
        return torch.device(operator.device)
    try:
        probe = torch.zeros(1, device=given)
        probe.cpu()
    except (AssertionError, RuntimeError, TypeError) as error:
        raise GramianError(f'basis_device: is {given!r}; expected a device such as "cpu"') from error
    return probe.device


def seeded(operator: Operator, given: Any = None) -> torch.Generator:
    """`given` if it is a torch.Generator; for None a new one with seed 0 on the operator's device; else GramianError."""
    if isinstance(given, torch.Generator):
        return given
    if given is not None:
        raise GramianError(f"generator: is {given!r}; expected a torch.Generator")
    return torch.Generator(device=operator.device).manual_seed(0)


class DenseOperator(Operator):
    """A symmetric matrix in memory as an operator."""

    def __init__(self, matrix_NN: Tensor) -> None:
        """Reference the matrix without copying; GramianError if it is not square."""
        if not isinstance(matrix_NN, Tensor) or matrix_NN.dim() != 2 or matrix_NN.shape[0] != matrix_NN.shape[1]:
            raise GramianError(f"matrix: {seen(matrix_NN)}; expected a square one")
        self.matrix_NN = matrix_NN
        self.dim, self.dtype, self.device = len(matrix_NN), matrix_NN.dtype, matrix_NN.device

    def matmat(self, y_NK: Tensor) -> Tensor:
        """M Y for Y [n, k], in the matrix's dtype and on its device."""
        check_vector(y_NK, self.dim, columns=True)
        return self.matrix_NN @ y_NK.to(self.matrix_NN)
