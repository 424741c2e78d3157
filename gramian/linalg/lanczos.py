"""Extreme eigenvalues of a symmetric map that is known by its products: block Lanczos with thick restarts.

Legend: n side, m vectors of the basis V, b vectors of a block, k eigenvalues asked for.

The basis is kept as rows, V [m, n], orthonormal. After every block of products

    M Vᵀ = Vᵀ H + Qᵀ C,    T = upper part of H, mirrored,

with the next block Q [b, n] and its coupling C [b, m]. T is block tridiagonal, but for what a restart brings along. An
eigenpair T s = θ s gives the Ritz pair (θ, Vᵀs) with the residual Vᵀ(H − T)s + QᵀCs; some eigenvalue of M lies within its
length of θ. Without restarts and for b = 1 the length of Cs is β_m|s_m|.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gramian.errors import GramianError
from gramian.linalg.operator import Operator, seeded

Which = Literal["LA", "SA", "LM", "BE"]
"""Largest, smallest, largest in magnitude, both ends."""

MISSED = 1e-6
"""Probability, at each end of the spectrum, that a search for further copies ends although there is one."""

_CHUNK = 2**22
"""Numbers of the basis that are widened to float64 at a time."""


@dataclass(frozen=True)
class LanczosSpectrum:
    """Some eigenvalues of a symmetric map, and how well they are known.

    Attributes:
        eigenvalues: [k], float64, most wanted first: descending for "LA", ascending for "SA", by magnitude for "LM"; for
            "BE" all of them descending.
        residual_bounds: [k], at least ‖Mx − θx‖ for every Ritz pair: an eigenvalue of M lies within it. Rounding counted.
        eigenvectors: [n, k], orthonormal, where asked for.
        converged: no bound exceeds tol·‖M‖ plus rounding.
        complete: what is orthogonal to the eigenvectors was searched and holds no eigenvalue that is wanted more: repeated
            eigenvalues are there as often as they should be.
        iterations: blocks of products; `matvecs`: products.
        restarts: how often the basis was cut down.
        breakdowns: how often a Krylov space was exhausted, and a random vector went on.
        smallest: smallest Ritz value met; `largest`: the largest. The spectrum reaches at least that far on both sides,
            whatever was asked for: a `smallest` below zero by more than `rounding` proves a negative eigenvalue.
        rounding: length below which a residual is rounding.
        asymmetry: ‖H − T‖_F / ‖M‖: what the products lack to be those of one symmetric matrix. Rounding, unless the map changes
            from call to call.
        basis_bytes: of the basis and the block that follows it, the memory that grows with n·m.
    """

    eigenvalues: Tensor
    residual_bounds: Tensor
    eigenvectors: Tensor | None
    converged: bool
    complete: bool
    iterations: int
    matvecs: int
    restarts: int
    breakdowns: int
    smallest: float
    largest: float
    rounding: float
    asymmetry: float
    basis_bytes: int


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
    """k eigenvalues of a symmetric map, positive or not, at one end of its spectrum or at both.

    A Krylov space holds one direction of every eigenspace (b of them for blocks of b). When the wanted pairs have converged,
    their vectors stay in the basis, a random vector orthogonal to them starts anew, and so on until a search changes nothing
    and either the best value outside has converged as well, or no wanted one can be there but with probability 10⁻⁶:
    λ ≤ θ + ε(λ_max − λ_min), ε = (ln(1.648 √n / 10⁻⁶)/(2j − 1))² after j products from a random start
    (Kuczyński and Woźniakowski 1992).

    Cost for i products: the products, up to 8·i·max_basis·n FLOPs of reorthogonalisation (twice, against the whole basis, sums
    in float64), and (max_basis + b)·n numbers.

    Args:
        operator: symmetric; nothing else is assumed.
        k: how many; fewer come back where the map has fewer.
        which: "LA" largest, "SA" smallest, "LM" largest in magnitude, "BE" from both ends by turns, starting above.
        tol: for residuals, relative to ‖M‖; by default eps^(2/3) of the operator's dtype. Eigenvalues are usually twice as
            many digits exact.
        max_iterations: blocks of products, all searches together; by default 40 times the basis.
        max_basis: most vectors kept; by default 2k + 20 + 10b; k + 2b at least, and the more the faster.
        block_size: b, columns of a product.
        search_copies: False ends with the first Krylov space, which sees b copies of a repeated eigenvalue at most.
        eigenvectors: hand them back.
        basis_device: where the basis is kept; by default on the operator's device.
        generator: of the random vectors; by default a fresh one with seed 0. The global one is never touched.

    Raises:
        GramianError: if an argument makes no sense, or a product is not finite.
    """
    for name, value in (("k", k), ("block_size", block_size), ("max_iterations", max_iterations)):
        if value is not None and value < 1:
            raise GramianError(f"{name}: is {value}; expected 1 or more")
    if which not in ("LA", "SA", "LM", "BE"):
        raise GramianError(f'which: is {which!r}; expected "LA", "SA", "LM" or "BE"')
    if tol is not None and not tol >= 0:
        raise GramianError(f"tol: is {tol}; expected 0 or more")
    n = operator.dim
    k, block_size = min(k, n), min(block_size, n)
    room = min(n, 2 * k + 20 + 10 * block_size if max_basis is None else max_basis)
    if room < min(n, k + 2 * block_size):
        raise GramianError(f"max_basis: is {max_basis}; expected {k + 2 * block_size} or more")
    limit = 40 * room if max_iterations is None else max_iterations
    basis = _Basis(operator, room, block_size, torch.device(basis_device or operator.device), generator)
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
        if settled and found_K is not None and bool(((ritz.values_M[wanted] - found_K).abs() <= level).all()):
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


# ---- which values, and whether they are all --------------------------------------------------------------------------


def _ranked(values_M: Tensor, k: int, which: Which) -> Tensor:
    """Indices of ascending values: the k wanted ones, then the others from the ends that more of them could come from."""
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
    """Last, first, last but one, second, and so on."""
    return torch.stack([indices_M.flip(0), indices_M], dim=1).flatten()[: len(indices_M)]


def _hidden_share(n: int, steps: int) -> float:
    """ε: but with probability `MISSED`, no eigenvalue lies above the largest Ritz value by more than ε(λ_max − λ_min)."""
    return (math.log(1.648 * math.sqrt(n) / MISSED) / (2 * steps - 1)) ** 2


def _nothing_outside(ritz: "_Ritz", ranking: Tensor, k: int, which: Which, level: float, share: float) -> bool:
    """True if no eigenvalue beside the first k is wanted more than they are."""
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
    reach = share / (1 - 2 * share) * float(values[high] - values[low]) if share < 0.5 else math.inf
    quiet_above = above == math.inf or ritz.couplings_M[high] <= level or float(values[high]) + reach <= above
    quiet_below = below == -math.inf or ritz.couplings_M[low] <= level or float(values[low]) - reach >= below
    return bool(quiet_above and quiet_below)


# ---- the basis -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Ritz:
    """T = S diag(θ) Sᵀ, θ ascending.

    Attributes:
        values_M: θ.
        vectors_MM: S.
        couplings_M: ‖Cs‖, the part of a residual that more products can reduce.
        losses_M: bounds of the rest: ‖(H − T)s‖, and what restarts left behind.
        asymmetry: ‖H − T‖_F.
    """

    values_M: Tensor
    vectors_MM: Tensor
    couplings_M: Tensor
    losses_M: Tensor
    asymmetry: float


class _Basis:
    """An orthonormal basis V, its products H, and the next block Q with its coupling C: M Vᵀ = Vᵀ H + Qᵀ C.

    Attributes:
        size: m, vectors whose products are known.
        scale: largest ‖Mq‖ met, at most ‖M‖.
    """

    _next_BN: Tensor
    _coupling_BM: Tensor

    def __init__(
        self, operator: Operator, room: int, block_size: int, device: torch.device, generator: torch.Generator | None
    ) -> None:
        self._operator, self._block_size = operator, block_size
        self._generator = seeded(operator) if generator is None else generator
        self._rows_MN = torch.empty(room, operator.dim, dtype=operator.working_dtype, device=device)
        self._H_MM = torch.zeros(room, room, dtype=torch.float64)
        self._lost_M = torch.zeros(room, dtype=torch.float64)  # what restarts left out of M Vᵀ: lengths of its columns,
        self._lost = 0.0  # and its Frobenius norm
        self.size = self.matvecs = self.breakdowns = 0
        self.scale = 0.0
        self._begin_anew()

    @property
    def waiting(self) -> int:
        """Vectors of the next block."""
        return len(self._next_BN)

    @property
    def rounding(self) -> float:
        """Length of a residual that cannot be told from zero."""
        return self._operator.rounding * self.scale

    @property
    def nbytes(self) -> int:
        """Of V and the largest Q."""
        return (len(self._rows_MN) + self._block_size) * self._operator.dim * self._rows_MN.element_size()

    def multiply(self) -> None:
        """Take the next block into the basis, multiply it, and find the block that follows."""
        n, begin, end = self._operator.dim, self.size, self.size + len(self._next_BN)
        self._rows_MN[begin:end] = self._next_BN
        self._H_MM[begin:end, :begin] = self._coupling_BM
        self.size = end
        product_NB = self._operator.checked_matmat(self._next_BN.mT)
        self.matvecs += end - begin
        residual_BN = product_NB.mT.to(device=self._rows_MN.device, dtype=torch.float64, copy=True)
        lengths_B = residual_BN.norm(dim=1)
        self.scale = max(self.scale, float(lengths_B.max()))
        self._H_MM[:end, begin:end] = self._orthogonalised(residual_BN)
        self._next_BN = self._rows_MN.new_empty(0, n)
        self._coupling_BM = torch.zeros(min(self._block_size, n - end), end, dtype=torch.float64)
        for column, (residual_N, length) in enumerate(zip(residual_BN, lengths_B, strict=True), start=begin):
            self._coupling_BM[: len(self._next_BN), column] = self._orthogonal_to_next(residual_N)
            beta = float(residual_N.norm())
            if beta > self.rounding and len(self._next_BN) < len(self._coupling_BM):
                residual_N /= beta
                if beta < 1e-3 * float(length):  # what is left of a long vector leans on the basis again
                    self._orthonormalise(residual_N)
                self._coupling_BM[len(self._next_BN), column] = beta
                self._append_next(residual_N)
        self._fill_next()

    def ritz(self) -> _Ritz:
        """Rayleigh and Ritz: eigenpairs of T, and their residuals."""
        m = self.size
        H_MM = self._H_MM[:m, :m]
        T_MM = H_MM.triu() + H_MM.triu(1).mT
        values_M, vectors_MM = torch.linalg.eigh(T_MM)
        couplings_M = (self._coupling_BM @ vectors_MM).norm(dim=0)
        noise_M = ((H_MM - T_MM) @ vectors_MM).norm(dim=0)
        lost_M = (self._lost_M[:m] @ vectors_MM.abs()).clamp(max=self._lost)
        return _Ritz(values_M, vectors_MM, couplings_M, noise_M + lost_M, float((H_MM - T_MM).norm()))

    def restart(self, ritz: _Ritz, kept: Tensor, anew: bool) -> None:
        """Keep these Ritz vectors only, and the next block, or `anew` a random one, whose coupling to them is dropped."""
        vectors_MP = ritz.vectors_MM[:, kept]
        rounded = torch.finfo(self._rows_MN.dtype).eps / 2 * self.scale
        added_P = ritz.couplings_M[kept] + rounded if anew else torch.full((len(kept),), rounded, dtype=torch.float64)
        self._lost += ritz.asymmetry + float(added_P.norm())
        self._lost_M.zero_()
        self._lost_M[: len(kept)] = ritz.losses_M[kept] + added_P
        self._combine_in_place(vectors_MP)
        self.size = len(kept)
        self._H_MM.zero_()
        self._H_MM[: self.size, : self.size] = torch.diag(ritz.values_M[kept])
        self._coupling_BM = self._coupling_BM @ vectors_MP
        if anew:
            self._begin_anew()

    def residuals(self, values_K: Tensor, vectors_MK: Tensor) -> Tensor:
        """‖M x − θ x‖ of Ritz pairs, [k], by one product for each."""
        lengths = []
        for begin in range(0, len(values_K), self._block_size):
            block = slice(begin, begin + self._block_size)
            x_NB = self.combined(vectors_MK[:, block])
            product_NB = self._operator.checked_matmat(x_NB).double()
            lengths.append((product_NB - x_NB.double() * values_K[block].to(x_NB.device)).norm(dim=0).cpu())
            self.matvecs += x_NB.shape[1]
        return torch.cat(lengths)

    def combined(self, vectors_MK: Tensor) -> Tensor:
        """Vᵀ S, [n, k], on the operator's device."""
        rows_MN = self._rows_MN[: self.size]
        combined_NK = rows_MN.new_empty(rows_MN.shape[1], vectors_MK.shape[1])
        for part in self._parts():
            combined_NK[part] = (rows_MN[:, part].double().mT @ vectors_MK.to(rows_MN.device)).to(rows_MN.dtype)
        return combined_NK.to(self._operator.device)

    def _combine_in_place(self, vectors_MP: Tensor) -> None:
        """First rows of V ← Sᵀ V, part by part."""
        m, p = vectors_MP.shape
        vectors_PM = vectors_MP.mT.to(self._rows_MN.device)
        for part in self._parts():
            self._rows_MN[:p, part] = (vectors_PM @ self._rows_MN[:m, part].double()).to(self._rows_MN.dtype)

    def _parts(self) -> list[slice]:
        width = max(1, _CHUNK // max(1, len(self._rows_MN)))
        return [slice(begin, begin + width) for begin in range(0, self._operator.dim, width)]

    # Random and orthogonal vectors. Sums run in float64, whatever the basis is kept in.

    def _begin_anew(self) -> None:
        """Random vectors, orthogonal to the basis, as the next block; coupled to nothing."""
        self._next_BN = self._rows_MN.new_empty(0, self._operator.dim)
        rows = min(self._block_size, self._operator.dim - self.size)
        self._coupling_BM = torch.zeros(rows, self.size, dtype=torch.float64)
        self._fill_next()
        self.breakdowns -= rows

    def _fill_next(self) -> None:
        """Random vectors, orthogonal to all others, for what the next block lacks."""
        while len(self._next_BN) < len(self._coupling_BM):
            random_N = torch.randn(self._operator.dim, generator=self._generator, device=self._generator.device)
            random_N = random_N.to(device=self._rows_MN.device, dtype=torch.float64)
            self._orthonormalise(random_N)
            self._append_next(random_N)
            self.breakdowns += 1

    def _append_next(self, vector_N: Tensor) -> None:
        self._next_BN = torch.cat([self._next_BN, vector_N[None].to(self._next_BN.dtype)])

    def _orthonormalise(self, vector_N: Tensor) -> None:
        """Make a vector orthogonal to V and Q, of length 1, in place."""
        for _ in range(2):
            self._orthogonalised(vector_N[None])
            self._orthogonal_to_next(vector_N)
            vector_N /= vector_N.norm()

    def _orthogonalised(self, vectors_BN: Tensor) -> Tensor:
        """Take what lies in V out of float64 vectors, in place, twice; what was taken, [m, b]."""
        taken_MB = torch.zeros(self.size, len(vectors_BN), dtype=torch.float64, device=vectors_BN.device)
        for _ in range(2):
            share_MB = torch.zeros_like(taken_MB)
            for part in self._parts():
                share_MB += self._rows_MN[: self.size, part].double() @ vectors_BN[:, part].mT
            for part in self._parts():
                vectors_BN[:, part] -= share_MB.mT @ self._rows_MN[: self.size, part].double()
            taken_MB += share_MB
        return taken_MB.cpu()

    def _orthogonal_to_next(self, vector_N: Tensor) -> Tensor:
        """The same for Q and one vector, [rows of Q]."""
        taken_B = torch.zeros(len(self._next_BN), dtype=torch.float64)
        for _ in range(2):
            for i, row_N in enumerate(self._next_BN.double()):
                share = row_N @ vector_N
                vector_N -= share * row_N
                taken_B[i] += share.cpu()
        return taken_B
