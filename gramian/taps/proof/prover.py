"""The row proof of one call: what taps attribute to a sample is a function of that sample alone.

Taps attribute rows (a_i, g_i) of every call to sample i. If they are functions of sample i alone, and what the taps make of all
of them adds up to autograd's gradient, then what is attributed to i is i's gradient. So a proof shows

1. that the tapped model returns what the untapped one returns, and that the sums are autograd's, twice those of half the loss
   (the backward is linear, so that B times the share of a mean is a sample's gradient);
2. that rows, and rows of the outputs, stay as they are when other samples are replaced: 2⌈log₂ U⌉ runs, in each of which the
   units with bit b of a random numbering equal to v are replaced, so that of every ordered pair one stays while the other goes;
3. where nothing random runs, or with modules in evaluation mode (no dropout): that a reversed batch has reversed rows, and that
   one unit alone has the gradient that was attributed to it.

Cost: 2⌈log₂ U⌉ + 4 forwards and backwards for each set of outputs that is proven by itself, one more with dropout, and up to 4
of single samples where a loader pads; where units have several rows, 2⌈log₂ B⌉ + 2 that show whether these are independent.
Memory beyond a training step: copies of the arguments and buffers, two random cotangents, about 40 bytes for each row of a
call, and in part 1 one gradient.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.taps.audit import AGREES
from gramian.taps.model.preserve_state import Beginning
from gramian.taps.proof.carried_state import changed, refuse_attribute, refuse_buffers
from gramian.taps.proof.proof_runs import HALF, SCALE, Execute, ProofRuns, Refuted, SecondAxis, Source, TappedRun
from gramian.taps.proof.row_fingerprint import Fingerprint
from gramian.taps.proof.row_recorder import Key, disagreement, sketches_of
from gramian.taps.proof.sample_arguments import SampleArguments, donors
from gramian.taps.proof.single_unit import FindLone, LoneUnit, compare_alone, fits_alone

if TYPE_CHECKING:
    from gramian.taps.hub import Hub

ONE_ROW = "; or a batch axis of 1 where a layer sees no sample: positions of shape [1, T], not [T]"
REPRODUCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest relative difference between a batch and the same samples in another order, by dtype."""
ROUNDING = 64
"""Rounding errors of the largest value by which rows may differ where bits cannot be equal."""
ROUNDING_OF_HALF = 8
"""The same in half precision, where 64 would be half of the value."""
EQUAL = {dtype: ROUNDING * torch.finfo(dtype).eps for dtype in REPRODUCES}


@dataclass
class Proven:
    """What was shown on a batch, for the record."""

    calls: frozenset[Any]
    shared: frozenset[str]
    """Layers that see one row for all samples, which may be expanded."""
    units: int
    runs: int
    reversal: bool
    alone: str
    """"slice", "collated", or why there was no such run."""
    fixed: tuple[int, ...] = ()
    """Arguments whose first axis is B by chance, and which were left alone."""
    open_outputs: dict[int, str] = field(default_factory=dict)
    """{number of an output: which one it is, and why it was not proven}: no backward may go through it."""
    exact: bool = True
    """True if rows were unchanged bit for bit."""
    silent: frozenset[Any] = frozenset()
    """Calls whose output gradient was zero."""
    partition: tuple[int, ...] | None = None
    """The grouping of rows into units, where rows of one unit depend on each other: nothing is shown of other groupings."""
    unpadded: tuple[Any, ...] | None = None
    """Sizes of a batch in which the loader padded no sample; batches of other sizes are still to be proven with padding."""
    stateful: bool = False
    """True if a forward changes buffers or attributes of the model."""
    shows: bool = True
    """False if no sample had a gradient, or one was not finite, so that the next batch has to show what this one did not."""


