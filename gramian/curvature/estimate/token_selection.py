"""Choose the tokens of a pass that enter the sums of a layer, and their weights.

Legend: B samples, T tokens, w token weights.

Weights come from the user (`token_weights`), else from the backward itself: a token without a loss term (`ignore_index`)
sends no gradient back through the last layers, so the head's gradients show which tokens have a term. Tokens of weight 0 are
left out. With `max_tokens`, the tokens with the smallest random keys are kept; a key depends only on seed, sample, position
and draw of labels, so the subset does not depend on how samples are split over passes and processes.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.core.keyed_random import token_keys
from gramian.curvature.estimate.refresh_pass import RefreshPass
from gramian.curvature.estimate.token_moments import StoragePolicy, Tokens
from gramian.linalg.wide import wide
from gramian.taps.gradients.grouped_rows import BITS
from gramian.taps.products.banks import BankSides
from gramian.taps.products.sides import Sides


@dataclass(frozen=True)
class ChosenTokens:
    """The tokens of a pass that enter the sums, for all layers that see the same number of tokens."""

    index: Tensor | None
    """Positions of the chosen tokens in the flattened [B·T]; None: all tokens."""
    weights: Tensor | None
    """Weights w of the chosen tokens; None: all are 1."""
    keys: Tensor | None
    seen: int
    """Number of tokens before a subset was taken."""

    def tokens(self, x_BTN: Tensor, borrowed: bool, scale: float | Tensor = 1.0, inverse: bool = False) -> Tokens:
        """The chosen rows of `x_BTN` (inputs or output gradients) as `Tokens` with their weights w, or 1/w if `inverse`.

        `scale`: a factor still to be multiplied in; `borrowed`: the memory of `x_BTN` is valid during this call only.
        """
        rows, owned = x_BTN.reshape(-1, x_BTN.shape[-1]), self.index is not None
        if self.index is not None:
            rows, borrowed = rows[self.index], False
        weights = 1.0 / self.weights if inverse and self.weights is not None else self.weights
        return Tokens(rows, weights, self.keys, scale, borrowed, self.seen, owned)


@dataclass
class TokenSelection:
    """Chooses the tokens that enter the sums of every layer; layers whose choice is the same share it."""

    seed: int
    """Seed of the random keys by which a subset of tokens is chosen."""
    forwards: dict[int, int] = field(default_factory=dict)
    """{number of a `cap.next(num_terms=...)` call: number of forwards whose loss terms its num_terms counts together}."""
    padded: dict[str, tuple[int, float]] = field(default_factory=dict)
    """{layer: (tokens counted, loss terms)} for layers where tokens without a loss term could not be recognised."""
    _with_term: dict[int, Tensor | None] = field(default_factory=dict)
    """{number of the pass: mask [B, T], True for tokens with a loss term; None: all have one}; no entry while unknown."""
    _counted: dict[tuple[int, str], int] = field(default_factory=dict)
    """{(number of the pass, layer): number of tokens so far}; a head may be called several times, with some tokens each."""
    _masks: list[Tensor] = field(default_factory=list)
    _chosen: dict[Any, ChosenTokens] = field(default_factory=dict)

    def end_pass(self) -> None:
        """Forget masks, counts and choices of the pass that ended."""
        for memo in (self._with_term, self._counted, self._masks, self._chosen):
            memo.clear()

    def find_ignored(self, sides: Sides, info: RefreshPass) -> None:
        """Find and store the tokens of a pass that have no loss term: those whose gradient is zero in the last layers.

        Called for each layer in the order of the backward, until a mask is stored. The mask of a layer's tokens with a nonzero
        gradient is stored if it has as many tokens as there are loss terms. All tokens count if they are as many as the terms,
        or if all have a gradient and they are more than the terms. If several forwards share one backward and its number of
        terms, the numbers cannot be compared, and the mask of the first layer, usually the head, is stored.
        """
        if info.token_weights is not None or info.number in self._with_term:
            return
        batch, tokens = sides.gradients_BTO.shape[:2]
        alone = self.forwards.get(info.announcement, 1) == 1
        if info.tensor_parallel is None and alone and info.num_terms == batch * tokens:
            self._with_term[info.number] = None
            return
        with_term_BT = (sides.gradients_BTO != 0).any(-1)
        counts = torch.stack([with_term_BT.sum(), with_term_BT.new_tensor(batch * tokens, dtype=torch.long)])
        if info.tensor_parallel is not None:  # what follows is the same on all processes that see these samples
            counts = info.tensor_parallel.sum(counts)
        sending, seen = counts.tolist()
        if sending == seen > info.num_terms or (alone and info.num_terms == seen):
            self._with_term[info.number] = None  # a term has several tokens, or every token one
        elif not alone or sending == info.num_terms:
            self._with_term[info.number] = with_term_BT

    def note_padding(self, sides: Sides, info: RefreshPass, layer: str) -> None:
        """Record in `padded` a layer with more tokens than loss terms if it is not known which tokens have no term."""
        if sides.positions_BT is not None:
            return
        with_term_BT = self._with_term.get(info.number)
        batch, tokens = info.rows, sides.gradients_BTO.shape[1]
        fits = with_term_BT is None or with_term_BT.shape[1] in (1, tokens) or tokens == 1
        self._note(batch * tokens, info, layer, fits)

    def _note(self, tokens: int, info: RefreshPass, layer: str, fits: bool) -> None:
        """Count `tokens` of a layer; record it in `padded` if they outnumber the loss terms and it is not known which have one.

        Nothing is known if no mask was found in this pass, or if it does not fit (`fits`) the layer's tokens.
        """
        counted = self._counted[info.number, layer] = self._counted.get((info.number, layer), 0) + tokens
        reports = info.tensor_parallel is None or info.tensor_parallel.first
        unknown = info.token_weights is None and (info.number not in self._with_term or not fits)
        if reports and unknown and counted > info.num_terms:
            self.padded[layer] = (counted, info.num_terms)

    def choose(self, sides: Sides, info: RefreshPass, layer: str, keep: StoragePolicy) -> ChosenTokens:
        """The tokens of a layer that enter its sums, at most `keep.limit` of them.

        Layers of a pass with equal token counts, padding and limit share the result. A GramianError is raised if the user's
        token weights have another number of tokens than the layer.
        """
        batch, tokens = sides.gradients_BTO.shape[:2]
        memo = (info.number, tokens, keep.limit, id(self._not_padding(sides, info)))
        plain = sides.counted_BT is None and sides.positions_BT is None
        if plain and memo in self._chosen:
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
            places = sides.positions_BT
            in_order = torch.arange(tokens, device=device)
            places = None if places is None else torch.where(places < 0, in_order, places)
            of_sample = tokens if places is None else int(places.max()) + 1 if places.numel() else 0
            keys_BT = token_keys(self.seed, info.samples_B.to(device, non_blocking=True), of_sample, info.draw)
            keys = (keys_BT if places is None else keys_BT.gather(1, places)).reshape(-1)
            keys = keys if index is None else keys[index]
            if len(keys) > keep.limit:
                subset = keys.topk(keep.limit, largest=False).indices.sort().values
                keys = keys[subset]
                weights = None if weights is None else weights[subset]
                index = subset if index is None else index[subset]
        chosen = ChosenTokens(index, weights, keys, seen)
        if plain:
            self._chosen[memo] = chosen
        return chosen

    def of_bank(self, bank: BankSides, info: RefreshPass, layer: str) -> tuple[BankSides, Tensor | None]:
        """(rows of a bank whose tokens count, their weights w; None: all are 1).

        Waits for the device where tokens have weights, or some have no loss term.
        """
        samples_K, tokens_K = bank.owners_K >> BITS, bank.owners_K & ((1 << BITS) - 1)
        if info.token_weights is None:
            with_term_BT = self._with_term.get(info.number)
            if with_term_BT is None and info.number in self._with_term:
                return bank, None
            if with_term_BT is None or not _same_tokens(with_term_BT, bank.sequence):
                self._note(len(bank.owners_K.unique()), info, layer, fits=False)
                return bank, None
            live_K = with_term_BT[samples_K, tokens_K if with_term_BT.shape[1] > 1 else 0]
            live_K = live_K | (bank.gradients_RO[bank.order_K] != 0).any(-1)
            return (bank if bool(live_K.all()) else bank.only(live_K)), None
        weights_BT = info.token_weights.to(bank.owners_K.device).double()
        weights_K = weights_BT[samples_K, tokens_K if weights_BT.shape[1] > 1 else 0]
        counts_K = weights_K > 0
        weights_K = weights_K[counts_K]
        return bank.only(counts_K), None if bool((weights_K == 1).all()) else weights_K

    def reduced(self, sides: Sides, info: RefreshPass, layer: str) -> Sides:
        """One token per sample: the mean of its inputs and the sum of its gradients (`weight_sharing="reduce"`)."""
        w_BT = self._weights(sides, info, layer)
        a_BTI, g_BTO = wide(sides.inputs_BT), wide(sides.gradients_BTO)
        if w_BT is None:
            return Sides(a_BTI.mean(1, keepdim=True), g_BTO.sum(1, keepdim=True))
        w_BT1 = w_BT.to(a_BTI)[..., None]
        tiny = torch.finfo(a_BTI.dtype).tiny
        mean = (a_BTI * w_BT1).sum(1, keepdim=True) / w_BT1.sum(1, keepdim=True).clamp(min=tiny)
        return Sides(mean, (g_BTO * (w_BT1 > 0)).sum(1, keepdim=True))

    def _weights(self, sides: Sides, info: RefreshPass, layer: str) -> Tensor | None:
        """Weights [B, T] of a layer's tokens, from the user or from padding; None: all are 1. A wrong T is a GramianError."""
        batch, tokens = sides.gradients_BTO.shape[:2]
        weights = self._not_padding(sides, info)
        if info.token_weights is not None:
            weights = info.token_weights
            known = (weights, *info.other_weights)
            weights = next((w for w in known if w.shape[1] in (1, tokens)), weights)
            weights = weights.to(sides.gradients_BTO.device).double()
            if sides.positions_BT is not None and weights.shape[1] > 1:
                at_place = weights.gather(1, sides.positions_BT.clamp(min=0))
                weights = torch.where(sides.positions_BT < 0, weights.amax(1, keepdim=True), at_place)
            elif tokens == 1:
                weights = weights.amax(1, keepdim=True)  # a layer behind a pooling sees the samples that count
            elif weights.shape[1] == 1:
                weights = weights.expand(-1, tokens)
            elif weights.shape[1] != tokens:
                raise GramianError(
                    f"token_weights: {layer or 'the model itself'} sees {tokens} tokens per sample, "
                    f"the weights have {weights.shape[1]}; "
                    f"expected shape [{batch}, {tokens}], or [{batch}, 1]"
                )
        if sides.counted_BT is not None:
            weights = sides.counted_BT.double() * (1.0 if weights is None else weights)
        return weights

    def _not_padding(self, sides: Sides, info: RefreshPass) -> Tensor | None:
        """[B, T], 0 for padding (tokens without a loss term whose gradient is zero in this layer too), else 1.

        None: all tokens count, or it is not known which do. Layers with equal masks get the same tensor object.
        """
        with_term_BT, tokens = self._with_term.get(info.number), sides.gradients_BTO.shape[1]
        if info.token_weights is not None or with_term_BT is None:
            return None
        if sides.positions_BT is not None:
            if sides.sequence is None or not _same_tokens(with_term_BT, sides.sequence):
                return None
            if with_term_BT.shape[1] > 1:
                with_term_BT = with_term_BT.gather(1, sides.positions_BT)
        elif tokens == 1:  # behind a pooling, or one token for a sample
            with_term_BT = with_term_BT.any(1, keepdim=True)
        elif with_term_BT.shape[1] not in (1, tokens):
            return None
        live_BT = (with_term_BT | (sides.gradients_BTO != 0).any(-1)).double()
        for known in self._masks:
            if known.shape == live_BT.shape and torch.equal(known, live_BT):
                return known
        self._masks.append(live_BT)
        return live_BT


def _same_tokens(with_term_BT: Tensor, sequence: int) -> bool:
    """Whether a mask is of as many tokens as a layer has, or of samples alone."""
    return with_term_BT.shape[1] in (1, sequence)
