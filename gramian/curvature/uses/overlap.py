"""Compare two tasks: the overlap of their Fishers, and the conflict of their gradients.

Legend: n rows of a factor (A or G), r columns of a low-rank one, k eigenvectors, o×m the shape of a block's weight matrix.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.curvature.apply.apply_factors import inner
from gramian.curvature.blocks.block import Block
from gramian.curvature.blocks.eigenvalue_correction import Basis, Correction
from gramian.curvature.blocks.parameter_parts import ParameterParts
from gramian.curvature.kfac import KFACNaturalGradient
from gramian.curvature.options import check_count
from gramian.curvature.spectrum.wide_side_spectra import WideSide
from gramian.curvature.uses.fisher_parameters import blocks_of, completed_gradient, parts_source
from gramian.linalg import WIDEST_DENSE, BlockDiagonal, Dense, Diagonal, DiagonalLowRank, Factor, LowRank, Spectral
from gramian.linalg.factors.columns import Columns
from gramian.linalg.factors.stored import LoadedMatrix
from gramian.linalg.spectra.lanczos import lanczos
from gramian.linalg.wide import pieces


@dataclass(frozen=True)
class Overlap:
    """A similarity of two tasks (Fishers or gradients), for every block and for the model."""

    model: float
    layers: dict[str, float]
    """{block: similarity}, by the names of `kfac_factors`."""
    unshared: tuple[str, ...]
    """Names of blocks that only one of the two tasks has."""


def fisher_overlap(one: KFACNaturalGradient, other: KFACNaturalGradient) -> Overlap:
    """tr(F₁F₂)/(‖F₁‖‖F₂‖): 1 for Fishers that are equal up to a factor, 0 for Fishers with orthogonal ranges.

    F₁ and F₂ are undamped. For Kronecker blocks tr(F₁F₂) = tr(A₁A₂)·tr(G₁G₂); traces and squared norms of the model are sums
    over the blocks that both have. The result is 0 where a Fisher is zero. No matrix with o·m rows is formed. A GramianError is
    raised if the two have no block in common, or blocks of the same name with different shapes.

    ```python
    overlap = fisher_overlap(kfac_of_task_1, kfac_of_task_2)
    overlap.model, overlap.layers["blocks.0.fc"]
    ```

    | factors M₁ and M₂ | tr(M₁M₂) | FLOPs |
    |---|---|---|
    | diagonal d and any M | Σ d_i·M_ii | 2·n, beside the diagonal of M |
    | low rank U and U' | ‖UᵀU'‖² | 2·n·r·r' |
    | low rank U and dense | Σ U ⊙ (M U) | 2·n²·r |
    | dense and dense | Σ M₁ ⊙ M₂ | 2·n² |
    | diagonal ± low rank | the sum of its two parts | |

    Args:
        one: F₁.
        other: F₂, of a model with the same layers; representations may differ.
    """
    shared, unshared = _shared(one, other)
    with torch.no_grad():
        traces = {
            name: (_block_trace(left, left), _block_trace(left, right), _block_trace(right, right))
            for name, (left, right) in shared.items()
        }
    total = tuple(sum(trace[i] for trace in traces.values()) for i in range(3))
    layers = {name: _normalised(*trace) for name, trace in traces.items()}
    return Overlap(_normalised(*total), layers, unshared)


def subspace_overlap(one: KFACNaturalGradient, other: KFACNaturalGradient, k: int = 10) -> Overlap:
    """‖V₁ᵀV₂‖²/k, V₁ and V₂ the eigenvectors of the k largest eigenvalues of two Fishers: 1 for equal spaces, 0 if orthogonal.

    Two random spaces have about k/(o·m). For a layer, V are the eigenvectors of its own k largest eigenvalues; for the model,
    those of the k largest of all layers. If a Fisher has fewer positive eigenvalues, all of these are compared, and the smaller
    number replaces k. If the k-th eigenvalue is repeated (equally frequent vocabulary entries), neither the space nor the
    result is unique.

    Eigenvectors of G ⊗ A are products q_i ⊗ a_j of those of G and A, and their inner products are products of two inner
    products: beyond the eigenvectors of A and G the cost is 2·k²·(o + m) FLOPs, and no vector has the length o·m.

    Args:
        one: F₁.
        other: F₂, of a model with the same layers.
        k: number of eigenvectors of each.

    Raises:
        GramianError: if the two have no block in common, or blocks of the same name with different shapes.
    """
    check_count("k", k)
    shared, unshared = _shared(one, other)
    with torch.no_grad():
        spaces = {name: (_leading(left, k), _leading(right, k)) for name, (left, right) in shared.items()}
        layers = {name: _compared([pair]) for name, pair in spaces.items()}
        floors = [_kth_largest([pair[side].values_K for pair in spaces.values()], k) for side in range(2)]
        cut = [(left.above(floors[0]), right.above(floors[1])) for left, right in spaces.values()]
        return Overlap(_compared(cut), layers, unshared)


def gradient_conflict(
    kfac: KFACNaturalGradient, model: nn.Module, left: Mapping[str, Tensor], right: Mapping[str, Tensor]
) -> Overlap:
    """Cosine gᵀF⁻¹h/√(gᵀF⁻¹g·hᵀF⁻¹h) of gradients g and h, F damped; below 0 a natural step for one loss raises the other.

    To first order a step −ηF⁻¹g changes the loss with gradient h by −η·hᵀF⁻¹g. Cost: two natural gradients.

    Args:
        kfac: the metric F, damped and clipped by its options.
        model: the metric's model.
        left: g, {parameter: tensor}.
        right: h, {parameter: tensor}.

    Returns:
        Cosines of every block with a gradient, and of the model; 0 where one of the two gradients is zero or missing.
    """
    gradients = [completed_gradient(kfac, "left", left), completed_gradient(kfac, "right", right)]
    natural = [kfac.compute_natural_gradient(model, gradients=gradient) for gradient in gradients]
    parts = ParameterParts.of(parts_source(kfac))
    gradients, natural = [parts.split(g) for g in gradients], [parts.split(x) for x in natural]
    products, unshared = {}, []
    for name, block in blocks_of(kfac).items():
        g, h = ({p: t for p, t in gradient.items() if p in block.spec.parameters} for gradient in gradients)
        if g or h:
            across = inner(g, natural[1]) if g and h else 0.0
            products[name] = (inner(g, natural[0]), across, inner(h, natural[1]))
        if bool(g) != bool(h):
            unshared.append(name)
    total = tuple(sum(product[i] for product in products.values()) for i in range(3))
    return Overlap(_normalised(*total), {name: _normalised(*p) for name, p in products.items()}, tuple(unshared))


def _normalised(left: float, across: float, right: float) -> float:
    """across/√(left·right), the cosine of x and y with left = ⟨x, x⟩, across = ⟨x, y⟩, right = ⟨y, y⟩; 0 if x or y is zero."""
    return across / (left**0.5 * right**0.5) if left > 0 and right > 0 else 0.0


def _shared(
    one: KFACNaturalGradient, other: KFACNaturalGradient
) -> tuple[dict[str, tuple[Block, Block]], tuple[str, ...]]:
    """({name: (block of one, block of the other)} for the blocks that both have, names of those that only one has).

    A GramianError is raised if no block is in both, or a block has other parameters or shapes.
    """
    mine, theirs = blocks_of(one), blocks_of(other)
    shared = {name: (block, theirs[name]) for name, block in mine.items() if name in theirs}
    for name, (left, right) in shared.items():
        if (left.spec.parameters, left.spec.shapes) != (right.spec.parameters, right.spec.shapes):
            raise GramianError(f"{name}: is not the same block in both; expected Fishers of one architecture")
    if not shared:
        raise GramianError("other: has no block that the first has; expected Fishers of one architecture")
    return shared, tuple([name for name in mine if name not in theirs] + [name for name in theirs if name not in mine])


# ---- traces ----------------------------------------------------------------------------------------------------------


def _block_trace(left: Block, right: Block) -> float:
    """tr(F₁F₂) of two blocks of the same parameters, from traces of products of their sides or from EK-FAC's eigenvalues."""
    if left.correction is None and right.correction is not None:
        left, right = right, left
    if left.correction is not None:
        seen_RS = _seen_in(left.correction, right)
        return float((left.correction.values_RS.double() * seen_RS.double()).sum())
    trace = product_trace(left.G, right.G)
    if left.A is not None and right.A is not None:
        trace *= product_trace(left.A, right.A)
    return trace


