"""One model out of several: an average of their parameters in which each counts where its Fisher says that it knows.

Every model k with parameters θ_k and Fisher F_k is a Gaussian with precision w_k (F_k + λI); the mode of their product solves

    Σ_k w_k (F_k + λI) θ = Σ_k w_k (F_k + λI) θ_k.

With diag F that is a weighted mean, entry by entry (Matena and Raffel 2022). With the Kronecker blocks of K-FAC it is a linear
system, which conjugate gradients solve from the plain mean, preconditioned by Σ_k w_k (F_k + damping_k)⁻¹.
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
from gramian.curvature.uses.fisher_parameters import covered_parameters, parameters_of
from gramian.curvature.uses.importance import parameter_importance
from gramian.linalg.spectra.operator import check_counts

Vector = dict[str, Tensor]


@dataclass(frozen=True)
class Average:
    """The averaged parameters, and how well they solve the equation."""

    parameters: Vector
    """Every parameter of the models, under its first name; `model.load_state_dict(average.parameters, strict=False)`."""
    plain: tuple[str, ...]
    """Those that no Fisher covers: their weighted mean was taken."""
    residual: float = 0.0
    """‖b − Mθ‖/‖b‖ relative to the plain mean (the diagonal is solved directly)."""
    steps: int = 0
    """Of conjugate gradients."""


def diagonal_average(
    models: Sequence[nn.Module],
    fishers: Sequence[KFACNaturalGradient | Mapping[str, Tensor]],
    *,
    weights: Sequence[float] | None = None,
    damping: float = 0.0,
) -> Average:
    """θ = Σ_k w_k (f_k + λ) ⊙ θ_k / Σ_k w_k (f_k + λ) with f_k = diag F_k. Cost: a few readings of every model.

    Entries that no Fisher sees (Σ f = 0, λ = 0) are the weighted mean.

    Args:
        models: of one architecture.
        fishers: of each, K-FAC factors or {parameter: diag F}, as `DiagonalFisher` gives it.
        weights: w_k; None: 1.
        damping: λ ≥ 0; the larger, the closer to the weighted mean.

    Raises:
        GramianError: if models or Fishers do not fit together.
    """
    weights, thetas = _checked(models, fishers, weights, damping, zero_too=True)
    diagonals = [_diagonal(fisher) for fisher in fishers]
    for diagonal in diagonals:
        _fit("fishers", diagonal, thetas[0])
        hollow = next((name for name, value in diagonal.items() if not bool(value.isfinite().all())), None)
        if hollow is not None:
            raise GramianError(f"fishers: {hollow} holds NaN or infinity; expected finite numbers")
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
    """θ with Σ_k w_k (F_k + λI)(θ − θ_k) = 0, F_k the whole Kronecker blocks, undamped but for λ and unclipped.

    Cost: one product with every F_k and one natural gradient of each a step; six vectors in float64.

    Args:
        models: of one architecture.
        fishers: of each.
        damping: λ > 0; the larger, the closer to the weighted mean.
        weights: w_k; None: 1.
        tolerance: of the residual, relative to that of the plain mean.
        max_steps: after which what was reached is handed back, its residual with it.

    Raises:
        GramianError: if models or Fishers do not fit together.
    """
    weights, thetas = _checked(models, fishers, weights, damping, zero_too=False)
    check_number("tolerance", tolerance)
    if tolerance < 0:
        raise GramianError(f"tolerance: expected a number of 0 or more, got {tolerance!r}")
    check_counts(max_steps=max_steps)
    covered = [covered_parameters(fisher) for fisher in fishers]
    for shapes in covered:
        parameters_of(models[0], shapes)
    mean = {
        name: sum(
            (w / sum(weights) * theta[name].to(like.device).double() for w, theta in zip(weights, thetas, strict=True)),
            torch.zeros_like(like, dtype=torch.float64),
        )
        for name, like in thetas[0].items()
    }

    def system(k: int, vector: Vector) -> Vector:
        """w_k (F_k + λI) v."""
        known = {name: value for name, value in vector.items() if name in covered[k]}
        return _scaled(weights[k], _sum(_scaled(damping, vector), fishers[k].compute_fisher_vector_product(known)))

    def preconditioner(k: int, vector: Vector) -> Vector:
        """w_k (F_k + damping_k)⁻¹ v, and v/λ where there is no curvature."""
        known = {name: value for name, value in vector.items() if name in covered[k]}
        natural = fishers[k].compute_natural_gradient(models[k], gradients=known)
        return _scaled(weights[k], {name: natural.get(name, value / damping) for name, value in vector.items()})

    def over_all(function: Callable[[int, Vector], Vector], vector: Vector) -> Vector:
        total = function(0, vector)
        for k in range(1, len(models)):
            total = _sum(total, function(k, vector))
        return total

    moving = [name for name in mean if any(name in names for names in covered)]
    right: Vector = {name: torch.zeros_like(mean[name]) for name in moving}
    for k, theta in enumerate(thetas):
        away = {name: theta[name].to(mean[name]) - mean[name] for name in moving}
        right = _sum(right, system(k, away))
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
    """x with ‖b − Mx‖ ≤ tolerance·‖b‖, its residual as it is (not as the recurrence has it), and the steps."""
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
    off = _sum(right, _scaled(-1.0, system(x)))
    return x, inner(off, off) ** 0.5 / size, steps


def _scaled(factor: float, vector: Vector) -> Vector:
    return {name: factor * value for name, value in vector.items()}


def _sum(left: Vector, right: Vector) -> Vector:
    return {name: value + right[name] if name in right else value for name, value in left.items()}


def _diagonal(fisher: KFACNaturalGradient | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return fisher if isinstance(fisher, Mapping) else parameter_importance(fisher)


def _there(diagonal: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    """diag F of a parameter, zeros where there is none."""
    if name not in diagonal:
        return torch.zeros_like(like, dtype=torch.float64)
    return diagonal[name].to(like.device).double()


def _checked(
    models: Any, fishers: Any, weights: Any, damping: Any, zero_too: bool
) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Weights, and the parameters of every model.

    Raises:
        GramianError: naming what does not fit.
    """
    if not isinstance(models, Sequence) or not models:
        raise GramianError("models: expected a list of at least one")
    if not isinstance(fishers, Sequence) or len(fishers) != len(models):
        raise GramianError(f"fishers: expected one for each of {len(models)} models")
    check_number("damping", damping)
    if damping < 0 or not (damping or zero_too):
        raise GramianError(f"damping: expected a number {'of 0 or more' if zero_too else 'above 0'}, got {damping!r}")
    weights = [1.0] * len(models) if weights is None else weights
    if not isinstance(weights, Sequence) or len(weights) != len(models):
        raise GramianError(f"weights: is {weights!r}; expected one for each of {len(models)} models")
    for weight in weights:
        check_number("weights", weight)
        if not weight > 0:
            raise GramianError(f"weights: expected numbers above 0, got {weight!r}")
    for fisher in fishers:
        if isinstance(fisher, Mapping) and zero_too:
            check_vector("fishers", fisher)
            negative = next((name for name, value in fisher.items() if bool((value < 0).any())), None)
            if negative is not None:
                raise GramianError(f"fishers: {negative} holds numbers below 0; expected means of squares")
        else:
            covered_parameters(fisher)
    thetas = [{name: p.detach() for name, p in parameters_of(model).items()} for model in models]
    for theta in thetas[1:]:
        _fit("models", theta, thetas[0])
        _fit("models", thetas[0], theta)
    return list(weights), thetas


def _fit(what: str, tensors: Mapping[str, Tensor], first: Mapping[str, Tensor]) -> None:
    for name, value in tensors.items():
        if name not in first or value.shape != first[name].shape:
            got = "a name that others lack" if name not in first else f"of shape {list(value.shape)}"
            raise GramianError(f"{what}: {name} is {got}; expected models of one architecture and their Fishers")
