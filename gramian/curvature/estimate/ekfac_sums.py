"""EK-FAC: second moments of per-sample gradients in K-FAC's eigenbasis, measured on the refresh's own passes.

Legend: B samples, T tokens, N loss terms, Y_b [o, m] the gradient of sample b, Q_G [o, r] and Q_A [m, s] the eigenvectors of
K-FAC's sides.

S = (1/N) Σ_b (Q_Gᵀ Y_b Q_A)⊙² is the diagonal of the per-sample Fisher in that basis: of all F that are diagonal in it the
closest one in the Frobenius norm (George et al. 2018). All uses of a weight by a sample and all its tokens are added before
anything is squared: Y_b = Σ_t g_t a_tᵀ. The basis exists only after the last token, so every token is stored until then.

For an exact head with token weights w_t and the Hessian H_t by its outputs (of a softmax diag p_t − p_t p_tᵀ), S =
(1/N) Σ_t w_t (q_GᵀH_t q_G)(q_Aᵀa_t)², since labels of different tokens are independent. If its weight is an embedding table
too, the table's part is added, as K-FAC adds its two products.

Cost beside K-FAC: 2·T·(o·r + m·s + r·s) FLOPs per sample, and T·(o + m) entries per sample until the refresh is over.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.curvature.blocks.block import Block
from gramian.curvature.blocks.block_specs import Spec
from gramian.curvature.blocks.eigenvalue_correction import Basis, Correction
from gramian.curvature.estimate.likelihood import OutputHessian
from gramian.curvature.estimate.token_moments import shared_copy
from gramian.curvature.options import Options
from gramian.curvature.refresh.shared_factorisation import SharedFactorisation
from gramian.linalg import WIDEST_DENSE, Diagonal, DiagonalLowRank
from gramian.linalg.wide import exact_float32, pieces, wide
from gramian.parallel.exchange import Exchange
from gramian.parallel.sharded_columns import ShardedColumns


@dataclass
class EKFACUse:
    """One call of a layer that uses the block's weight: the inputs and output gradients of its tokens."""

    inputs_BT: Tensor
    """Inputs a [B, T, in]; for an embedding table the indices [B, T]."""
    gradients_BTO: Tensor
    """Gradients g [B, T, out] of the layer's outputs."""
    scale: float | Tensor
    """Factor that turns `gradients_BTO` into gradients of each sample's own loss."""
    is_table: bool
    owned: bool = False
    """True if inputs and gradients are copies that no one else can write to."""

    def own(self, copies: dict[tuple[int, ...], Tensor]) -> None:
        """Copy inputs and gradients, which the user may write to after the pass; layers that share an input share its copy."""
        if self.owned:
            return
        self.owned = True
        self.inputs_BT = shared_copy(self.inputs_BT, copies)
        self.gradients_BTO = shared_copy(self.gradients_BTO, copies)


@dataclass
class HeadTokens:
    """Tokens of a head whose Fisher is exact: inputs [T, in], Hessian by its outputs, weights [T]."""

    inputs_TI: Tensor
    hessian: OutputHessian
    weights_T: Tensor


@dataclass
class EKFACSamples:
    """The stored tokens of one block, from which EK-FAC measures its eigenvalues."""

    passes: dict[int, list[EKFACUse]] = field(default_factory=dict)
    """{pass number: calls of layers with this weight, all by the samples of that pass}."""
    weights: dict[int, Tensor] = field(default_factory=dict)
    """{pass number: weight of each sample [B]}, the largest of its tokens; only for passes with weights other than 0 and 1."""
    head: list[HeadTokens] = field(default_factory=list)

    def add(self, number: int, use: EKFACUse, weights_BT: Tensor | None, borrowed: bool) -> None:
        """Add one layer call `use` to pass `number`, with token weights; None: all are 1.

        Memory that is `borrowed` (reused after the call) is copied at once.
        """
        if borrowed:
            use.own({})
        self.passes.setdefault(number, []).append(use)
        if weights_BT is not None and not bool(((weights_BT == 0) | (weights_BT == 1)).all()):
            self.weights[number] = weights_BT.amax(1)

    def own(self, copies: dict[tuple[int, ...], Tensor]) -> None:
        """At the end of a pass, copy the stored tensors that are the user's memory; `copies` holds copies that layers share."""
        for uses in self.passes.values():
            for use in uses:
                use.own(copies)


