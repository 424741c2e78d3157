"""Fisher-weighted averages against a linear solve with every Fisher written out."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gramian
from gramian.curvature import diagonal_average, fisher_average
from tests.curvature.problems import assert_close, kfac
from tests.curvature.small import loss_of
from tests.curvature.uses import KINDS, TASKS, data, flat, moved, names_of, network, task, written_out
from tests.kit.matrix import FULL
from tests.kit.refusals import refused
from tests.oracles import dense_uses

pytestmark = pytest.mark.oracle
WEIGHTS = (1.0, 3.0)
LAMBDA = 0.01


def two(kind: str = "dense", **options: Any) -> tuple[list[nn.Module], list[gramian.KFACNaturalGradient]]:
    """Two models near each other, each with the Fisher of its own task."""
    models = [moved(network(kind), seed) for seed in TASKS]
    return models, [task(model, seed, kind, **options) for model, seed in zip(models, TASKS, strict=True)]


def expected(models: list[nn.Module], fishers: list[Tensor], damping: float = LAMBDA) -> Tensor:
    names = names_of(models[0])
    return dense_uses.average(fishers, [flat(model, names) for model in models], WEIGHTS, damping)


@pytest.mark.parametrize("kind", KINDS if FULL else ("dense", "exact head"))
def test_the_average_solves_the_system_written_out(kind: str) -> None:
    models, fishers = two(kind)
    got = fisher_average(models, fishers, weights=WEIGHTS, damping=LAMBDA, tolerance=1e-12)
    whole = [written_out(fisher, model) for fisher, model in zip(fishers, models, strict=True)]
    assert_close(flat(got.parameters, names_of(models[0])), expected(models, whole))
    assert got.residual < 1e-11 and got.steps > 0 and got.plain == ()


@pytest.mark.parametrize("mode", ["pi", "factored", "joint"] if FULL else ["factored"])
def test_the_damping_of_the_preconditioner_changes_the_way_and_not_the_end(mode: str) -> None:
    models, fishers = two(damping_mode=mode, damping=0.2)
    got = fisher_average(models, fishers, weights=WEIGHTS, damping=LAMBDA, tolerance=1e-12)
    whole = [written_out(fisher, model) for fisher, model in zip(fishers, models, strict=True)]
    assert_close(flat(got.parameters, names_of(models[0])), expected(models, whole))


def test_the_fisher_as_preconditioner_saves_steps_and_solves_one_fisher_in_one() -> None:
    models, fishers = two(damping_mode="joint", damping=LAMBDA, use_eigenvalue_correction=False)
    same = fisher_average(models, [fishers[0], fishers[0]], damping=LAMBDA, tolerance=1e-10)
    assert same.steps == 1
    _, far = two(damping_mode="joint", damping=1e6, use_eigenvalue_correction=False)  # as good as none
    few, many = (fisher_average(models, found, damping=LAMBDA, tolerance=1e-8).steps for found in (fishers, far))
    assert few < many


def test_a_residual_that_was_not_reached_is_reported() -> None:
    models, fishers = two()
    got = fisher_average(models, fishers, weights=WEIGHTS, damping=LAMBDA, tolerance=1e-13, max_steps=2)
    whole = [written_out(fisher, model) for fisher, model in zip(fishers, models, strict=True)]
    names, eye = names_of(models[0]), torch.eye(len(whole[0]), dtype=torch.float64)
    left = [w * (F + LAMBDA * eye) for w, F in zip(WEIGHTS, whole, strict=True)]

    def off(theta: Tensor) -> float:
        return float(sum(M @ (flat(m, names) - theta) for M, m in zip(left, models, strict=True)).norm())

    mean = sum(w * flat(m, names) for w, m in zip(WEIGHTS, models, strict=True)) / sum(WEIGHTS)
    assert got.steps == 2 and got.residual > 1e-12
    assert got.residual == pytest.approx(off(flat(got.parameters, names)) / off(mean), rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damping", [0.0, LAMBDA])
def test_the_diagonal_average_is_that_of_the_diagonal_written_out(kind: str, damping: float) -> None:
    models, fishers = two(kind)
    diagonals = [torch.diag(written_out(f, m).diagonal()) for f, m in zip(fishers, models, strict=True)]
    got = flat(diagonal_average(models, fishers, weights=WEIGHTS, damping=damping).parameters, names_of(models[0]))
    assert not bool(((diagonals[0] + diagonals[1]).diagonal() > 0).all())  # words that neither task has
    assert_close(
        got, expected(models, diagonals, damping or 1e-300)
    )  # where nothing is seen, the limit: the weighted mean


def test_a_measured_diagonal_does_as_well() -> None:
    models = two()[0]
    fishers = []
    for model, seed in zip(models, TASKS, strict=True):
        fisher = gramian.DiagonalFisher()
        with gramian.observe(model, fisher) as seen:
            loss_of(model, data("dense", seed)).backward()
        fishers.append(seen[fisher])
    got = diagonal_average(models, fishers, weights=WEIGHTS, damping=LAMBDA)
    names = names_of(models[0])
    want = expected(models, [torch.diag(flat(fisher, names)) for fisher in fishers])
    assert_close(flat(got.parameters, names), want)


def test_parameters_without_curvature_are_averaged_plainly_and_named() -> None:
    models, fishers = two()
    for value, model in enumerate(models):
        model.extra = nn.Parameter(torch.full((3,), float(value), dtype=torch.float64))
    for got in (
        fisher_average(models, fishers, weights=WEIGHTS, damping=LAMBDA),
        diagonal_average(models, fishers, weights=WEIGHTS),
    ):
        assert got.plain == ("extra",)
        torch.testing.assert_close(got.parameters["extra"], torch.full((3,), 0.75, dtype=torch.float64))


def test_an_average_loads_into_a_model_and_keeps_its_dtype() -> None:
    models, fishers = two("tied")
    models = [copy.deepcopy(model).float() for model in models]
    got = fisher_average(models, fishers, damping=LAMBDA, max_steps=3)
    left = models[0].load_state_dict(got.parameters, strict=False)
    assert left.missing_keys == ["head.weight"] and not left.unexpected_keys  # the tied name
    assert {value.dtype for value in got.parameters.values()} == {torch.float32}
    torch.testing.assert_close(models[0].head.weight, got.parameters["table.weight"])


def test_what_cannot_be_averaged_is_refused_in_one_line() -> None:
    models, fishers = two()
    cases: list[tuple[tuple[Any, Any], dict[str, Any], str]] = [
        (([], []), {"damping": 1.0}, "models:"),
        ((models, fishers[:1]), {"damping": 1.0}, "fishers:"),
        ((models, fishers), {"damping": 0.0}, "damping:"),
        ((models, fishers), {"damping": 1.0, "weights": [1.0]}, "weights:"),
        ((models, fishers), {"damping": 1.0, "weights": [1.0, -1.0]}, "weights:"),
        ((models, fishers), {"damping": 1.0, "weights": 3}, "weights:"),
        ((models, [fishers[0], kfac()]), {"damping": 1.0}, "kfac:"),
        (([models[0], network("tied")], fishers), {"damping": 1.0}, "models:"),
        ((models, fishers), {"damping": 1.0, "tolerance": -1.0}, "tolerance:"),
        ((models, fishers), {"damping": 1.0, "max_steps": 2.5}, "max_steps:"),
        ((models, fishers), {"damping": 1.0, "max_steps": 0}, "max_steps:"),
    ]
    for arguments, options, word in cases:
        with refused(word, "expected"):
            fisher_average(*arguments, **options)
    with refused("fishers:", "nobody", "expected"):
        diagonal_average(models, [{"nobody": torch.ones(2)}] * 2)
    with refused("fishers:", "fc.bias", "NaN", "expected"):
        diagonal_average(models, [{"fc.bias": torch.full_like(models[0].fc.bias, float("nan"))}] * 2)
    with refused("fishers:", "fc.bias", "below 0", "expected"):
        diagonal_average(models, [{"fc.bias": -torch.ones_like(models[0].fc.bias)}] * 2)
