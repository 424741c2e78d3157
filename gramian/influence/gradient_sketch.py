"""Compressed gradients of samples: a random projection of the whitened gradient of every block, made in the backward pass.

Legend: B samples, T tokens, Y_b [o, m] the gradient of sample b in one block, k and l numbers of rows of the two projections.

    z_b = S_G (G + λ_G)^(−1/2) Y_b (A + λ_A)^(−1/2) S_Aᵀ      of a sample, [k, l]
    z_q = S_G (G + λ_G)^(1/2)  D_q (A + λ_A)^(1/2)  S_Aᵀ      of a query's natural gradient D_q = (F + λ)⁻¹ g_q

S_G [k, o] and S_A [l, m] have random orthogonal rows with E[SᵀS] = I, so that ⟨z_q, z_b⟩ has the expectation ⟨D_q, Y_b⟩, and
equals it where k = o and l = m. Whitening changes the variance only, which is smallest where all directions are about as
large; λ_A and λ_G are δ times the mean eigenvalue of their side.

The projections are multiplied out once, so a sample costs 2·T·(o·k + m·l + k·l) FLOPs for each block, and Y_b is never formed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gramian.curvature.blocks.assumed_matrices import checked, sides_of
from gramian.curvature.blocks.block import Block
from gramian.curvature.blocks.block_specs import Spec, blocks_by_layer, trained_blocks
from gramian.curvature.blocks.eigenvalue_correction import Basis
from gramian.curvature.blocks.parameter_parts import ParameterParts
from gramian.curvature.estimate.eigenbasis_sums import EKFACUse
from gramian.linalg import Dense, Factor
from gramian.linalg.wide import wide, wide_mm
from gramian.statistics.by_pass import ByPass
from gramian.taps.gradients.per_sample_gradient import flat
from gramian.taps.records import LayerRecord, ParameterRecord
from gramian.taps.roles import Needs, ParameterInfo

GradientsByPass = dict[int, Tensor]
"""{number of the pass: compressed gradients of its samples, [B, columns]}."""


@dataclass(frozen=True)
class BlockSketch:
    """The projections of one block, and the columns of its part of a compressed gradient."""

    spec: Spec
    columns: slice
    samples_KO: Tensor
    """S_G (G + λ_G)^(−1/2)."""
    samples_LM: Tensor
    """S_A (A + λ_A)^(−1/2); [1, 1] for a block that is not a Kronecker product."""
    queries_KO: Tensor
    queries_LM: Tensor

    def of_uses(self, use: EKFACUse) -> Tensor:
        """z_b [B, k, l] of the samples in one call of a layer of this block."""
        left, right, spec = self.samples_KO, self.samples_LM, self.spec
        g_BTO = wide(use.gradients_BTO).to(left.dtype) * use.scale
        if use.is_table and spec.layout == "table":
            g_BTK, a_BTL = g_BTO @ left.mT, right.mT[use.inputs_BT]
        elif use.is_table:  # tied to a head, of whose outputs it is a row
            g_BTK, a_BTL = left.mT[use.inputs_BT], g_BTO @ right.mT
        else:
            g_BTK, width = g_BTO @ left.mT, spec.inputs - spec.has_bias
            a_BTL = wide(use.inputs_BT).to(left.dtype) @ right[:, :width].mT
            a_BTL = a_BTL + right[:, -1] if spec.has_bias else a_BTL
        return g_BTK.flatten(1, -2).mT @ a_BTL.flatten(1, -2)

    def of_query(self, direction: Mapping[str, Tensor]) -> Tensor:
        """z_q, flat, of a natural gradient {parameter: tensor}."""
        y_OM = self.spec.matrix({n: direction[n].to(self.queries_KO) for n in self.spec.parameters if n in direction})
        return (self.queries_KO @ y_OM @ self.queries_LM.mT).flatten()


class GradientSketch:
    """The projections of all blocks of a Fisher, a function of the factors, of `rank` and of `seed`."""

    def __init__(self, blocks: Mapping[str, Block], rank: int, share: float, seed: int) -> None:
        """Compute all projections: a factorisation of every side, and rank · (o + m) entries twice for each block.

        Args:
            blocks: the blocks of the Fisher.
            rank: most rows k and l of a block's projections; a parameter vector has up to rank².
            share: δ, damping of the whitening relative to the mean eigenvalue.
            seed: seed of the projections.
        """
        self.sketches: dict[str, BlockSketch] = {}
        at = 0
        for number, (name, block) in enumerate(blocks.items()):
            k, other = rank_of(block.spec, rank)
            generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
            basis_G, basis_A = (None, None) if block.correction is None else (block.correction.G, block.correction.A)
            samples_KO, queries_KO = _both(block.G, basis_G, k, share, generator)
            one = torch.ones(1, 1, dtype=samples_KO.dtype, device=samples_KO.device)
            samples_LM, queries_LM = (one, one) if block.A is None else _both(block.A, basis_A, other, share, generator)
            columns = slice(at, at + k * other)
            self.sketches[name] = BlockSketch(block.spec, columns, samples_KO, samples_LM, queries_KO, queries_LM)
            at = columns.stop
        self.columns = at
        """Number of entries of a compressed gradient."""

    def of_query(self, direction: Mapping[str, Tensor]) -> Tensor:
        """z_q [columns] of a query's natural gradient {parameter: tensor}."""
        each = ParameterParts.of(sketch.spec for sketch in self.sketches.values()).split(direction)
        return torch.cat([sketch.of_query(each) for sketch in self.sketches.values()])


