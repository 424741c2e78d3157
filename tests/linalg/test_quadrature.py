"""Stochastic Lanczos quadrature: exact where it should be, and intervals that miss as often as they say."""

import math

import pytest
import torch

from gramian import GramianError, linalg
from gramian.linalg import DenseOperator, Estimate, log_det, spectral_density
from gramian.linalg.spectra.operator import seeded
from gramian.linalg.spectra.trace import random_blocks
from tests.kit.matrix import sample
from tests.kit.mutations import RED, Edit
from tests.linalg.spectra import SPECTRA, Broken, dense, numbers, spread, symmetric
from tests.linalg.test_trace import DISTRIBUTIONS, REPETITIONS, assert_coverage, seed


def forms(matrix, probes, distribution, f):
    """zᵀ f(M) z by eigh, for the probes of the default generator."""
    (z,) = random_blocks(DenseOperator(matrix), probes, distribution, probes, seeded(DenseOperator(matrix)))
    values, vectors = torch.linalg.eigh(matrix)
    return (f(values)[:, None] * (vectors.mT @ z).square()).sum(0)


def damped_log(values):
    return (values + 60).log()


# ---- exact -----------------------------------------------------------------------------------------------------------


@pytest.mark.oracle
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("name", sample([*SPECTRA], 6, case=lambda _: 0))
def test_functions_of_the_whole_krylov_space_are_exact(name, distribution):
    """With as many steps as dimensions every sample is zᵀ f(M) z, exhausted Krylov spaces or not."""
    matrix = symmetric(SPECTRA[name])
    density = spectral_density(DenseOperator(matrix), 4, len(matrix), distribution=distribution)
    for f in (damped_log, torch.sin, torch.ones_like):
        expected = forms(matrix, 4, distribution, f)
        assert torch.allclose(density.samples(f), expected, rtol=1e-10, atol=1e-9)


@pytest.mark.oracle
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_polynomials_are_exact_up_to_twice_the_steps(steps):
    matrix = symmetric(spread(-1, 2, 50))
    density = spectral_density(DenseOperator(matrix), 6, steps)
    for degree in range(2 * steps + 1):
        exact = torch.allclose(
            density.samples(lambda t, d=degree: t**d),
            forms(matrix, 6, "rademacher", lambda t, d=degree: t**d),
            rtol=1e-11,
        )
        assert exact == (degree < 2 * steps)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_blocks_of_probes_do_not_change_them(dtype):
    operator = dense(SPECTRA["evenly spaced"], dtype)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4
    whole, parts = (spectral_density(operator, 6, 12, block_size=b, basis_device="cpu") for b in (6, 4))
    assert torch.allclose(whole.samples(torch.exp), parts.samples(torch.exp), rtol=tolerance)
    assert whole.matvecs == parts.matvecs == 6 * 12


def test_a_float32_recurrence_stays_orthogonal():
    """Samples of a float32 operator agree with those of eigh to what its own entries allow."""
    matrix = symmetric(10 ** spread(2, -4, 80)).float()
    density = spectral_density(DenseOperator(matrix), 4, 60)
    expected = forms(matrix.double(), 4, "rademacher", damped_log)
    assert torch.allclose(density.samples(damped_log), expected, rtol=1e-6)


def test_a_converged_node_does_not_come_back():
    """Orthogonality is lost against what has converged: nodes would be repeated at the upper end."""
    values = 10 ** spread(2, -4, 60)
    nodes_PS = spectral_density(dense(values), 2, 60).nodes_PS
    assert torch.allclose(nodes_PS[:, -10:], values[:10].flip(0), rtol=1e-9)


def test_an_exhausted_krylov_space_ends_its_recurrence():
    density = spectral_density(dense(SPECTRA["projection"]), 5, 30)
    assert density.matvecs == 5 * 2
    assert torch.allclose(density.nodes_PS[:, :2], numbers(0, 1), atol=1e-12)
    assert not bool(density.weights_PS[:, 2:].any())
    assert torch.allclose(density.weights_PS.sum(1), numbers(90))
    assert torch.allclose(spectral_density(dense(SPECTRA["zero"]), 3, 5).nodes_PS, numbers(0))


