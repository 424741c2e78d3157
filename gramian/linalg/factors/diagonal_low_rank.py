"""A factor M = diag(d) ± U Uᵀ: the exact Fisher of a softmax head (minus), a tied embedding and head (plus).

Solves use Woodbury's formula with D_λ = diag(d + λ), λ the damping, and S = I ± Uᵀ D_λ⁻¹ U:
(M+λI)⁻¹Y = D_λ⁻¹Y ∓ D_λ⁻¹U S⁻¹ UᵀD_λ⁻¹Y. For the softmax head S is nearly singular (M·1 = 0), so it is formed in float64.
Integer powers, trace, Frobenius norm and log det are exact. Other powers are approximated by sums of shifted inverses, and
`power_by_column`, which scales M differently for every column, solves by conjugate gradients; `work.error_bound` bounds the
error of both.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from gramian.linalg.factors.cholesky import Cholesky
from gramian.linalg.factors.columns import Columns
from gramian.linalg.factors.dense import Dense
from gramian.linalg.factors.factor import WIDEST_DENSE, AtRest, Clip
from gramian.linalg.factors.rational_power import rational_power
from gramian.linalg.factors.stored import MatrixSource, Stored, store_columns
from gramian.linalg.wide import by_columns

CG_STEPS = 1000
CG_TOLERANCE = 1e-12


class DiagonalLowRank(AtRest):
    """M = diag(d) + sign·U Uᵀ with U [n, r], positive semi-definite. Memory: n·r + n numbers, r² more once used."""

    def __init__(self, values_N: Tensor, columns: Stored | Columns, sign: int) -> None:
        """Store d [n], in full also where the rows of U are sharded, and U [n, r]; `sign` is +1 or -1. Nothing is computed."""
        self.values_N, self.sign = values_N, sign
        self.columns = Columns(columns) if isinstance(columns, Stored) else columns
        self.kind = "diagonal minus low rank" if sign < 0 else "diagonal plus low rank"
        super().__init__(self.columns.stored, len(values_N), self.columns.count)
        self._whole: Dense | None = None

    @classmethod
    def of(
        cls, values_N: Tensor, columns_NR: Tensor, sign: int, storage: torch.dtype | None = None
    ) -> "DiagonalLowRank":
        """The factor diag(values) + sign·U Uᵀ, with U rounded to the dtype `storage` (None: its own) and d unchanged."""
        return cls(values_N, store_columns(columns_NR, storage or columns_NR.dtype), sign)

    @classmethod
    def softmax(
        cls, weighted_p_NR: Tensor | MatrixSource, storage: torch.dtype, scale: float = 1.0
    ) -> "DiagonalLowRank":
        """The softmax Fisher Σ_t w_t (diag p_t − p_t p_tᵀ) of tokens t with predicted probabilities p_t and weights w_t.

        Args:
            weighted_p_NR: columns √w_t p_t / scale, one per token.
            storage: dtype to which the columns are rounded.
            scale: factor of all columns.
        """
        stored = store_columns(weighted_p_NR, storage)
        return cls.softmax_of(Columns(stored if scale == 1.0 else stored.scaled(scale)))

    @classmethod
    def softmax_of(cls, columns: Columns) -> "DiagonalLowRank":
        """Softmax Fisher Σ_t w_t (diag p_t − p_t p_tᵀ) from columns u_t = √w_t p_t, positive semi-definite also after rounding.

        p_t are the probabilities predicted at token t, w_t its weight. diag(q)(1ᵀq) − qqᵀ is positive semi-definite for q ≥ 0,
        so d is summed from the stored, rounded columns q_t: d = Σ_t q_t (1ᵀq_t), which is Σ_t w_t p_t for exact columns. d
        stays in float64, since M is the small difference of diag(d) and U Uᵀ where predictions are confident.
        """
        return cls(_row_sums(columns), columns, -1)

    @property
    def nbytes(self) -> int:
        """Bytes of d, U, the Cholesky factorisation of S [r, r] and, if it was formed, the dense M."""
        whole = 0 if self._whole is None else self._whole.nbytes
        return self.values_N.nbytes + self.columns.nbytes + sum(c.nbytes for c in self.pending()) + whole

    @property
    def quantisation_error(self) -> Tensor:
        """Relative error of the stored U Uᵀ: about twice that of U."""
        return 2 * self.columns.stored.relative_error

    def matvec(self, y_NK: Tensor) -> Tensor:
        """M Y = d ⊙ Y ± U(UᵀY) for Y [n, k]. 4·n·r·k FLOPs."""
        y_NK = y_NK.to(self.dtype)
        return self._shifted_matvec(y_NK, self.values_N.to(y_NK)[:, None])

    def _shifted_matvec(self, y_NK: Tensor, d_N1: Tensor) -> Tensor:
        return d_N1 * y_NK + self.sign * self.columns.times(self.columns.transposed_times(y_NK))

    def trace(self) -> Tensor:
        """Trace of M, Σ d ± ‖U‖_F², 0-dim float64."""
        return self.values_N.double().sum() + self.sign * self.columns.square()

    def diagonal(self) -> Tensor:
        """The diagonal of M, [n]: d ± squared row norms of U."""
        return (self.values_N.double() + self.sign * self.columns.squares_N()).to(self.dtype)

    def frobenius(self) -> Tensor:
        """‖M‖_F = √(‖d‖² ± 2 Σ d_i‖u_i‖² + ‖UᵀU‖_F²) with rows u_i of U, 0-dim float64."""
        d_N = self.values_N.double()
        cross = (d_N * self.columns.squares_N()).sum()
        return (
            (d_N.square().sum() + 2 * self.sign * cross + self.columns.cached_gram().square().sum()).clamp(min=0).sqrt()
        )

    def largest_bound(self) -> Tensor:
        """Upper bound of the largest eigenvalue: max d, plus ‖UᵀU‖_F if U Uᵀ is added (sign > 0)."""
        top = self.values_N.max().double()
        if self.sign < 0:
            return top
        norm: Tensor = torch.linalg.vector_norm(self.columns.cached_gram())
        return top + norm

    def eigenvalues(self) -> Tensor:
        """All eigenvalues of M, from the dense matrix, for sides up to `WIDEST_DENSE`. 9·n³ FLOPs."""
        values: Tensor = torch.linalg.eigvalsh(self.to_dense().double())
        return values.clamp(min=0).to(self.dtype)

    def power(self, y_NK: Tensor, p: float, damping: float, max_condition: float | None = None) -> Tensor:
        """(M + λI)^p Y for Y [n, k], λ = `damping`: exact for integer p, else with a relative error up to `work.error_bound`.

        p is split into an integer and a fraction in (-1, 0), for which a sum of shifted inverses is fitted. If the condition
        number of M + λI may exceed `max_condition` κ, the power is computed on the dense M with eigenvalues below largest/κ
        raised to that floor, or, if M is wider than `WIDEST_DENSE`, with λ raised to the floor.
        """
        given = torch.promote_types(self.dtype, y_NK.dtype)
        if not self.clips_nothing(damping, max_condition) and self.dim <= WIDEST_DENSE:
            return self.written_out().power(y_NK, p, damping, max_condition)
        asked, damping = damping, self._clipped_damping(damping, max_condition)
        bound = 0.0
        if damping > asked:
            bound = abs((1 + damping / asked) ** p - 1) if asked else float("inf")
        whole = -int(-p // 1)  # ceiling
        fraction, out = p - whole, y_NK.to(torch.float64)
        if fraction:
            fit = rational_power(fraction, damping, self.bound() + damping)
            total = fit.constant * out
            for weight, shift in zip(fit.weights, fit.shifts, strict=True):
                total = total + weight * self._solve(out, damping + shift, keep=False)
            out, bound = total, bound + fit.error
        for _ in range(whole):
            out = self._shifted_matvec(out, (self.values_N.double() + damping).to(out.device)[:, None])
        for _ in range(-whole):
            out = self._solve(out, damping, keep=True)
        if bound:
            self.work.error_bound = bound
        return out.to(given)

    def power_by_column(self, y_NK: Tensor, p: float, scales_K: Tensor, damping: float) -> Tensor:
        """(s_j M + λI)^p y_j for every column y_j of Y, with scales s [k], for the joint damping of a Kronecker product.

        Inverses are solved by conjugate gradients in float64, with the diagonal as preconditioner, until the relative residual
        of every column is at most `CG_TOLERANCE` or `CG_STEPS` steps were made. `work.error_bound` becomes the relative error
        bound of the worst column, from ‖x − x*‖ ≤ ‖residual‖/λ for each solve, propagated through the solves and products
        that follow.
        """
        whole = -int(-p // 1)
        fraction, out, scales = p - whole, y_NK.to(torch.float64), scales_K.to(y_NK.device, torch.float64)
        top_K = self.bound() * scales + damping
        error_K, bound = torch.zeros_like(scales), 0.0
        if fraction:
            fit = rational_power(fraction, damping, float(top_K.max()))
            total, bound = fit.constant * out, fit.error
            for weight, shift in zip(fit.weights, fit.shifts, strict=True):
                part, error = self._conjugate_gradients(out, scales, damping + shift)
                total, error_K = total + weight * part, error_K + abs(weight) * error
            out = total
        for _ in range(whole):
            out = scales * self._shifted_matvec(out, self.values_N.to(out)[:, None]) + damping * out
            error_K = error_K * top_K
        for _ in range(-whole):
            out, error = self._conjugate_gradients(out, scales, damping)
            error_K = error_K / damping + error
        relative_K = error_K / out.norm(dim=0).clamp(min=torch.finfo(torch.float64).tiny)
        self.work.error_bound = bound + float(relative_K.max()) if len(relative_K) else bound
        return out.to(self.dtype)

    def _conjugate_gradients(self, b_NK: Tensor, scales_K: Tensor, damping: float) -> tuple[Tensor, Tensor]:
        """Solve (s_j M + λI) x_j = b_j for every column j of B; returns X, and an upper bound of every column's error, [k]."""
        d_N1 = self.values_N.to(b_NK)[:, None]
        conditioner = 1.0 / (self.diagonal().clamp(min=0).to(b_NK)[:, None] * scales_K + damping)
        x = torch.zeros_like(b_NK)

        def system(v: Tensor) -> Tensor:
            return scales_K * self._shifted_matvec(v, d_N1) + damping * v

        r = b_NK - system(x)
        z = conditioner * r
        direction, rz = z, (r * z).sum(0)
        target = CG_TOLERANCE * b_NK.norm(dim=0)
        for _ in range(CG_STEPS):
            if bool((r.norm(dim=0) <= target).all()):
                break
            image = system(direction)
            step = rz / (direction * image).sum(0).clamp(min=torch.finfo(torch.float64).tiny)
            x, r = x + step * direction, r - step * image
            z = conditioner * r
            rz_next = (r * z).sum(0)
            direction = z + (rz_next / rz.clamp(min=torch.finfo(torch.float64).tiny)) * direction
            rz = rz_next
        return x, (b_NK - system(x)).norm(dim=0) / damping

    def written_out(self) -> Dense:
        """M as a dense factor, formed once and cached; it records Cholesky attempts and fallbacks in this factor's `work`."""
        if self._whole is None:
            self._whole = Dense.of(self.to_dense())
            self._whole.work = self.work
        return self._whole

    def _clipped_damping(self, damping: float, max_condition: float | None) -> float:
        """Damping that limits the condition number to `max_condition` κ: λ = `damping` if that does, else (σ_max + λ)/κ.

        σ_max is an upper bound of the largest eigenvalue of M. Compared with raising only the eigenvalues of M + λI below that
        floor, every eigenvalue becomes at most twice as large, provided that the bound is tight.
        """
        if self.clips_nothing(damping, max_condition):
            return damping
        assert max_condition is not None
        raised_to = (self.bound() + damping) / max_condition
        self.work.clip_note = (
            f"damping raised to the clip's floor {raised_to:.3g}, from a bound on the largest eigenvalue"
        )
        return raised_to

    def clip(self, damping: float, max_condition: float) -> Clip:
        """How many eigenvalues of M + λI are raised, and by how much, to limit its condition number to `max_condition`.

        The count is 0 if an upper bound of the eigenvalues shows it; else they are counted on the dense M. If M is wider than
        `WIDEST_DENSE`, all n count as raised, since `power` then raises the damping λ instead.
        """
        if self.clips_nothing(damping, max_condition):
            return Clip(0, self.dim, 0.0, (self.bound() + damping) / max_condition)
        if self.dim <= WIDEST_DENSE:
            return self.written_out().clip(damping, max_condition)
        floor = self._clipped_damping(damping, max_condition)
        return Clip(self.dim, self.dim, self.dim * (floor - damping), floor)

    def prepare_solve(self, damping: float, first_jitter: float, dtype: torch.dtype = torch.float32) -> None:
        """Launch the Cholesky factorisation, in float64, of S = I ± Uᵀ(d + λ)⁻¹U; only that of the last damping λ is stored."""
        if (damping, torch.float64) not in self._cholesky:
            self._cholesky = {(damping, torch.float64): self._system(damping, first_jitter)}

    def _system(self, damping: float, first_jitter: float) -> Cholesky:
        small = self.columns.gram(1.0 / (self.values_N.double() + damping)) * self.sign
        small.diagonal().add_(1.0)
        return Cholesky(small, first_jitter)

    def solve(self, y_NK: Tensor, damping: float, first_jitter: float = 1e-12) -> Tensor:
        """(M + λI)⁻¹ Y by Woodbury's formula in float64, λ = `damping`. 2·n·r² + r³/3 FLOPs once, then 4·n·r·k for Y [n, k]."""
        self.prepare_solve(damping, first_jitter)
        given = torch.promote_types(self.dtype, y_NK.dtype)
        return by_columns(y_NK, self.dim, lambda y: self._solve(y.to(torch.float64), damping, keep=True), given)

    def _solve(self, y_NK: Tensor, damping: float, keep: bool) -> Tensor:
        if keep:
            self.prepare_solve(damping, 1e-12)
        system = self._cholesky[damping, torch.float64] if keep else self._system(damping, 1e-12)
        d_N1 = (self.values_N.double() + damping).to(y_NK.device)[:, None]
        scaled = y_NK / d_N1
        inner = system.solve(self.columns.transposed_times(scaled).to(self.device)).to(scaled)
        if keep:
            self.work.attempts = [vars(attempt) for attempt in system.attempts]
        return self.columns.times(inner).div_(d_N1).mul_(-self.sign).add_(scaled)

    def logdet(self, damping: float) -> Tensor:
        """log det(M + λI) = Σ log(d + λ) + log det S, S = I ± Uᵀ(d + λ)⁻¹U, 0-dim float64."""
        return (self.values_N.double() + damping).log().sum() + self._system(damping, 1e-14).logdet()

    def thin(self, chosen: Tensor) -> "DiagonalLowRank":
        """A factor of the columns with the indices `chosen`, times √(r / their number): M in expectation over random choices.

        If U Uᵀ is subtracted, the part Σ_t u_t(1ᵀu_t) of d that belongs to the columns u_t is replaced by that of the chosen
        ones, so that the result is positive semi-definite.
        """
        columns = self.columns.select(chosen, (self.rank / len(chosen)) ** 0.5)
        d_N = self.values_N
        if self.sign < 0:
            rest = self.values_N.double() - _row_sums(self.columns)
            d_N = rest.clamp(min=0) + _row_sums(columns)
        return DiagonalLowRank(d_N, columns, self.sign)

    def moved(self, move: Callable[[Tensor], Tensor], home: torch.device | None = None) -> "DiagonalLowRank":
        """The same factor with d and U passed through `move`; `home`: device for products with U, None: where U is."""
        return DiagonalLowRank(move(self.values_N), self.columns.moved(move, home), self.sign)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "DiagonalLowRank":
        """The same factor on another device or with U rounded to another storage dtype; None leaves either as it is."""
        columns = self.columns.to(device, dtype)
        if dtype is None or dtype == self.storage_dtype:
            return DiagonalLowRank(self.values_N.to(device=device), columns, self.sign)
        values_N = self.values_N.to(device=device, dtype=torch.promote_types(self.values_N.dtype, columns.stored.dtype))
        return DiagonalLowRank(values_N, within_diagonal(values_N, columns, self.sign), self.sign)

    def dense(self) -> Tensor:
        """The matrix M = diag(d) ± U Uᵀ, [n, n]."""
        whole = self.columns.whole().squared().mul_(self.sign)
        whole.diagonal().add_(self.values_N.to(whole))
        return whole


def within_diagonal(values_N: Tensor, columns: Columns, sign: int) -> Columns:
    """U, scaled down a little if rounding it made diag(d) − U Uᵀ indefinite; unchanged if `sign` > 0. 2·n·r² FLOPs.

    diag(d) − U Uᵀ is positive semi-definite if no eigenvalue of Uᵀ diag(d)⁻¹ U exceeds 1. Rows of U must be 0 where d is 0.
    """
    if sign > 0 or not columns.count:
        return columns
    d_N = values_N.double()
    largest = float(torch.linalg.eigvalsh(columns.gram(torch.where(d_N > 0, 1 / d_N, 0.0))).max())
    return columns.scaled(largest**-0.5) if largest > 1 + 1e-14 else columns


def _row_sums(columns: Columns) -> Tensor:
    """Σ_t u_t (1ᵀu_t), [n], float64: the diagonal that makes diag − U Uᵀ positive semi-definite for every U ≥ 0."""
    one_N1 = torch.ones(columns.dim, 1, dtype=torch.float64, device=columns.stored.body.device)
    return columns.times(columns.transposed_times(one_N1))[:, 0]
