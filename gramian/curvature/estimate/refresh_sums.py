"""The sums of one refresh: a statistic over layers for K-FAC blocks, one over parameters for all others.

Legend: B samples, T tokens, I = m inputs, O outputs, N loss terms, w token weights.

A = Σ w a aᵀ / Σ w and G = (1/N) Σ g gᵀ / w over tokens, where g is the gradient of one loss term as if it stood alone with
weight 1. A token weight is the weight of its term in the loss: weight 2 is the same as having the sample twice.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.core.keyed_random import token_keys
from gramian.curvature.blocks.block_specs import Spec
from gramian.curvature.estimate.ekfac_sums import EKFACSamples, EKFACUse, SoftmaxTokens
from gramian.curvature.estimate.loss_coefficient import LOOKED, seen_coefficient
from gramian.curvature.estimate.token_moments import Keep, Products, TokenMoment, Tokens
from gramian.curvature.memory.curvature_plan import Keeps, keeps_of
from gramian.curvature.options import Options
from gramian.linalg import WIDEST_DENSE
from gramian.linalg.wide import pieces, wide
from gramian.parallel.tensor_parallel import TensorParallel
from gramian.taps.records import LayerRecord, ParameterRecord, PassInfo
from gramian.taps.roles import Needs, ParameterInfo
from gramian.taps.sites.site import Sides


@dataclass(frozen=True)
class RefreshPass(PassInfo):
    """A pass of a refresh, and which of its samples it has."""

    num_terms: float = 0.0
    samples_B: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    """Global ids of the samples: what keys belong to."""
    draw: int = 0
    """Number of the draw of labels."""
    telling: int = 0
    """Number of the word on num_terms that it goes by: forwards of one backward share theirs."""
    whole_batch: int = 0
    """Samples behind `num_terms`: this process's, and those that others of a tensor-parallel group took."""
    spread: TensorParallel | None = None
    """The processes that see the same samples, and of which each takes its share."""

    @property
    def rows(self) -> int:
        """Samples of the whole batch."""
        return self.whole_batch


@dataclass
class BlockSums:
    """What one K-FAC block has seen."""

    inputs: TokenMoment | None = None
    gradients: TokenMoment | None = None
    probabilities: TokenMoment | None = None
    """In place of `gradients` where the head's Fisher is exact."""
    counts_V: Tensor | None = None
    """Σ w per row of a table."""
    table_weight: float | Tensor = 0.0
    table_gradients: TokenMoment | None = None
    samples: EKFACSamples = field(default_factory=EKFACSamples)
    """Whole samples, kept for EK-FAC alone."""

    def moments(self) -> list[TokenMoment]:
        """Those that hold something."""
        found = (self.inputs, self.gradients, self.probabilities, self.table_gradients)
        return [moment for moment in found if moment is not None]


@dataclass(frozen=True)
class Chosen:
    """Which tokens of a pass take part, for layers that see the same number of them."""

    index: Tensor | None
    """Of the flattened [B·T]; None: all."""
    weights: Tensor | None
    """w of the chosen; None: all 1."""
    keys: Tensor | None
    seen: int

    def tokens(self, x_BTN: Tensor, borrowed: bool, scale: float | Tensor = 1.0, inverse: bool = False) -> Tokens:
        """The chosen rows of one side; `inverse`: weighted with 1/w."""
        rows, owned = x_BTN.reshape(-1, x_BTN.shape[-1]), self.index is not None
        if self.index is not None:
            rows, borrowed = rows[self.index], False
        weights = 1.0 / self.weights if inverse and self.weights is not None else self.weights
        return Tokens(rows, weights, self.keys, scale, borrowed, self.seen, owned)


class SumsOfOneCapture:
    """What both statistics have in common: `join` adds their sums up over processes, and no two captures' sums are joined."""

    def merge(self, left: Any, right: Any) -> Any:
        """Sums of several processes are joined by `join`, those of several captures are not.

        Raises:
            GramianError: always.
        """
        raise GramianError(
            "merge: K-FAC sums of several captures; expected one capture with cap.next() between backwards"
        )

    def finish(self, sums: Any) -> Any:
        """The sums as they are."""
        return sums