def test_probes_of_one_block_may_end_at_different_steps():
    """A diagonal matrix of few values: a probe that happens to miss none, and a unit-like one, go on by themselves."""
    matrix = torch.diag(numbers(1, 2, 3, 4))
    rows = {int((w > 0).sum()) for w in spectral_density(DenseOperator(matrix), 3, 4).weights_PS}
    assert rows == {4}
    repeated = torch.diag(numbers(1, 1, 2, 2))
    found = spectral_density(DenseOperator(repeated), 3, 4, distribution="gaussian")
    assert torch.allclose(found.samples(torch.exp), forms(repeated, 3, "gaussian", torch.exp), rtol=1e-12)


# ---- densities -------------------------------------------------------------------------------------------------------


@pytest.mark.oracle
def test_the_density_is_that_of_the_eigenvalues():
    """With all steps: Σ_i (u_iᵀz)² N(t; λ_i, σ²)/n, mean over probes; and within 5 standard errors Σ_i N(t; λ_i, σ²)/n."""
    matrix = symmetric(SPECTRA["top repeated"])
    density = spectral_density(DenseOperator(matrix), 30, len(matrix))
    smooth = density.smooth(kernel_width=0.05, points=400)
    values, vectors = torch.linalg.eigh(matrix)
    kernels = torch.distributions.Normal(values, 0.05).log_prob(smooth.grid[:, None]).exp() / len(matrix)
    (z,) = random_blocks(DenseOperator(matrix), 30, "rademacher", 30, seeded(DenseOperator(matrix)))
    expected = kernels @ (vectors.mT @ z).square()
    assert torch.allclose(smooth.density, expected.mean(1), rtol=1e-8, atol=1e-10)
    assert torch.allclose(smooth.standard_error, expected.std(1) / math.sqrt(30), rtol=1e-6, atol=1e-10)
    assert bool(((smooth.density - kernels.sum(1)).abs() <= 5 * smooth.standard_error + 1e-10).all())
    assert smooth.kernel_width == 0.05


@pytest.mark.parametrize("name", ["decaying", "indefinite", "identity", "zero", "one"])
def test_a_density_integrates_to_one(name):
    smooth = spectral_density(dense(SPECTRA[name]), 4, 12).smooth()
    assert float(torch.trapezoid(smooth.density, smooth.grid)) == pytest.approx(1, abs=1e-3)
    assert smooth.kernel_width > 0


# ---- chance ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_intervals_of_groups_of_probes_miss_as_often_as_they_say(distribution):
    """5 %: 400 groups of 12 probes of one run."""
    values = spread(0, 3, 40)
    density = spectral_density(dense(values), 12 * REPETITIONS, 8, distribution=distribution)
    for f in (torch.square, lambda t: (t + 1).log()):
        target, missed = float(f(values).sum()), 0
        for group in density.samples(f).split(12):
            low, high = Estimate.of(group, 0).interval(0.05)
            missed += not low <= target <= high
        assert_coverage(missed)


@pytest.mark.full
def test_intervals_of_log_determinants_miss_as_often_as_they_say():
    """5 %, over 400 seeds."""
    values = spread(0, 3, 40)
    operator, target, missed = dense(values), float((values + 0.5).log().sum()), 0
    for i in range(REPETITIONS):
        low, high = log_det(operator, 0.5, 16, 12, generator=seed(i)).interval(0.05)
        missed += not low <= target <= high
    assert_coverage(missed)


def test_a_log_determinant_is_within_its_error():
    values = spread(0, 3, 40)
    found = log_det(dense(values), 0.5, 40, 15)
    target = float((values + 0.5).log().sum())
    assert abs(found.value - target) < 4 * found.standard_error < 0.2 * abs(target)
    assert found.matvecs == 40 * 15


def test_gauss_rule_errs_upwards_for_logarithms():
    matrix = symmetric(10 ** spread(0, -5, 60))
    exact = forms(matrix, 8, "rademacher", lambda t: (t + 1e-6).log())
    found = [spectral_density(DenseOperator(matrix), 8, s).samples(lambda t: (t + 1e-6).log()) for s in (5, 15, 50)]
    assert bool((found[0] > found[1]).all()) and bool((found[1] > exact).all())
    assert torch.allclose(found[2], exact, rtol=1e-3)


# ---- refusals and traps ----------------------------------------------------------------------------------------------


def test_a_logarithm_of_a_matrix_that_is_not_positive_is_refused():
    for name, damping in (("indefinite", 10.0), ("projection", 0.0), ("rank 1", 1e-17)):
        with pytest.raises(GramianError, match="^damping: is .* leaves a Ritz value .*; expected a positive definite"):
            log_det(dense(SPECTRA[name]), damping)


