"""The Laplace approximation against (n F + τI)⁻¹ written out."""

from statistics import NormalDist

import pytest
import torch
from torch import nn

import gramian
from gramian.curvature import Laplace
from gramian.oracles import dense_kfac
from tests.curvature.problems import TOLERANCE, assert_close, kfac, normal, seeded
from tests.curvature.uses import KINDS, TASKS, flat, names_of, network, task, written_out
from tests.kit.refusals import refused
from tests.oracles import dense_uses

pytestmark = pytest.mark.oracle
N, TAU = 50.0, 0.7
DRAWS, ERROR_RATE = 3000, 1e-3


@pytest.mark.parametrize(
    "kind, mode", [*((kind, KINDS[kind].get("damping_mode", "pi")) for kind in KINDS), ("dense", "joint")]
)
def test_noise_is_scaled_by_the_root_of_the_covariance_whatever_the_damping(kind: str, mode: str) -> None:
    model = network(kind)
    found = task(model, TASKS[0], kind, damping_mode=mode, damping=3.0, max_condition_number=2.0)
    names = names_of(model)
    noise = {name: normal(*p.shape, seed=i) for i, (name, p) in enumerate(model.named_parameters())}
    root = dense_kfac.matrix_power(N * written_out(found, model), -0.5, TAU)
    got = Laplace(found, model, N, TAU).scaled(noise)
    assert_close(flat(got, names), root @ flat(noise, names))


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_the_log_marginal_add_up_to_the_textbooks(kind: str) -> None:
    model = network(kind)
    found, names = task(model, TASKS[0], kind), names_of(model)
    about = {"fc.bias": torch.full((9,), 0.3, dtype=torch.float64)}
    mu = flat({n: about.get(n, torch.zeros_like(p)) for n, p in model.named_parameters()}, names)
    F, theta = written_out(found, model), flat(model, names)
    got = Laplace(found, model, N, TAU).log_marginal(-123.0, about)
    assert got.total == pytest.approx(dense_uses.log_marginal(F, theta, mu, N, TAU, -123.0), rel=TOLERANCE)
    assert got.log_likelihood == -123.0 and got.parameters == len(theta) and got.error == 0.0
    assert got.prior_quadratic == pytest.approx(-0.5 * TAU * float((theta - mu).square().sum()), rel=1e-12)
    covariance = dense_uses.posterior_covariance(F, N, TAU)
    assert got.posterior_log_det == pytest.approx(0.5 * float(torch.linalg.slogdet(covariance)[1]), rel=TOLERANCE)
    assert got.total == pytest.approx(
        got.log_likelihood + got.prior_quadratic + got.prior_log_det + got.posterior_log_det
    )


def small() -> tuple[nn.Module, gramian.KFACNaturalGradient]:
    """Eight parameters: everything about their covariance can be looked at."""
    model = seeded(lambda: nn.Linear(3, 2))
    found = kfac(kfac_policy="small_only")
    with found.capture(model, loss_reduction="sum", num_terms=7):
        (model(normal(7, 3)) * normal(7, 2, seed=1)).sum().backward()
    return model, found


@pytest.mark.full
def test_draws_have_the_covariance_of_the_formula() -> None:
    """Every entry of the whitened covariance, and the mean, within what chance allows once in 1/ERROR_RATE suites."""
    model, found = small()
    names, posterior = names_of(model), Laplace(found, model, N, TAU)
    generator = torch.Generator().manual_seed(0)
    x_SP = torch.stack([flat(posterior.sample(generator), names) for _ in range(DRAWS)]) - flat(model, names)
    whitened_SP = x_SP @ dense_kfac.matrix_power(N * written_out(found, model), 0.5, TAU)
    size = whitened_SP.shape[1]
    looks = size * (size + 1) // 2 + size
    most = NormalDist().inv_cdf(1 - ERROR_RATE / (2 * looks))
    covariance = whitened_SP.mT @ whitened_SP / DRAWS
    spread = (1 + torch.eye(size)).sqrt() / DRAWS**0.5  # of z_i z_j: variance 1, of z_i²: 2
    assert float(((covariance - torch.eye(size)) / spread).abs().max()) < most
    assert float(whitened_SP.mean(0).abs().max()) * DRAWS**0.5 < most


def test_the_same_generator_gives_the_same_draw_and_the_model_stays() -> None:
    model, found = small()
    before = flat(model, names_of(model))
    posterior = Laplace(found, model, N, TAU)
    draws = [posterior.sample(torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(draws[0]["weight"], draws[1]["weight"]) and not torch.equal(
        draws[0]["weight"], draws[2]["weight"]
    )
    assert torch.equal(flat(model, names_of(model)), before)
    assert torch.func.functional_call(model, draws[0], normal(4, 3)).shape == (4, 2)


def test_parameters_without_curvature_are_named_and_stay() -> None:
    model = network()
    found = task(model, TASKS[0])
    model.extra = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    posterior = Laplace(found, model, N, TAU)
    assert posterior.fixed == ["extra"] and "extra" not in posterior.sample(torch.Generator())


def test_a_fisher_that_is_another_now_is_refused() -> None:
    """Else the posterior had the means of one model and the covariance of a later one."""
    model, found = small()
    posterior = Laplace(found, model, N, TAU)
    found.load_state_dict(found.state_dict(), model)
    for use in (lambda: posterior.sample(torch.Generator()), lambda: posterior.log_marginal(0.0)):
        with refused("kfac: was refreshed or loaded after Laplace took the parameters; expected an object of its own"):
            use()


def test_invalid_arguments_of_a_posterior_are_refused_in_one_line() -> None:
    model, found = small()
    for arguments, word in (((N, 0.0), "prior_precision:"), ((-1.0, TAU), "n:"), (("many", TAU), "n:")):
        with refused(word, "expected"):
            Laplace(found, model, *arguments)
    with refused("kfac:", "expected"):
        Laplace(kfac(), model, N, TAU)
    posterior = Laplace(found, model, N, TAU)
    with refused("generator:", "expected"):
        posterior.sample(0)  # type: ignore[arg-type]
    with refused("vector:", "bias", "expected"):
        posterior.scaled({"weight": model.weight})
    with refused("prior_mean:", "nobody", "expected"):
        posterior.log_marginal(0.0, {"nobody": torch.zeros(2)})
    with refused("prior_mean:", "weight", "expected"):
        posterior.log_marginal(0.0, {"weight": model.weight[:1]})