def correct(
    options: Options,
    fresh: Mapping[str, Block],
    samples: Mapping[str, EKFACSamples],
    before: Mapping[str, Block],
    factorisations: SharedFactorisation,
) -> None:
    """Measure EK-FAC's eigenvalues S of every Kronecker block of a refresh, from {block: its stored tokens}. Collective.

    They are set on the new blocks `fresh`, averaged with those of the old blocks `before`; `factorisations` shares the
    eigendecompositions among processes. An error on one process is raised on all as a GramianError.
    """
    blocks = {name: block for name, block in fresh.items() if block.A is not None}
    exchange = factorisations.exchange
    with torch.no_grad(), exact_float32():
        for block in blocks.values():
            block.corrected, block.facts.reason_ekfac = _can_be_corrected(block)
        able = {name: block for name, block in blocks.items() if block.corrected}
        factorisations.factorise(able, {name: _dtype(block) for name, block in able.items()}, -1.0, options.kfac_eps)
        found, problem = {}, ""
        for name, block in able.items():
            bases = Basis.of(block.holder("G", "eigen")), Basis.of(block.holder("A", "eigen"))
            found[name], failure = _measured(block, bases, samples.get(name) or EKFACSamples(), exchange)
            problem = problem or failure
        problems = [problem] if exchange is None else exchange.gather_messages(problem)
        problem = next((f"process {rank}: {text}" for rank, text in enumerate(problems) if text), "")
        if problem:
            raise GramianError(f"{problem}; expected every process to measure its samples (ekfac=True)")
        for name, block in able.items():
            sums = found[name].summed(exchange)
            block.correction = _averaged(sums.correction(block.facts.terms), block, before.get(name), options.ema_decay)


def _can_be_corrected(block: Block) -> tuple[bool, str]:
    for side, factor in block.factors.items():
        if isinstance(factor, DiagonalLowRank) and factor.dim > WIDEST_DENSE:
            return False, f"{side} is {factor.dim} wide and has no eigenvectors: K-FAC's eigenvalues are kept"
    return True, ""


def _dtype(block: Block) -> torch.dtype:
    assert block.A is not None
    return torch.promote_types(block.A.dtype, block.G.dtype)


@dataclass
class EigenbasisSums:
    """Sums over samples b of one block for EK-FAC's eigenvalues: Σ_b (Q_GᵀY_bQ_A)⊙² [R, S] and Σ_b ‖Y_b‖², with both bases."""

    squares_RS: Tensor
    norm: Tensor
    """Σ_b ‖Y_b‖² over the gradients Y_b of samples b, 0-dim float64."""
    G: Basis
    A: Basis

    def summed(self, exchange: Exchange | None) -> "EigenbasisSums":
        """These sums added up over all processes; `exchange` None: unchanged. One all-reduce of a matrix, one of a number."""
        if exchange is None:
            return self
        return EigenbasisSums(exchange.sum(self.squares_RS), exchange.sum(self.norm), self.G, self.A)

    def correction(self, terms: float) -> Correction:
        """EK-FAC's eigenvalues (sums of squares / N = `terms`) with their bases, and the share of the trace outside of them."""
        inside, norm = float(self.squares_RS.double().sum()), float(self.norm)
        outside = max(0.0, 1.0 - inside / norm) if norm > 0 else 0.0
        return Correction(self.squares_RS / terms, self.G, self.A, outside)


def _averaged(new: Correction, block: Block, old: Block | None, decay: float) -> Correction:
    """The moving average of EK-FAC's eigenvalues over refreshes, the old ones expressed in the new basis; `new` without old.

    `decay` is β of the average; `block`, the new one, has the number of refreshes in it.
    """
    k = block.facts.refreshes
    if old is None or old.correction is None or k <= 1:
        return new
    share = (1 - decay) / (1 - decay**k)
    seen = old.correction.seen_in(new.G, new.A).to(new.values_RS)
    return Correction((1 - share) * seen + share * new.values_RS, new.G, new.A, new.outside)