def test_a_function_that_is_not_finite_on_the_spectrum_is_refused():
    with pytest.raises(GramianError, match="^f: is not finite at .*; expected a function"):
        spectral_density(dense(SPECTRA["indefinite"]), 2, 5).trace_of(torch.log)


@pytest.mark.parametrize(
    "f", [lambda x: x.sum(), lambda x: 1.0, lambda x: x[0], lambda x: x.sum(1, keepdim=True), lambda x: x + 1j, 3, None]
)
def test_a_function_that_does_not_go_element_by_element_is_refused(f):
    """`lambda x: x.sum()` on the identity of 5 once came to 400."""
    with pytest.raises(GramianError, match="^f: (is|returned) .*; expected a function"):
        spectral_density(DenseOperator(torch.eye(5)), 4, 3).trace_of(f)


def test_a_spectrum_without_values_is_refused():
    with pytest.raises(GramianError, match="^operator: has no rows; expected one or more$"):
        log_det(DenseOperator(torch.zeros(0, 0)), 1.0)


@pytest.mark.parametrize("damping", ["x", None, math.nan, math.inf])
def test_a_damping_that_is_no_number_is_refused_before_the_first_product(damping):
    with pytest.raises(GramianError, match="^damping: is .*; expected a finite number$"):
        log_det(Broken("oom", after=0), damping)
    with pytest.raises(GramianError, match="^damping: is .*; expected a finite number$"):
        spectral_density(dense(spread(0, 1, 10)), 2, 5).log_det(damping)


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("kernel_width", {"kernel_width": "x"}),
        ("kernel_width", {"kernel_width": math.inf}),
        ("points", {"points": "x"}),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused(field, arguments):
    with pytest.raises(GramianError, match=f"^{field}: is .*; expected"):
        spectral_density(dense(spread(0, 1, 10)), 2, 5).smooth(**arguments)


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("probes", {"probes": 0}),
        ("basis_device", {"basis_device": "foo"}),
        ("basis_device", {"basis_device": "meta"}),
        ("probes", {"probes": 2.5}),
        ("steps", {"steps": 2.5}),
        ("generator", {"generator": 0}),
        ("steps", {"steps": 0}),
        ("block_size", {"block_size": 0}),
        ("distribution", {"distribution": "x"}),
    ],
)
def test_arguments_that_make_no_sense_are_refused(field, arguments):
    with pytest.raises(GramianError, match=f"^{field}: is .*; expected"):
        spectral_density(dense(spread(0, 1, 10)), **arguments)


def test_a_kernel_that_falls_through_the_grid_is_refused():
    with pytest.raises(GramianError, match="^kernel_width: is .*; expected"):
        spectral_density(dense(spread(0, 1, 10)), 2, 5).smooth(kernel_width=1e-6)
    with pytest.raises(GramianError, match="^DenseOperator: products are"):
        spectral_density(DenseOperator(torch.eye(3, dtype=torch.complex64)))


def test_failed_products_are_neither_zeros_nor_numbers():
    with pytest.raises(GramianError, match="^Broken: a product holds NaN or infinity"):
        spectral_density(Broken("nan", after=20), 4, 10)
    with pytest.raises(torch.OutOfMemoryError):
        spectral_density(Broken("oom", after=20), 4, 10)


def test_the_global_generator_is_not_touched():
    before = torch.get_rng_state()
    linalg.spectral_density(dense(spread(0, 1, 20)), 3, 5)
    assert torch.equal(torch.get_rng_state(), before)


TRAPS = {
    "recent vectors only": (
        Edit("quadrature:_tridiagonal", "basis_BSN[:, : step + 1]", "basis_BSN[:, max(0, step - 1) : step + 1]"),
        test_a_converged_node_does_not_come_back,
    ),
    "noise after a breakdown": (
        Edit("quadrature:_tridiagonal", "beta_B > operator.rounding * scale_B", "beta_B > 0"),
        test_an_exhausted_krylov_space_ends_its_recurrence,
    ),
    "global generator seeded": (
        Edit(
            "operator:seeded",
            "return torch.Generator(device=operator.device).manual_seed(0)",
            "return torch.manual_seed(0)",
        ),
        test_the_global_generator_is_not_touched,
    ),
}


@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_that_is_put_back_turns_its_test_red(name):
    edit, check = TRAPS[name]
    check()
    with edit.applied(), pytest.raises(RED):
        check()
