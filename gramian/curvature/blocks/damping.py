"""Damping: the multiples of the identity that are added to a block of the Fisher before it is raised to a power.

Kronecker block F = G ⊗ A (row-major: F vec(Y) = vec(G Y A)):
- "factored": (G + λ_G I) ⊗ (A + λ_A I);
- "pi": the same with λ_A = π√λ, λ_G = √λ/π, π² = (tr A/m)/(tr G/o), so that both sides are damped alike relative to their
  mean eigenvalues (Martens and Grosse 2015);
- "joint": G ⊗ A + λI exactly, in the eigenbasis of both sides.
Any other block: F + λI, with λ_G in place of λ under "factored".

A mode is one entry of `DAMPING_MODES`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class Lambdas(NamedTuple):
    """The options `damping`, `damping_A` (as A) and `damping_G` (as G); `damping` replaces the last two if not given."""

    damping: float
    A: float
    G: float


@dataclass(frozen=True)
class DampingMode:
    """One value of the option `damping_mode`: functions that compute the λs of a block from those of the options."""

    split: Callable[[Lambdas, float, float], tuple[float, float, float]]
    """Maps (λs of the options, tr A/m, tr G/o) for a Kronecker block to (λ_A, λ_G, π)."""
    single: Callable[[Lambdas], float]
    """Maps the λs of the options to the λ of a block that is not a Kronecker product."""
    on_product: bool = False
    """True if λ is added to G ⊗ A, which needs the eigenvectors of A and G; False if λs are added to A and to G."""
    sides: bool = True
    """True if the options `damping_A` and `damping_G` are used; False if the mode computes both from `damping`."""


def _split_by_trace(lambdas: Lambdas, mean_A: float, mean_G: float) -> tuple[float, float, float]:
    pi, root = _balance(mean_A, mean_G), lambdas.damping**0.5
    return pi * root, root / pi, pi


def _balance(mean_A: float, mean_G: float) -> float:
    """π = √(mean eigenvalue of A / mean eigenvalue of G), which splits damping between them; 1 where a side is zero."""
    return (mean_A / mean_G) ** 0.5 if mean_A > 0 and mean_G > 0 else 1.0


DAMPING_MODES = {
    "pi": DampingMode(_split_by_trace, lambda lambdas: lambdas.damping, sides=False),
    "factored": DampingMode(lambda lambdas, mean_A, mean_G: (lambdas.A, lambdas.G, 1.0), lambda lambdas: lambdas.G),
    "joint": DampingMode(
        lambda lambdas, mean_A, mean_G: (lambdas.A, lambdas.A, 1.0), lambda lambdas: lambdas.A, on_product=True
    ),
}
"""{value of the option `damping_mode`: its `DampingMode`}."""


@dataclass(frozen=True)
class Damping:
    """The damping of one block as numbers: mode, λ_A, λ_G, π and the clip's κ_max."""

    mode: str
    lambda_A: float
    lambda_G: float
    pi: float
    max_condition: float | None
    """κ_max: damped eigenvalues are raised to at least (largest)/κ_max; None: no clip."""

    @property
    def joint(self) -> bool:
        """True if λ is added to the product G ⊗ A and not to each side."""
        return DAMPING_MODES[self.mode].on_product

    def floor(self, top: float, value: float) -> float:
        """Least damped eigenvalue that the clip allows: (`top` + λ)/κ_max; 0 without a clip.

        `top` is the largest undamped eigenvalue, `value` is λ.
        """
        return 0.0 if self.max_condition is None else (top + value) / self.max_condition


def resolve(mode: str, lambdas: Lambdas, max_condition: float | None, means: tuple[float, float] | None) -> Damping:
    """Compute the damping of one block from the options.

    Args:
        mode: a key of `DAMPING_MODES`.
        lambdas: λs of the options.
        max_condition: κ_max of the clip; None: no clip.
        means: mean eigenvalues (tr A/m, tr G/o) of a Kronecker block; None for any other block.
    """
    if means is None:
        return Damping(mode, 0.0, DAMPING_MODES[mode].single(lambdas), 1.0, max_condition)
    return Damping(mode, *DAMPING_MODES[mode].split(lambdas, *means), max_condition)