def _seen_in(basis: Correction, block: Block) -> Tensor:
    """The diagonal of a block's F in the eigenbasis of an EK-FAC correction, [r, s]."""
    if block.correction is not None:
        return block.correction.seen_in(basis.G, basis.A)
    assert block.A is not None
    return torch.outer(_diagonal_in(basis.G, block.G), _diagonal_in(basis.A, block.A).to(block.G.device))


def _diagonal_in(basis: Basis, factor: Factor) -> Tensor:
    """q_iᵀ M q_i for every vector q_i of a basis and the matrix M of a factor, [r]."""
    q_NR = basis.combined(torch.eye(basis.rank, dtype=factor.dtype, device=factor.device))
    return (q_NR * factor.matvec(q_NR)).sum(0)


def product_trace(one: Factor, other: Factor) -> float:
    """tr(M₁M₂) of the matrices of two factors of any representation, in float64. Collective for sharded rows."""
    if isinstance(one, Diagonal):
        return float(one.values_N.double() @ _diagonal(other).to(one.device))
    if isinstance(one, BlockDiagonal):
        assert isinstance(other, BlockDiagonal)
        return float((one.blocks_RWW.double() * other.blocks_RWW.to(one.device).double()).sum())
    if isinstance(one, LowRank):
        return _columns_trace(one.columns, other)
    if isinstance(one, DiagonalLowRank):
        diagonal = float(one.values_N.double() @ _diagonal(other).to(one.values_N.device))
        return diagonal + one.sign * _columns_trace(one.columns, other)
    if not isinstance(other, Dense):
        return product_trace(other, one)
    assert isinstance(one, Dense)
    return sum(
        float((one.stored.load(rows, torch.float64) * other.stored.load(rows, torch.float64, one.device)).sum())
        for rows in pieces(one.dim, one.dim)
    )


