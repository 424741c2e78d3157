"""Damping: the multiples of the identity that are added to a block of the Fisher before it is raised to a power.

Kronecker block F = G ⊗ A (row-major: F vec(Y) = vec(G Y A)):
- "factored": (G + λ_G I) ⊗ (A + λ_A I);
- "pi": the same with λ_A = π√λ, λ_G = √λ/π, π² = (tr A/m)/(tr G/o), so that both sides are damped alike relative to their
  mean eigenvalues (Martens and Grosse 2015);
- "joint": G ⊗ A + λI exactly, in the eigenbasis of both sides.
Any other block: F + λI, with λ_G in place of λ under "factored".
"""

from dataclasses import dataclass

from gramian.curvature.options import Options


@dataclass(frozen=True)
class Damping:
    """The damping of one block as numbers."""

    mode: str
    lambda_A: float
    lambda_G: float
    pi: float
    max_condition: float | None
    """κ_max, above which eigenvalues are raised; None: no clip."""

    @property
    def joint(self) -> bool:
        """True if λ is added to the product."""
        return self.mode == "joint"

    def floor(self, top: float, value: float) -> float:
        """The smallest damped eigenvalue that the clip allows, (top + λ)/κ_max; 0 without a clip."""
        return 0.0 if self.max_condition is None else (top + value) / self.max_condition


def resolve(options: Options, kronecker: bool, mean_A: float, mean_G: float) -> Damping:
    """The damping of one block from the mean eigenvalues tr A/m and tr G/o of its sides; both λs are λ under "joint"."""
    condition = options.max_condition
    if not kronecker:
        value = options.lambda_G if options.damping_mode == "factored" else options.joint_lambda
        return Damping(options.damping_mode, 0.0, value, 1.0, condition)
    if options.damping_mode == "joint":
        return Damping("joint", options.joint_lambda, options.joint_lambda, 1.0, condition)
    if options.damping_mode == "factored":
        return Damping("factored", options.lambda_A, options.lambda_G, 1.0, condition)
    pi = (mean_A / mean_G) ** 0.5 if mean_A > 0 and mean_G > 0 else 1.0
    root = options.damping**0.5
    return Damping("pi", pi * root, root / pi, pi, condition)
