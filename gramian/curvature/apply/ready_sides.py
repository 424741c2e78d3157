"""Compute P = (M + λI)^p of the sides of blocks as tensors: a matrix, or diag(d) + V Uᵀ with thin V and U.

Factors and damping in, a `ReadySide` per side out. Inverses without a clip (p = −1) are computed for all sides of one width
together: batched Cholesky factorisations of M + λI, or of UᵀU + λI for a low-rank M = U Uᵀ, are several times faster than one
after the other. All other powers, and systems whose factorisation fails, follow from the exact path applied to the identity.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from gramian.curvature.blocks.block import Block
from gramian.linalg import Dense, Diagonal, DiagonalLowRank, Factor, LowRank
from gramian.linalg.factors.factor import fetch_bounds, raised
from gramian.linalg.tensor_core_products import Operand, Precision

ALIGNED = 16
"""Sides are padded with zeros to multiples of this width: rows that begin at other places are far slower on tensor cores."""
THIN = 0.75
"""Largest number of columns, relative to the width, of a low-rank side that is applied as two thin products."""
STACKED = 2**27
"""Largest number of entries of the systems that are factorised together."""


@dataclass(frozen=True)
class ReadySide:
    """P = (M + λI)^p of one side of a block, symmetric [n, n]: a matrix, or diag(d) + V Uᵀ; or those of a stack of blocks."""

    matrix: Tensor | None = None
    """P [n, n]; None: the other fields are P."""
    scale: Tensor | None = None
    """d [n]."""
    left: Tensor | None = None
    """V [n, r]; None: P is diagonal."""
    right: Tensor | None = None
    """U [n, r]."""

    @property
    def form(self) -> tuple[object, ...]:
        """Shapes of the tensors; sides of equal form can be stacked."""
        return tuple(None if t is None else (*t.shape, t.dtype) for t in self._tensors())

    def _tensors(self) -> list[Tensor | None]:
        return [self.matrix, self.scale, self.left, self.right]

    def padded(self) -> "ReadySide":
        """The same operator with rows and columns of zeros, so that all widths are `aligned`."""
        found = []
        for t in self._tensors():
            widths = [] if t is None else [(0, aligned(n) - n) for n in reversed(t.shape)]
            found.append(None if t is None else F.pad(t, [n for pair in widths for n in pair]))
        return ReadySide(*found)

    @classmethod
    def stack(cls, sides: Sequence["ReadySide"]) -> "ReadySide":
        """Sides of equal form as one, with a leading axis for the blocks."""
        parts = zip(*(side._tensors() for side in sides), strict=True)
        return cls(*(None if ts[0] is None else torch.stack([t for t in ts if t is not None]) for ts in parts))


@dataclass(frozen=True)
class SideTask:
    """One side whose power is to be computed: several blocks share it if they share the factor and its damping."""

    block: Block
    side: str
    factor: Factor
    value: float
    """λ of this side."""
    dtype: torch.dtype
    """Dtype to compute in: float64 where float32 would not be exact enough."""
    precision: Precision
    """Precision in which the operator will be applied."""

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for tasks of the same result."""
        return (id(self.factor), self.value, self.dtype)

    @property
    def is_thin(self) -> bool:
        """Whether the side is applied as two thin products."""
        return isinstance(self.factor, LowRank | DiagonalLowRank) and self.factor.rank <= THIN * self.factor.dim


def side_tasks(block: Block, power: float, precision: Precision) -> dict[str, SideTask]:
    """{"G" and, of a Kronecker product, "A": the task} of a block."""
    damping = block.damping
    assert damping is not None
    wide = block.working_dtype(block.G.dtype, power)
    values = {"A": damping.lambda_A, "G": damping.lambda_G}
    return {s: SideTask(block, s, factor, values[s], wide, precision) for s, factor in block.factors.items()}


def make_sides(
    tasks: Sequence[SideTask], power: float, jitter: float, prepare: Callable[[Mapping[str, Block]], None]
) -> dict[tuple[object, ...], ReadySide]:
    """{key of a task: its side}. `prepare` launches the factorisations of blocks that the exact path needs.

    `jitter` is the first Cholesky jitter of the exact path, relative to the mean diagonal. One wait for the device reads bounds
    of all factors, another whether all factorisations succeeded.
    """
    distinct = {task.key: task for task in tasks}
    fetch_bounds([task.factor for task in distinct.values()])
    solved = [task for task in distinct.values() if power == -1 and _is_solved(task)]
    found = _inverted(solved)
    rest = {key: task for key, task in distinct.items() if key not in found}
    prepare({task.block.spec.name: task.block for task in rest.values()})
    return found | {key: _by_exact_path(task, power, jitter) for key, task in rest.items()}


def _is_solved(task: SideTask) -> bool:
    damping = task.block.damping
    assert damping is not None
    return isinstance(task.factor, Dense | LowRank) and task.block.solves(task.side, task.factor, task.value, damping)


