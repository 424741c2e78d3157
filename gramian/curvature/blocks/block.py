"""One block of the Fisher with its factors: products F Y = G Y A with Y [o, m], and powers (F + damping)^p Y.

Legend: Y the block's parameters or their gradient as a matrix, o outputs, m inputs (the bias included), r and s numbers of
eigenvectors of G and A. A and G are the two sides of the block. The clip raises damped eigenvalues to at least largest/κ_max.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gramian.core.dtypes import HALF
from gramian.core.errors import GramianError
from gramian.curvature.blocks.block_specs import Spec
from gramian.curvature.blocks.damping import Damping
from gramian.curvature.blocks.eigenvalue_correction import Correction
from gramian.linalg import WIDEST_DENSE, BlockDiagonal, Clip, Dense, Diagonal, DiagonalLowRank, Factor, Spectral
from gramian.linalg.factors.factor import Decomposable, raised
from gramian.linalg.factors.factor_transfer import What, prepare_power
from gramian.linalg.wide import padded

PARTS = 8
"""Number of parts of a gradient that are multiplied one after the other inside of a memory budget."""


@dataclass
class Facts:
    """How the estimate of one block was made: token counts, reasons, bytes and times, for the K-FAC record."""

    tokens: int = 0
    """Number of tokens T in the captured data; the number of samples for a block that is not a Kronecker product."""
    kept_tokens: int = 0
    """Number of tokens in the estimate: fewer than `tokens` where a random subset was taken."""
    terms: float = 0.0
    """Number of loss terms N over which G was averaged."""
    step: int = 0
    """Number of the step (capture or collection) at which the estimate was made."""
    refreshes: int = 0
    """Number of estimates in the moving average of the factors."""
    reason_A: str = ""
    """Why the factor A is dense, low rank or diagonal."""
    reason_G: str = ""
    most_columns: dict[str, int] = field(default_factory=dict)
    """{"A" or "G": column limit that memory_budget sets on its low-rank moving average}; otherwise `kfac_auto_t_max`."""
    discarded_trace_A: float = 0.0
    discarded_trace_G: float = 0.0
    seconds: float = 0.0
    shares_A_with: str = ""
    estimate: str = ""
    """Where the labels behind G came from: "empirical" (the data), "mc" (drawn), or "exact softmax" (no labels).

    Of another loss than a softmax its name follows: "mc, bce", "exact mse, noise_scale=1"."""
    local_tokens: int = 0
    """Number of tokens that this process had, out of the `tokens` of all processes."""
    reduction_A: str = ""
    """How processes joined the sums of A: "dense" (all-reduce), "gather", "gram" (sharded by features); "": not joined."""
    reduction_G: str = ""
    sent: dict[str, int] = field(default_factory=dict)
    """{kind of collective: bytes that this process sent for the block}."""
    reason_ekfac: str = ""
    """Why the block has K-FAC's eigenvalues although EK-FAC is on; "" if it has EK-FAC's, or EK-FAC is off."""
    samples: int = 0
    """Number of samples behind the factors, every draw of labels counted."""
    backwards: int = 0
    """Number of backwards, over all processes, behind the factors."""
    ekfac_samples: int = 0
    """Number of samples behind EK-FAC's eigenvalues, every draw of labels counted."""
    ekfac_terms: float = 0.0
    """Number of loss terms N behind EK-FAC's eigenvalues."""
    ekfac_backwards: int = 0
    """Number of backwards, over all processes, behind EK-FAC's eigenvalues."""


