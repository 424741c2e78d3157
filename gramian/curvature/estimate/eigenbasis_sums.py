"""Sums over samples behind EK-FAC's eigenvalues of one block: Σ_b (Q_Gᵀ Y_b Q_A)⊙² [r, s], and Σ_b ‖Y_b‖².

Legend: B samples, K tokens of a sample over all uses of the weight, Y_b [o, m] the gradient of sample b, Q_G [o, r] and
Q_A [m, s] the eigenvectors of K-FAC's sides.

All uses of a weight by a sample and all its tokens are added before anything is squared: Y_b = Σ_k g_k a_kᵀ. Samples are
projected a piece at a time, and a sample with many tokens a piece of these at a time, so that the memory beside the sums does
not grow with the batch (`workspace`).

For an exact head with token weights w_t and the Hessian H_t by its outputs (of a softmax diag p_t − p_t p_tᵀ) the sum is
Σ_t w_t (q_GᵀH_t q_G)(q_Aᵀa_t)², since labels of different tokens are independent. If its weight is an embedding table too, the
table's part is added, as K-FAC adds its two products.

Cost: 2·K·(o·r + m·s + r·s) FLOPs per sample.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gramian.curvature.blocks.block import Block
from gramian.curvature.blocks.block_specs import Spec
from gramian.curvature.blocks.eigenvalue_correction import Basis, Correction
from gramian.curvature.estimate.likelihood import OutputHessian
from gramian.curvature.estimate.token_moments import shared_copy
from gramian.linalg import Diagonal
from gramian.linalg import wide as wide_products
from gramian.linalg.wide import pieces, wide
from gramian.parallel.exchange import Exchange
from gramian.taps.products.sides import Sides

FEW = 64
"""Number of tokens that are projected at a time, at least, inside a memory budget."""


def piece_of(o: int, m: int, r: int, s: int, budgeted: bool) -> int:
    """Number of entries that are projected at a time: `BLOCK`; inside a memory budget those of S [r, s], or of `FEW` tokens."""
    return min(wide_products.BLOCK, max(r * s, FEW * (o + m + r + s))) if budgeted else wide_products.BLOCK


def workspace(o: int, m: int, r: int, s: int, budgeted: bool, tokens: int, lookups: int) -> int:
    """Upper bound on the entries, beside the sums, while samples of `tokens` tokens, or an embedding's `lookups`, are added.

    A piece of tokens and the [r, s] of its samples, as they come and on their way; for an embedding the gradients of the rows
    that a sample has looked up.
    """
    each = o + m + r + s
    piece = max(piece_of(o, m, r, s, budgeted), each)
    met = min(piece + r * s, tokens * each + tokens // 2 * r * s)
    looked_up = min(lookups, m) * o + 2 * min(piece, lookups * (o + r + 1))
    return max(4 * met + r * s, looked_up) if tokens or lookups else 0


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

    @classmethod
    def of(cls, sides: Sides, scale: float | Tensor, is_table: bool) -> "EKFACUse":
        """The call with these `sides`; tokens that the layer itself ignores (a padding index) have no gradient."""
        g_BTO = sides.gradients_BTO
        if sides.counted_BT is not None:
            g_BTO = g_BTO.masked_fill(~sides.counted_BT[..., None], 0.0)
        return cls(sides.inputs_BT, g_BTO, scale, is_table)

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


def sample_weights(weights_BT: Tensor | None) -> Tensor | None:
    """Weight of each sample [B], the largest of its tokens; None: all weights are 0 or 1, so that every sample counts once."""
    if weights_BT is None or bool(((weights_BT == 0) | (weights_BT == 1)).all()):
        return None
    return weights_BT.amax(1)


@dataclass
class EigenbasisSums:
    """The sums of one block over the samples of this process, in the eigenbases of its factors."""

    spec: Spec
    G: Basis
    """The basis Q_G with all its rows on this process."""
    A: Basis
    table: bool
    """True if the weight is an embedding table alone, whose inputs are indices."""
    squares_RS: Tensor
    norm: Tensor
    """Σ_b ‖Y_b‖², 0-dim float64; not summed where both bases are complete, because it is that of `squares_RS` then."""
    most: int
    """Number of entries that are projected at a time."""
    samples: int = 0
    """Number of samples, or of tokens of an exact head, so far."""

    @classmethod
    def of(cls, block: Block, bases: tuple[Basis, Basis], budgeted: bool) -> "EigenbasisSums":
        """Sums of zero for a Kronecker block in `bases` (G, A). Collective where rows of a basis are sharded.

        `budgeted`: there is a memory budget, so that samples are projected in smaller pieces.
        """
        assert block.A is not None
        (G, A), spec = (basis.whole() for basis in bases), block.spec
        dtype = torch.promote_types(block.A.dtype, block.G.dtype)
        table = isinstance(block.A, Diagonal) and spec.layout == "table"
        squares = torch.zeros(G.rank, A.rank, dtype=dtype, device=spec.device)
        norm = torch.zeros((), dtype=torch.float64, device=spec.device)
        return cls(spec, G, A, table, squares, norm, piece_of(G.dim, A.dim, G.rank, A.rank, budgeted))

    @property
    def complete(self) -> bool:
        """True if the bases span the whole space of [o, m] matrices, so that nothing lies outside of them."""
        return self.G.rank == self.G.dim and self.A.rank == self.A.dim

    @property
    def _each(self) -> int:
        """Number of entries of one token on its way into the bases."""
        return self.G.dim + self.G.rank + (1 if self.table else self.A.dim + self.A.rank)

    # ---- samples ---------------------------------------------------------------------------------------------------

    def add(self, uses: Sequence[EKFACUse], weights_B: Tensor | None) -> None:
        """Add the samples of one pass, from all calls of layers with this weight; `weights_B` None: each counts once.

        A sample of weight w counts as w samples: its gradient, which is w times that of one, is divided by √w.
        """
        batch, tokens = len(uses[0].gradients_BTO), sum(use.gradients_BTO.shape[1] for use in uses)
        self.samples += batch
        roots_B = None
        if weights_B is not None:
            top_B = weights_B.to(self.squares_RS)
            roots_B = torch.where(top_B > 0, top_B, 1.0).rsqrt()
        matrix = 0 if self.table or tokens == 1 else self.squares_RS.numel()
        for part in pieces(batch, tokens * self._each + matrix, self.most):
            if self.table:
                self._add_lookups(uses, part, roots_B)
            elif tokens == 1:
                self._add_single(uses[0], part, roots_B)
            else:
                self._add_samples(uses, part, roots_B)

    def _add_single(self, use: EKFACUse, part: slice, roots_B: Tensor | None) -> None:
        """Add samples of one token each, whose squares are products of squares."""
        out_BO, in_BM = (side[:, 0] for side in self._sides(use, part, slice(None), roots_B))
        g_RB, a_SB = self.G.coordinates(out_BO.mT), self.A.coordinates(in_BM.mT)
        self.squares_RS.addmm_(g_RB.square(), a_SB.square().mT)
        if not self.complete:
            self.norm += (out_BO.square().sum(1) * in_BM.square().sum(1)).sum(dtype=torch.float64)

    def _add_samples(self, uses: Sequence[EKFACUse], part: slice, roots_B: Tensor | None) -> None:
        """Add samples whose tokens are summed first: C_b = Σ_k (Q_Gᵀg_k)(Q_Aᵀa_k)ᵀ."""
        c_BRS = self.squares_RS.new_zeros(part.stop - part.start, *self.squares_RS.shape)
        for out_BCO, in_BCM in self._chunks(uses, part, roots_B):
            g_BRC, a_BSC = _in_basis(self.G, out_BCO), _in_basis(self.A, in_BCM)
            c_BRS.baddbmm_(g_BRC, a_BSC.mT)
        self.squares_RS += c_BRS.square_().sum(0)
        if not self.complete:
            self._add_norms(uses, part, roots_B)

    def _add_norms(self, uses: Sequence[EKFACUse], part: slice, roots_B: Tensor | None) -> None:
        """Add ‖Y_b‖² of samples: of Y_b itself where it is small enough, else Σ_kl (g_k·g_l)(a_k·a_l) over pairs of tokens."""
        entries, samples = self.G.dim * self.A.dim, part.stop - part.start
        if entries <= self.most:
            for few in pieces(samples, entries, self.most):
                here = slice(part.start + few.start, part.start + few.stop)
                y_BOM = self.squares_RS.new_zeros(few.stop - few.start, self.G.dim, self.A.dim)
                for out_BCO, in_BCM in self._chunks(uses, here, roots_B):
                    y_BOM.baddbmm_(out_BCO.mT, in_BCM)
                self.norm += y_BOM.square_().sum(dtype=torch.float64)
            return
        for number, (out_BCO, in_BCM) in enumerate(self._chunks(uses, part, roots_B)):
            for other, (out_BDO, in_BDM) in enumerate(self._chunks(uses, part, roots_B)):
                if other > number:
                    break
                pairs = (out_BCO @ out_BDO.mT).mul_(in_BCM @ in_BDM.mT).sum(dtype=torch.float64)
                self.norm += pairs if other == number else 2 * pairs

    def _add_lookups(self, uses: Sequence[EKFACUse], part: slice, roots_B: Tensor | None) -> None:
        """Add samples of an embedding table; a sample's tokens with the same index are added before anything is squared."""
        width, place = self.A.dim, 0
        index_BK = torch.cat([use.inputs_BT[part] for use in uses], 1)
        sample_B1 = torch.arange(len(index_BK), device=index_BK.device)[:, None]
        keys_U, place_BK = (sample_B1 * width + index_BK).unique(return_inverse=True)
        joined_UO = self.squares_RS.new_zeros(len(keys_U), self.G.dim)
        for use in uses:
            for tokens in pieces(use.inputs_BT.shape[1], len(index_BK) * self._each, self.most):
                out_BCO, size = self._gradients(use, part, tokens, roots_B), tokens.stop - tokens.start
                joined_UO.index_add_(0, place_BK[:, place : place + size].flatten(), out_BCO.flatten(0, 1))
                place += size
        for some in pieces(len(keys_U), self._each, self.most):
            squares_RU = self.G.coordinates(joined_UO[some].mT).square()
            self.squares_RS.index_add_(1, keys_U[some] % width, squares_RU)
        if not self.complete:
            self.norm += joined_UO.square_().sum(dtype=torch.float64)

    def _chunks(self, uses: Sequence[EKFACUse], part: slice, roots_B: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
        """(output gradients [b, c, o], inputs [b, c, m]) of the samples of a slice, some tokens at a time."""
        for use in uses:
            for tokens in pieces(use.gradients_BTO.shape[1], (part.stop - part.start) * self._each, self.most):
                yield self._sides(use, part, tokens, roots_B)

    def _sides(self, use: EKFACUse, part: slice, tokens: slice, roots_B: Tensor | None) -> tuple[Tensor, Tensor]:
        """(output gradients [b, c, o], inputs [b, c, m]) of some samples and tokens of a call, scaled and widened."""
        out, into = self._gradients(use, part, tokens, roots_B), use.inputs_BT[part, tokens]
        if not use.is_table:
            return out, self._with_one(into)
        # of a tied head: a row of its outputs
        return torch.nn.functional.one_hot(into, self.G.dim).to(out.dtype), out

    def _gradients(self, use: EKFACUse, part: slice, tokens: slice, roots_B: Tensor | None) -> Tensor:
        out_BCO = wide(use.gradients_BTO[part, tokens]).to(self.squares_RS.dtype) * use.scale
        return out_BCO if roots_B is None else out_BCO * roots_B[part, None, None]

    def _with_one(self, inputs: Tensor) -> Tensor:
        """Inputs [..., in] in the dtype of the sums, with a last entry of 1 where the block has a bias."""
        rows = wide(inputs).to(self.squares_RS.dtype)
        return torch.cat([rows, rows.new_ones(*rows.shape[:-1], 1)], -1) if self.spec.has_bias else rows

    # ---- exact heads -----------------------------------------------------------------------------------------------

    def add_head(self, head: HeadTokens) -> None:
        """Add Σ_t w_t (q_GᵀH_t q_G)(q_Aᵀa)² and the trace Σ_t w_t tr(H_t)‖a‖² of an exact head's tokens.

        H_t = diag(d) − p pᵀ is the Hessian by the outputs, a are inputs, q_G and q_A basis vectors.
        """
        self.samples += len(head.weights_T)
        q_VR = self.G.vectors(self.squares_RS)
        q2_VR = q_VR.square()
        for part in pieces(len(head.weights_T), self._each, self.most):
            d_TV, w_T = (t[part].to(self.squares_RS) for t in (head.hessian.diagonal_TV, head.weights_T))
            in_TM = self._with_one(head.inputs_TI[part])
            curved_TR, trace_T = d_TV @ q2_VR, d_TV.sum(1)
            if head.hessian.minus_TV is not None:
                p_TV = head.hessian.minus_TV[part].to(self.squares_RS)
                curved_TR, trace_T = curved_TR - (p_TV @ q_VR).square(), trace_T - p_TV.square().sum(1)
            a_ST = self.A.coordinates(in_TM.mT)
            self.squares_RS.addmm_((curved_TR * w_T[:, None]).mT, a_ST.square().mT)
            if not self.complete:
                self.norm += (w_T * trace_T * in_TM.square().sum(1)).double().sum()

    # ---- the end ---------------------------------------------------------------------------------------------------

    def correction(self, terms: float, bases: tuple[Basis, Basis], exchange: Exchange | None) -> Correction:
        """EK-FAC's eigenvalues: the sums of squares of all processes over N = `terms`, with `bases` (G, A). Collective.

        The sums are used up. One all-reduce of a matrix, one of a number; `exchange` None: this process alone.
        """
        squares, norm = self.squares_RS, self.norm
        if exchange is not None:
            squares, norm = exchange.sum(squares), exchange.sum(norm)
        outside, whole = 0.0, float(norm)
        if not self.complete and whole > 0:
            outside = max(0.0, 1.0 - float(squares.double().sum()) / whole)
        return Correction(squares.div_(terms), *bases, outside)


def _in_basis(basis: Basis, rows_BCN: Tensor) -> Tensor:
    """Coordinates [b, r, c] of rows [b, c, n] in a basis of r vectors."""
    samples, tokens, width = rows_BCN.shape
    found = basis.coordinates(rows_BCN.reshape(-1, width).mT)
    return found.reshape(basis.rank, samples, tokens).transpose(0, 1)