def _measured(
    block: Block, bases: tuple[Basis, Basis], samples: EKFACSamples, exchange: Exchange | None
) -> tuple[EigenbasisSums, str]:
    """This process's `EigenbasisSums` of a block in `bases` (G, A), and the text of an error on this process, "" if none.

    After an error the sums are incomplete. Collective where a side's rows are sharded.
    """
    (G, A), spec, dtype = bases, block.spec, _dtype(block)
    zero = torch.zeros(G.rank, A.rank, dtype=dtype, device=spec.device)
    sums, problem = EigenbasisSums(zero, torch.zeros((), dtype=torch.float64, device=spec.device), G, A), ""
    table = isinstance(block.A, Diagonal) and spec.layout == "table"
    passes: list[_Rows] = []
    heads, heads_TI = samples.head, []
    try:
        passes = [
            _Rows(spec, uses, samples.weights.get(number), dtype, table) for number, uses in samples.passes.items()
        ]
        heads_TI = [_with_one(head.inputs_TI, spec, dtype) for head in heads]
    except Exception as error:  # of any kind: raised when all processes know of it; until then its part is missing
        problem, passes, heads = _one_line(spec, error), [], []
    outputs = _in_basis(G, [rows.outputs_KN for rows in passes], spec.outputs, dtype, exchange)
    inputs: Sequence[Tensor | None] = [None] * len(passes)
    head_inputs: list[Tensor] = []
    if not table:
        inputs = _in_basis(A, [rows.inputs_KN for rows in passes], spec.inputs, dtype, exchange)
        head_inputs = _in_basis(A, heads_TI, spec.inputs, dtype, exchange)
    try:
        for rows, g_KR, a_KS in zip(passes, outputs, inputs, strict=True):
            if a_KS is None:
                rows.add_table(sums, g_KR)
            else:
                rows.add(sums, g_KR, a_KS)
        for head, a_TS in zip(heads, head_inputs, strict=True):
            _add_head(sums, head, a_TS)
    except Exception as error:  # of any kind: raised on all processes, which take part in the collectives until then
        problem = _one_line(spec, error)
    return sums, problem


def _one_line(spec: Spec, error: Exception) -> str:
    """The text of an error in one line, with the block's name and the error's type."""
    return " ".join(f"{spec.name}: {type(error).__name__}: {error}".split())


class _Rows:
    """Inputs and output gradients of all K tokens of a weight in one pass: sample b's gradient is Y_b = Σ_k out_bk in_bkᵀ."""

    def __init__(
        self, spec: Spec, uses: Sequence[EKFACUse], weights_B: Tensor | None, dtype: torch.dtype, table: bool
    ) -> None:
        """Concatenate the tokens of the layer calls `uses`; `table`: the weight is only an embedding table, inputs are indices.

        `weights_B`: weights of the samples; None: all are 1.
        """
        self.batch = len(uses[0].gradients_BTO)
        self.weights_B, self.width = weights_B, spec.inputs
        inputs, outputs = [], []
        for use in uses:
            out, into = (wide(use.gradients_BTO).to(dtype) * use.scale).flatten(1, -2), use.inputs_BT
            if use.is_table and not table:  # of a tied head: a row of its outputs
                out, into = torch.nn.functional.one_hot(into.flatten(1), spec.outputs).to(dtype), out
            else:
                into = into.flatten(1) if use.is_table else _with_one(into, spec, dtype).flatten(1, -2)
            outputs.append(out)
            inputs.append(into)
        self.inputs_BK, self.outputs_BKO = torch.cat(inputs, 1), torch.cat(outputs, 1)

    @property
    def outputs_KN(self) -> Tensor:
        """Output gradients of all K tokens of all B samples, [B·K, o]."""
        return self.outputs_BKO.flatten(0, 1)

    @property
    def inputs_KN(self) -> Tensor:
        """Inputs of all K tokens of all B samples, [B·K, m]."""
        return self.inputs_BK.flatten(0, 1)

    def _roots_B(self, like: Tensor) -> Tensor | None:
        """1/√w [B] for sample weights w, so that a sample of weight 2 counts as two samples; None: all are 1."""
        if self.weights_B is None:
            return None
        top_B = self.weights_B.to(like)
        return torch.where(top_B > 0, top_B, 1.0).rsqrt()

    def add(self, sums: EigenbasisSums, g_KR: Tensor, a_KS: Tensor) -> None:
        """Add Σ_b (Q_GᵀY_bQ_A)⊙² and Σ_b ‖Y_b‖² to `sums`, from both sides in their bases: g [B·K, r], a [B·K, s]."""
        tokens = self.outputs_BKO.shape[1]
        g_BKR, a_BKS = (c.reshape(self.batch, tokens, c.shape[1]) for c in (g_KR, a_KS))
        roots_B = self._roots_B(g_KR)
        if roots_B is not None:
            g_BKR = g_BKR * roots_B[:, None, None]
        if g_BKR.shape[1] == 1:
            sums.squares_RS.addmm_(g_BKR[:, 0].square().mT, a_BKS[:, 0].square())
        else:
            for part in pieces(self.batch, g_BKR.shape[2] * a_BKS.shape[2]):
                sums.squares_RS += (g_BKR[part].mT @ a_BKS[part]).square_().sum(0)
        out, into = self.outputs_BKO, self.inputs_BK
        if roots_B is not None:
            out = out * roots_B[:, None, None]
        for part in pieces(self.batch, out.shape[1] ** 2):
            sums.norm += (out[part] @ out[part].mT).mul_(into[part] @ into[part].mT).sum(dtype=torch.float64)

    def add_table(self, sums: EigenbasisSums, g_KR: Tensor) -> None:
        """Add Σ_b (Q_GᵀY_bQ_A)⊙² and Σ_b ‖Y_b‖² of an embedding table to `sums`, from output gradients g [B·K, r] in G's basis.

        Tokens of a sample with the same index are added before anything is squared.
        """
        tokens = self.inputs_BK.shape[1]
        sample_K = torch.arange(self.batch, device=g_KR.device).repeat_interleave(tokens)
        keys, place_K = (sample_K * self.width + self.inputs_BK.flatten()).unique(return_inverse=True)
        roots_B = self._roots_B(g_KR)
        root_K = 1.0 if roots_B is None else roots_B[sample_K][:, None]
        joined_UR = g_KR.new_zeros(len(keys), g_KR.shape[1]).index_add_(0, place_K, g_KR * root_K)
        sums.squares_RS.index_add_(1, keys % self.width, joined_UR.square().mT)
        raw = self.outputs_KN
        joined_UO = raw.new_zeros(len(keys), raw.shape[1]).index_add_(0, place_K, raw * root_K)
        sums.norm += joined_UO.double().square().sum()