class Prover:
    """Proves one call of a model, or of a loss behind it."""

    def __init__(
        self,
        hub: "Hub",
        execute: Execute,
        samples: SampleArguments,
        *,
        seed: int = 0,
        lone: FindLone = lambda among: [],
        second_axis: SecondAxis = "certain",
        beginning: Beginning | None = None,
    ) -> None:
        """Nothing runs yet.

        Args:
            hub: of the model.
            execute: runs the model, or the loss, on arguments.
            samples: the arguments.
            seed: of the numbering, the replacements and the cotangents.
            lone: gives some samples as a loader would collate them alone; none: a slice is taken.
            second_axis: see `ProofRuns`.
            beginning: see `ProofRuns`.
        """
        root = hub.root()
        assert root is not None
        self._root, self._samples, self._units, self._find_lone = root, samples, samples.units, lone
        self._draw, self._private = random.Random(seed), hub.rule.withholds
        self.runs = ProofRuns(hub, execute, samples, seed, second_axis, beginning)
        self._repeat: TappedRun | None = None
        self.fits_alone = False
        """True if a sample alone ran with the whole of every input that belongs to nobody."""
        self._records: set[str] = set()
        """Attributes that hold samples, and that nothing reads."""
        self._contents = samples.contents()
        self._count = samples.batch if self._units is None else self._units.count
        self._numbers = self._draw.sample(range(self._count), self._count)
        """The random numbering of units."""

    @property
    def open(self) -> bool:
        """True if all samples are equal, so that nothing can be shown."""
        return len(set(self._contents)) < 2

    # ---- the three parts -------------------------------------------------------------------------------------------

    def prove(self, choose: Callable[[list[Tensor]], Sequence[int]], *, whole: bool = True) -> Proven:
        """Prove some outputs together.

        Args:
            choose: gives the numbers of the outputs that get a cotangent.
            whole: False for part 1 alone.

        Raises:
            Refuted: naming the layer and what was seen.
            GramianError: from a tap, naming the layer.
        """
        runs = self.runs
        outputs, gradients = runs.untapped(choose)
        chosen = [i for i, cotangent in enumerate(runs.cotangents) if cotangent is not None]
        lone = self._lone(range(self._count)) if whole else []
        base = runs.tapped(runs.everyone, sums=True, alone=[unit.number for unit in lone])
        self._compare_outputs(outputs, base)
        finite = self._compare_sums(base, gradients)
        del gradients
        reversal, alone = False, "no such run"
        if whole:
            for replaced in self.separating_sets():
                self.separate(base, replaced)
            reversal, alone = self._reorder(base, chosen, lone)
        elif runs.shared:
            self._constant(base)
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
            exact=not self._repeat,
            silent=frozenset(call for call in base.calls if call[:2] not in loud),
        )

    def separating_sets(self) -> list[set[int]]:
        """Sets of units such that of every ordered pair one set holds the second and not the first."""
        bits = max(1, (self._count - 1).bit_length())
        return [
            {unit for unit, number in enumerate(self._numbers) if number >> bit & 1 == value}
            for bit in range(bits)
            for value in (0, 1)
        ]

    def separate(self, base: TappedRun, replaced: set[int]) -> None:
        """Replace some units; the rows of all others must not change.

        Raises:
            Refuted: if they do.
        """
        source: Source
        if self._units is not None and self._units.ids.dim() == 2:
            source = self._other_tokens(replaced)
        else:
            units = self._unit_of_rows()
            stayed_rows = [row for row, unit in enumerate(units) if unit not in replaced]
            pairs = zip(units, donors(self._contents, stayed_rows, self._draw), strict=True)
            source = [
                donor if unit in replaced and donor is not None else row for row, (unit, donor) in enumerate(pairs)
            ]
        stayed = [unit for unit in range(self._count) if unit not in replaced]
        run = self.runs.tapped(source)
        if self._private:
            refuse_buffers(base.buffers, run.buffers)
            self._refuse_memory(base, run)
        moved = self._moved(base, run, stayed, stayed)
        if moved is not None:
            raise Refuted(
                f"{moved[0]} when other samples are replaced; expected rows that depend on one sample each, those of a sample "
                f"next to each other and in the order of the batch{moved[1]}"
            )

    def _refuse_memory(self, base: TappedRun, run: TappedRun) -> None:
        """Under privacy no later batch may depend on samples that modules remember in attributes.

        Attributes that differ after both runs may be a record that nothing reads, so a batch is run after each of them.

        Args:
            base: a run of the batch.
            run: the last run, of other samples.

        Raises:
            Refuted: naming an attribute.
        """
        names = changed(base.remembered, run.remembered)
        if self._records.issuperset(names):
            return
        everyone = self.runs.everyone
        after_others = self.runs.tapped(everyone, forget=False)
        self.runs.tapped(everyone)
        after_itself = self.runs.tapped(everyone, forget=False)
        if self._moved(after_itself, after_others, everyone, everyone, EQUAL) is not None:
            refuse_attribute(names[0])
        self._records.update(names)

    def _reorder(self, base: TappedRun, chosen: Sequence[int], lone: Sequence[LoneUnit]) -> tuple[bool, str]:
        """Compare with the reversed batch, and with units alone.

        Where random numbers were drawn, modules run in evaluation mode: of a sample alone other units would drop out.

        Returns:
            Whether the batch was reversed, and how units were alone.
        """
        if base.drew:
            with _evaluating(self._root):
                try:
                    base = self.runs.tapped(self.runs.everyone, alone=[unit.number for unit in lone])
                except (GramianError, Refuted):
                    return False, "random operations ran, and in evaluation mode the model is another one"
                if base.drew:
                    if lone:
                        self.fits_alone = fits_alone(self.runs, self._samples, lone[0], chosen)
                    return False, "random operations ran, in evaluation mode too"
                return self._reorder(base, chosen, lone)
        if self._units is None:
            self._reverse(base)
        with_gradient = self._with_gradient(base)
        if with_gradient and not with_gradient.intersection(unit.number for unit in lone):  # theirs is 0 anywhere
            lone = self._lone(sorted(with_gradient))
            base = self.runs.tapped(self.runs.everyone, alone=[unit.number for unit in lone])
        if not lone:
            return self._units is None, "tokens of several units share rows"
        words = compare_alone(self.runs, self._samples, base, lone, chosen)
        self.fits_alone = words in ("slice", "collated")
        return self._units is None, words

    def _unpadded(self, lone: Sequence[LoneUnit]) -> tuple[Any, ...] | None:
        """Sizes of the batch if samples alone, as the loader collates them, have the same; else None."""
        sizes, collated = self._samples.sizes, [unit.collated for unit in lone if unit.collated is not None]
        alone = [self._samples.of_one(one.arguments).sizes for one in collated]
        return sizes if alone and all(one == sizes for one in alone) else None

    @staticmethod
    def _with_gradient(base: TappedRun) -> set[int]:
        """Units for which some output gradient is not zero."""
        sides = [rows for key, rows in base.rows.items() if base.sides[key] != "input"]
        return {int(unit) for rows in sides for unit in (rows.projections_RK != 0).any(1).nonzero().flatten()}

    def _reverse(self, base: TappedRun) -> None:
        order = list(reversed(self.runs.everyone))
        moved = self._moved(base, self.runs.tapped(order), order, self.runs.everyone, REPRODUCES)
        if moved is not None:
            raise Refuted(
                f"{moved[0]} when the batch is reversed; expected rows that follow their sample to its place in the batch"
            )

    def _constant(self, base: TappedRun) -> None:
        """What a layer sees as one row for all samples must not change with the samples: the batch rolled by one.

        Raises:
            Refuted: if it does.
        """
        batch = self._samples.batch
        run = self.runs.tapped([(i + 1) % batch for i in range(batch)])
        shared = {(layer, ordinal) for layer, ordinal, rows in base.calls if rows == 0}
        for key, before in base.rows.items():
            after = run.rows.get(key)
            if key[1:3] not in shared or base.sides[key] != "input" or after is None:
                continue
            if not torch.equal(before.hashes_R, after.hashes_R):
                raise Refuted(
                    f"{key[1] or 'model'}: sees one row that depends on samples; expected one row for each sample, or one "
                    "that is the same for all"
                )

    def _unit_of_rows(self) -> list[int]:
        """The unit of each row; of rows that several units share, none."""
        if self._units is None:
            return list(self.runs.everyone)
        return self._units.ids.tolist() if self._units.ids.dim() == 1 else []

    def _lone(self, among: Sequence[int]) -> list[LoneUnit]:
        """Units that are run alone: the loader's choice, else the first of the numbering; none if units share rows."""
        collated = self._find_lone(among) if self._units is None else []
        if collated:
            return [LoneUnit(one.row, [one.row], one) for one in collated]
        units = self._unit_of_rows()
        first = min((unit for unit in units if unit in among), key=self._numbers.__getitem__, default=None)
        return [] if first is None else [LoneUnit(first, [i for i, unit in enumerate(units) if unit == first], None)]

    def _other_tokens(self, replaced: set[int]) -> Tensor:
        """For every token of the replaced units another token of the batch: [B, T]."""
        assert self._units is not None
        ids_BT = self._units.ids.cpu()
        places = torch.arange(ids_BT.numel())
        generator = torch.Generator().manual_seed(self._draw.getrandbits(62))
        shuffled = places[torch.randperm(len(places), generator=generator)]
        goes = torch.isin(ids_BT.flatten(), torch.tensor(sorted(replaced)))
        return torch.where(goes, shuffled, places).view(ids_BT.shape)

    # ---- comparisons -----------------------------------------------------------------------------------------------

    def _moved(
        self,
        base: TappedRun,
        run: TappedRun,
        rows: Sequence[int],
        places: Sequence[int],
        tolerances: Mapping[torch.dtype, float] | None = None,
    ) -> tuple[str, str] | None:
        """The first tensor of which a row is not what it was, in words, and advice; None: all are.

        Args:
            base: the batch as it is.
            run: another one.
            rows: rows of the first that are compared.
            places: where the second has them.
            tolerances: relative, by dtype; None: bit for bit, or as far as two equal runs are apart.
        """
        if base.rows.keys() != run.rows.keys():
            odd = sorted(base.rows.keys() ^ run.rows.keys())[0]
            return f"{odd[1] or 'model'}: is called another number of times", ""
        here, there = list(rows), list(places)
        for words, one, other, key in self._compared(base, run):
            side = None if isinstance(key, int) else base.sides[key]
            if one.shape != other.shape:
                return f"{words} has another shape", ""
            equal = one.hashes_R[here] == other.hashes_R[there]
            if bool(equal.all()):
                continue
            apart = (one.projections_RK[here] - other.projections_RK[there]).square().mean(1).sqrt()
            relative = None if tolerances is None else _tolerance(tolerances, base)
            allowed = self._apart(base, run, key, one) if relative is None else relative * one.largest
            numbers = one.finite()[here] | other.finite()[there]  # else both rows are no numbers
            off = ~equal & ~(apart <= allowed) & numbers
            if bool(off.any()):
                constant = side == "output gradient" and self._sees_no_sample(base, run, key)
                return f"{words} of sample {here[int(off.nonzero()[0])]} changes", ONE_ROW if constant else ""
        return None

    @staticmethod
    def _sees_no_sample(base: TappedRun, run: TappedRun, key: "Key | int") -> bool:
        """True if all inputs of a call are the same in both runs, whatever the samples are."""
        inputs = [
            k for k, side in base.sides.items() if side == "input" and not isinstance(key, int) and k[:3] == key[:3]
        ]
        return bool(inputs) and all(torch.equal(base.rows[k].hashes_R, run.rows[k].hashes_R) for k in inputs)

    def _compared(self, base: TappedRun, run: TappedRun) -> list[tuple[str, Fingerprint, Fingerprint, "Key | int"]]:
        """Tensors of both runs, in words: inputs in the order of the forward, output gradients, joined calls, outputs."""
        pairs: list[tuple[str, Fingerprint, Fingerprint, Key | int]] = [
            (f"{key[1] or 'model'}: the {base.sides[key]}", base.rows[key], run.rows[key], key)
            for side in ("input", "output gradient", "sum over calls")
            for key in (reversed(base.rows) if side == "input" else base.rows)
            if base.sides[key] == side
        ]
        outputs = enumerate(zip(base.outputs, run.outputs, strict=True))
        titles, runs = self.runs.titles, self.runs
        with_gradient = {i for i in runs.row_outputs if runs.cotangents[i] is not None}
        return pairs + [(f"{titles[i]}: the row", *both, i) for i, both in outputs if i in with_gradient]

    def _apart(self, base: TappedRun, run: TappedRun, key: "Key | int", one: Fingerprint) -> float:
        """How far apart rows may be: not at all where two equal runs are equal and every call has the same rows.

        Inputs and outputs are compared bit for bit where two equal forwards are, whatever their backwards do.
        """
        if self._repeat is None:
            self._repeat = self.runs.tapped(self.runs.everyone)
        repeated, forward = self._repeat.rows, isinstance(key, int) or base.sides[key] == "input"
        sides = [k for k in base.rows if base.sides[k] == "input" or not forward]
        equal = all(k in repeated and torch.equal(base.rows[k].hashes_R, repeated[k].hashes_R) for k in sides)
        if equal and sorted(base.calls) == sorted(run.calls):
            return -1.0
        again = self._repeat.outputs[key] if isinstance(key, int) else repeated.get(key)
        between = 0.0 if again is None else float(one.moved(again).max())
        return max(4 * between, (ROUNDING if one.eps < HALF else ROUNDING_OF_HALF) * one.eps * one.largest)

    def _compare_outputs(self, plain: list[Fingerprint], base: TappedRun) -> None:
        for number, (one, other) in enumerate(zip(plain, base.outputs, strict=True)):
            same = one.shape == other.shape and len(one.hashes_R) == len(other.hashes_R)
            if same and not torch.equal(one.hashes_R, other.hashes_R):
                # rounding: products have other kernels where weights need no gradient, or where one row is several
                # terms of a single number may cancel
                largest = one.largest if number in self.runs.row_outputs else max(1.0, one.largest)
                allowed = max(self._apart(base, base, number, one), _tolerance(REPRODUCES, base) * largest)
                same = bool((~(one.finite() | other.finite()) | (one.moved(other) <= allowed)).all())
            if not same and not self.runs.shared:
                raise Refuted(
                    f"model: two equal forwards differ in {self.runs.titles[number]}; expected a forward that writes into no "
                    "weight, and remembers nothing but in buffers and attributes of its modules"
                )
            if not same:
                layers = ", ".join(sorted(self.runs.shared))
                raise Refuted(
                    f"{layers}: returns one row for all samples, and the model returns something else once that row stands for "
                    f"each of them ({self.runs.titles[number]}); expected code behind it that broadcasts the row over the batch"
                )

    def _compare_sums(self, base: TappedRun, gradients: dict[str, Tensor | None]) -> bool:
        """True if the sums are autograd's; False if they are not finite, so that nothing was shown."""
        halved = sketches_of(gradients)
        bad = disagreement(base.recorder.totals, halved, AGREES, floor=base.rounding, factors=(SCALE,))
        if bad is not None:
            raise Refuted(
                f"{bad[0]}: the taps explain a gradient of norm {bad[1] / SCALE:.4g}, autograd computed {bad[2] / SCALE:.4g} "
                f"({SCALE} times the loss, over {SCALE}); expected the weight to be used through its own module only (not "
                "F.linear(x, layer.weight)), or a registered site, and a backward that is linear (no hook that normalises)"
            )
        return all(sketch.finite for sketch in (*base.recorder.totals.values(), *halved.values()))


@contextmanager
def _evaluating(root: nn.Module) -> Iterator[None]:
    """Modules in evaluation mode, and then each in the mode that it was in."""
    modes = [(module, module.training) for module in root.modules()]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _tolerance(tolerances: Mapping[torch.dtype, float], base: TappedRun) -> float:
    """That of the narrowest dtype that took part in a run."""
    narrowest = max((print_.eps for print_ in (*base.rows.values(), *base.outputs)), default=0.0)
    return next(tolerance for dtype, tolerance in tolerances.items() if torch.finfo(dtype).eps >= narrowest)