@dataclass
class KroneckerSums(SumsOfOneCapture):
    """Σ over tokens for every K-FAC block. A statistic over layers."""

    specs: Mapping[str, Spec]
    options: Options
    seed: int
    exact_head: bool
    head: "str | None" = None
    """The layer whose outputs are the logits."""
    find_head: Any = None
    """Asked once, in the first backward, if `head` is not known before."""
    check_softmax: bool = True
    check_coefficient: bool = True
    """Whether the coefficient of a loss term is still to be looked at."""
    coefficient: float | None = None
    """Of one loss term, relative to the stated one, where the head shows that it is another."""
    needs: Needs = "layer"
    per_sample: bool = False
    _by_layer: dict[str, Spec] = field(default_factory=dict)
    _keeps: Keeps | None = None
    _products: Products = field(default_factory=Products)
    _chosen: dict[Any, Chosen] = field(default_factory=dict)
    forwards: dict[int, int] = field(default_factory=dict)
    """{word on num_terms: forwards that go by it}."""
    padded: dict[str, tuple[int, float]] = field(default_factory=dict)
    """{layer: (tokens counted, loss terms)} where tokens without a term could not be told from the others."""
    _answered: dict[int, Tensor | None] = field(default_factory=dict)
    """{pass: [B, T], True for tokens with a loss term; None: all have one}, as far as it is known."""
    _counted: dict[tuple[int, str], int] = field(default_factory=dict)
    """{(pass, layer): tokens so far}: a head may be called in pieces."""
    _masks: list[Tensor] = field(default_factory=list)
    _last_rows: dict[Any, tuple[Tensor, Tokens]] = field(default_factory=dict)

    def start(self, parameters: Mapping[str, ParameterInfo]) -> dict[str, BlockSums]:
        """No tokens yet."""
        kronecker = {name: spec for name, spec in self.specs.items() if spec.kind == "kronecker"}
        self._by_layer = {layer: spec for spec in kronecker.values() for layer in spec.layers}
        return {name: BlockSums() for name in kronecker}

    def update(self, sums: dict[str, BlockSums], record: LayerRecord) -> None:
        """Add one use of one layer."""
        spec = self._by_layer.get(record.layer)
        if spec is None or spec.parameters[0] not in record.gradients:
            return
        if self.find_head is not None:
            self.head, self.find_head = self.find_head(), None
        if self._keeps is None:
            self._keeps = keeps_of(self.specs, self.options, self.head, self.exact_head)
        keeps = self._keeps[spec.name]
        info = record.info
        assert isinstance(info, RefreshPass)
        sides, block = record.sides(), sums[spec.name]
        is_table = record.layer in spec.tables
        is_head = record.layer == self.head
        if self.options.ekfac and not (is_head and self.exact_head):
            g_BTO = sides.gradients_BTO
            if sides.counted_BT is not None:
                g_BTO = g_BTO.masked_fill(~sides.counted_BT[..., None], 0.0)
            use = EKFACUse(sides.inputs_BT, g_BTO, info.scale, is_table)
            block.samples.add(info.number, use, info.token_weights, record.borrowed)
        if not is_table:
            self._see_ignored(sides, info)
        self._note_padding(sides, info, record.layer)
        if is_table:
            self._add_table(block, spec, sides, info, record, keeps["table"])
            return
        whole = sides
        if self.options.weight_sharing == "reduce":
            sides = self._reduced(sides, info, record.layer)
        block.inputs = block.inputs or TokenMoment(spec.inputs - spec.has_bias, keeps["A"])
        chosen = self._choose(sides, info, record.layer, block.inputs.keep)
        inputs = self._rows(chosen, sides.inputs_BT, record.borrowed)
        block.inputs.add(inputs, self._products)
        keep = keeps["G"]
        if is_head and self.exact_head:
            self._add_head(block, spec, whole, info, record, keep)
            return
        chosen = self._choose(sides, info, record.layer, keep)
        gradients = chosen.tokens(sides.gradients_BTO, record.borrowed, info.scale, inverse=True)
        if is_head and sides is whole and sides.outputs is not None and info.spread is None and self.check_coefficient:
            rows = chosen.tokens(sides.inputs_BT, borrowed=True).rows_TN[:LOOKED]
            self._look_at_coefficient(sides.outputs(rows).softmax(dim=-1), gradients)
        block.gradients = block.gradients or TokenMoment(spec.outputs, keep)
        block.gradients.add(gradients, Products())

    def count(self, sums: dict[str, BlockSums], samples: int) -> None:
        """A pass is over: nothing of it is held on to but copies of rows."""
        copies: dict[tuple[int, ...], Tensor] = {}
        for block in sums.values():
            for moment in block.moments():
                moment.own(copies)
            block.samples.own(copies)
        self._products.forget()
        self._chosen.clear()
        self._last_rows.clear()
        self._answered.clear()
        self._counted.clear()
        self._masks.clear()

    # ---- sides -----------------------------------------------------------------------------------------------------

    def _rows(self, chosen: Chosen, inputs_BT: Tensor, borrowed: bool) -> Tokens:
        """The chosen rows of an input; the very same tensors if the last layer had the same input."""
        if borrowed or chosen.index is None:
            return chosen.tokens(inputs_BT, borrowed)
        key = (inputs_BT.data_ptr(), inputs_BT.shape, inputs_BT.stride(), inputs_BT.dtype, id(chosen))
        if key not in self._last_rows:
            self._last_rows = {
                key: (inputs_BT, chosen.tokens(inputs_BT, borrowed))
            }  # held, so its address stays its own
        return self._last_rows[key][1]

    def _add_table(
        self, block: BlockSums, spec: Spec, sides: Sides, info: RefreshPass, record: LayerRecord, keep: Keep
    ) -> None:
        """A lookup: inputs are one-hot, so A is a count per row."""
        tied = spec.layout != "table"
        rows, width = (spec.outputs, spec.inputs) if tied else (spec.inputs, spec.outputs)
        chosen = self._choose(sides, info, record.layer, Keep(rows_up_to=0))
        index = sides.inputs_BT.reshape(-1)
        index = index if chosen.index is None else index[chosen.index]
        dtype = wide(sides.gradients_BTO[:0]).dtype
        weights = index.new_ones(len(index), dtype=dtype) if chosen.weights is None else chosen.weights.to(dtype)
        counts = torch.zeros(rows, dtype=dtype, device=index.device).index_add_(0, index, weights)
        block.counts_V = counts if block.counts_V is None else block.counts_V + counts
        block.table_weight = block.table_weight + weights.double().sum()
        block.table_gradients = block.table_gradients or TokenMoment(width, keep)
        chosen = self._choose(sides, info, record.layer, keep)
        gradients = chosen.tokens(sides.gradients_BTO, record.borrowed, info.scale, inverse=True)
        block.table_gradients.add(gradients, Products())

    def _add_head(
        self, block: BlockSums, spec: Spec, sides: Sides, info: RefreshPass, record: LayerRecord, keep: Keep
    ) -> None:
        """The head's own Fisher: Σ w (diag p − p pᵀ) over tokens with a loss, from its recomputed outputs.

        Labels of different tokens are drawn apart, so the Fisher of a sample's summed gradient is this sum too.
        """
        if sides.outputs is None:
            raise GramianError(
                f"{record.layer}: is no linear layer, so its softmax has no exact Fisher here; "
                "expected another head=, or kfac_true_fisher_head=False"
            )
        if self.options.ekfac and spec.outputs <= WIDEST_DENSE:
            block.samples.softmax.append(self._softmax_tokens(sides, info, record))
        chosen = self._choose(sides, info, record.layer, keep)
        gradients = chosen.tokens(sides.gradients_BTO, record.borrowed, info.scale, inverse=True)
        rows = chosen.tokens(sides.inputs_BT, borrowed=True).rows_TN
        p_TV = sides.outputs(rows).softmax(dim=-1)
        g_TV = gradients.rows_TN
        weights = (g_TV != 0).any(1).to(p_TV) if chosen.weights is None else chosen.weights.to(p_TV)
        if self.check_softmax:
            seen = _checked_softmax(info.spread, spec.name, p_TV, gradients)
            self.check_softmax = not seen
        if info.spread is None and self.check_coefficient:
            self._look_at_coefficient(p_TV[:LOOKED], gradients)
        block.probabilities = block.probabilities or TokenMoment(spec.outputs, keep)
        block.probabilities.add(Tokens(p_TV, weights, chosen.keys, seen=chosen.seen), Products())

    def _look_at_coefficient(self, p_TV: Tensor, gradients: Tokens) -> None:
        """Compare the first tokens' gradients with those of a cross entropy of the stated coefficient, once."""
        self.check_coefficient = False
        g_TV = wide(gradients.rows_TN[:LOOKED]) * gradients.scale
        if gradients.weights_T is not None:
            g_TV = g_TV * gradients.weights_T[:LOOKED, None].to(g_TV)
        self.coefficient = seen_coefficient(p_TV, g_TV.to(p_TV))

    def _softmax_tokens(self, sides: Sides, info: RefreshPass, record: LayerRecord) -> SoftmaxTokens:
        """All tokens with a loss, whatever subset K-FAC takes."""
        assert sides.outputs is not None
        chosen = self._choose(sides, info, record.layer, Keep())
        rows_TI = chosen.tokens(sides.inputs_BT, borrowed=True).rows_TN
        g_TV = chosen.tokens(sides.gradients_BTO, borrowed=True).rows_TN
        p_TV = sides.outputs(rows_TI).softmax(dim=-1)
        weights = (g_TV != 0).any(1).to(p_TV) if chosen.weights is None else chosen.weights.to(p_TV)
        return SoftmaxTokens(wide(rows_TI).clone(), p_TV, weights)

    def _reduced(self, sides: Sides, info: RefreshPass, layer: str) -> Sides:
        """One token per sample: the mean input and the summed gradient."""
        w_BT = self._weights(sides, info, layer)
        a_BTI, g_BTO = wide(sides.inputs_BT), wide(sides.gradients_BTO)
        if w_BT is None:
            return Sides(a_BTI.mean(1, keepdim=True), g_BTO.sum(1, keepdim=True))
        w_BT1 = w_BT.to(a_BTI)[..., None]
        mean = (a_BTI * w_BT1).sum(1, keepdim=True) / w_BT1.sum(1, keepdim=True).clamp(
            min=torch.finfo(a_BTI.dtype).tiny
        )
        return Sides(mean, (g_BTO * (w_BT1 > 0)).sum(1, keepdim=True))

    def _see_ignored(self, sides: Sides, info: RefreshPass) -> None:
        """Note which tokens have no loss term (`ignore_index`): those that send nothing back through the last layers.

        The first layer of a backward, usually the head, tells, if as many of its tokens send a gradient as there are terms,
        or all of them do; else the next one is asked. Forwards that share a backward share its number of terms, so that
        cannot be compared.
        """
        if info.token_weights is not None or info.number in self._answered:
            return
        batch, tokens = sides.gradients_BTO.shape[:2]
        alone = self.forwards.get(info.telling, 1) == 1
        if info.spread is None and alone and info.num_terms == batch * tokens:
            self._answered[info.number] = None
            return
        answered_BT = (sides.gradients_BTO != 0).any(-1)
        answers_seen = torch.stack([answered_BT.sum(), answered_BT.new_tensor(batch * tokens, dtype=torch.long)])
        if info.spread is not None:  # what follows is the same on all processes that see these samples
            answers_seen = info.spread.sum(answers_seen)
        answers, seen = answers_seen.tolist()
        if answers == seen > info.num_terms or (alone and info.num_terms == seen):
            self._answered[info.number] = None  # a term has several tokens, or every token one
        elif not alone or answers == info.num_terms:
            self._answered[info.number] = answered_BT

    def _note_padding(self, sides: Sides, info: RefreshPass, layer: str) -> None:
        """Note a layer that counts more tokens than there are terms because nobody knows which of them have one."""
        batch, tokens = info.rows, sides.gradients_BTO.shape[1]
        counted = self._counted[info.number, layer] = self._counted.get((info.number, layer), 0) + batch * tokens
        if info.token_weights is not None or counted <= info.num_terms:
            return
        answered_BT = self._answered.get(info.number)
        fits = answered_BT is None or answered_BT.shape[1] in (1, tokens) or tokens == 1
        says = info.spread is None or info.spread.first
        if says and (info.number not in self._answered or not fits):
            self.padded[layer] = (counted, info.num_terms)

    # ---- tokens ----------------------------------------------------------------------------------------------------

    def _weights(self, sides: Sides, info: RefreshPass, layer: str) -> Tensor | None:
        """[B, T] for this layer; None: all tokens count alike."""
        batch, tokens = sides.gradients_BTO.shape[:2]
        weights = info.token_weights
        if weights is None:
            weights = self._live(sides, info)
        if weights is not None:
            weights = weights.to(sides.gradients_BTO.device).double()
            if tokens == 1:
                weights = weights.amax(1, keepdim=True)  # a layer behind a pooling sees the samples that count
            elif weights.shape[1] == 1:
                weights = weights.expand(-1, tokens)
            elif weights.shape[1] != tokens:
                raise GramianError(
                    f"token_weights: {layer} sees {tokens} tokens per sample, the weights have {weights.shape[1]}; "
                    f"expected shape [{batch}, {tokens}], or [{batch}, 1]"
                )
        if sides.counted_BT is not None:
            weights = sides.counted_BT.double() * (1.0 if weights is None else weights)
        return weights

    def _live(self, sides: Sides, info: RefreshPass) -> Tensor | None:
        """[B, T], 0 for tokens without a loss term that send nothing back through this layer either: padding.

        None: all count, or nothing is known. The very same tensor for layers that agree.
        """
        answered_BT, tokens = self._answered.get(info.number), sides.gradients_BTO.shape[1]
        if info.token_weights is not None or answered_BT is None:
            return None
        if tokens == 1:  # behind a pooling, or one token for a sample
            answered_BT = answered_BT.any(1, keepdim=True)
        elif answered_BT.shape[1] not in (1, tokens):
            return None
        live_BT = (answered_BT | (sides.gradients_BTO != 0).any(-1)).double()
        for known in self._masks:
            if known.shape == live_BT.shape and torch.equal(known, live_BT):
                return known
        self._masks.append(live_BT)
        return live_BT

    def _choose(self, sides: Sides, info: RefreshPass, layer: str, keep: Keep) -> Chosen:
        """The tokens that take part; once per pass for all layers with as many."""
        batch, tokens = sides.gradients_BTO.shape[:2]
        memo = (info.number, tokens, keep.limit, id(self._live(sides, info)))
        if sides.counted_BT is None and memo in self._chosen:
            return self._chosen[memo]
        device = sides.gradients_BTO.device
        weights_BT = self._weights(sides, info, layer)
        index = weights = keys = None
        seen = batch * tokens
        if weights_BT is not None:
            flat = weights_BT.reshape(-1)
            index = (flat > 0).nonzero()[:, 0]
            seen = len(index)
            weights = flat[index]
            weights = None if bool((weights == 1).all()) else weights
            index = None if seen == batch * tokens else index
        if keep.limit is not None:
            keys = token_keys(self.seed, info.samples_B.to(device), tokens, info.draw).reshape(-1)
            keys = keys if index is None else keys[index]
            if len(keys) > keep.limit:
                kept = keys.topk(keep.limit, largest=False).indices.sort().values
                keys = keys[kept]
                weights = None if weights is None else weights[kept]
                index = kept if index is None else index[kept]
        chosen = Chosen(index, weights, keys, seen)
        if sides.counted_BT is None:
            self._chosen[memo] = chosen
        return chosen


