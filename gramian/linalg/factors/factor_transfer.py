"""Export a factorisation from the rank that computed it, and import it on the other ranks that store the same factor.

A factor is applied through one of two factorisations: the Cholesky factorisation of its damped matrix ("solve"), or its
eigenpairs ("eigen"). Sending one is cheap compared with computing it: n² numbers against about n³ operations.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from gramian.linalg.factors.cholesky import Cholesky, CholeskyAttempt
from gramian.linalg.factors.dense import Dense
from gramian.linalg.factors.factor import AtRest, Decomposable, Factor

What = Literal["solve", "eigen"]


def side(factor: Factor) -> int:
    """Side n of the matrix that is factorised: the width of a dense factor, the rank of a low-rank one."""
    return factor.dim if isinstance(factor, Dense) else factor.rank


def flops(factor: Factor, what: What) -> float:
    """FLOPs of a factorisation of this factor: about n³/3 for Cholesky ("solve"), 9n³ for eigenpairs ("eigen")."""
    return side(factor) ** 3 * (9.0 if what == "eigen" else 1 / 3)


def prepare_power(
    factor: Decomposable, p: float, damping: float, max_condition: float | None, dtype: torch.dtype
) -> None:
    """Compute and cache the eigenpairs that `factor.power(Y, p, damping, max_condition)` needs for a Y of this dtype."""
    lowest = max(damping, factor._floor(damping, max_condition))
    factor.eigenpairs(torch.promote_types(factor.working_dtype(lowest, p), dtype))


def forget_system(factor: Factor) -> None:
    """Free the Cholesky factorisation that this factor caches."""
    assert isinstance(factor, AtRest)
    factor._cholesky = {}


def made(factor: Factor, what: What) -> tuple[list[Tensor], dict[str, Any]]:
    """Export a factor's last factorisation: its tensors, and a JSON dict of attempts and fallbacks; `take` imports both.

    For "solve" it must be called before the factorisation is first used (see `Cholesky.parts`).
    """
    if what == "eigen":
        assert isinstance(factor, Decomposable) and factor._eigen is not None
        return list(factor._eigen), {"decomposed": factor.work.decomposed, "fallback": factor.work.fallback}
    (system,) = factor.pending()
    return system.parts(), {"attempts": [[attempt.jitter, attempt.result] for attempt in system.attempts]}


def take(factor: Factor, what: What, damping: float, tensors: list[Tensor], about: dict[str, Any]) -> None:
    """Store in `factor` a factorisation for `damping`, from the `tensors` and the dict `about` that another rank exported."""
    if what == "eigen":
        assert isinstance(factor, Decomposable)
        factor._eigen = (tensors[0], tensors[1])
        factor.work.decomposed, factor.work.fallback = about["decomposed"], about["fallback"]
        return
    system = Cholesky.of_parts(tensors, [CholeskyAttempt(*attempt) for attempt in about["attempts"]])
    assert isinstance(factor, AtRest)
    factor._cholesky = {(damping, tensors[0].dtype): system}
