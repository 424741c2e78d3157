"""One block of the Fisher with its data: F Y = G Y A on matrices Y [o, m], damped, to any power."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.curvature.blocks.block_specs import Spec
from gramian.curvature.blocks.damping import Damping
from gramian.curvature.blocks.eigenvalue_correction import Correction
from gramian.linalg import WIDEST_DENSE, Clip, Dense, Diagonal, DiagonalLowRank, Factor, LowRank, Spectral
from gramian.linalg.factors.factor import raised
from gramian.linalg.factors.factor_transfer import What, decompose, prepare_power
from gramian.linalg.factors.stored import HALF
from gramian.linalg.wide import padded


@dataclass
class Facts:
    """How the estimate came about, for the record."""

    tokens: int = 0
    """T of the refresh; of a block that is no Kronecker product its samples."""
    kept_tokens: int = 0
    """Tokens that entered, where a subset was taken."""
    terms: float = 0.0
    """N."""
    step: int = 0
    """Number of the step that it comes from."""
    refreshes: int = 0
    """Refreshes in its average."""
    reason_A: str = ""
    reason_G: str = ""
    most_columns: dict[str, int] = field(default_factory=dict)
    """{side: columns that memory_budget allows it}; as many as the policy does where it is not in there."""
    discarded_trace_A: float = 0.0
    discarded_trace_G: float = 0.0
    seconds: float = 0.0
    shares_A_with: str = ""
    estimate: str = ""
    """Where G comes from: "empirical", "mc", "exact softmax"."""
    local_tokens: int = 0
    """Those of T that were this process's."""
    reduction_A: str = ""
    """How processes joined a side: "dense", "gather", "gram"; empty: they did not."""
    reduction_G: str = ""
    sent: dict[str, int] = field(default_factory=dict)
    """Bytes that left this process for it, by kind of collective."""
    reason_ekfac: str = ""
    """Why its eigenvalues are K-FAC's own, where EK-FAC was asked for."""


