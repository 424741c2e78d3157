"""Self-influence of samples: g_iᵀ (F + λ)⁻¹ g_i, large for samples that the rest of the data does not explain.

Legend: B samples, Y_b [o, m] the gradient of sample b in one block, Q_G [o, r] and Q_A [m, s] the eigenvectors of its sides.

With EK-FAC's eigenvalues S it is Σ_rs C_rs² / (S_rs + λ) + (‖Y_b‖² − ‖C‖²)/λ, C = Q_Gᵀ Y_b Q_A, since F is zero outside the
basis; otherwise ⟨Y_b, (F + λ)⁻¹ Y_b⟩ sample by sample. Cost: 2·o·m·(r + s) FLOPs for each sample and block, and its gradient.
"""

import torch
from torch import Tensor

from gramian.curvature.blocks.block import Block
from gramian.curvature.kfac import KFACNaturalGradient
from gramian.curvature.uses.fisher_parameters import blocks_of
from gramian.linalg.wide import exact_float32, pieces
from gramian.statistics.by_pass import ByPass
from gramian.taps.gradients.per_sample_gradient import PerSampleGradient
from gramian.taps.products.parts import owner, view
from gramian.taps.records import ParameterRecord
from gramian.taps.roles import Needs


class SelfInfluence(ByPass):
    """The statistic g_iᵀ (F + damping)⁻¹ g_i of every captured sample i, for a Fisher whose λ is added to G ⊗ A ("joint").

    ```python
    own = SelfInfluence(kfac)
    with gramian.observe(model, own, loss_reduction="sum") as seen:
        loss(model(x), y).backward()
    seen[own]  # [B]
    ```
    """

    needs: Needs = "parameter"

    def __init__(self, kfac: KFACNaturalGradient) -> None:
        self._kfac = kfac
        self._blocks_of: dict[str, list[Block]] = {}
        for block in blocks_of(kfac).values():
            for p in dict.fromkeys(block.spec.owners):
                self._blocks_of.setdefault(p, []).append(block)
        self._waiting: dict[tuple[int, str], dict[str, PerSampleGradient]] = {}
        """{(pass, block): gradients of those of its parameters that came first}: weight and bias are one matrix."""

    def update(self, sums: dict[int, Tensor], record: ParameterRecord) -> None:
        """Add a block's part once all of its parameters are there."""
        for block in self._blocks_of.get(record.parameter, []):
            key = record.info.number, block.spec.name
            found = self._waiting.setdefault(key, {})
            found[record.parameter] = record.gradient.copy() if record.borrowed else record.gradient
            if len(found) == len(block.spec.parameters):
                self.add(sums, record, _quadratic(block, self._waiting.pop(key), self._kfac) * record.info.scale**2)

    def forget(self, sums: dict[int, Tensor], number: int) -> None:
        """Remove what a pass whose backward failed has left."""
        super().forget(sums, number)
        self._waiting = {key: found for key, found in self._waiting.items() if key[0] != number}

    def finish(self, sums: dict[int, Tensor]) -> Tensor:
        """Self-influence of all samples in the order of the passes, [B]."""
        return torch.cat([sums[number] for number in sorted(sums)]) if sums else torch.zeros(0)


def _quadratic(block: Block, gradients: dict[str, PerSampleGradient], kfac: KFACNaturalGradient) -> Tensor:
    """⟨Y_b, (F + λ)⁻¹ Y_b⟩ of each sample, [B]."""
    spec, parts = block.spec, []
    batch = next(iter(gradients.values())).batch
    with exact_float32():
        for part in pieces(batch, 4 * spec.outputs * spec.inputs):
            written = {name: g.select(part.start, part.stop).per_sample() for name, g in gradients.items()}
            y_BOM = torch.stack(
                [
                    spec.matrix({name: view(written[owner(name)][b], name) for name in spec.parameters})
                    for b in range(part.stop - part.start)
                ]
            )
            parts.append(_in_eigenbasis(block, y_BOM) if block.correction else _by_sample(block, y_BOM, kfac))
    return torch.cat(parts)


def _in_eigenbasis(block: Block, y_BOM: Tensor) -> Tensor:
    """The form with EK-FAC's eigenvalues: [B]."""
    correction, damping = block.correction, block.damping
    assert correction is not None and damping is not None
    (batch, o, m), (r, s) = y_BOM.shape, correction.values_RS.shape
    y_BOM = y_BOM.to(torch.promote_types(y_BOM.dtype, correction.values_RS.dtype))
    c_RBM = correction.G.coordinates(y_BOM.transpose(0, 1).reshape(o, batch * m)).reshape(r, batch, m)
    c_SBR = correction.A.coordinates(c_RBM.permute(2, 1, 0).reshape(m, batch * r)).reshape(s, batch, r)
    squares_BRS = c_SBR.permute(1, 2, 0).square()
    inside = (squares_BRS / (correction.values_RS + damping.lambda_G)).sum((1, 2))
    if correction.complete:
        return inside
    outside = (y_BOM.square().sum((1, 2)) - squares_BRS.sum((1, 2))).clamp(min=0)
    return inside + outside / damping.lambda_G


def _by_sample(block: Block, y_BOM: Tensor, kfac: KFACNaturalGradient) -> Tensor:
    assert block.damping is not None
    solved = [block.power(y, -1.0, block.damping, kfac.options.kfac_eps) for y in y_BOM]
    return torch.stack([(x * y).sum() for x, y in zip(solved, y_BOM, strict=True)])
