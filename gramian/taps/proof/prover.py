"""The row proof of one call and one set of outputs: sums, replacements, order and single units (see `gramian.taps.proof`).

In: the arguments of the call by sample, and which outputs get a random output gradient (cotangent). Out: `Proven`, or the
exception `Refuted` with the layer's name and what differed. Legend: B rows of the batch, U units (rows, or groups of rows or
tokens that count as one sample).

Cost: 2⌈log₂ U⌉ + 4 forwards and backwards for each set of outputs that is proven by itself, two more with dropout, and up to 4
of single samples if a loader pads. If units have several rows, 2⌈log₂ B⌉ + 2 more show whether these rows are independent. If
the model draws random numbers other than dropout's, 2⌈log₂ U⌉ + 1 more for each further random state (20 states for 2 samples,
1 for 10). Memory beyond a training step: copies of the arguments and buffers, two random cotangents, about 40 bytes for each
row of a call, and in part 1 one gradient.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gramian.taps.model.dropout import WithoutDropout
from gramian.taps.model.preserve_state import InitialState
from gramian.taps.proof.carried_state import changed, refuse_attribute, refuse_buffers
from gramian.taps.proof.evaluation_mode import evaluating
from gramian.taps.proof.proof_runs import Execute, ProofRuns, Refuted, SecondAxis, Source, TappedRun
from gramian.taps.proof.remedies.sample_axes import SampleAxes
from gramian.taps.proof.row_comparison import EQUAL, RowComparison
from gramian.taps.proof.sample_arguments import SampleArguments, donors
from gramian.taps.proof.single_unit import FindAlone, UnitAlone, compare_alone, fits_alone
from gramian.taps.sites.generic import REPRODUCES
from gramian.taps.tapped_model import Call, TappedModel

REDRAWS = 16
"""How often a token that is to be replaced is drawn, until it is another one."""
CHANCE = 1e-6
"""Largest probability that a model which permutes samples at random leaves them in place at every random state of a proof."""


@dataclass
class Proven:
    """Result of a row proof on one batch: which calls of layers and outputs of the model it covers, and by which runs."""

    calls: frozenset[Call]
    shared: frozenset[str]
    """Layers that process one row for all samples, and whose output may be expanded to a row for each sample."""
    units: int
    runs: int
    reversal: bool
    """True if a run of the reversed batch was compared."""
    alone: str
    """How units ran alone: as a "slice" of the batch or "collated" by the loader, perhaps "…, beside a copy of itself"; or the
    reason why none did."""
    fixed: tuple[int, ...] = ()
    """Indices of arguments whose first axis has size B by chance and has no samples."""
    open_outputs: dict[int, str] = field(default_factory=dict)
    """{index of an output that was not proven: its name and the reason}; a backward through it raises GramianError."""
    exact: bool = True
    """True if rows of samples that were not replaced were equal bit for bit in all runs."""
    silent: frozenset[Call] = frozenset()
    """Calls of layers whose output gradient was zero in this proof, so that nothing was shown about them."""
    moved: tuple[str, ...] = ()
    """Layers that have their samples elsewhere than on axis 0."""
    partition: tuple[int, ...] | None = None
    """The unit of each row, if rows of one unit depend on each other, so that only this grouping is proven; None: any is."""
    unpadded: tuple[Any, ...] | None = None
    """Shapes of the batch if the loader padded no sample in it, so that padding is still to be proven. None: some sample was
    padded, or none was collated alone by a loader."""
    stateful: bool = False
    """True if a forward changes buffers or attributes of the model."""
    shows: bool = True
    """False if no sample had a gradient, or one was not finite, so that nothing was shown and a later batch must be proven."""


class Prover:
    """Runs the parts of the row proof (sums, replacements, order, single units) for one call of a model, or of a loss."""

    def __init__(
        self,
        model: TappedModel,
        execute: Execute,
        samples: SampleArguments,
        *,
        seed: int = 0,
        lone: FindAlone = lambda among: [],
        second_axis: SecondAxis = "certain",
        beginning: InitialState | None = None,
    ) -> None:
        """Number the units at random; nothing runs yet.

        Args:
            model: the tapped model.
            execute: runs the model, or the loss, on arguments.
            samples: the arguments by sample.
            seed: seed of the numbering, the replacements and the cotangents.
            lone: returns some of the given samples, each collated alone by a loader; if it returns none, a unit that runs
                alone is a slice of the batch.
            second_axis: which outputs have their samples on axis 1 (see `ProofRuns`).
            beginning: the state from which every run begins; None: the present one.
        """
        self._root, self._samples, self._units, self._find_lone = model.root_module, samples, samples.units, lone
        self._draw, self._private = random.Random(seed), model.rule.withholds
        self.runs = ProofRuns(model, execute, samples, seed, second_axis, beginning)
        self._compare = RowComparison(self.runs)
        self.fits_alone = False
        """True if the model ran on one sample alone, with inputs that have no row per sample unchanged."""
        self._unread: set[str] = set()
        """Names of module attributes that depend on samples, but on which no later batch depends."""
        by_token = samples.units is not None and samples.units.by_token
        self._contents = samples.token_contents() if by_token else samples.contents()
        """Hash of the content of each row; of each token [B·T] where units are groups of tokens."""
        self._count = samples.batch if self._units is None else self._units.count
        self._padding = self._count - 1 if self._units is not None and self._units.padded else None
        """Number of the unit of padding, on which no unit may depend, and which may depend on any; None: there is none."""
        self._numbers = self._draw.sample(range(self._count), self._count)
        """The random number of each unit."""

    @property
    def open(self) -> bool:
        """True if all samples (with ids by token: all tokens) are equal, so that nothing can be shown."""
        return len(set(self._contents)) < 2

    def prove(self, choose: Callable[[list[Tensor]], Sequence[int]], *, sums_only: bool = False) -> Proven:
        """Run the proof for some outputs together.

        Args:
            choose: returns, from all outputs, the indices of those that get a cotangent.
            sums_only: True to show only that the taps' sums are autograd's gradients (part 1).

        Returns:
            What was shown.

        Raises:
            Refuted: naming the layer and what differs.
            GramianError: from a tap, naming the layer.
        """
        runs, self._compare = self.runs, RowComparison(self.runs)  # a repeated run has the cotangents of these outputs
        outputs, gradients = runs.untapped(choose)
        chosen = [i for i, cotangent in enumerate(runs.cotangents) if cotangent is not None]
        lone = [] if sums_only else self._lone(range(self._count))
        base = runs.tapped(runs.everyone, sums=True, alone=[unit.number for unit in lone])
        self._compare.compare_outputs(outputs, base)
        finite = self._compare.compare_sums(base, gradients)
        del gradients
        reversal, alone = False, "no such run"
        if not sums_only:
            for replaced in self.separating_sets():
                self.separate(base, replaced)
            reversal, alone = self._reorder(base, chosen, lone)
        elif runs.shared:
            self._compare.refuse_shared_samples(base, by_sample=self._units is None)
        loud = {key[1:3] for key, rows in base.rows.items() if base.sides[key] == "output gradient" and rows.largest}
        return Proven(
            calls=frozenset(base.calls),
            shared=frozenset(runs.shared),
            units=self._count,
            runs=runs.count,
            reversal=reversal,
            alone=alone,
            shows=finite and bool(self._with_gradient(base)),
            unpadded=self._unpadded(lone),
            stateful=bool(base.buffers or base.remembered),
            exact=self._compare.exact,
            moved=tuple(sorted(self.runs.layouts)),
            silent=frozenset(call for call in base.calls if call[:2] not in loud),
        )

    # ---- replacements ----------------------------------------------------------------------------------------------

    def separating_sets(self) -> list[set[int]]:
        """2⌈log₂ U⌉ sets of units to replace, such that for every ordered pair (i, j) of units some set has j and not i."""
        bits = max(1, (self._count - 1).bit_length())
        return [
            {unit for unit, number in enumerate(self._numbers) if number >> bit & 1 == value}
            for bit in range(bits)
            for value in (0, 1)
        ]

    def watched(self, axes: SampleAxes, brief: bool = False) -> None:
        """Let `axes` look at runs without taps: one of the batch, then one for each set of samples to replace.

        `brief`: until no layer can have its samples elsewhere than on axis 0.
        """
        self.runs.on(self._samples.take(self.runs.everyone), lambda outputs: None)
        axes.begin()
        for replaced in self.separating_sets() if not self.open else ():
            if brief and axes.settled:
                return
            stayed = [i for i in self.runs.everyone if i not in replaced]
            self.runs.on(self._samples.take(self._replaced(replaced)), lambda outputs: None)
            axes.compare(stayed)

    def _replaced(self, replaced: set[int]) -> list[int]:
        """The row of the batch to put in the place of each row: a donor's for the units in `replaced`, else itself."""
        units = self._unit_of_rows()
        stayed = [row for row, unit in enumerate(units) if unit not in replaced]
        pairs = zip(units, donors(self._contents, stayed, self._draw), strict=True)
        return [donor if unit in replaced and donor is not None else row for row, (unit, donor) in enumerate(pairs)]

    def separate(self, base: TappedRun, replaced: set[int], compare: RowComparison | None = None) -> None:
        """Run the batch with other content for the units in `replaced`; the rows of all other units must not change.

        Args:
            base: the run without replacements.
            replaced: numbers of the units to replace.
            compare: has the order of samples in which `base` ran, for units of one row; None: the order of the batch.

        Raises:
            Refuted: if a row of a unit that was not replaced changes; under privacy also if buffers, or attributes that a
                later batch depends on, change.
        """
        source: Source
        compare = compare or self._compare
        order = range(self._count) if self._units is not None else compare.order
        if self._units is not None and self._units.by_token:
            source = self._other_tokens(replaced)
        else:
            rows = self._replaced(replaced)
            source = rows if self._units is not None else [rows[sample] for sample in order]
        stayed = [place for place, unit in enumerate(order) if unit not in replaced and unit != self._padding]
        run = self.runs.tapped(source)
        if self._private:
            refuse_buffers(base.buffers, run.buffers)
            self._refuse_memory(base, run)
        change = compare.first_change(base, run, stayed, stayed, repeat=lambda: self.runs.tapped(source))
        if change is not None:
            alone = "rows that depend on one sample each, those of a sample next to each other and in the order of the batch"
            if self._units is not None and self._units.by_token:
                alone = "tokens that depend on those of their own unit (a mask that hides documents from each other)"
            copied = any(change[0].startswith(f"{layer}: ") for layer in self.runs.shared)
            why = IndexError("the code behind it reads one of the copies of its row") if copied else None
            raise Refuted(f"{change[0]} when other samples are replaced; expected {alone}{change[1]}") from why

    def _other_tokens(self, replaced: set[int]) -> Tensor:
        """Index of the token to put in each place [B, T]: a random other token of the batch for replaced units, else the same.

        Random tokens are drawn again, up to `REDRAWS` times, where they equal those that they replace.
        """
        assert self._units is not None
        ids_BT, contents = self._units.ids.cpu(), torch.tensor(self._contents)
        places = torch.arange(ids_BT.numel())
        generator = torch.Generator().manual_seed(self._draw.getrandbits(62))
        goes = torch.isin(ids_BT.flatten(), torch.tensor(sorted(replaced)))
        found = places.clone()
        for _ in range(REDRAWS):
            equal = goes & (contents[found] == contents)
            found[equal] = torch.randint(len(places), (int(equal.sum()),), generator=generator)
        return found.view(ids_BT.shape)

    def _refuse_memory(self, base: TappedRun, run: TappedRun) -> None:
        """Raise Refuted if a later batch depends on samples that modules store in attributes.

        Attributes that differ between `base`, the run of the batch, and `run`, the last one, on other samples, may never be
        read. So the batch is run again after each of both, and the two results are compared.
        """
        names = changed(base.remembered, run.remembered)
        if self._unread.issuperset(names):
            return
        everyone = self.runs.everyone
        after_others = self.runs.tapped(everyone, forget=False)
        self.runs.tapped(everyone)
        after_itself = self.runs.tapped(everyone, forget=False)
        if self._compare.first_change(after_itself, after_others, everyone, everyone, EQUAL) is not None:
            refuse_attribute(names[0])
        self._unread.update(names)

    def _repeat_at_other_random_states(self) -> None:
        """Repeat the replacements with other random states, on the reversed batch if each row is a unit.

        A model that permutes samples at random (mixup) leaves them in place at 1 of U! random states, which would hide the
        mixing; one that sorts them leaves a sorted batch in place. With random numbers, a run of the reversed batch cannot be
        compared with one of the batch itself.

        Raises:
            Refuted: if a row of a unit that was not replaced changes.
        """
        order = list(reversed(self.runs.everyone)) if self._units is None else None
        for _ in range(math.ceil(-math.log(CHANCE) / math.lgamma(self._count + 1)) if self._count > 1 else 0):
            with self.runs.beginning.advanced():
                compare = RowComparison(self.runs, order)
                base = self.runs.tapped(compare.order)
                for replaced in self.separating_sets():
                    self.separate(base, replaced, compare)

    # ---- order, and units alone ------------------------------------------------------------------------------------

    def _reorder(self, base: TappedRun, chosen: Sequence[int], lone: Sequence[UnitAlone]) -> tuple[bool, str]:
        """Compare the run `base` with one of the reversed batch, and with runs of single units (`lone`).

        If random numbers were drawn, all run in evaluation mode: a sample alone would draw another dropout mask. If some of
        them are not dropout's, the replacements are repeated first. `chosen`: indices of the outputs with a cotangent.

        Returns:
            Whether the reversed batch was compared; and how units ran alone, or why none did (`Proven.alone`).

        Raises:
            Refuted: if rows or gradients differ.
        """
        if base.drew:
            with WithoutDropout():
                beyond_dropout = self.runs.tapped(self.runs.everyone).drew
            if beyond_dropout:
                self._repeat_at_other_random_states()
            with evaluating(self._root):
                try:
                    base = self.runs.tapped(self.runs.everyone, alone=[unit.number for unit in lone])
                except Exception:  # the user's forward may refuse to run in evaluation mode, in its own way
                    return False, "random operations ran, and in evaluation mode the model is another one"
                if base.drew:
                    if lone:
                        self.fits_alone = fits_alone(self.runs, self._samples, lone[0], chosen)
                    return False, "random operations ran, in evaluation mode too"
                return self._reorder(base, chosen, lone)
        reordered = self._turn(base) if self._units is not None and self._units.by_token else self._units is None
        if self._units is None:
            self._reverse(base)
        with_gradient = self._with_gradient(base)
        if with_gradient and not with_gradient.intersection(unit.number for unit in lone):  # theirs is 0 anywhere
            lone = self._lone(sorted(with_gradient))
            base = self.runs.tapped(self.runs.everyone, alone=[unit.number for unit in lone])
        if not lone:
            return reordered, "tokens of several units share rows"
        how = compare_alone(self.runs, self._samples, base, lone, chosen)
        self.fits_alone = how in ("slice", "collated")
        return reordered, how

    def _reverse(self, base: TappedRun) -> None:
        order = list(reversed(self.runs.everyone))
        run = self.runs.tapped(order)
        change = self._compare.first_change(base, run, order, self.runs.everyone, REPRODUCES)
        if change is not None:
            raise Refuted(
                f"{change[0]} when the batch is reversed; expected rows that follow their sample to its place in the batch"
            )

    def _turn(self, base: TappedRun) -> bool:
        """Turn every row until its second unit comes first, and compare: a unit must not depend on its place in a row.

        Returns:
            True if rows were compared; False without privacy, or if some argument is not by token alone (a mask [T, T]), so
            that tokens cannot move.

        Raises:
            Refuted: if rows of a unit change.
        """
        assert self._units is not None
        if not self._private or not self._samples.turns:
            return False
        ids_BT = self._units.ids.cpu()
        places_BT = torch.arange(ids_BT.numel()).view(ids_BT.shape)
        real_BT = ids_BT != (-1 if self._padding is None else self._padding)
        first_B1 = ids_BT.gather(1, real_BT.int().argmax(1, keepdim=True))
        second_B = (real_BT & (ids_BT != first_B1)).int().argmax(1)  # where the second unit begins; 0: there is none
        turned_BT = (torch.arange(ids_BT.shape[1]) + second_B[:, None]) % ids_BT.shape[1]
        source = places_BT.gather(1, turned_BT)
        after_BT = ids_BT.gather(1, turned_BT)
        in_order = [unit for unit in range(self._count) if bool((source[after_BT == unit].diff() > 0).all())]
        in_order = [unit for unit in in_order if unit != self._padding]
        change = self._compare.first_change(base, self.runs.turned(source), in_order, in_order, REPRODUCES)
        if change is not None:
            raise Refuted(
                f"{change[0]} when units are in other places of their rows; expected tokens whose positions begin anew with "
                "their unit, so that no unit depends on what it is packed with"
            )
        return True

    def _lone(self, among: Sequence[int]) -> list[UnitAlone]:
        """Units of `among` to run alone: those that the loader collated, else the lowest numbered; none if units share rows.

        The loader collates single rows, so it is asked for units of one row.
        """
        units, wanted = self._unit_of_rows(), set(among)
        rows = Counter(units)
        single = [row for row, unit in enumerate(units) if unit in wanted and rows[unit] == 1]
        collated = self._find_lone(single) if single else []
        if collated:
            return [UnitAlone(units[one.row], [one.row], one) for one in collated]
        first = min((unit for unit in units if unit in among), key=self._numbers.__getitem__, default=None)
        return [] if first is None else [UnitAlone(first, [i for i, unit in enumerate(units) if unit == first], None)]

    def _unit_of_rows(self) -> list[int]:
        """The unit of each row; empty if units are groups of tokens, so that several may share a row."""
        if self._units is None:
            return list(self.runs.everyone)
        return self._units.ids.tolist() if self._units.ids.dim() == 1 else []

    def _unpadded(self, lone: Sequence[UnitAlone]) -> tuple[Any, ...] | None:
        """Shapes of the batch's arguments if all samples that the loader collated alone have the same ones; else None."""
        sizes, collated = self._samples.sizes, [unit.collated for unit in lone if unit.collated is not None]
        alone = [self._samples.of_one(one.arguments).sizes for one in collated]
        return sizes if alone and all(one == sizes for one in alone) else None

    @staticmethod
    def _with_gradient(base: TappedRun) -> set[int]:
        """Units whose output gradient is not zero in some call of the run `base`."""
        sides = [rows for key, rows in base.rows.items() if base.sides[key] != "input"]
        return {int(unit) for rows in sides for unit in (rows.projections_RK != 0).any(1).nonzero().flatten()}
