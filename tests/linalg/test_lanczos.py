"""Lanczos: the right eigenvalues, as often as they occur, at both ends, with bounds that hold."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gramian import GramianError, linalg
from gramian.linalg import DenseOperator, LanczosSpectrum, Operator
from tests.kit.matrix import FULL, sample
from tests.kit.mutations import RED, Edit
from tests.linalg.matrices import normal
from tests.linalg.spectra import SPECTRA, Broken, dense, numbers, spread, symmetric

WHICH = ("LA", "SA", "LM", "BE")


def lanczos(*arguments: Any, **options: Any) -> LanczosSpectrum:
    """The function of the package, looked up at every call: a trap changes it there."""
    return linalg.lanczos(*arguments, **options)


def expected(values: Tensor, k: int, which: str) -> Tensor:
    """What `lanczos` should return."""
    values, k = values.sort().values, min(k, len(values))
    if which == "BE":
        return torch.cat([values.flip(0)[: (k + 1) // 2], values[: k // 2].flip(0)])
    order = {"LA": values.flip(0), "SA": values, "LM": values[values.abs().argsort(descending=True, stable=True)]}
    return order[which][:k]


SMALLEST = {torch.float64: 2.0**-1074, torch.float32: 2.0**-149}
"""The smallest number of a dtype: what a rounding is at least."""


def assert_spectrum(
    found: LanczosSpectrum,
    values: Tensor,
    k: int,
    which: str,
    tolerance: float = 1e-10,
    dtype: torch.dtype = torch.float64,
) -> None:
    assert found.converged and found.complete
    target = expected(values, k, which)
    assert found.eigenvalues.shape == target.shape
    actual = found.eigenvalues
    if which == "LM":  # two of one magnitude may come in either order
        actual, target = actual.abs(), target.abs()
    allowed = tolerance * float(values.abs().max()) + len(values) * SMALLEST[dtype]
    assert float((actual - target).abs().max()) <= allowed
    assert bool((found.residual_bounds <= 40 * allowed).all())


def assert_bounds(found: LanczosSpectrum, matrix: Tensor, exact: Tensor) -> None:
    """Every bound is at least the residual, and the distance to an eigenvalue."""
    x = found.eigenvectors.double()
    unit = float(exact.abs().max()) or 1.0  # squares may leave the range
    residuals = ((matrix / unit) @ x - x * (found.eigenvalues / unit)).norm(dim=0) * unit
    distances = (found.eigenvalues[:, None] - exact).abs().min(1).values
    assert bool((residuals <= found.residual_bounds).all()), (residuals / found.residual_bounds).max()
    assert bool((distances <= found.residual_bounds).all()), (distances / found.residual_bounds).max()


# ---- eigenvalues -----------------------------------------------------------------------------------------------------

SLOW = {("decaying", "SA"), ("decaying", "BE")}
"""Where most eigenvalues crowd, relative to the whole spectrum, at the end that is asked for: no restarts, no ARPACK."""

ARPACK = ("decaying", "evenly spaced", "clustered", "indefinite")
"""Not "top repeated": ARPACK returns 9 of the 10 copies and then 1."""

BASES = ((1, None), (1, 35), (3, 50))
"""Block size, and room for the basis: the whole space or restarts."""

MATRIX = [
    (name, which, b, room)
    for name in SPECTRA
    for which in WHICH
    for b, room in BASES
    if room is None or (name, which) not in SLOW
]


@pytest.mark.oracle
@pytest.mark.parametrize(("name", "which", "block_size", "max_basis"), sample(MATRIX, 20))
def test_eigenvalues_are_those_of_eigvalsh(name, which, block_size, max_basis):
    matrix = symmetric(SPECTRA[name])
    found = lanczos(DenseOperator(matrix), 10, which, block_size=block_size, max_basis=max_basis, eigenvectors=True)
    exact = torch.linalg.eigvalsh(matrix)
    assert_spectrum(found, exact, 10, which)
    assert_bounds(found, matrix, exact)
    x = found.eigenvectors
    assert float((x.mT @ x - torch.eye(x.shape[1], dtype=torch.float64)).abs().max()) < 1e-13
    assert found.breakdowns <= found.matvecs


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("name", "which", "block_size", "max_basis"),
    sample([item for item in MATRIX if item[0] in ARPACK and item[:2] not in SLOW], 4),
)
def test_eigenvalues_are_those_of_arpack(name, which, block_size, max_basis):
    arpack = pytest.importorskip("scipy.sparse.linalg")
    matrix = symmetric(SPECTRA[name])
    n = len(matrix)
    start = normal(n, seed=5).numpy()
    exact = arpack.eigsh(matrix.numpy(), 10, which=which, ncv=n - 1, v0=start, tol=1e-13, return_eigenvectors=False)
    found = lanczos(DenseOperator(matrix), 10, which, block_size=block_size, max_basis=max_basis)
    error = found.eigenvalues.sort().values - torch.from_numpy(exact).sort().values
    assert float(error.abs().max()) <= 1e-10 * float(SPECTRA[name].abs().max())


@pytest.mark.parametrize("multiplicity", sample(range(2, 11), 2, case=lambda m: m > 5))
def test_a_repeated_eigenvalue_is_found_as_often_as_it_occurs(multiplicity):
    """Without breakdown: the other eigenvalues are all different, so no Krylov space is ever exhausted."""
    values = torch.cat([numbers(*[7.0] * multiplicity), numbers(5), spread(0, 2, 50)])
    found = lanczos(dense(values), 10, max_basis=50)
    assert_spectrum(found, values, 10, "LA")
    assert found.breakdowns == 0
    alone = lanczos(dense(values), 2, tol=1e-5, search_copies=False)
    assert alone.converged and not alone.complete
    assert int((alone.eigenvalues > 6).sum()) == 1  # what one Krylov space can see, until rounding brings in more


@pytest.mark.parametrize("block_size", sample([1, 5], 1))
def test_copies_across_the_last_place_are_no_reason_to_search_on(block_size):
    """20 copies, 4 asked for: one of the four may be any of them."""
    values = torch.cat([numbers(*[2.0] * 20), spread(-1, 1, 40)])
    found = lanczos(dense(values), 4, block_size=block_size)
    assert_spectrum(found, values, 4, "LA")
    assert found.matvecs < 200


def test_magnitudes_that_tie_end_the_search():
    """Six times 3 and six times −3, one asked for: any of them will do."""
    values = torch.cat([numbers(*[3.0] * 6, *[-3.0] * 6), spread(-1, 1, 40)])
    found = lanczos(dense(values), 1, "LM")
    assert_spectrum(found, values, 1, "LM")
    assert found.matvecs < 60


spectra = st.lists(
    st.tuples(st.sampled_from([0.0, 1.0, -1.0, 1 + 1e-7]) | st.floats(-3, 3), st.integers(1, 6)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=200 if FULL else 12)
@example(
    runs=[(3.702093632007521e-295, 3), (0.0, 2)],
    which="LA",
    k=1,
    block_size=1,
    exponent=-18,
    single=False,
    narrow=False,
)
@given(
    runs=spectra,
    which=st.sampled_from(WHICH),
    k=st.integers(1, 8),
    block_size=st.integers(1, 3),
    exponent=st.integers(-20, 20),
    single=st.booleans(),
    narrow=st.booleans(),
)
def test_any_spectrum_is_found_and_bounded(runs, which, k, block_size, exponent, single, narrow):
    """Eigenvalues of any multiplicity and sign, any scale: right if it says so, and bounds hold in any case."""
    dtype = torch.float32 if single else torch.float64
    values = torch.cat([numbers(*[value] * times) for value, times in runs]) * 10.0**exponent
    matrix = symmetric(values).to(dtype)
    exact = torch.linalg.eigvalsh(matrix.double())
    room = 2 * k + 20 if narrow else None
    found = lanczos(DenseOperator(matrix), k, which, block_size=block_size, max_basis=room, eigenvectors=True)
    assert_bounds(found, matrix.double(), exact)
    assert_spectrum(found, exact, k, which, 3e-5 if single else 1e-10, dtype)


@pytest.mark.parametrize("scale", [1e-250, 1e250])
def test_squares_that_leave_the_range_do_no_harm(scale):
    values = scale * torch.cat([numbers(4, 4, -3), spread(0, 1, 30)])
    found = lanczos(dense(values), 3, "BE", max_basis=20, eigenvectors=True)
    assert_spectrum(found, values, 3, "BE")
    assert_bounds(found, symmetric(values), values)


def test_bounds_hold_before_convergence_as_well():
    matrix = symmetric(spread(0, 1, 80))
    for iterations in (1, 5, 12, 40):
        found = lanczos(DenseOperator(matrix), 5, "BE", max_iterations=iterations, max_basis=20, eigenvectors=True)
        assert not found.converged and not found.complete and found.matvecs == iterations
        assert_bounds(found, matrix, spread(0, 1, 80))
    assert float(lanczos(DenseOperator(matrix), 5, "BE", max_iterations=30).residual_bounds.max()) > 1e-6


# ---- precision -------------------------------------------------------------------------------------------------------


def test_a_float32_operator_keeps_an_orthonormal_basis():
    """To what storage in float32 allows: eps/2 for a length, less for products."""
    found = lanczos(dense(SPECTRA["decaying"], torch.float32), 10, eigenvectors=True)
    x = found.eigenvectors
    assert x.dtype == torch.float32 and found.eigenvalues.dtype == torch.float64
    assert float((x.double().mT @ x.double() - torch.eye(10, dtype=torch.float64)).abs().max()) < 1e-7
    assert_spectrum(found, SPECTRA["decaying"], 10, "LA", 1e-6)


def test_half_precision_products_have_a_float32_basis_and_wide_bounds():
    matrix = symmetric(torch.cat([numbers(4, 3, 2), spread(0, 0.1, 60)])).to(torch.bfloat16)
    found = lanczos(DenseOperator(matrix), 3, eigenvectors=True)
    assert found.eigenvectors.dtype == torch.float32
    exact = torch.linalg.eigvalsh(matrix.double())
    assert_bounds(found, matrix.double(), exact)
    assert float((found.eigenvalues - exact.flip(0)[:3]).abs().max()) < 0.02 * 4


def test_a_map_that_changes_between_calls_does_not_converge():
    class Noisy(DenseOperator):
        def matmat(self, y_NK: Tensor) -> Tensor:
            self.calls = getattr(self, "calls", 0) + 1
            return super().matmat(y_NK) * (1 + 1e-3 * (-1) ** self.calls)

    found = lanczos(Noisy(symmetric(spread(0, 1, 60))), 3, max_iterations=60)
    assert found.asymmetry > 1e-4 and not found.converged
    assert float(found.residual_bounds.min()) > 1e-5
    assert lanczos(dense(spread(0, 1, 60)), 3).asymmetry < 1e-10


# ---- edges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_a_map_with_fewer_eigenvalues_gives_all_it_has(n, which):
    found = lanczos(dense(spread(-2, 3, n)), 10, which, block_size=4, eigenvectors=True)
    assert found.converged and found.complete and found.matvecs == n
    assert found.eigenvectors.shape == (n, n)
    assert torch.allclose(found.eigenvalues, expected(spread(-2, 3, n), 10, which), atol=1e-13)


def test_the_basis_never_exceeds_its_room():
    matrix = symmetric(spread(0, 1, 60) ** 2)
    widths = []

    class Watched(DenseOperator):
        def matmat(self, y_NK: Tensor) -> Tensor:
            widths.append(y_NK.shape[1])
            return super().matmat(y_NK)

    found = lanczos(Watched(matrix), 4, max_basis=16, block_size=2)
    assert_spectrum(found, spread(0, 1, 60) ** 2, 4, "LA")
    assert found.restarts > 5 and set(widths) == {2} and sum(widths) == found.matvecs
    assert found.basis_bytes == (16 + 2) * 60 * 8


def test_results_come_from_the_generator_alone():
    operator = dense(SPECTRA["indefinite"])
    first, second = (lanczos(operator, 5, basis_device="cpu") for _ in range(2))
    assert torch.equal(first.eigenvalues, second.eigenvalues)
    other = lanczos(operator, 5, generator=torch.Generator().manual_seed(9))
    assert not torch.equal(first.residual_bounds, other.residual_bounds)
    assert torch.allclose(first.eigenvalues, other.eigenvalues, atol=1e-10)


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("k", {"k": 0}),
        ("k", {"k": 2.5}),
        ("k", {"k": True}),
        ("max_basis", {"max_basis": "64"}),
        ("generator", {"generator": 0}),
        ("block_size", {"block_size": 0}),
        ("which", {"which": "SM"}),
        ("tol", {"tol": -1e-3}),
        ("tol", {"tol": float("nan")}),
        ("tol", {"tol": "x"}),
        ("basis_device", {"basis_device": "foo"}),
        ("basis_device", {"basis_device": 1.5}),
        ("max_basis", {"max_basis": 6, "k": 5}),
        ("max_iterations", {"max_iterations": 0}),
    ],
)
def test_arguments_that_make_no_sense_are_refused(field, arguments):
    with pytest.raises(GramianError, match=f"^{field}: is .*; expected"):
        lanczos(dense(spread(0, 1, 40)), **arguments)


@pytest.mark.parametrize("dtype", [torch.complex128, torch.int64])
def test_other_numbers_than_real_ones_are_refused(dtype):
    with pytest.raises(GramianError, match="DenseOperator: products are"):
        lanczos(DenseOperator(torch.eye(3, dtype=dtype)))


def test_what_a_search_may_miss_is_bounded(monkeypatch):
    """ε of Kuczyński and Woźniakowski: no more than the stated share of random starts see less than it promises."""
    from gramian.linalg.spectra.lanczos import _hidden_share

    monkeypatch.setitem(_hidden_share.__globals__, "MISSED", 0.1)
    values = torch.cat([spread(0, 0.9, 99), numbers(1)])
    starts, steps, missed = 200, 6, 0
    share = _hidden_share(100, steps)
    assert share < 0.5
    powers = values ** torch.arange(steps, dtype=torch.float64)[:, None]
    for start in normal(starts, 100, seed=1):
        q = torch.linalg.qr((powers * start).mT).Q  # a basis of the Krylov space of diag(values)
        largest = float(torch.linalg.eigvalsh(q.mT @ (values[:, None] * q))[-1])
        missed += 1 - largest > share
    assert missed <= 0.1 * starts


# ---- traps, and that each turns its test red -------------------------------------------------------------------------


def test_the_global_generator_is_not_touched():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = lanczos(dense(SPECTRA["rank 1"]), 5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    assert torch.equal(lanczos(dense(SPECTRA["rank 1"]), 5).eigenvalues, first.eigenvalues)


@pytest.mark.parametrize("how", ["nan", "inf"])
def test_a_product_that_is_not_finite_ends_with_the_operators_name(how):
    with pytest.raises(GramianError, match="^Broken: a product holds NaN or infinity; expected finite numbers$"):
        lanczos(Broken(how), 3)


def test_an_operator_without_memory_is_no_operator_of_zeros():
    with pytest.raises(torch.OutOfMemoryError):
        lanczos(Broken("oom"), 3)


def test_the_other_end_shows_whatever_was_asked_for():
    operator = dense(SPECTRA["indefinite"])
    found = lanczos(operator, 3, "LA")
    assert found.smallest == pytest.approx(-50, abs=1e-6) and found.largest == pytest.approx(9.99, abs=1e-9)
    for which in ("SA", "LM", "BE"):
        assert float(lanczos(operator, 2, which).eigenvalues.min()) == pytest.approx(-50, abs=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_converged_eigenvalue_does_not_come_back(dtype):
    """Orthogonality is lost against what has converged, not against recent vectors."""
    values = 10 ** spread(2, -4, 60)
    found = lanczos(dense(values, dtype), 10, max_basis=50, max_iterations=200)
    assert_spectrum(found, values, 10, "LA", 1e-10 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("name", ["rank 1", "projection", "identity", "zero"])
def test_an_exhausted_krylov_space_is_left_for_a_random_vector(name):
    found = lanczos(dense(SPECTRA[name]), 10, max_iterations=100)
    assert_spectrum(found, SPECTRA[name], 10, "LA", 1e-13)
    assert found.breakdowns > 0


ZEROS = Edit(
    "Operator.checked_matmat",
    "product_NK = self.matmat(y_NK.to(device=self.device, dtype=self.dtype))",
    "try:\n"
    "        product_NK = self.matmat(y_NK.to(device=self.device, dtype=self.dtype))\n"
    "    except torch.OutOfMemoryError:\n"
    "        product_NK = torch.zeros_like(y_NK)",
)
TRAPS: dict[str, tuple[Edit, Callable[[], None]]] = {
    "global generator seeded": (
        Edit(
            "operator:seeded",
            "return torch.Generator(device=operator.device).manual_seed(0)",
            "return torch.manual_seed(0)",
        ),
        test_the_global_generator_is_not_touched,
    ),
    "zeros without memory": (ZEROS, test_an_operator_without_memory_is_no_operator_of_zeros),
    "products not looked at": (
        Edit("Operator.checked_matmat", "if not bool(product_NK.isfinite().all()):", "if False:"),
        functools.partial(test_a_product_that_is_not_finite_ends_with_the_operators_name, "nan"),
    ),
    "top values only": (
        Edit("lanczos:lanczos", "min(smallest, float(ritz.values_M[0]))", "float(ritz.values_M[wanted].min())"),
        test_the_other_end_shows_whatever_was_asked_for,
    ),
    "recent vectors only": (
        Edit(
            "krylov:orthogonalise",
            "share_MB += rows_MN[:, part].double() @ vectors_BN[:, part].mT",
            "share_MB[-2:] += rows_MN[-2:, part].double() @ vectors_BN[:, part].mT",
        ),
        functools.partial(test_a_converged_eigenvalue_does_not_come_back, torch.float64),
    ),
    "noise after a breakdown": (
        Edit("KrylovBasis._orthonormalise", "self._orthogonalised(vector_N[None])", "pass"),
        functools.partial(test_an_exhausted_krylov_space_is_left_for_a_random_vector, "rank 1"),
    ),
    "a direction of rounding followed": (
        Edit("KrylovBasis.multiply", "if beta > self.rounding and len", "if beta > 0 and len"),
        functools.partial(test_an_exhausted_krylov_space_is_left_for_a_random_vector, "rank 1"),
    ),
    "no coupling to the vector before": (
        Edit("KrylovBasis.ritz", "H_MM.triu() + H_MM.triu(1).mT", "torch.diag(H_MM.diagonal())"),
        functools.partial(test_a_converged_eigenvalue_does_not_come_back, torch.float64),
    ),
    "sums in float32": (
        Edit(
            "krylov:orthogonalise",
            "rows_MN[:, part].double() @ vectors_BN[:, part].mT",
            "(rows_MN[:, part].float() @ vectors_BN[:, part].mT.float()).double()",
        ),
        functools.partial(test_a_converged_eigenvalue_does_not_come_back, torch.float64),
    ),
    "basis in half precision": (
        Edit("Operator.working_dtype", "return torch.promote_types(self.dtype, torch.float32)", "return self.dtype"),
        test_half_precision_products_have_a_float32_basis_and_wide_bounds,
    ),
    "convergence in absolute numbers": (
        Edit("lanczos:lanczos", "allowed = tol * basis.scale + 2 * basis.rounding", "allowed = 1e-10"),
        functools.partial(test_a_converged_eigenvalue_does_not_come_back, torch.float32),
    ),
    "one copy of each": (
        Edit("lanczos:lanczos", "if settled and not search_copies:", "if settled:"),
        functools.partial(test_a_repeated_eigenvalue_is_found_as_often_as_it_occurs, 4),
    ),
    "what restarts leave behind not counted": (
        Edit("KrylovBasis.ritz", "noise_M + lost_M", "noise_M * 0"),
        test_a_map_that_changes_between_calls_does_not_converge,
    ),
}


@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_that_is_put_back_turns_its_test_red(name):
    edit, check = TRAPS[name]
    if FULL:
        check()
    with edit.applied(), pytest.raises((*RED, torch.OutOfMemoryError)):
        check()


def test_operators_have_no_other_duty_than_their_products():
    class Least(Operator):
        dim, dtype, device = 50, torch.float64, torch.device("cpu")

        def matmat(self, y_NK: Tensor) -> Tensor:
            return spread(-1, 1, 50)[:, None] * y_NK

    assert_spectrum(lanczos(Least(), 4, "BE"), spread(-1, 1, 50), 4, "BE")
