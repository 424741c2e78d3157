"""Merge several models into one: an average of their parameters, weighted by each model's Fisher.

Every model k with parameters θ_k, Fisher F_k and weight w_k is a Gaussian over parameters with mean θ_k and precision
w_k (F_k + λI); the mode of their product solves

    Σ_k w_k (F_k + λI) θ = Σ_k w_k (F_k + λI) θ_k.

With diag F this is an elementwise weighted mean (Matena and Raffel 2022). With the Kronecker blocks of K-FAC it is a linear
system, solved by conjugate gradients from the weighted mean Σ_k w_k θ_k / Σ_k w_k, with the preconditioner
Σ_k w_k (F_k + damping_k)⁻¹, damping_k as in the options of K-FAC object k.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.curvature.apply.apply_factors import inner
from gramian.curvature.blocks.consistency import check_number, check_vector
from gramian.curvature.kfac import KFACNaturalGradient
from gramian.curvature.uses.fisher_parameters import fisher_parameters, parameters_of
from gramian.curvature.uses.importance import parameter_importance
from gramian.linalg.spectra.operator import check_counts

Vector = dict[str, Tensor]


@dataclass(frozen=True)
class Average:
    """The averaged parameters of several models, and how exactly the equation for them was solved."""

    parameters: Vector
    """{name: average} of every parameter, tied ones once; use `model.load_state_dict(average.parameters, strict=False)`."""
    plain: tuple[str, ...]
    """Names of parameters for which no model has a Fisher; they are the weighted mean."""
    residual: float = 0.0
    """Residual norm of the linear system, divided by that at the weighted mean; 0 for `diagonal_average`, which solves exactly.
    """
    steps: int = 0
    """Number of steps of conjugate gradients."""


def diagonal_average(
    models: Sequence[nn.Module],
    fishers: Sequence[KFACNaturalGradient | Mapping[str, Tensor]],
    *,
    weights: Sequence[float] | None = None,
    damping: float = 0.0,
) -> Average:
    """θ = Σ_k w_k (f_k + λ) ⊙ θ_k / Σ_k w_k (f_k + λ) over models k, with f_k = diag F_k. Cost: a few reads of every model.

    Entries where every f_k is zero or missing, and λ = 0, are the weighted mean Σ_k w_k θ_k / Σ_k w_k.

    ```python
    merged = diagonal_average([model_a, model_b], [kfac_a, kfac_b])
    model_a.load_state_dict(merged.parameters, strict=False)
    ```

    Args:
        models: models of one architecture.
        fishers: for each model its K-FAC factors or {parameter: diag F}, as from `DiagonalFisher`.
        weights: w_k > 0, one for each model; None: all 1.
        damping: λ ≥ 0; a larger one moves the result towards the weighted mean.

    Raises:
        GramianError: if models, Fishers and weights do not fit each other, or a Fisher is negative or not finite.
    """
    weights, thetas = _checked(models, fishers, weights, damping, zero_allowed=True)
    diagonals = [_diagonal(fisher) for fisher in fishers]
    for diagonal in diagonals:
        _fit("fishers", diagonal, thetas[0])
        bad = next((name for name, value in diagonal.items() if not bool(value.isfinite().all())), None)
        if bad is not None:
            raise GramianError(f"fishers: {bad} holds NaN or infinity; expected finite numbers")
    found: Vector = {}
    for name, like in thetas[0].items():
        total, weighted, plain = (torch.zeros_like(like, dtype=torch.float64) for _ in range(3))
        for theta, diagonal, weight in zip(thetas, diagonals, weights, strict=True):
            precision = weight * (_there(diagonal, name, like).clamp(min=0) + damping)
            total += precision
            weighted += precision * theta[name].to(like.device).double()
            plain += weight / sum(weights) * theta[name].to(like.device).double()
        found[name] = torch.where(total > 0, weighted / total, plain).to(like.dtype)
    return Average(found, tuple(name for name in found if not any(name in d for d in diagonals)))


def fisher_average(
    models: Sequence[nn.Module],
    fishers: Sequence[KFACNaturalGradient],
    *,
    damping: float,
    weights: Sequence[float] | None = None,
    tolerance: float = 1e-6,
    max_steps: int = 200,
) -> Average:
    """Solve Σ_k w_k (F_k + λI)(θ − θ_k) = 0 for θ, F_k the full Kronecker blocks of model k, damped by λ alone, unclipped.

    It is solved by conjugate gradients. Cost: a product and a natural gradient with every F_k per step; six vectors in float64.

    ```python
    merged = fisher_average([model_a, model_b], [kfac_a, kfac_b], damping=1e-4)
    model_a.load_state_dict(merged.parameters, strict=False)
    ```

    Args:
        models: models of one architecture.
        fishers: the Fisher of each model.
        damping: λ > 0; a larger one moves the result towards the weighted mean.
        weights: w_k > 0, one for each model; None: all 1.
        tolerance: the residual, relative to that of the weighted mean of the θ_k, at which the solver stops.
        max_steps: number of steps after which the current iterate is returned, with its residual.
    """
    weights, thetas = _checked(models, fishers, weights, damping, zero_allowed=False)
    check_number("tolerance", tolerance, "not negative")
    check_counts(max_steps=max_steps)
    shapes_of = [fisher_parameters(fisher) for fisher in fishers]
    for shapes in shapes_of:
        parameters_of(models[0], shapes)
    mean = {
        name: sum(
            (w / sum(weights) * theta[name].to(like.device).double() for w, theta in zip(weights, thetas, strict=True)),
            torch.zeros_like(like, dtype=torch.float64),
        )
        for name, like in thetas[0].items()
    }

    def system(k: int, vector: Vector) -> Vector:
        """w_k (F_k + λI) v for model k and v = {parameter: tensor}."""
        known = {name: value for name, value in vector.items() if name in shapes_of[k]}
        return _scaled(weights[k], _sum(_scaled(damping, vector), fishers[k].compute_fisher_vector_product(known)))

    def preconditioner(k: int, vector: Vector) -> Vector:
        """w_k (F_k + damping_k)⁻¹ v for model k with its K-FAC object's damping; w_k v/λ for parameters without a Fisher."""
        known = {name: value for name, value in vector.items() if name in shapes_of[k]}
        natural = fishers[k].compute_natural_gradient(models[k], gradients=known)
        return _scaled(weights[k], {name: natural.get(name, value / damping) for name, value in vector.items()})

    def over_all(function: Callable[[int, Vector], Vector], vector: Vector) -> Vector:
        total = function(0, vector)
        for k in range(1, len(models)):
            total = _sum(total, function(k, vector))
        return total

    moving = [name for name in mean if any(name in shapes for shapes in shapes_of)]
    right: Vector = {name: torch.zeros_like(mean[name]) for name in moving}
    for k, theta in enumerate(thetas):
        offset = {name: theta[name].to(mean[name]) - mean[name] for name in moving}
        right = _sum(right, system(k, offset))
    step, residual, steps = _conjugate_gradients(
        lambda v: over_all(system, v), lambda v: over_all(preconditioner, v), right, tolerance, max_steps
    )
    found = {
        name: (mean[name] + step[name] if name in step else mean[name]).to(like.dtype)
        for name, like in thetas[0].items()
    }
    return Average(found, tuple(name for name in found if name not in step), residual, steps)