@dataclass
class Block:
    """A block with its factors; A is None where the block is no Kronecker product (then m = 1)."""

    spec: Spec
    A: Factor | None
    G: Factor
    facts: Facts = field(default_factory=Facts)
    damping: Damping | None = None
    gathered: str = ""
    """Why its sharded gradient was put together when it was last used; "": it was not, or nothing was sharded."""
    clips: dict[str, Clip] = field(default_factory=dict)
    """{"A", "G" or "joint": what the clip did when it was last looked at}."""
    corrected: bool = False
    """True if EK-FAC's eigenvalues take the place of K-FAC's: `correction`, once they are measured."""
    correction: Correction | None = None

    def with_factors(self, A: Factor | None, G: Factor, facts: Facts) -> "Block":
        """A new estimate of the same block."""
        return replace(self, A=A, G=G, facts=facts, damping=None, clips={}, corrected=False, correction=None)

    @property
    def factors(self) -> dict[str, Factor]:
        """By side."""
        return {"G": self.G} if self.A is None else {"A": self.A, "G": self.G}

    @property
    def nbytes(self) -> int:
        """Of both sides, and of what corrects them; a basis that a side holds too counts once."""
        return sum(factor.nbytes for factor in self.factors.values()) + self.correction_nbytes

    @property
    def correction_nbytes(self) -> int:
        """Of EK-FAC's eigenvalues, and of bases that no side holds too."""
        if self.correction is None or self.A is None:
            return 0
        bases = self.correction.G.nbytes_beside(self.G) + self.correction.A.nbytes_beside(self.A)
        return self.correction.values_RS.nbytes + bases

    def matvec(self, y_OM: Tensor) -> Tensor:
        """G Y A, undamped and unclipped; of a corrected block Q_G (S ⊙ Q_GᵀYQ_A) Q_Aᵀ."""
        if self.correction is not None:
            return self.correction.apply(y_OM, self.correction.values_RS, 0.0)
        out = self.G.matvec(y_OM)
        return out if self.A is None else self.A.matvec(out.mT.to(self.A.dtype)).mT

    def prepare(self, damping: Damping, first_jitter: float, dtype: torch.dtype) -> None:
        """Launch the factorisations that power -1 of a Y of this dtype will use at this damping, and wait for nothing."""
        if not damping.joint or self.A is None:
            dtype = torch.promote_types(dtype, self._dtype(-1.0, damping))
            for side, factor, value in self._sides(damping):
                if self._solves(side, factor, value, damping):
                    factor.prepare_solve(value, first_jitter, dtype)

    def factorisations(self, p: float, damping: Damping) -> dict[str, What]:
        """{side: what `power` will need of it}; sides that need nothing are left out."""
        found: dict[str, What] = {}
        if self.correction is not None:
            return found
        for side, factor, value in self._sides(damping):
            if isinstance(factor, Diagonal):
                continue
            if self.corrected:
                found[side] = "eigen"
                continue
            if damping.joint and self.A is not None:
                if isinstance(factor, Spectral) or (side == "G" and self._writes_out_G(damping)):
                    found[side] = "eigen"
            elif p == -1 and self._solves(side, factor, value, damping):
                found[side] = "solve"
            elif isinstance(factor, Spectral) or not (
                factor.clips_nothing(value, damping.max_condition) or factor.dim > WIDEST_DENSE
            ):
                found[side] = "eigen"
        return found

    def factorise(self, side: str, what: What, p: float, damping: Damping, jitter: float, dtype: torch.dtype) -> None:
        """Make it, as `power` of a Y of this dtype would; a Cholesky factorisation is launched and not waited for."""
        value, factor = (damping.lambda_A if side == "A" else damping.lambda_G), self.holder(side, what)
        if what == "solve":
            factor.prepare_solve(value, jitter, torch.promote_types(dtype, self._dtype(p, damping)))
            return
        assert isinstance(factor, Dense | LowRank)
        if damping.joint and self.A is not None:
            decompose(factor, torch.float32 if self._stable(damping) else torch.float64)
        else:
            wide = torch.promote_types(dtype, self._dtype(p, damping))
            prepare_power(factor, p, value, damping.max_condition, wide)

    def holder(self, side: str, what: What) -> Factor:
        """The factor that keeps a factorisation: the side's own, or the matrix that it is written out as."""
        factor = self.factors[side]
        return factor.written_out() if what == "eigen" and isinstance(factor, DiagonalLowRank) else factor

    def power(self, y_OM: Tensor, p: float, damping: Damping, first_jitter: float) -> Tensor:
        """(F + damping)^p Y, with the clip if there is one; [o, m] on Y's device.

        Where one side needs float64, what it is handed and what it hands on is float64 too: the other side would multiply the
        rounding between them by its own condition.
        """
        if damping.joint and self.A is not None:
            return self._joint(y_OM, p, damping)
        y_OM = y_OM.to(torch.promote_types(y_OM.dtype, self._dtype(p, damping)))
        out = padded(y_OM)  # the columns are solved each for itself, and cut off before they become rows
        for side, factor, _ in self._sides(damping):
            turned = out[:, : y_OM.shape[1]].mT if side == "A" else out
            turned = self.act(side, factor, turned, p, damping, first_jitter)
            out = turned.mT if side == "A" else turned
        return out[:, : y_OM.shape[1]]

    def act(self, side: str, factor: Factor, y_NK: Tensor, p: float, damping: Damping, first_jitter: float) -> Tensor:
        """(M + λI)^p Y of one side, with the clip if there is one.

        Args:
            side: "A" or "G".
            factor: its factor, or what stands for it where Y is spread over processes.
            y_NK: Y.
            p: any real number.
            damping: of both sides.
            first_jitter: relative, of a Cholesky factorisation.
        """
        value = damping.lambda_A if side == "A" else damping.lambda_G
        if p == -1 and self._solves(side, factor, value, damping):
            with factor.products(value):
                return factor.solve(y_NK, value, first_jitter)
        out = factor.power(y_NK, p, value, damping.max_condition)
        if damping.max_condition is not None:
            self._clip(side, self.factors[side], value, damping.max_condition)
        return out

    def working_dtype(self, y: torch.dtype, p: float) -> torch.dtype:
        """The dtype in which `power` of a Y of this dtype runs."""
        assert self.damping is not None
        return torch.promote_types(y, self._dtype(p, self.damping))

    def _dtype(self, p: float, damping: Damping) -> torch.dtype:
        """Float64 if one side needs it; not if it is stored in half precision, which cost more digits than that would save."""
        exact = [(factor, value) for _, factor, value in self._sides(damping) if factor.storage_dtype not in HALF]
        needed = [factor.working_dtype(value, p) for factor, value in exact]
        return torch.float64 if torch.float64 in needed else torch.float32

    def _clip(self, side: str, factor: Factor, value: float, max_condition: float) -> None:
        if side not in self.clips:
            self.clips[side] = factor.clip(value, max_condition)

    def _sides(self, damping: Damping) -> list[tuple[str, Factor, float]]:
        sides: list[tuple[str, Factor, float]] = [("G", self.G, damping.lambda_G)]
        return sides if self.A is None else [*sides, ("A", self.A, damping.lambda_A)]

    def _solves(self, side: str, factor: Factor, value: float, damping: Damping) -> bool:
        """True if power -1 of a side goes by Cholesky: always without the clip, with it where nothing would be clipped."""
        if damping.max_condition is None:
            return True
        if not factor.clips_nothing(value, damping.max_condition):
            return False
        floor = (factor.bound() + value) / damping.max_condition
        self.clips.setdefault(side, Clip(0, factor.dim, 0.0, floor))
        return True

    # ---- joint damping ---------------------------------------------------------------------------------------------

    def _joint(self, y_OM: Tensor, p: float, damping: Damping) -> Tensor:
        """(G ⊗ A + λI)^p Y in the eigenbasis of both sides.

        With C = Q_GᵀYQ_A: f₀Y + Q_G [(f(σ_iα_j) − f₀) ⊙ C] Q_Aᵀ, f(x) = max(x + λ, floor)^p, f₀ = f(0): outside either basis
        the product's eigenvalue is 0. Cost: 4·o·m·(r_A + r_G) FLOPs once both sides are decomposed.
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
                return self._joint_by_column(y_OM, p, value, damping.max_condition)
            G = G.written_out()
        assert isinstance(G, Spectral)
        sigma, alpha = G.spectrum, self.A.spectrum
        top = float(sigma.max()) * float(alpha.max()) if len(sigma) and len(alpha) else 0.0
        floor = 0.0 if damping.max_condition is None else (top + value) / damping.max_condition
        stable = torch.finfo(torch.float32).eps * (top + value) / max(value, floor) <= 1e-2
        y = y_OM.to(torch.float32 if stable and G.dtype == self.A.dtype == torch.float32 else torch.float64)
        c_RS = self.A.to_basis(G.to_basis(y).mT).mT
        sigma, alpha = G.spectrum, self.A.spectrum  # now as exact as the bases
        products = sigma.to(y)[:, None] * alpha.to(y)[None, :] + value
        outside = 0.0 if G.complete and self.A.complete else max(value, floor) ** p
        out = self.A.from_basis(G.from_basis((raised(products, floor).pow(p) - outside) * c_RS).mT).mT
        out = out.add_(y, alpha=outside) if outside else out
        self._clip_joint(products, value, floor, damping)
        return out.to(G.dtype)

    def _clip_joint(self, damped: Tensor, value: float, floor: float, damping: Damping) -> None:
        """Count what is raised, of the eigenvalues in the basis and of those outside, which are λ."""
        if damping.max_condition is None or "joint" in self.clips:
            return
        low = damped.double() < floor
        unseen = self.spec.outputs * self.spec.inputs - damped.numel()
        count, mass = int(low.sum()), float((floor - damped.double()[low]).sum())
        if value < floor:
            count, mass = count + unseen, mass + unseen * (floor - value)
        self.clips["joint"] = Clip(count, self.spec.outputs * self.spec.inputs, mass, floor)

    def _corrected(self, correction: Correction, y_OM: Tensor, p: float, damping: Damping) -> Tensor:
        """(F + λI)^p Y with EK-FAC's eigenvalues."""
        value, values = damping.lambda_G, correction.values_RS
        damped = values + value
        top = float(values.max()) if values.numel() else 0.0
        floor = 0.0 if damping.max_condition is None else (top + value) / damping.max_condition
        y = y_OM.to(torch.promote_types(y_OM.dtype, values.dtype))
        outside = 0.0 if correction.complete else max(value, floor) ** p
        out = correction.apply(y, raised(damped, floor).pow(p), outside)
        self._clip_joint(damped, value, floor, damping)
        return out

    def _writes_out_G(self, damping: Damping) -> bool:
        """True if single eigenvalues of a G without eigenvectors have to be raised, and it is narrow enough for that."""
        assert self.A is not None
        if damping.max_condition is None or self.G.dim > WIDEST_DENSE:
            return False
        return damping.lambda_G * damping.max_condition < self.G.bound() * self.A.bound() + damping.lambda_G

    def _stable(self, damping: Damping) -> bool:
        """True if bounds show that float32 does for joint damping."""
        assert self.A is not None
        value, top = damping.lambda_G, self.G.bound() * self.A.bound()
        floor = 0.0 if damping.max_condition is None else (top + value) / damping.max_condition
        exact = torch.finfo(torch.float32).eps * (top + value) / max(value, floor) <= 1e-2
        return exact and self.G.dtype == self.A.dtype == torch.float32

    def _joint_by_column(self, y_OM: Tensor, p: float, value: float, max_condition: float | None) -> Tensor:
        """G without eigenvectors: in A's basis every column j is (α_j G + λI)^p, by conjugate gradients."""
        assert isinstance(self.A, Spectral) and isinstance(self.G, DiagonalLowRank)
        y = y_OM.to(torch.float64)
        alpha = self.A.spectrum.to(y)
        top = self.G.bound() * (float(alpha.max()) if len(alpha) else 0.0)
        size = self.spec.outputs * self.spec.inputs
        floor = 0.0 if max_condition is None else (top + value) / max_condition
        if floor > value:
            self.G.work.clip_note = (
                f"damping raised to the clip's floor {floor:.3g}; eigenvalues within a factor of 2 of a clip there"
            )
            self.clips["joint"] = Clip(size, size, size * (floor - value), floor)
            value = floor
        elif max_condition is not None:
            self.clips.setdefault("joint", Clip(0, size, 0.0, floor))
        c_OS = self.A.to_basis(y.mT).mT
        out = self.A.from_basis(self.G.power_by_column(c_OS, p, alpha, value).to(y).mT).mT
        if not self.A.complete:
            out = out + value**p * (y - self.A.from_basis(c_OS.mT).mT)
        return out.to(self.G.dtype)
