"""Extreme eigenvalues of a symmetric operator by block Lanczos with thick restarts.

Legend: n side, m vectors of the basis V, b vectors of a block, k eigenvalues asked for. See `krylov` for the recurrence.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.linalg.spectra.krylov import KrylovBasis, Ritz
from gramian.linalg.spectra.operator import Operator, basis_device_of, check_counts, check_numbers, check_operator

Which = Literal["LA", "SA", "LM", "BE"]
"""End of the spectrum: "LA" largest, "SA" smallest, "LM" largest in magnitude, "BE" both ends."""

SMALL = 512
"""Largest side n for which the basis may by default fill the whole space."""

MISSED = 1e-6
"""Probability, at each end of the spectrum, that the search for further copies of an eigenvalue stops too early."""


@dataclass(frozen=True)
class LanczosSpectrum:
    """Some eigenvalues θ of a symmetric operator M, with bounds on their errors."""

    eigenvalues: Tensor
    """The k eigenvalues, float64: descending for "LA" and "BE", ascending for "SA", largest magnitude first for "LM"."""
    residual_bounds: Tensor
    """[k], upper bounds of ‖Mx − θx‖ of every eigenpair, rounding included: an eigenvalue of M lies that close to θ."""
    eigenvectors: Tensor | None
    """[n, k], orthonormal columns; None unless asked for."""
    converged: bool
    """True if all k were found and no residual bound exceeds tol·‖M‖ plus rounding."""
    complete: bool
    """True if the space orthogonal to the eigenvectors was searched and has no eigenvalue that should be among the k, so that
    repeated eigenvalues are listed as often as they occur.
    """
    iterations: int
    """Number of products with blocks; `matvecs`: number of products with single vectors."""
    matvecs: int
    restarts: int
    """Number of times the basis was reduced."""
    breakdowns: int
    """Number of times a Krylov space was exhausted, and a random vector continued it."""
    smallest: float
    """Smallest Ritz value seen (`largest`: the largest one); the spectrum extends at least from one to the other. A `smallest`
    below zero by more than `rounding` proves that M has a negative eigenvalue.
    """
    largest: float
    rounding: float
    """Norm below which a residual cannot be told from zero because of rounding."""
    asymmetry: float
    """Frobenius norm of the asymmetry of the projected operator, relative to its scale: at the level of rounding unless the
    operator is not symmetric or changes from call to call.
    """
    basis_bytes: int
    """Bytes of the basis and of the next block, the memory that grows with n times the basis size."""


def lanczos(
    operator: Operator,
    k: int = 10,
    which: Which = "LA",
    *,
    tol: float | None = None,
    max_iterations: int | None = None,
    max_basis: int | None = None,
    block_size: int = 1,
    search_copies: bool = True,
    eigenvectors: bool = False,
    basis_device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
) -> LanczosSpectrum:
    """k eigenvalues of a symmetric operator, definite or not, at one end of its spectrum or at both.

    A Krylov space contains one direction of every eigenspace (b directions for blocks of b), so it can miss copies of repeated
    eigenvalues. When the k pairs have converged, they stay in the basis, and a random block orthogonal to them starts a new
    search. Searches end when one changes none of the k values and the next best Ritz value θ either has converged too or is too
    far away: with probability 1 − 10⁻⁶ no eigenvalue λ in the searched space exceeds the largest θ there by more than
    ε(λ_max − λ_min), ε = (ln(1.648 √n / 10⁻⁶)/(2j − 1))² after j products from a random start (Kuczyński, Woźniakowski 1992).

    Cost for i products: the products, up to 8·i·max_basis·n FLOPs of reorthogonalisation (twice, against the whole basis,
    sums in float64), and (max_basis + b)·n numbers.

    Args:
        operator: symmetric; nothing else is assumed.
        k: number of eigenvalues; fewer are returned where n is smaller.
        which: "LA" largest, "SA" smallest, "LM" largest in magnitude, "BE" from both ends by turns, starting above.
        tol: largest residual norm, relative to ‖M‖; None: eps^(2/3) of the operator's dtype. Eigenvalues usually have twice
            as many exact digits.
        max_iterations: largest number of products with blocks, all searches together; None: 40·max_basis products with vectors.
        max_basis: largest number of stored vectors, at least k + 2b (or n); more converge faster. None: n for n ≤ 512, else
            2k + 20 + 12b.
        block_size: b, number of columns of one product.
        search_copies: False stops with the first Krylov space, which finds at most b copies of a repeated eigenvalue.
        eigenvectors: whether to return the eigenvectors.
        basis_device: device that stores the basis; None: the operator's.
        generator: source of the random vectors; None: a fresh one with seed 0. The global one is never touched.

    Raises:
        GramianError: for an argument outside its range, or a product that is not finite.
    """
    check_operator(operator)
    check_counts(k=k, block_size=block_size)
    if max_iterations is not None:
        check_counts(max_iterations=max_iterations)
    if max_basis is not None:
        check_counts(max_basis=max_basis)
    if which not in ("LA", "SA", "LM", "BE"):
        raise GramianError(f'which: is {which!r}; expected "LA", "SA", "LM" or "BE"')
    if tol is not None:
        check_numbers(tol=tol)
        if tol < 0:
            raise GramianError(f"tol: is {tol}; expected 0 or more")
    n = operator.dim
    k, block_size = min(k, n), min(block_size, n)
    if max_basis is None:
        max_basis = n if n <= SMALL else 2 * k + 20 + 12 * block_size
    room = min(n, max_basis)
    if room < min(n, k + 2 * block_size):
        raise GramianError(f"max_basis: is {max_basis}; expected {k + 2 * block_size} or more")
    limit = 40 * room // max(1, block_size) if max_iterations is None else max_iterations
    basis = KrylovBasis(operator, room, block_size, basis_device_of(operator, basis_device), generator)
    if tol is None:
        tol = float(torch.finfo(operator.dtype).eps ** (2 / 3))

    iterations = restarts = 0
    steps, counting = 0, True  # blocks since a random start, up to the first restart
    found_K: Tensor | None = None  # the wanted values when a search began; none in the first Krylov space
    complete = False
    ritz = basis.ritz()
    wanted = _ranked(ritz.values_M, k, which)[:k]
    smallest, largest = math.inf, -math.inf
    while not complete and basis.size < n and iterations < limit:
        basis.multiply()
        iterations, steps = iterations + 1, steps + counting
        crowded = basis.size + basis.waiting > room
        if not (crowded or basis.size == n or iterations == limit) and iterations % (1 + basis.size // 64):
            continue  # a look at T costs m³
        ritz = basis.ritz()
        ranking = _ranked(ritz.values_M, k, which)
        wanted = ranking[:k]
        smallest, largest = min(smallest, float(ritz.values_M[0])), max(largest, float(ritz.values_M[-1]))
        level = tol / 10 * basis.scale + basis.rounding
        settled = len(wanted) == k and bool((ritz.couplings_M[wanted] <= level).all())
        if settled and not search_copies:
            break
        if settled and found_K is not None and _same(ritz.values_M[wanted], found_K, which, level):
            complete = _nothing_outside(ritz, ranking, k, which, level, _hidden_share(n, steps))
        elif settled and basis.size < n and iterations < limit:
            found_K = ritz.values_M[wanted]
            basis.restart(ritz, wanted, anew=True)
            restarts, steps, counting = restarts + 1, 0, True
            continue
        if crowded and basis.size < n and not complete and iterations < limit:
            basis.restart(ritz, ranking[: k + (room - k - block_size) // 2], anew=False)
            restarts, counting = restarts + 1, False
    complete = complete or basis.size == n
    if which == "BE":
        wanted = wanted[ritz.values_M[wanted].argsort(descending=True)]
    bounds_K = (ritz.couplings_M + ritz.losses_M + basis.rounding)[wanted]
    allowed = tol * basis.scale + 2 * basis.rounding
    if complete and bool((bounds_K > allowed).any()):  # many searches have added up: look at the residuals themselves
        bounds_K = basis.residuals(ritz.values_M[wanted], ritz.vectors_MM[:, wanted]) + basis.rounding
    return LanczosSpectrum(
        eigenvalues=ritz.values_M[wanted],
        residual_bounds=bounds_K,
        eigenvectors=basis.combined(ritz.vectors_MM[:, wanted]) if eigenvectors else None,
        converged=len(wanted) == k and bool((bounds_K <= allowed).all()),
        complete=complete,
        iterations=iterations,
        matvecs=basis.matvecs,
        restarts=restarts,
        breakdowns=basis.breakdowns,
        smallest=smallest if n else 0.0,
        largest=largest if n else 0.0,
        rounding=basis.rounding,
        asymmetry=ritz.asymmetry / basis.scale if basis.scale else 0.0,
        basis_bytes=basis.nbytes,
    )


def _ranked(values_M: Tensor, k: int, which: Which) -> Tensor:
    """Indices of the ascending `values_M`, the k wanted ones first, then the rest in the order in which it is worth keeping.

    For "LM" and "BE" the rest alternates between the upper and the lower end, since either may have wanted values.
    """
    ascending = torch.arange(len(values_M))
    if which == "SA":
        return ascending
    if which == "LA":
        return ascending.flip(0)
    if which == "LM":
        magnitude = values_M.abs().argsort(descending=True, stable=True)
        others = magnitude[k:].sort().values
        return torch.cat([magnitude[:k], _inwards(others)])
    return _inwards(ascending)


def _inwards(indices_M: Tensor) -> Tensor:
    """The indices in the order last, first, last but one, second, and so on."""
    return torch.stack([indices_M.flip(0), indices_M], dim=1).flatten()[: len(indices_M)]


def _same(values_K: Tensor, others_K: Tensor, which: Which, level: float) -> bool:
    """True if two lists of k values, sorted, differ by at most `level` in every place; for "LM" by magnitude."""
    if which == "LM":
        values_K, others_K = values_K.abs(), others_K.abs()
    return bool(((values_K.sort().values - others_K.sort().values).abs() <= level).all())


def _hidden_share(n: int, steps: int) -> float:
    """ε such that with probability 1 − `MISSED` no eigenvalue exceeds the largest Ritz value by more than ε(λ_max − λ_min).

    `steps`: Lanczos steps from a random start; n: side of the operator.
    """
    return (math.log(1.648 * math.sqrt(n) / MISSED) / (2 * steps - 1)) ** 2


def _nothing_outside(ritz: Ritz, ranking: Tensor, k: int, which: Which, level: float, share: float) -> bool:
    """True if no eigenvalue other than the first k of `ranking` can belong among the k that `which` asks for.

    `level`: residual norm that counts as converged; `share`: the ε of `_hidden_share`.
    """
    values, outside = ritz.values_M, ranking[k:].sort().values
    if not len(outside):
        return False
    low, high = int(outside[0]), int(outside[-1])
    wanted = [float(value) for value in values[ranking[:k]]]
    above, below = {
        "LA": (min(wanted), -math.inf),
        "SA": (math.inf, max(wanted)),
        "LM": (min(map(abs, wanted)), -min(map(abs, wanted))),
        "BE": (min(wanted[::2]), max(wanted[1::2], default=-math.inf)),
    }[which]
    known_above, known_below = (bool(ritz.couplings_M[end] <= level) for end in (high, low))
    seen = float(values[high] - values[low])  # λ_max − λ_min outside is at most this over 1 − ε for every end not known
    unknown = 2 - known_above - known_below
    reach = share / (1 - unknown * share) * seen if unknown * share < 1 else math.inf
    quiet_above = known_above or above == math.inf or float(values[high]) + reach <= above
    quiet_below = known_below or below == -math.inf or float(values[low]) - reach >= below
    return quiet_above and quiet_below