def rank_of(spec: Spec, rank: int) -> tuple[int, int]:
    """(k, l), the rows of a block's two projections: at most `rank` and the width of the side; rank² for a vector."""
    if spec.kind != "kronecker":
        return min(rank * rank, spec.outputs), 1
    return min(rank, spec.outputs), min(rank, spec.inputs)


def _both(
    factor: Factor, basis: Basis | None, rank: int, share: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """S (M + λ)^(−1/2) and S (M + λ)^(1/2), each [rank, n], of one side M [n, n] with λ = share · tr M / n.

    `basis`: M's eigenvectors where EK-FAC has stored them; else M is decomposed.
    """
    s_KN = _orthogonal(rank, factor.dim, generator).to(factor.device, factor.dtype)
    value = share * float(factor.trace()) / factor.dim
    if value <= 0:
        return s_KN, s_KN
    columns_NK = s_KN.mT.contiguous()
    if basis is None or basis.matrix is None or not isinstance(factor, Dense):
        powers = [factor.power(columns_NK, p, value) for p in (-0.5, 0.5)]
    else:
        vectors_NR = basis.vectors(columns_NK)
        values_R = (vectors_NR * wide_mm(factor.dense().to(vectors_NR), vectors_NR)).sum(0).clamp(min=0)
        inside_RK = wide_mm(vectors_NR.mT, columns_NK)
        powers = [
            value**p * columns_NK + wide_mm(vectors_NR, ((values_R + value) ** p - value**p)[:, None] * inside_RK)
            for p in (-0.5, 0.5)
        ]
    down, up = (found.to(s_KN).mT.contiguous() for found in powers)
    return down, up


def _orthogonal(rows: int, width: int, generator: torch.Generator) -> Tensor:
    """Random S [rows, width] with orthogonal rows and E[SᵀS] = I; the identity if rows = width."""
    if rows == width:
        return torch.eye(width, dtype=torch.float64)
    gauss = torch.randn(width, rows, dtype=torch.float64, generator=generator)
    q, r = torch.linalg.qr(gauss)
    found: Tensor = (q * r.diagonal().sign()).mT * (width / rows) ** 0.5
    return found


# ---- statistics ------------------------------------------------------------------------------------------------------


class MatrixGradients(ByPass):
    """The statistic of compressed gradients of all blocks that are Kronecker products, from the calls of their layers."""

    needs: Needs = "layer"
    takes_products: ClassVar[bool] = True
    """Records may be of single products inside a layer (`InlineProducts`)."""

    def __init__(self, sketch: GradientSketch) -> None:
        self._sketch = sketch
        self._specs = {n: one.spec for n, one in sketch.sketches.items() if one.spec.kind == "kronecker"}
        self._by_layer = blocks_by_layer(self._specs)

    def update(self, sums: GradientsByPass, record: LayerRecord) -> None:
        """Add the samples' part of one call of a layer."""
        names, number = trained_blocks(self._by_layer, self._specs, record), record.info.number
        for key, name in names.items():
            sketch = self._sketch.sketches[name]
            found = sides_of(sketch.spec, key, record)
            if found is None:
                continue
            use = EKFACUse.of(checked(found), record.info.scale, record.layer in sketch.spec.tables)
            z_BKL = sketch.of_uses(use)
            if number not in sums:
                sums[number] = z_BKL.new_zeros(len(z_BKL), self._sketch.columns)
            sums[number][:, sketch.columns] += z_BKL.flatten(1).to(sums[number])

    def finish(self, sums: GradientsByPass) -> Tensor:
        """Compressed gradients of all samples in the order of the passes, [B, columns]; empty without such blocks."""
        return torch.cat([sums[number] for number in sorted(sums)]) if sums else torch.zeros(0)


class VectorGradients(ByPass):
    """The statistic of compressed gradients of all blocks that are no Kronecker products: norm layers, unmatched biases."""

    needs: Needs = "parameter"

    def __init__(self, sketch: GradientSketch) -> None:
        self._sketch = sketch
        self._by_parameter = {
            one.spec.parameters[0]: one for one in sketch.sketches.values() if one.spec.kind != "kronecker"
        }

    def start(self, parameters: Mapping[str, ParameterInfo]) -> GradientsByPass:
        """An empty state."""
        return {}

    def update(self, sums: GradientsByPass, record: ParameterRecord) -> None:
        """Add the samples' gradients of one parameter."""
        sketch = self._by_parameter.get(record.parameter)
        if sketch is None:
            return
        rows_BN = torch.cat([flat(part.per_sample()) for part in record.gradient.chunks()])
        z_BK = (rows_BN.to(sketch.samples_KO) * record.info.scale) @ sketch.samples_KO.mT
        number = record.info.number
        if number not in sums:
            sums[number] = z_BK.new_zeros(len(z_BK), self._sketch.columns)
        sums[number][:, sketch.columns] += z_BK.to(sums[number])

    def finish(self, sums: GradientsByPass) -> Tensor:
        """Compressed gradients of all samples in the order of the passes, [B, columns]; empty without such blocks."""
        return torch.cat([sums[number] for number in sorted(sums)]) if sums else torch.zeros(0)