def _checked_softmax(spread: TensorParallel | None, layer: str, *told: Any) -> bool:
    """`_check_softmax`, with one answer for all processes that see the same samples: nobody raises alone and is waited for."""
    if spread is None:
        return _check_softmax(layer, *told)
    problem, seen = "", False
    try:
        seen = _check_softmax(layer, *told)
    except GramianError as error:
        problem = str(error)
    said = spread.tell([problem, seen])
    problem = next((text for text, _ in said if text), "")
    if problem:
        raise GramianError(problem)
    return any(seen for _, seen in said)


def _check_softmax(layer: str, p_TV: Tensor, gradients: Tokens) -> bool:
    """The loss must be the cross entropy of these very logits: p − g is then a distribution, the target.

    Beside p and g a piece of the tokens is held.

    Returns:
        True if there was a token to look at.

    Raises:
        GramianError: if it is not, which a wrong num_terms or loss_reduction shows as well.
    """
    g_TV, seen = gradients.rows_TN, False
    slack = {torch.float64: 1e-6, torch.float32: 1e-3}.get(g_TV.dtype, 5e-2)
    for piece in pieces(*g_TV.shape):
        inverse = 1.0 if gradients.weights_T is None else gradients.weights_T[piece].to(p_TV)[:, None]
        g_CV = wide(g_TV[piece]) * gradients.scale * inverse
        target = p_TV[piece] - g_CV
        live = (g_CV != 0).any(1)
        bad = live & ((target.sum(1) - 1).abs().gt(slack) | target.amin(1).lt(-slack))
        if bool(bad.any()):
            row = int(bad.nonzero()[0, 0])
            raise GramianError(
                f"{layer}: the gradient of token {piece.start + row} is not that of a cross entropy of this layer's outputs "
                f"(targets sum to {float(target[row].sum()):.4g}, smallest {float(target[row].min()):.4g}); expected softmax "
                "cross entropy on the head itself, with the right loss_reduction, num_terms and loss_scale, or "
                "kfac_true_fisher_head=False"
            )
        seen = seen or bool(live.any())
    return seen