def _inverted(tasks: Sequence[SideTask]) -> dict[tuple[object, ...], ReadySide]:
    """{key: side} of the inverses M⁻¹ that batched Cholesky factorisations give; those that fail are missing."""
    batches: dict[tuple[int, torch.dtype, torch.device], list[SideTask]] = {}
    for task in tasks:
        width = task.factor.rank if task.is_thin else task.factor.dim
        batches.setdefault((width, task.dtype, task.factor.device), []).append(task)
    found: dict[tuple[object, ...], ReadySide] = {}
    outcomes: list[tuple[SideTask, Tensor]] = []
    for (width, _, _), members in batches.items():
        each = max(1, STACKED // max(1, width * width))
        for begin in range(0, len(members), each):
            chosen = members[begin : begin + each]
            inverses, failed = _inverses(torch.stack([_system(task) for task in chosen]))
            for task, inverse, bad in zip(chosen, inverses, failed, strict=True):
                found[task.key] = _inverse_side(task, inverse)
                outcomes.append((task, bad))
    bad_ones = torch.stack([bad.to(outcomes[0][1].device) for _, bad in outcomes]).tolist() if outcomes else []
    for (task, _), bad in zip(outcomes, bad_ones, strict=True):
        if bad:
            del found[task.key]
    return found


def _system(task: SideTask) -> Tensor:
    """The matrix to invert, a new tensor: UᵀU + λI for a thin side, else M + λI."""
    factor = task.factor
    if task.is_thin:
        assert isinstance(factor, LowRank)
        system = factor.columns.gram(exact=not factor.coarse(task.value)).to(task.dtype)
    else:
        system = factor.dense().to(task.dtype, copy=True)
    system.diagonal().add_(task.value)
    return system


def _inverses(systems_BNN: Tensor) -> tuple[Tensor, Tensor]:
    """(inverses [b, n, n], whether each factorisation failed [b]) of symmetric positive definite matrices."""
    lower_BNN, info_B = torch.linalg.cholesky_ex(systems_BNN)
    identity = torch.eye(systems_BNN.shape[-1], dtype=systems_BNN.dtype, device=systems_BNN.device)
    root_BNN = torch.linalg.solve_triangular(lower_BNN, identity.expand_as(systems_BNN), upper=False)
    return root_BNN.mT @ root_BNN, info_B != 0


def _inverse_side(task: SideTask, inverse: Tensor) -> ReadySide:
    """The side of an inverse: itself, or (U Uᵀ + λI)⁻¹ = (I − U(UᵀU + λI)⁻¹Uᵀ)/λ."""
    if not task.is_thin:
        return ReadySide(inverse)
    factor = task.factor
    assert isinstance(factor, LowRank)
    columns = factor.columns.stored.load(dtype=task.dtype)
    precision: Precision = "fp64" if task.dtype == torch.float64 else "fp32"
    if task.precision in ("bf16", "tf32", "bf16x3"):
        precision = "bf16x3"
    left = Operand.of(inverse, precision, "right").times(columns).div_(-task.value)
    scale = torch.full((factor.dim,), 1 / task.value, dtype=task.dtype, device=left.device)
    return ReadySide(None, scale, left, columns)


def _by_exact_path(task: SideTask, power: float, jitter: float) -> ReadySide:
    """The side from the exact path, applied to ones, to the columns U, or to the identity."""
    block, side, factor, value = task.block, task.side, task.factor, task.value
    damping = block.damping
    assert damping is not None
    if isinstance(factor, Diagonal):
        one = torch.ones(factor.dim, 1, dtype=task.dtype, device=factor.device)
        return ReadySide(scale=block.act(side, factor, one, power, damping, jitter)[:, 0])
    if task.is_thin and isinstance(factor, DiagonalLowRank):
        # (N ± UUᵀ)⁻¹ = N⁻¹ ∓ [(N ± UUᵀ)⁻¹U] UᵀN⁻¹ with N = diag(d + λ)
        columns = factor.columns.stored.load(dtype=task.dtype)
        inverse = 1 / (factor.values_N.double() + value)
        left = block.act(side, factor, columns, power, damping, jitter).mul_(-factor.sign)
        return ReadySide(None, inverse.to(task.dtype), left, (inverse[:, None] * columns).to(task.dtype))
    if task.is_thin and isinstance(factor, LowRank):
        # f₀I + U W (f(σ) − f₀) WᵀUᵀ with eigenvectors U W and eigenvalues σ
        columns = factor.columns.stored.load(dtype=task.dtype)
        sigma, basis = factor.eigenpairs()
        floor = damping.floor(float(sigma.max()) if len(sigma) else 0.0, value)
        outside = max(value, floor) ** power
        f = raised(sigma + value, floor).pow(power) - outside
        left = columns @ ((basis * f) @ basis.mT).to(columns)
        block.act(side, factor, columns[:, :0], power, damping, jitter)  # records the clip
        scale = torch.full((factor.dim,), outside, dtype=task.dtype, device=left.device)
        return ReadySide(None, scale, left, columns)
    if isinstance(factor, Dense) and not (power == -1 and _is_solved(task)):
        factor.eigenpairs(task.dtype)  # before the clip, which would decompose M in float32 first
    identity = torch.eye(factor.dim, dtype=task.dtype, device=factor.device)
    matrix = block.act(side, factor, identity, power, damping, jitter)
    return ReadySide((matrix + matrix.mT).div_(2))


def aligned(width: int) -> int:
    """The width that a side of this width is padded to: the next multiple of `ALIGNED`, unless it is narrow."""
    return width if width <= ALIGNED // 2 else -(-width // ALIGNED) * ALIGNED
