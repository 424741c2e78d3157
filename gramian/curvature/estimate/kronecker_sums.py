"""Sums over tokens for the K-FAC blocks of one refresh, as a statistic that observes layers.

Legend: B samples, T tokens, I = m inputs, O outputs, V classes, N loss terms, w token weights.

A = Σ w a aᵀ / Σ w and G = (1/N) Σ g gᵀ / w over tokens with inputs a and output gradients g of the weighted sum of all loss
terms. A token weight is the weight of its term in that sum: weight 2 is the same as having the sample twice.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.curvature.blocks.assumed_matrices import Totals, checked, row_sides, sides_of, turned
from gramian.curvature.blocks.block_specs import LAYOUTS, Spec, blocks_by_layer, table_of_rows, trained_blocks
from gramian.curvature.estimate.eigenbasis_sums import EKFACUse, HeadTokens
from gramian.curvature.estimate.ekfac_sums import EKFACSamples
from gramian.curvature.estimate.likelihood import Likelihood, Softmax
from gramian.curvature.estimate.loss_checks import CoefficientCheck, check_softmax
from gramian.curvature.estimate.refresh_pass import RefreshPass, SumsOfOneCapture
from gramian.curvature.estimate.token_moments import Products, StoragePolicy, TokenMoment, Tokens, add_groups
from gramian.curvature.estimate.token_selection import ChosenTokens, TokenSelection
from gramian.curvature.memory.curvature_plan import Keeps
from gramian.curvature.memory.memory_budget import keeps_of
from gramian.curvature.options import Options
from gramian.linalg import WIDEST_DENSE
from gramian.linalg.wide import wide
from gramian.taps.products.banks import BankPart, MatrixSides
from gramian.taps.products.replay import BOTH_WAYS, OTHERWISE
from gramian.taps.products.sides import Sides
from gramian.taps.records import LayerRecord
from gramian.taps.roles import Needs, ParameterInfo


@dataclass
class BlockSums:
    """Sums of one K-FAC block over the tokens that this process saw in a refresh."""

    inputs: TokenMoment | None = None
    gradients: TokenMoment | None = None
    probabilities: TokenMoment | None = None
    """Softmax outputs of the head's tokens, in place of `gradients` where the head's Fisher is exact."""
    deviations: TokenMoment | None = None
    """√H of the head's tokens, H the diagonal Hessian of independent outputs, in place of `gradients` where it is exact."""
    counts_V: Tensor | None = None
    """[V]: for each row of an embedding table the sum of the weights of the tokens that looked it up."""
    table_weight: float | Tensor = 0.0
    table_gradients: TokenMoment | None = None
    samples: EKFACSamples = field(default_factory=EKFACSamples)
    """All tokens of all samples, stored for EK-FAC only."""

    def moments(self) -> list[TokenMoment]:
        """The sums of inputs, gradients, probabilities, deviations and table gradients that are not None, as a list."""
        found = (self.inputs, self.gradients, self.probabilities, self.deviations, self.table_gradients)
        return [moment for moment in found if moment is not None]