@dataclass
class RemainderSums(SumsOfOneCapture):
    """Σ_i g_i g_iᵀ, or its diagonal, over samples for every parameter outside K-FAC. A statistic over parameters."""

    specs: Mapping[str, Spec]
    needs: Needs = "parameter"
    per_sample: bool = False

    def start(self, parameters: Mapping[str, ParameterInfo]) -> dict[str, Tensor]:
        """Nothing yet; what stays missing was not used."""
        return {}

    def update(self, sums: dict[str, Tensor], record: ParameterRecord) -> None:
        """Add one parameter, all its uses joined."""
        spec = self.specs.get(record.parameter)
        if spec is None or spec.kind == "kronecker":
            return
        scale = record.info.scale
        weights_B = record.info.token_weights
        gradient = record.gradient
        fractional = weights_B is not None and not bool(((weights_B == 0) | (weights_B == 1)).all())
        if spec.kind == "block" or fractional:
            g_BN = gradient.per_sample().reshape(gradient.batch, spec.outputs) * scale
            if fractional:
                assert weights_B is not None
                top_B = weights_B.to(g_BN).amax(1)
                g_BN = g_BN * torch.where(top_B > 0, top_B, 1.0).rsqrt()[:, None]
            added = g_BN.mT @ g_BN if spec.kind == "block" else g_BN.square().sum(0)
        else:
            added = gradient.sum_of_squares().reshape(-1) * scale**2
        name = spec.name
        sums[name] = added if name not in sums else sums[name] + added

    def count(self, sums: dict[str, Tensor], samples: int) -> None:
        """Terms are counted by the capture."""
