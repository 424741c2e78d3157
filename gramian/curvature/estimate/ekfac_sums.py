"""EK-FAC from one pass: the tokens of a refresh are stored, and its eigenvalues are measured when the basis is known.

S = (1/N) Σ_b (Q_Gᵀ Y_b Q_A)⊙² is the diagonal of the per-sample Fisher in K-FAC's eigenbasis: of all F that are diagonal in it
the closest one in the Frobenius norm (George et al. 2018). The basis exists only after the last token, so every token is stored
until then: T·(o + m) entries per sample. `second_pass` measures the same S from a second pass over the data and stores none.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.curvature.blocks.block import Block
from gramian.curvature.blocks.block_specs import Spec
from gramian.curvature.blocks.eigenvalue_correction import Basis, Correction
from gramian.curvature.estimate.eigenbasis_sums import EigenbasisSums, EKFACUse, HeadTokens, sample_weights
from gramian.curvature.options import Options
from gramian.curvature.refresh.shared_factorisation import SharedFactorisation
from gramian.linalg import WIDEST_DENSE, Diagonal, DiagonalLowRank
from gramian.linalg.wide import exact_float32

Bases = tuple[Basis, Basis]
"""Eigenvectors of a block's sides G and A."""


@dataclass
class EKFACSamples:
    """The stored tokens of one block, from which EK-FAC measures its eigenvalues."""

    passes: dict[int, list[EKFACUse]] = field(default_factory=dict)
    """{pass number: calls of layers with this weight, all by the samples of that pass}."""
    weights: dict[int, Tensor | None] = field(default_factory=dict)
    """{pass number: weight of each sample [B]}; None: each sample counts once."""
    head: list[HeadTokens] = field(default_factory=list)

    def add(self, number: int, use: EKFACUse, weights_BT: Tensor | None, borrowed: bool) -> None:
        """Add one layer call `use` to pass `number`, with token weights; None: all are 1.

        Memory that is `borrowed` (reused after the call) is copied at once.
        """
        if borrowed:
            use.own({})
        self.passes.setdefault(number, []).append(use)
        self.weights[number] = sample_weights(weights_BT)

    def own(self, copies: dict[tuple[int, ...], Tensor]) -> None:
        """At the end of a pass, copy the stored tensors that are the user's memory; `copies` holds copies that layers share."""
        for uses in self.passes.values():
            for use in uses:
                use.own(copies)

    def measure(self, sums: EigenbasisSums) -> None:
        """Add all stored samples to `sums`."""
        for number, uses in self.passes.items():
            sums.add(uses, self.weights[number])
        for head in self.head:
            sums.add_head(head)


def correct(
    options: Options,
    fresh: Mapping[str, Block],
    samples: Mapping[str, EKFACSamples],
    before: Mapping[str, Correction],
    factorisations: SharedFactorisation,
) -> None:
    """Measure EK-FAC's eigenvalues S of every Kronecker block of a refresh, from {block: its stored tokens}. Collective.

    They are set on the new blocks `fresh`, averaged with earlier ones, {block: its eigenvalues `before`}; `factorisations`
    shares the eigendecompositions among processes. An error on one process is raised on all as a GramianError.
    """
    exchange = factorisations.exchange
    with torch.no_grad(), exact_float32():
        problem, found = "", {}
        for name, pair in bases_of(fresh, options, factorisations).items():
            found[name] = pair, EigenbasisSums.of(fresh[name], pair, options.budget is not None)
            try:
                samples.get(name, EKFACSamples()).measure(found[name][1])
            except Exception as error:  # of any kind: raised when all processes know of it
                problem = problem or _one_line(fresh[name].spec, error)
            found[name][1].G, found[name][1].A = pair  # frees the gathered rows
        problems = [problem] if exchange is None else exchange.gather_messages(problem)
        problem = next((f"process {rank}: {text}" for rank, text in enumerate(problems) if text), "")
        if problem:
            raise GramianError(f"{problem}; expected every process to measure its samples (ekfac=True)")
        for name in list(found):
            pair, sums = found.pop(name)
            new = sums.correction(fresh[name].facts.terms, pair, exchange)
            fresh[name].correction = averaged(new, fresh[name], before.get(name), options.ema_decay)


def bases_of(blocks: Mapping[str, Block], options: Options, factorisations: SharedFactorisation) -> dict[str, Bases]:
    """{Kronecker block: eigenvectors of G and A} of the blocks that have both; the others record why not. Collective.

    A block with EK-FAC's eigenvalues keeps the basis that they are in.
    """
    kronecker = {name: block for name, block in blocks.items() if block.A is not None}
    for block in kronecker.values():
        block.corrected, block.facts.reason_ekfac = _can_be_corrected(block)
    able = {name: block for name, block in kronecker.items() if block.corrected}
    factorisations.factorise(able, {name: _dtype(block) for name, block in able.items()}, -1.0, options.kfac_eps)
    found = {}
    for name, block in able.items():
        if block.correction is not None:
            found[name] = block.correction.G, block.correction.A
        else:
            found[name] = Basis.of(block.holder("G", "eigen")), Basis.of(block.holder("A", "eigen"))
    return found


def _can_be_corrected(block: Block) -> tuple[bool, str]:
    if all(isinstance(factor, Diagonal) for factor in block.factors.values()):
        return False, "both sides are diagonal, and eigenvalues would be as many as weights: K-FAC's are kept"
    for side, factor in block.factors.items():
        if isinstance(factor, DiagonalLowRank) and factor.dim > WIDEST_DENSE:
            return False, f"{side} is {factor.dim} wide and has no eigenvectors: K-FAC's eigenvalues are kept"
    return True, ""


def _dtype(block: Block) -> torch.dtype:
    assert block.A is not None
    return torch.promote_types(block.A.dtype, block.G.dtype)


def averaged(new: Correction, block: Block, old: Correction | None, decay: float) -> Correction:
    """The moving average of EK-FAC's eigenvalues over refreshes, the old ones expressed in the new basis; `new` without old.

    `decay` is β of the average; `block`, the new one, has the number of refreshes in it.
    """
    k = block.facts.refreshes
    if old is None or k <= 1:
        return new
    share = (1 - decay) / (1 - decay**k)
    seen = old.seen_in(new.G, new.A).to(new.values_RS)
    return Correction((1 - share) * seen + share * new.values_RS, new.G, new.A, new.outside)


def _one_line(spec: Spec, error: Exception) -> str:
    """The text of an error in one line, with the block's name and the error's type."""
    return " ".join(f"{spec.name}: {type(error).__name__}: {error}".split())
