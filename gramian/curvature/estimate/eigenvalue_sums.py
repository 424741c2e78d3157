"""EK-FAC's eigenvalues as a statistic of a second pass: samples are projected in the backward, and no token is stored after it.

Tokens of a weight wait until its last use in the backward, because a sample's uses are added before they are squared. Those of
a weight that is used once are projected at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from gramian.curvature.blocks.assumed_matrices import checked, sides_of
from gramian.curvature.blocks.block_specs import Spec, blocks_by_layer, trained_blocks
from gramian.curvature.blocks.eigenvalue_correction import Basis
from gramian.curvature.estimate.eigenbasis_sums import EigenbasisSums, EKFACUse, HeadTokens, sample_weights
from gramian.curvature.estimate.kronecker_sums import head_tokens
from gramian.curvature.estimate.likelihood import Likelihood, Softmax
from gramian.curvature.estimate.loss_checks import CoefficientCheck
from gramian.curvature.estimate.refresh_pass import RefreshPass, SumsOfOneCapture
from gramian.curvature.estimate.token_moments import StoragePolicy
from gramian.curvature.estimate.token_selection import TokenSelection
from gramian.linalg.wide import pieces
from gramian.taps.products.sides import Sides
from gramian.taps.records import LayerRecord, ParameterRecord
from gramian.taps.roles import Needs, ParameterInfo


@dataclass
class EigenvalueSums(SumsOfOneCapture):
    """The statistic Σ_b (Q_Gᵀ Y_b Q_A)⊙² of every K-FAC block, for eigenvectors Q that are known before the first sample b."""

    specs: Mapping[str, Spec]
    sums: dict[str, EigenbasisSums]
    """{K-FAC block: its sums}, of the blocks that have eigenvectors."""
    bases: Mapping[str, tuple[Basis, Basis]]
    """{K-FAC block: eigenvectors of G and A}, with their rows as the factors store them."""
    exact_head: bool
    """True if the Fisher of the head is that of its outputs and not of labels."""
    head: str | None
    likelihood: Likelihood = Softmax()
    """The distribution that the outputs of an exact head stand for."""
    seed: int = 0
    coefficient: CoefficientCheck = field(default_factory=CoefficientCheck)
    """Whether loss terms have the coefficient that the arguments of the pass give."""
    needs: Needs = "layer"
    takes_products: ClassVar[bool] = True
    """Records may be of single products inside a layer (`InlineProducts`)."""
    per_sample: bool = False
    selection: TokenSelection = field(default_factory=lambda: TokenSelection(0))
    _by_layer: dict[str, dict[str, str]] = field(default_factory=dict)
    _waiting: dict[tuple[int, str], dict[str, list[EKFACUse]]] = field(default_factory=dict)
    """{(pass number, parameter): {its block: the calls of layers with it so far}}."""

    def start(self, parameters: Mapping[str, ParameterInfo]) -> dict[str, EigenbasisSums]:
        """The sums of all blocks, at the start of a capture."""
        self._by_layer = blocks_by_layer({name: self.specs[name] for name in self.sums})
        return self.sums

    def update(self, sums: dict[str, EigenbasisSums], record: LayerRecord) -> None:
        """Take the tokens of one layer call (`record`); those of an exact head are added at once."""
        if record.layer == self.head and self.coefficient.due:
            self._check_coefficient(record)
        names = trained_blocks(self._by_layer, self.specs, record)
        for key, name in names.items():
            spec = self.specs[name]
            found = sides_of(spec, key, record)
            if found is None:
                continue
            sides = checked(found)
            if self.exact_head and record.layer == self.head:
                self._add_head(sums[name], sides, record)
                continue
            use = EKFACUse.of(sides, record.info.scale, record.layer in spec.tables)
            self._waiting.setdefault((record.info.number, spec.owners[0]), {}).setdefault(name, []).append(use)
            if record.borrowed:
                use.own({})

    def complete(self, record: ParameterRecord) -> None:
        """Add the samples of a pass to the sums of a block whose weight (`record`) has no further use in it."""
        for name, uses in self._waiting.pop((record.info.number, record.parameter), {}).items():
            self.sums[name].add(uses, sample_weights(record.info.token_weights))

    def count(self, sums: dict[str, EigenbasisSums], samples: int) -> None:
        """End a pass: forget which tokens were chosen in it; `samples` is not used."""
        self.selection.end_pass()

    def _check_coefficient(self, record: LayerRecord) -> None:
        info, sides = record.info, checked(next(iter(record.sides().values())))
        assert isinstance(info, RefreshPass)
        chosen = self.selection.choose(sides, info, record.layer, StoragePolicy())
        gradients = chosen.tokens(sides.gradients_BTO, True, info.scale, inverse=True)
        self.coefficient.compare(sides, chosen, gradients, info, self.likelihood)

    def _add_head(self, sums: EigenbasisSums, sides: Sides, record: LayerRecord) -> None:
        """Add the tokens of an exact head, some at a time, because the Hessian of each has as many entries as outputs."""
        assert sides.outputs is not None
        rows_TI, _, weights_T, _ = head_tokens(self.selection, self.likelihood, sides, record, StoragePolicy())
        for part in pieces(len(rows_TI), sums.G.dim, sums.most):
            hessian = self.likelihood.hessian(sides.outputs(rows_TI[part]))
            sums.add_head(HeadTokens(rows_TI[part], hessian, weights_T[part].to(hessian.diagonal_TV)))