def _diagonal(factor: Factor) -> Tensor:
    """The diagonal of a factor [n], float64; a difference d − Σu² is computed before rounding, since it may cancel."""
    if isinstance(factor, DiagonalLowRank):
        return factor.values_N.double() + factor.sign * factor.columns.squares_N()
    return factor.diagonal().double()


def _columns_trace(columns: Columns, other: Factor) -> float:
    """tr(U Uᵀ M) = tr(Uᵀ M U) for stored columns U and the matrix M of a factor, a chunk of columns at a time."""
    source = LoadedMatrix(columns.whole().stored, torch.float64)
    return sum(_squared(source.piece(part), other) for part in pieces(columns.count, columns.dim))


def _squared(u_NC: Tensor, other: Factor) -> float:
    """tr(Uᵀ M U) for U [n, c] and the matrix M of a factor."""
    if isinstance(other, Dense):
        return sum(
            float((u_NC[rows] * (other.stored.load(rows, torch.float64, u_NC.device) @ u_NC)).sum())
            for rows in pieces(other.dim, other.dim)
        )
    if isinstance(other, LowRank):
        return float(other.columns.transposed_times(u_NC).square().sum())
    assert isinstance(other, Diagonal | DiagonalLowRank)
    total = float(other.values_N.to(u_NC) @ u_NC.square().sum(1))
    if isinstance(other, DiagonalLowRank):
        total += other.sign * float(other.columns.transposed_times(u_NC).square().sum())
    return total