def _conjugate_gradients(
    system: Callable[[Vector], Vector],
    preconditioner: Callable[[Vector], Vector],
    right: Vector,
    tolerance: float,
    max_steps: int,
) -> tuple[Vector, float, int]:
    """Solve M x = b by conjugate gradients and return (x, ‖b − Mx‖/‖b‖ computed anew at the end, number of steps).

    `system` multiplies by M, `right` is b; stops at ‖b − Mx‖ ≤ `tolerance`·‖b‖ or after `max_steps`.
    """
    x, rest = _scaled(0.0, right), right
    size, steps = inner(right, right) ** 0.5, 0
    if not size:
        return x, 0.0, 0
    direction = conditioned = preconditioner(rest)
    energy = inner(rest, conditioned)
    while steps < max_steps and inner(rest, rest) ** 0.5 > tolerance * size:
        image = system(direction)
        length = energy / inner(direction, image)
        x, rest = _sum(x, _scaled(length, direction)), _sum(rest, _scaled(-length, image))
        conditioned = preconditioner(rest)
        before, energy = energy, inner(rest, conditioned)
        direction = _sum(conditioned, _scaled(energy / before, direction))
        steps += 1
    error = _sum(right, _scaled(-1.0, system(x)))
    return x, inner(error, error) ** 0.5 / size, steps


def _scaled(factor: float, vector: Vector) -> Vector:
    return {name: factor * value for name, value in vector.items()}


def _sum(left: Vector, right: Vector) -> Vector:
    return {name: value + right[name] if name in right else value for name, value in left.items()}


def _diagonal(fisher: KFACNaturalGradient | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return fisher if isinstance(fisher, Mapping) else parameter_importance(fisher)


def _there(diagonal: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    """diag F of parameter `name` in float64 on the device of `like`; zeros of its shape if it has no Fisher."""
    if name not in diagonal:
        return torch.zeros_like(like, dtype=torch.float64)
    return diagonal[name].to(like.device).double()


def _checked(
    models: Any, fishers: Any, weights: Any, damping: Any, zero_allowed: bool
) -> tuple[list[float], list[dict[str, Tensor]]]:
    """(weights, [{parameter: tensor} of every model]); a GramianError if an argument is wrong or the models differ.

    `zero_allowed`: damping may be 0, and a Fisher may be {parameter: diag F}.
    """
    if not isinstance(models, Sequence) or not models:
        raise GramianError("models: expected a list of at least one")
    if not isinstance(fishers, Sequence) or len(fishers) != len(models):
        raise GramianError(f"fishers: expected one for each of {len(models)} models")
    check_number("damping", damping, "not negative" if zero_allowed else "positive")
    weights = [1.0] * len(models) if weights is None else weights
    if not isinstance(weights, Sequence) or len(weights) != len(models):
        raise GramianError(f"weights: is {weights!r}; expected one for each of {len(models)} models")
    for weight in weights:
        check_number("weights", weight, "positive")
    for fisher in fishers:
        if isinstance(fisher, Mapping) and zero_allowed:
            check_vector("fishers", fisher)
            negative = next((name for name, value in fisher.items() if bool((value < 0).any())), None)
            if negative is not None:
                raise GramianError(f"fishers: {negative} holds numbers below 0; expected means of squares")
        else:
            fisher_parameters(fisher)
    thetas = [{name: p.detach() for name, p in parameters_of(model).items()} for model in models]
    for theta in thetas[1:]:
        _fit("models", theta, thetas[0])
        _fit("models", thetas[0], theta)
    return list(weights), thetas


def _fit(what: str, tensors: Mapping[str, Tensor], first: Mapping[str, Tensor]) -> None:
    for name, value in tensors.items():
        if name not in first or value.shape != first[name].shape:
            got = "not in every model" if name not in first else f"of shape {list(value.shape)}"
            raise GramianError(f"{what}: {name} is {got}; expected models of one architecture and their Fishers")