def _add_head(sums: EigenbasisSums, head: HeadTokens, a_TS: Tensor) -> None:
    """Add Σ_t w_t (q_GᵀH_t q_G)(q_Aᵀa)² and the trace Σ_t w_t tr(H_t)‖a‖² of an exact head's tokens to `sums`.

    H_t = diag(d) − p pᵀ is the Hessian by the outputs, a are inputs, q_G and q_A basis vectors; `a_TS` are the q_Aᵀa.
    """
    d_TV, w_T = head.hessian.diagonal_TV.to(a_TS), head.weights_T.to(a_TS)
    q_VR = sums.G.combined(torch.eye(sums.G.rank, dtype=a_TS.dtype, device=a_TS.device))
    curved_TR, trace_T = d_TV @ q_VR.square(), d_TV.sum(1)
    if head.hessian.minus_TV is not None:
        p_TV = head.hessian.minus_TV.to(a_TS)
        curved_TR, trace_T = curved_TR - (p_TV @ q_VR).square(), trace_T - p_TV.square().sum(1)
    sums.squares_RS.addmm_((curved_TR * w_T[:, None]).mT, a_TS.square())
    norms_T = head.inputs_TI.to(a_TS).square().sum(1) + (1.0 if sums.A.dim > head.inputs_TI.shape[1] else 0.0)
    sums.norm += (w_T * trace_T * norms_T).double().sum()


def _with_one(inputs: Tensor, spec: Spec, dtype: torch.dtype) -> Tensor:
    """Inputs [..., in] in `dtype`, with a last entry of 1 where the block has a bias."""
    rows = wide(inputs).to(dtype)
    return torch.cat([rows, rows.new_ones(*rows.shape[:-1], 1)], -1) if spec.has_bias else rows


def _in_basis(
    basis: Basis, pieces: Sequence[Tensor], width: int, dtype: torch.dtype, exchange: Exchange | None
) -> list[Tensor]:
    """Coordinates in a basis, [K, r] each, of the rows [K, n] of several passes. Collective if the basis's rows are sharded.

    `width` n and `dtype` shape the empty input of a process without rows.
    """
    sizes = [len(piece) for piece in pieces]
    columns = basis.columns
    if not isinstance(columns, ShardedColumns) or exchange is None:
        return [basis.coordinates(piece.mT).mT for piece in pieces]
    rows = torch.cat(list(pieces)) if pieces else torch.zeros(0, width, dtype=dtype, device=columns.stored.body.device)
    counts = [int(count) for count in exchange.gather_messages(len(rows))]
    features = exchange.reshard(rows, counts)
    local = Basis(basis.dim, basis.matrix, columns.local())
    start = sum(counts[: exchange.rank])
    found = local.coordinates(features.mT)[:, start : start + len(rows)].mT
    return list(found.split(sizes))