@dataclass
class Block:
    """A block of the Fisher with its factors, F Y = G Y A; A is None if the block is not a Kronecker product (then m = 1).

    ```python
    block = kfac.kfac_factors["blocks.0.fc"]
    image_OM = block.matvec(y_OM)  # G Y A, undamped
    ```
    """

    spec: Spec
    A: Factor | None
    G: Factor
    facts: Facts = field(default_factory=Facts)
    damping: Damping | None = None
    gathered: str = ""
    """Why the sharded gradient was gathered when this block last multiplied it; "": it was not gathered or not sharded."""
    clips: dict[str, Clip] = field(default_factory=dict)
    """{"A", "G" or "joint": how many eigenvalues of that matrix the clip raised, and by how much}."""
    corrected: bool = False
    """True if EK-FAC's eigenvalues are measured for this block in place of K-FAC's."""
    correction: Correction | None = None
    """EK-FAC's eigenvalues and their basis; None until they are measured."""
    parts: int = 1
    """Number of parts of Y's columns that a side multiplies one after the other: `PARTS` inside of a memory budget."""

    def with_factors(self, A: Factor | None, G: Factor, facts: Facts) -> "Block":
        """A copy of this block with new factors and facts; damping, clips and EK-FAC eigenvalues of the old ones are reset."""
        return replace(self, A=A, G=G, facts=facts, damping=None, clips={}, corrected=False, correction=None)

    @property
    def factors(self) -> dict[str, Factor]:
        """{"A": factor, "G": factor}, or {"G": factor} where the block is not a Kronecker product."""
        return {"G": self.G} if self.A is None else {"A": self.A, "G": self.G}

    @property
    def nbytes(self) -> int:
        """Bytes of both factors and of EK-FAC's eigenvalues and bases; memory that they share counts once."""
        return sum(factor.nbytes for factor in self.factors.values()) + self.correction_nbytes

    @property
    def correction_nbytes(self) -> int:
        """Bytes of EK-FAC's eigenvalues, and of its bases where no factor stores them."""
        if self.correction is None or self.A is None:
            return 0
        bases = self.correction.G.nbytes_beside(self.G) + self.correction.A.nbytes_beside(self.A)
        return self.correction.values_RS.nbytes + bases

    def matvec(self, y_OM: Tensor) -> Tensor:
        """G Y A for Y [o, m], undamped; with EK-FAC's eigenvalues S and eigenvectors Q: Q_G (S ⊙ Q_GᵀYQ_A) Q_Aᵀ."""
        if self.correction is not None:
            return self.correction.apply(y_OM, self.correction.values_RS, 0.0)
        out = self.G.matvec(y_OM)
        return out if self.A is None else self.A.matvec(out.mT.to(self.A.dtype)).mT

    def prepare(self, damping: Damping, first_jitter: float, dtype: torch.dtype) -> None:
        """Launch, without waiting, the Cholesky factorisations that `power` with p = -1 uses, for a Y of this dtype.

        `first_jitter` is the first Cholesky jitter, relative to the mean diagonal. Under joint damping a Kronecker block is
        applied by eigenvectors, and nothing is launched.
        """
        if not damping.joint or self.A is None:
            dtype = torch.promote_types(dtype, self._dtype(-1.0, damping))
            for side, factor, value in self._sides(damping):
                if self.solves(side, factor, value, damping):
                    factor.prepare_solve(value, first_jitter, dtype)

    def factorisations(self, p: float, damping: Damping) -> dict[str, What]:
        """{"A" or "G": "eigen" (eigenpairs) or "solve" (Cholesky)}: factorisations that `power` with exponent p will use."""
        found: dict[str, What] = {}
        if self.correction is not None:
            return found
        for side, factor, value in self._sides(damping):
            if isinstance(factor, Diagonal | BlockDiagonal):  # nothing that processes would share
                continue
            if self.corrected:
                found[side] = "eigen"
                continue
            if damping.joint and self.A is not None:
                if isinstance(factor, Spectral) or (side == "G" and self._writes_out_G(damping)):
                    found[side] = "eigen"
            elif p == -1 and self.solves(side, factor, value, damping):
                found[side] = "solve"
            elif isinstance(factor, Spectral) or not (
                factor.clips_nothing(value, damping.max_condition) or factor.dim > WIDEST_DENSE
            ):
                found[side] = "eigen"
        return found

    def factorise(self, side: str, what: What, p: float, damping: Damping, jitter: float, dtype: torch.dtype) -> None:
        """Compute the eigenpairs ("eigen") of a side, or launch its Cholesky ("solve"), for `power` of a Y of this dtype.

        `jitter` is the first Cholesky jitter, relative to the mean diagonal.
        """
        value, factor = (damping.lambda_A if side == "A" else damping.lambda_G), self.holder(side, what)
        if what == "solve":
            factor.prepare_solve(value, jitter, torch.promote_types(dtype, self._dtype(p, damping)))
            return
        assert isinstance(factor, Decomposable)
        if self.corrected and isinstance(factor, Dense):
            factor.eigenbasis()
        elif damping.joint and self.A is not None:
            factor.eigenpairs(torch.float32 if self._stable(damping) else torch.float64)
        else:
            wide = torch.promote_types(dtype, self._dtype(p, damping))
            prepare_power(factor, p, value, damping.max_condition, wide)

    def holder(self, side: str, what: What) -> Factor:
        """The factor that stores the factorisation `what` of side "A" or "G": the side's own factor, or its dense form.

        The dense form is used for "eigen" of a diagonal ± low-rank factor, which has no eigenpairs itself.
        """
        factor = self.factors[side]
        return factor.written_out() if what == "eigen" and isinstance(factor, DiagonalLowRank) else factor

    def power(self, y_OM: Tensor, p: float, damping: Damping, first_jitter: float) -> Tensor:
        """(F + damping)^p Y for Y [o, m], with the clip if there is one: [o, m] on Y's device.

        If one side needs float64, the intermediate product is float64 too: the other side would multiply its rounding error by
        its own condition number. `first_jitter`: first Cholesky jitter, relative to the mean diagonal. Joint damping raises a
        GramianError for an A that is diagonal ± low rank, unless EK-FAC has measured eigenvalues.
        """
        if damping.joint and self.A is not None:
            return self._joint(y_OM, p, damping)
        y_OM = y_OM.to(torch.promote_types(y_OM.dtype, self._dtype(p, damping)))
        out = padded(y_OM)  # columns are independent of each other; the padding is cut off before they become rows
        for side, factor, _ in self._sides(damping):
            turned = out[:, : y_OM.shape[1]].mT if side == "A" else out
            turned = self.act(side, factor, turned, p, damping, first_jitter)
            out = turned.mT if side == "A" else turned
        return out[:, : y_OM.shape[1]]

    def act(self, side: str, factor: Factor, y_NK: Tensor, p: float, damping: Damping, first_jitter: float) -> Tensor:
        """(M + λI)^p Y [n, k] with the clip, M = A or G by `side`; `factor` is M, or its shard if Y's rows are sharded.

        `first_jitter`: first Cholesky jitter, relative to the mean diagonal. What was clipped is recorded in `clips`.
        """
        value = damping.lambda_A if side == "A" else damping.lambda_G
        if p == -1 and self.solves(side, factor, value, damping):
            with factor.products(value):
                return self._in_parts(factor, y_NK, lambda y_NC: factor.solve(y_NC, value, first_jitter))
        out = self._in_parts(factor, y_NK, lambda y_NC: factor.power(y_NC, p, value, damping.max_condition))
        if damping.max_condition is not None and side not in self.clips:
            self.clips[side] = self.factors[side].clip(value, damping.max_condition)
        return out

    def _in_parts(self, factor: Factor, y_NK: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """`function`, which maps columns to columns, of Y, a part of the columns at a time: one part alone is in float64."""
        step = -(-y_NK.shape[1] // self.parts)
        if step in (0, y_NK.shape[1]) or isinstance(factor, Diagonal | BlockDiagonal):
            return function(y_NK)
        first = function(y_NK[:, :step])
        out = first.new_empty(y_NK.shape)
        out[:, :step] = first
        del first
        for start in range(step, y_NK.shape[1], step):
            out[:, start : start + step] = function(y_NK[:, start : start + step])
        return out

    def working_dtype(self, y: torch.dtype, p: float) -> torch.dtype:
        """The dtype in which `power` with exponent p computes for a Y of dtype `y`, at this block's damping."""
        assert self.damping is not None
        return torch.promote_types(y, self._dtype(p, self.damping))

    def _dtype(self, p: float, damping: Damping) -> torch.dtype:
        """Float64 if a side, not stored in half precision, is too ill-conditioned for float32 at exponent p; else float32."""
        exact = [(factor, value) for _, factor, value in self._sides(damping) if factor.storage_dtype not in HALF]
        needed = [factor.working_dtype(value, p) for factor, value in exact]
        return torch.float64 if torch.float64 in needed else torch.float32

    def _sides(self, damping: Damping) -> list[tuple[str, Factor, float]]:
        sides: list[tuple[str, Factor, float]] = [("G", self.G, damping.lambda_G)]
        return sides if self.A is None else [*sides, ("A", self.A, damping.lambda_A)]

    def solves(self, side: str, factor: Factor, value: float, damping: Damping) -> bool:
        """True if power -1 of a side uses Cholesky: there is no clip, or a bound shows that nothing would be clipped."""
        if damping.max_condition is None:
            return True
        if not factor.clips_nothing(value, damping.max_condition):
            return False
        self.clips.setdefault(side, Clip(0, factor.dim, 0.0, damping.floor(factor.bound(), value)))
        return True

    # ---- joint damping ---------------------------------------------------------------------------------------------

    def _joint(self, y_OM: Tensor, p: float, damping: Damping) -> Tensor:
        """(G ⊗ A + λI)^p Y for Y [o, m], in the eigenbases of both sides, with the clip if there is one.

        f₀Y + Q_G [(f(σ_iα_j) − f₀) ⊙ C] Q_Aᵀ with C = Q_GᵀYQ_A; σ_i, Q_G and α_j, Q_A are eigenvalues and eigenvectors of G
        and A, f(x) = max(x + λ, floor)^p with the clip's floor, f₀ = f(0): outside the bases the eigenvalue of G ⊗ A is 0.
        Cost: 4·o·m·(r_A + r_G) FLOPs for r_A and r_G eigenvectors, once both sides are decomposed.
        """
        assert self.A is not None
        if self.correction is not None:
            return self._corrected(self.correction, y_OM, p, damping)
        if isinstance(self.A, DiagonalLowRank):
            raise GramianError(
                f"{self.spec.name}: its inputs have a {self.A.kind} factor; expected damping_mode pi or factored"
            )
        assert isinstance(self.A, Spectral)
        value, G = damping.lambda_G, self.G
        if isinstance(G, DiagonalLowRank):
            if not self._writes_out_G(damping):
                return self._joint_by_column(y_OM, p, damping)
            G = G.written_out()
        assert isinstance(G, Spectral)
        sigma, alpha = G.spectrum, self.A.spectrum
        top = float(sigma.max()) * float(alpha.max()) if len(sigma) and len(alpha) else 0.0
        floor = damping.floor(top, value)
        stable = torch.finfo(torch.float32).eps * (top + value) / max(value, floor) <= 1e-2
        y = y_OM.to(torch.float32 if stable and G.dtype == self.A.dtype == torch.float32 else torch.float64)
        c_RS = self.A.to_basis(G.to_basis(y).mT).mT
        sigma, alpha = G.spectrum, self.A.spectrum  # now as exact as the bases
        products = sigma.to(y)[:, None] * alpha.to(y)[None, :] + value
        if not (G.complete and self.A.complete):
            outside = max(value, floor) ** p
        else:  # any number is exact: `Spectral.power`
            outside = 0.0 if G.orthonormal and self.A.orthonormal else float(raised(products.min(), floor)) ** p
        out = self.A.from_basis(G.from_basis((raised(products, floor).pow(p) - outside) * c_RS).mT).mT
        out = out.add_(y, alpha=outside) if outside else out
        self._clip_joint(products, value, floor, damping)
        return out.to(G.dtype)

    def _clip_joint(self, damped: Tensor, value: float, floor: float, damping: Damping) -> None:
        """Record in `clips` how many eigenvalues the clip raises to `floor`: of those in `damped`, and of λ outside the basis.

        `damped` are the damped eigenvalues in the basis, `value` is λ.
        """
        if damping.max_condition is None or "joint" in self.clips:
            return
        low = damped.double() < floor
        unseen = self.spec.outputs * self.spec.inputs - damped.numel()
        count, mass = int(low.sum()), float((floor - damped.double()[low]).sum())
        if value < floor:
            count, mass = count + unseen, mass + unseen * (floor - value)
        self.clips["joint"] = Clip(count, self.spec.outputs * self.spec.inputs, mass, floor)

    def _corrected(self, correction: Correction, y_OM: Tensor, p: float, damping: Damping) -> Tensor:
        """(F + λI)^p Y [o, m] with EK-FAC's eigenvalues of F, and the clip if there is one."""
        value, values = damping.lambda_G, correction.values_RS
        damped = values + value
        top = float(values.max()) if values.numel() else 0.0
        floor = damping.floor(top, value)
        y = y_OM.to(torch.promote_types(y_OM.dtype, values.dtype))
        outside = 0.0 if correction.complete else max(value, floor) ** p
        out = correction.apply(y, raised(damped, floor).pow(p), outside)
        self._clip_joint(damped, value, floor, damping)
        return out

    def _writes_out_G(self, damping: Damping) -> bool:
        """True if G, a diagonal ± low-rank factor, must be decomposed as a dense matrix, as the clip may raise eigenvalues."""
        assert self.A is not None
        if damping.max_condition is None or self.G.dim > WIDEST_DENSE:
            return False
        return damping.lambda_G * damping.max_condition < self.G.bound() * self.A.bound() + damping.lambda_G

    def _stable(self, damping: Damping) -> bool:
        """True if bounds on the eigenvalues show that float32 is exact enough for joint damping, and both sides use float32."""
        assert self.A is not None
        value, top = damping.lambda_G, self.G.bound() * self.A.bound()
        floor = damping.floor(top, value)
        exact = torch.finfo(torch.float32).eps * (top + value) / max(value, floor) <= 1e-2
        return exact and self.G.dtype == self.A.dtype == torch.float32

    def _joint_by_column(self, y_OM: Tensor, p: float, damping: Damping) -> Tensor:
        """(G ⊗ A + λI)^p Y for a G without eigenvectors: (α_j G + λI)^p times column j of Y Q_A, by conjugate gradients.

        α_j and Q_A are the eigenvalues and eigenvectors of A. Where the clip would act, λ is raised to its floor.
        """
        assert isinstance(self.A, Spectral) and isinstance(self.G, DiagonalLowRank)
        y = y_OM.to(torch.float64)
        value, alpha = damping.lambda_G, self.A.spectrum.to(y)
        top = self.G.bound() * (float(alpha.max()) if len(alpha) else 0.0)
        size = self.spec.outputs * self.spec.inputs
        floor = damping.floor(top, value)
        if floor > value:
            self.G.work.clip_note = (
                f"damping raised to the clip's floor {floor:.3g}; eigenvalues within a factor of 2 of a clip there"
            )
            self.clips["joint"] = Clip(size, size, size * (floor - value), floor)
            value = floor
        elif damping.max_condition is not None:
            self.clips.setdefault("joint", Clip(0, size, 0.0, floor))
        c_OS = self.A.to_basis(y.mT).mT
        out = self.A.from_basis(self.G.power_by_column(c_OS, p, alpha, value).to(y).mT).mT
        if not self.A.complete:
            out = out + value**p * (y - self.A.from_basis(c_OS.mT).mT)
        return out.to(self.G.dtype)