@dataclass
class KroneckerSums(SumsOfOneCapture):
    """The statistic that sums inputs and output gradients of layers over tokens, for every K-FAC block."""

    specs: dict[str, Spec]
    """{block: its `Spec`}; those of assumed matrices change if they are seen to be stored in the other layout."""
    options: Options
    seed: int
    """Seed of the random keys by which token subsets are chosen."""
    exact_head: bool
    """True if the G of the head is the exact Fisher of its outputs and not an estimate."""
    stores_samples: bool = False
    """True if all tokens are stored, so that EK-FAC can measure its eigenvalues at the end of the capture."""
    head: str | None = None
    """Name of the layer whose outputs are the logits; None while it is not known."""
    find_head: Callable[[], str | None] | None = None
    """Returns the name of the head; called once, in the first backward, if it was not known before."""
    check_softmax: bool = True
    """True while it is still to be checked that the loss at an exact head is softmax cross entropy."""
    coefficient: CoefficientCheck = field(default_factory=CoefficientCheck)
    """Whether loss terms have the coefficient that the capture's arguments give."""
    likelihood: Likelihood = Softmax()
    """The distribution that the outputs of the head stand for; a user's own loss is taken for a softmax, and checked."""
    needs: Needs = "layer"
    takes_products: ClassVar[bool] = True
    """Records may be of single products inside a layer (`InlineProducts`)."""
    per_sample: bool = False
    selection: TokenSelection = field(init=False)
    observed: dict[str, str] = field(default_factory=dict)
    """{parameter of an assumed form: the layout that was seen in this refresh, or why it is not a matrix}."""
    _by_layer: dict[str, dict[str, str]] = field(default_factory=dict)
    """{layer: {name of a weight, or part of one, inside it: its block}}."""
    _parameters: Mapping[str, ParameterInfo] = field(default_factory=dict)
    _keeps: Keeps | None = None
    _products: Products = field(default_factory=Products)
    _last_rows: dict[Any, tuple[Tensor, Tokens]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Create the `TokenSelection`, which chooses the tokens that enter the sums."""
        self.selection = TokenSelection(self.seed)

    def start(self, parameters: Mapping[str, ParameterInfo]) -> dict[str, BlockSums]:
        """{K-FAC block: empty `BlockSums`}, at the start of a capture."""
        kronecker = {name: spec for name, spec in self.specs.items() if spec.kind == "kronecker"}
        self._by_layer, self._parameters = blocks_by_layer(kronecker), parameters
        return {name: BlockSums() for name in kronecker}

    def update(self, sums: dict[str, BlockSums], record: LayerRecord) -> None:
        """Add the tokens of one layer call (`record`) to the sums of its blocks; calls outside K-FAC blocks are ignored."""
        names = trained_blocks(self._by_layer, self.specs, record)
        if not names:
            return
        if self.find_head is not None:
            self.head, self.find_head = self.find_head(), None
        totals, parts = Totals(record), dict[str, BankPart]()
        for key, name in names.items():
            sides = self._sides(key, name, record, totals)
            if isinstance(sides, BankPart):
                parts[name] = sides
            elif sides is not None and sides.gradients_BTO.shape[1]:
                self._add(sums[name], self.specs[name], sides, record)
        if parts and self._adds_at_once(parts, record):
            self._add_bank(sums, parts, record)
            return
        for name, part in parts.items():
            self._add(sums[name], self.specs[name], checked(part), record)

    def _adds_at_once(self, parts: Mapping[str, BankPart], record: LayerRecord) -> bool:
        """True if the rows of a bank can be added for all of its matrices at once: every row counts, by itself."""
        self._keeps = self._keeps or keeps_of(self.specs, self.options, self.head, self.exact_head)
        info = record.info
        assert isinstance(info, RefreshPass)
        rows = self.options.weight_sharing == "expand" and not self.stores_samples and not info.other_weights
        limits = {limit for name in parts for limit in (self._keeps[name].A.limit, self._keeps[name].G.limit)}
        return rows and limits == {None}

    def _add_bank(self, sums: dict[str, BlockSums], parts: Mapping[str, BankPart], record: LayerRecord) -> None:
        """Add the rows of one call to the sums of the matrices of a bank that have some."""
        assert self._keeps is not None and isinstance(record.info, RefreshPass)
        bank, weights_K = self.selection.of_bank(next(iter(parts.values())).bank, record.info, record.layer)
        inputs, gradients, spans = list[TokenMoment](), list[TokenMoment](), list[tuple[int, int]]()
        for name, part in parts.items():
            begin, end = bank.span(part.number)
            if begin == end:  # all of its tokens have the weight 0
                continue
            spans.append((begin, end))
            spec, keeps, block = self.specs[name], self._keeps[name], sums[name]
            block.inputs = block.inputs or TokenMoment(spec.inputs, keeps.A)
            block.gradients = block.gradients or TokenMoment(spec.outputs, keeps.G)
            inputs.append(block.inputs)
            gradients.append(block.gradients)
        add_groups(inputs, bank.inputs_RI, bank.order_K, spans, weights_K)
        inverse_K = None if weights_K is None else 1.0 / weights_K
        add_groups(gradients, bank.gradients_RO, bank.order_K, spans, inverse_K, record.info.scale)

    def _sides(self, key: str, name: str, record: LayerRecord, totals: Totals) -> Sides | BankPart | None:
        """The verified tokens of one call with a block, which is a table of rows from now on if no token multiplies it."""
        spec = self.specs[name]
        found = sides_of(spec, key, record)
        if found is None or spec.by_rows:
            return None if found is None else checked(found)
        sides = self._verified(spec, found, totals)
        why = self.observed.get(spec.owners[0])
        table = None if why is None or why in LAYOUTS else table_of_rows(spec, self._parameters[spec.owners[0]], why)
        if table is None:
            return sides
        self.specs[name], self._keeps = table, None
        return row_sides(table, record)

    def _verified(self, spec: Spec, sides: MatrixSides, totals: Totals) -> Sides | BankPart | None:
        """`sides`, if they are those of the block's matrix; None, with the reason in `observed`, for an assumed one if not.

        The sum Σ g aᵀ of recorded products is compared with the gradient of their parameter. 2·T·o·m FLOPs.
        """
        if not spec.assumed:
            return checked(sides) if isinstance(sides, str) else sides
        parameter = spec.owners[0]
        before = self.observed.get(parameter)
        if before is not None and before not in LAYOUTS:
            return None
        if isinstance(sides, str):
            if totals.any(parameter):  # else no data has reached it, and nothing was seen
                self.observed[parameter] = sides if before is None else OTHERWISE
            return None
        layout, why = sides.layout or spec.layout, BOTH_WAYS
        if self.observed.setdefault(parameter, layout) == layout:
            if layout != spec.layout:
                self.specs[spec.name], self._keeps = turned(spec, layout), None
            why = totals.other_than(self.specs[spec.name], checked(sides)) if sides.recorded else ""
            why = OTHERWISE if why and before is not None else why
        if why:
            self.observed[parameter] = why
        return None if why else sides

    def _add(self, block: BlockSums, spec: Spec, sides: Sides, record: LayerRecord) -> None:
        """Add the tokens of one call to the sums of one block."""
        if self._keeps is None:
            self._keeps = keeps_of(self.specs, self.options, self.head, self.exact_head)
        keeps = self._keeps[spec.name]
        info = record.info
        assert isinstance(info, RefreshPass)
        is_table = record.layer in spec.tables
        is_head = record.layer == self.head
        if self.stores_samples and not (is_head and self.exact_head):
            use = EKFACUse.of(sides, info.scale, is_table)
            block.samples.add(info.number, use, info.token_weights, record.borrowed)
        if not is_table and sides.positions_BT is None:
            self.selection.find_ignored(sides, info)
        self.selection.note_padding(sides, info, record.layer)
        if is_table and is_head and self.exact_head:
            raise GramianError(
                f"head: {record.layer!r} does not multiply by its weight, so its outputs have no exact Fisher here; expected "
                'fisher_type="mc" and kfac_true_fisher_head=False'
            )
        if is_table:
            self._add_table(block, spec, sides, info, record, keeps.table)
            return
        all_tokens = sides
        if self.options.weight_sharing == "reduce":
            sides = self.selection.reduced(sides, info, record.layer)
        block.inputs = block.inputs or TokenMoment(spec.inputs - spec.has_bias, keeps.A)
        chosen = self.selection.choose(sides, info, record.layer, block.inputs.keep)
        inputs = self._rows(chosen, sides.inputs_BT, record.borrowed)
        block.inputs.add(inputs, self._products)
        keep = keeps.G
        if is_head and self.exact_head:
            self._add_head(block, spec, all_tokens, info, record, keep)
            return
        chosen = self.selection.choose(sides, info, record.layer, keep)
        gradients = chosen.tokens(sides.gradients_BTO, record.borrowed, info.scale, inverse=True)
        if is_head and sides is all_tokens:
            self.coefficient.compare(sides, chosen, gradients, info, self.likelihood)
        block.gradients = block.gradients or TokenMoment(spec.outputs, keep)
        block.gradients.add(gradients, Products())

    def count(self, sums: dict[str, BlockSums], samples: int) -> None:
        """End a pass: copy the stored rows that are memory of the pass, and clear its caches; `samples` is not used."""
        copies: dict[tuple[int, ...], Tensor] = {}
        for block in sums.values():
            for moment in block.moments():
                moment.own(copies)
            block.samples.own(copies)
        self._products.forget()
        self.selection.end_pass()
        self._last_rows.clear()

    def _rows(self, chosen: ChosenTokens, inputs_BT: Tensor, borrowed: bool) -> Tokens:
        """The chosen rows of an input [B, T, in]; the same tensor objects as for the last layer if that had the same input."""
        if borrowed or chosen.index is None:
            return chosen.tokens(inputs_BT, borrowed)
        key = (inputs_BT.data_ptr(), inputs_BT.shape, inputs_BT.stride(), inputs_BT.dtype, id(chosen))
        if key not in self._last_rows:  # with the input itself, so that no other tensor gets its address
            self._last_rows = {key: (inputs_BT, chosen.tokens(inputs_BT, borrowed))}
        return self._last_rows[key][1]

    def _add_table(
        self, block: BlockSums, spec: Spec, sides: Sides, info: RefreshPass, record: LayerRecord, keep: StoragePolicy
    ) -> None:
        """Add the lookups of an embedding table to a block's sums; inputs are one-hot, so A is diagonal: a count per row."""
        tied = spec.layout != "table"
        rows, width = (spec.outputs, spec.inputs) if tied else (spec.inputs, spec.outputs)
        chosen = self.selection.choose(sides, info, record.layer, StoragePolicy(rows_up_to=0))
        index = sides.inputs_BT.reshape(-1)
        index = index if chosen.index is None else index[chosen.index]
        dtype = wide(sides.gradients_BTO[:0]).dtype
        weights = index.new_ones(len(index), dtype=dtype) if chosen.weights is None else chosen.weights.to(dtype)
        counts = torch.zeros(rows, dtype=dtype, device=index.device).index_add_(0, index, weights)
        block.counts_V = counts if block.counts_V is None else block.counts_V + counts
        block.table_weight = block.table_weight + weights.double().sum()
        block.table_gradients = block.table_gradients or TokenMoment(width, keep)
        chosen = self.selection.choose(sides, info, record.layer, keep)
        gradients = chosen.tokens(sides.gradients_BTO, record.borrowed, info.scale, inverse=True)
        block.table_gradients.add(gradients, Products())

    def _add_head(
        self, block: BlockSums, spec: Spec, sides: Sides, info: RefreshPass, record: LayerRecord, keep: StoragePolicy
    ) -> None:
        """Add the exact Fisher of a head to a block's sums: Σ w H, H the Hessian by its recomputed outputs.

        H is diag p − p pᵀ for a softmax, diagonal for independent outputs. Labels of different tokens are independent, so the
        Fisher of a sample's summed gradient is this sum too. A GramianError is raised if the head is not a linear layer, or if
        a user's own loss is not the cross entropy of its outputs.
        """
        if sides.outputs is None:
            raise GramianError(
                f"{record.layer}: is not a linear layer, so its outputs have no exact Fisher here; "
                "expected another head=, or kfac_true_fisher_head=False"
            )
        if self.stores_samples and spec.outputs <= WIDEST_DENSE:  # all tokens with a loss, whatever subset K-FAC takes
            rows_TI, _, weights, _ = head_tokens(self.selection, self.likelihood, sides, record, StoragePolicy())
            hessian = self.likelihood.hessian(sides.outputs(rows_TI))
            block.samples.head.append(HeadTokens(wide(rows_TI).clone(), hessian, weights.to(hessian.diagonal_TV)))
        independent = not isinstance(self.likelihood, Softmax)
        if independent:
            keep = StoragePolicy(diagonal=True, why="exact, of independent outputs")
        rows_TI, gradients, weights, chosen = head_tokens(self.selection, self.likelihood, sides, record, keep)
        p_TV = self.likelihood.hessian(sides.outputs(rows_TI)).diagonal_TV
        weights = weights.to(p_TV)
        if independent:
            block.deviations = block.deviations or TokenMoment(spec.outputs, keep)
            block.deviations.add(Tokens(p_TV.sqrt(), weights, None, seen=chosen.seen), Products())
            return
        if self.check_softmax:
            self.check_softmax = not check_softmax(spec.name, p_TV, gradients, info.tensor_parallel)
        self.coefficient.compare(sides, chosen, gradients, info, self.likelihood, p_TV)
        block.probabilities = block.probabilities or TokenMoment(spec.outputs, keep)
        block.probabilities.add(Tokens(p_TV, weights, chosen.keys, seen=chosen.seen), Products())


def head_tokens(
    selection: TokenSelection, likelihood: Likelihood, sides: Sides, record: LayerRecord, keep: StoragePolicy
) -> tuple[Tensor, Tokens, Tensor, ChosenTokens]:
    """(inputs [T, I], gradients, weights [T], choice) of the tokens with a loss term that are chosen at an exact head."""
    info = record.info
    assert isinstance(info, RefreshPass)
    chosen = selection.choose(sides, info, record.layer, keep)
    gradients = chosen.tokens(sides.gradients_BTO, record.borrowed, info.scale, inverse=True)
    rows_TI = chosen.tokens(sides.inputs_BT, borrowed=True).rows_TN
    weights = chosen.weights
    if weights is None and isinstance(likelihood, Softmax):  # of a user's loss, which may leave tokens out
        weights = (gradients.rows_TN != 0).any(1)
    weights = torch.ones(len(rows_TI), device=rows_TI.device) if weights is None else weights
    return rows_TI, gradients, weights, chosen