# ---- leading eigenvectors --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Space:
    """Leading eigenvectors q_k ⊗ a_k of a block, as columns of two matrices, one for each side."""

    values_K: Tensor
    """Eigenvalues that belong to the columns of the two matrices, descending, all above zero."""
    G_OK: Tensor
    A_MK: Tensor | None

    def above(self, floor: float) -> "_Space":
        """This space without the eigenvectors whose eigenvalue is below `floor`."""
        count = int((self.values_K >= floor).sum())
        A_MK = None if self.A_MK is None else self.A_MK[:, :count]
        return _Space(self.values_K[:count], self.G_OK[:, :count], A_MK)


def _leading(block: Block, k: int) -> _Space:
    """The k largest eigenvalues of a block, or fewer if fewer are nonzero up to rounding, with their eigenvectors."""
    if block.correction is not None:
        values_RS = block.correction.values_RS.double()
    else:
        sigma_R, G_OR = _leading_of_side(block.G, k)
        alpha_S, A_MS = (sigma_R.new_ones(1), None) if block.A is None else _leading_of_side(block.A, k)
        values_RS = torch.outer(sigma_R, alpha_S.to(sigma_R))
    values, chosen = values_RS.flatten().sort(descending=True, stable=True)
    noise = max(block.spec.outputs, block.spec.inputs) * torch.finfo(torch.float64).eps
    count = min(k, int((values > noise * values[:1]).sum()))
    rows, columns = chosen[:count] // values_RS.shape[1], chosen[:count] % values_RS.shape[1]
    if block.correction is not None:
        q_RK, a_SK = _one_hot(rows, values_RS.shape[0]), _one_hot(columns, values_RS.shape[1])
        return _Space(values[:count], block.correction.G.combined(q_RK), block.correction.A.combined(a_SK))
    return _Space(values[:count], G_OR[:, rows], None if A_MS is None else A_MS[:, columns.to(A_MS.device)])


def _one_hot(chosen_K: Tensor, size: int) -> Tensor:
    """The columns `chosen_K` of the identity of this size, [size, K], float64."""
    found = torch.zeros(size, len(chosen_K), dtype=torch.float64, device=chosen_K.device)
    return found.scatter_(0, chosen_K[None], 1.0)


def _leading_of_side(factor: Factor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest eigenvalues of a factor, descending, and their eigenvectors [n, k], float64."""
    if isinstance(factor, DiagonalLowRank) and factor.dim > WIDEST_DENSE:
        found = lanczos(WideSide(factor), k, eigenvectors=True)
        assert found.eigenvectors is not None
        return found.eigenvalues.to(found.eigenvectors.device).clamp(min=0), found.eigenvectors
    if isinstance(factor, DiagonalLowRank):
        factor = factor.written_out()
    assert isinstance(factor, Spectral)
    nothing = torch.zeros(len(factor.spectrum), 0, dtype=torch.float64, device=factor.device)
    factor.from_basis(nothing)  # first: the spectrum is then as exact as the basis
    values, order = factor.spectrum.double().sort(descending=True)
    return values[:k], factor.from_basis(_one_hot(order[:k], len(values)))


def _kth_largest(values: list[Tensor], k: int) -> float:
    """The k-th largest number of all tensors together; 0 where there are fewer than k."""
    together = torch.cat([v.cpu() for v in values]).sort(descending=True).values
    return float(together[k - 1]) if len(together) >= k else 0.0


def _compared(pairs: list[tuple[_Space, _Space]]) -> float:
    """Σ ‖V₁ᵀV₂‖² over pairs of spaces (V₁, V₂), one pair per block, divided by the smaller of their total dimensions."""
    counts = [sum(len(pair[side].values_K) for pair in pairs) for side in range(2)]
    if not min(counts):
        return 0.0
    total = 0.0
    for left, right in pairs:
        cosines_KK = left.G_OK.mT @ right.G_OK.to(left.G_OK)
        if left.A_MK is not None and right.A_MK is not None:
            cosines_KK = cosines_KK * (left.A_MK.mT @ right.A_MK.to(left.A_MK)).to(cosines_KK)
        total += float(cosines_KK.square().sum())
    return total / min(counts)
