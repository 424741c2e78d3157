"""Maps that are known by their products: adapters and refusals."""

import functools

import pytest
import torch

from gramian import GramianError
from gramian.linalg import DenseOperator, lanczos, log_det, spectral_density, stochastic_trace
from tests.linalg.matrices import normal
from tests.linalg.spectra import Broken, dense, spread, symmetric

linalg = pytest.importorskip("scipy.sparse.linalg")


@pytest.mark.oracle
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_scipy_sees_the_same_map(dtype):
    matrix = symmetric(spread(-3, 5, 40))
    adapted = DenseOperator(matrix.to(dtype)).to_scipy()
    y = normal(40, 3)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert abs(adapted @ y.numpy() - (matrix @ y).numpy()).max() < tolerance
    assert abs(adapted @ y[:, 0].numpy() - (matrix @ y[:, 0]).numpy()).max() < tolerance
    largest = linalg.eigsh(adapted, 3, which="LA", return_eigenvectors=False)
    assert abs(sorted(largest) - spread(-3, 5, 40)[-3:].numpy()).max() < tolerance


def test_dense_and_vector_products_are_those_of_the_matrix():
    matrix = symmetric(spread(-3, 5, 7))
    operator = DenseOperator(matrix)
    assert torch.equal(operator.to_dense(), matrix)
    assert torch.allclose(operator.matvec(normal(7)), matrix @ normal(7), atol=1e-14, rtol=0)


def test_a_checked_product_is_made_in_the_operators_dtype():
    product = dense(spread(0, 1, 5), torch.bfloat16).checked_matmat(normal(5, 2))
    assert product.dtype == torch.bfloat16


@pytest.mark.parametrize("how", ["nan", "inf", "-inf", "shape"])
def test_products_that_are_none_are_refused_by_name(how):
    with pytest.raises(GramianError, match="Broken: a product .*; expected"):
        Broken(how, after=0).checked_matmat(normal(30, 2))


@pytest.mark.parametrize("dtype", [torch.complex128, torch.int64])
def test_only_real_numbers_have_a_working_dtype(dtype):
    with pytest.raises(GramianError, match="DenseOperator: products are .*; expected real"):
        _ = DenseOperator(torch.eye(3, dtype=dtype)).working_dtype
    assert DenseOperator(torch.eye(3, dtype=torch.bfloat16)).working_dtype == torch.float32


@pytest.mark.parametrize("matrix", [torch.zeros(2, 3), torch.zeros(3), [[1.0]], None])
def test_what_is_no_square_matrix_is_refused(matrix):
    with pytest.raises(GramianError, match=r"^matrix: (is|has) .*; expected a square one$"):
        DenseOperator(matrix)


@pytest.mark.parametrize(
    "function", [lanczos, spectral_density, functools.partial(log_det, damping=1.0), stochastic_trace]
)
@pytest.mark.parametrize("what", [torch.eye(3), None, 3])
def test_what_is_no_operator_is_refused_by_name(what, function):
    with pytest.raises(
        GramianError, match=r"^operator: is of type \w+; expected an Operator such as DenseOperator\(matrix\)$"
    ):
        function(what)


@pytest.mark.parametrize("vector", [torch.ones(3), torch.ones(5, 1), torch.tensor(1.0), [1], None])
def test_a_vector_that_does_not_fit_is_refused(vector):
    with pytest.raises(GramianError, match=r"^vector: (is|has) .*; expected \[5\]$"):
        DenseOperator(torch.eye(5)).matvec(vector)


@pytest.mark.parametrize("columns", [torch.ones(3, 2), torch.ones(5), [1]])
def test_columns_that_do_not_fit_are_refused(columns):
    with pytest.raises(GramianError, match=r"^vector: (is|has) .*; expected \[5, k\]$"):
        DenseOperator(torch.eye(5)).matmat(columns)


def test_a_vector_of_another_dtype_is_taken_in_the_operators():
    product = DenseOperator(torch.eye(5)).matvec(torch.ones(5, dtype=torch.float64))
    assert product.dtype == torch.float32 and torch.equal(product, torch.ones(5))
