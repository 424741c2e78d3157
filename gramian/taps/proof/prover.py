"""The runs of a row proof: forwards and backwards on batches in which other samples stand, under random cotangents.

Taps attribute rows (a_i, g_i) of every call to sample i. If they are functions of sample i alone, and what the taps make of all
of them adds up to autograd's gradient, then what is attributed to i is i's gradient. So a proof shows

1. that the tapped model returns what the untapped one returns, and that the sums are autograd's;
2. that rows, and rows of the outputs, stay as they are when other samples are replaced: 2⌈log₂ U⌉ runs, in each of which the
   units with bit b of a random numbering equal to v are replaced, so that of every ordered pair one stays while the other goes;
3. where nothing random runs: that a reversed batch has reversed rows, and that one unit alone has the gradient that was
   attributed to it.

Cost: 2⌈log₂ U⌉ + 4 forwards and backwards for each output that is proven by itself. Memory beyond a training step: copies of the
arguments and buffers, two random cotangents, about 40 bytes for each row of a call, and in run 1 one gradient.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gramian.errors import GramianError
from gramian.taps.audit import AGREES
from gramian.taps.preserve_state import Generators
from gramian.taps.proof.fingerprint import Fingerprint
from gramian.taps.proof.recorder import Key, Recorder, disagreement
from gramian.taps.proof.samples import Samples, donors

if TYPE_CHECKING:
    from gramian.taps.hub import Hub

REPRODUCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest relative difference between a batch and the same samples in another order, by dtype."""
ALONE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 3e-2}
"""Largest relative difference between a unit's gradient in a batch and alone, by dtype."""

Source = Sequence[int] | Tensor
"""Which sample, or which token [B, T], stands in each place."""


class Refuted(Exception):  # noqa: N818
    """A run showed that rows cannot be attributed; the message names the layer and what was seen."""


@dataclass(frozen=True)
class Lone:
    """One sample of the batch as a loader would collate it alone."""

    row: int
    arguments: Any
    padded_left: bool
    """True if the batch has its padding before the sample's tokens."""


@dataclass
class Run:
    """What one forward and backward brought."""

    rows: dict[Key, Fingerprint]
    sides: dict[Key, str]
    outputs: list[Fingerprint]
    calls: list[Any]
    drew: bool
    """True if a random number was drawn."""
    recorder: Recorder


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
    """{number of an output: why it was not proven}: no backward may go through it."""
    exact: bool = True
    """True if rows were unchanged bit for bit."""


class Prover:
    """Proves one call of a model, or of a loss behind it."""

    def __init__(
        self,
        hub: "Hub",
        execute: Callable[[Any], Any],
        samples: Samples,
        *,
        seed: int = 0,
        lone: Callable[[], Lone | None] = lambda: None,
    ) -> None:
        """Nothing runs yet.

        Args:
            hub: of the model.
            execute: runs the model, or the loss, on arguments.
            samples: the arguments.
            seed: of the numbering, the replacements and the cotangents.
            lone: one sample as a loader would collate it alone; None: a slice is taken.
        """
        root = hub.root()
        assert root is not None
        self._hub, self._root, self._execute, self._samples = hub, root, execute, samples
        self._seed, self._draw, self._find_lone = seed, random.Random(seed), lone
        self._lone: Lone | None = None
        self._generators = Generators(root)
        self._states = self._generators.states()
        self._units = samples.units
        self.runs = 0
        self.shared: set[str] = set()
        self._repeat: Run | None = None
        self._contents = samples.contents()
        count = samples.batch if self._units is None else self._units.count
        self._numbers = self._draw.sample(range(count), count)
        """The random numbering of units."""
        self._cotangents: list[Tensor | None] = []
        self._row_outputs: set[int] = set()

    @property
    def open(self) -> bool:
        """True if all samples are equal, so that nothing can be shown."""
        return len(set(self._contents)) < 2

    # ---- the three parts -------------------------------------------------------------------------------------------

    def prove(self, chosen: Sequence[int], *, whole: bool = True) -> Proven:
        """Prove some outputs together.

        Args:
            chosen: numbers of the outputs that get a cotangent.
            whole: False for part 1 alone.

        Raises:
            Refuted: naming the layer and what was seen.
            GramianError: from a tap, naming the layer.
        """
        outputs, gradients = self._untapped(chosen)
        lone = self._unit_alone() if whole else []
        base = self._tapped(range(self._samples.batch), sums=True, alone=lone)
        self._compare_outputs(outputs, base)
        self._compare_sums(base, gradients)
        del gradients
        reversal, alone = False, "no such run"
        if self.shared and not whole:
            self._constant(base)
        if whole:
            for replaced in self.separating_sets():
                self.separate(base, replaced)
            if not base.drew and self._units is None:
                reversal = True
                self._reverse(base)
            alone = self._compare_alone(base, lone, chosen) if not base.drew else "random operations ran"
        units = self._samples.batch if self._units is None else self._units.count
        exact = self._repeat is None
        return Proven(frozenset(base.calls), frozenset(self.shared), units, self.runs, reversal, alone, exact=exact)

    def separating_sets(self) -> list[set[int]]:
        """Sets of units such that of every ordered pair one set holds the second and not the first."""
        bits = max(1, (len(self._numbers) - 1).bit_length())
        return [
            {unit for unit, number in enumerate(self._numbers) if number >> bit & 1 == value}
            for bit in range(bits)
            for value in (0, 1)
        ]

    def base(self, chosen: Sequence[int]) -> Run:
        """A run on the batch as it is, to compare others with."""
        self._untapped(chosen)
        return self._tapped(range(self._samples.batch))

    def separate(self, base: Run, replaced: set[int]) -> None:
        """Replace some units; the rows of all others must not change.

        Raises:
            Refuted: if they do.
        """
        stayed = [unit for unit in range(len(self._numbers)) if unit not in replaced]
        source: Source
        if self._units is not None and self._units.ids.dim() == 2:
            source, rows = self._other_tokens(replaced), stayed
        else:
            of_row = range(self._samples.batch) if self._units is None else self._units.ids.tolist()
            others = donors(self._contents, self._draw)
            source = [
                donor if unit in replaced and donor is not None else row
                for row, (unit, donor) in enumerate(zip(of_row, others, strict=True))
            ]
            rows = [row for row, unit in enumerate(of_row) if unit not in replaced]
        run = self._tapped(source)
        moved = self._moved(base, run, rows, rows)
        if moved is not None:
            raise Refuted(
                f"{moved} when other samples are replaced; expected rows that depend on one sample each, those of a sample next "
                "to each other and in the order of the batch"
            )

    def _constant(self, base: Run) -> None:
        """What a layer sees as one row for all samples must not change with the samples: the batch rolled by one.

        Raises:
            Refuted: if it does.
        """
        batch = self._samples.batch
        run = self._tapped([(i + 1) % batch for i in range(batch)])
        shared = {(layer, ordinal) for layer, ordinal, rows in base.calls if rows == 0}
        for key, before in base.rows.items():
            other = run.rows.get(key)
            if key[1:3] in shared and base.sides[key] == "input" and other is not None:
                if bool((before.hashes_R != other.hashes_R).any()):
                    raise Refuted(
                        f"{key[1] or 'model'}: sees one row that depends on samples; expected one row for each sample, or one "
                        "that is the same for all"
                    )

    def _reverse(self, base: Run) -> None:
        order = list(reversed(range(self._samples.batch)))
        run = self._tapped(order)
        moved = self._moved(base, run, order, list(range(len(order))), REPRODUCES)
        if moved is not None:
            raise Refuted(
                f"{moved} when the batch is reversed; expected rows that follow their sample to its place in the batch"
            )

    def _unit_alone(self) -> list[int]:
        """Rows of the unit that is run alone: the loader's, else the first of the numbering."""
        if self._units is not None and self._units.ids.dim() == 2:
            return []
        self._lone = self._find_lone() if self._units is None else None
        if self._lone is not None:
            return [self._lone.row]
        unit = self._numbers.index(0)
        of_row = list(range(self._samples.batch)) if self._units is None else self._units.ids.tolist()
        return [i for i, other in enumerate(of_row) if other == unit]

    def _compare_alone(self, base: Run, rows: list[int], chosen: Sequence[int]) -> str:
        """Compare a unit's gradient in the batch with autograd's for the unit alone; how it was done.

        Raises:
            Refuted: if they differ. Gradients of scalar outputs may differ by a factor, which depends on the reduction.
        """
        if not rows:
            return "tokens of several units share rows"
        scalar = any(not self._rows_of_number(i) for i in chosen)
        arguments = self._samples.take(rows) if self._lone is None else self._lone.arguments
        try:
            outputs, weights = self._forward(arguments)
        except GramianError:
            raise
        except Exception as error:
            return f"the model does not run on it ({type(error).__name__})"
        regions = {i: self._region(i, outputs[i], rows) for i in chosen}
        if any(region is None for region in regions.values()):
            return "outputs of another shape"
        own = base.recorder.own
        if any(self._cotangents[i] is not None and self._narrowed(i, rows, regions[i]) for i in chosen):
            own = self._tapped(range(self._samples.batch), alone=rows).recorder.own
        pairs = [(outputs[i], self._cotangent_alone(i, rows, regions[i], outputs[i])) for i in chosen]
        bad = disagreement(own, self._backward(pairs, weights), ALONE, scaled=scalar)
        if bad is not None:
            raise Refuted(
                f"{bad[0]}: sample {rows[0]} alone has a gradient of norm {bad[2]:.4g}, and in the batch one of norm "
                f"{bad[1]:.4g}; expected samples that do not depend on each other (padding that is masked)"
            )
        return "slice" if self._lone is None else "collated"

    def _rows_of_number(self, number: int) -> int:
        cotangent = self._cotangents[number]
        return 0 if cotangent is None else self._rows_of(cotangent)

    def _region(self, number: int, output: Tensor, rows: list[int]) -> tuple[slice, ...] | None:
        """Where the outputs of the unit alone lie in its rows of the batch's; None if that cannot be said."""
        cotangent = self._cotangents[number]
        assert cotangent is not None
        if not self._rows_of(cotangent):
            return ()
        each = cotangent.shape[0] // self._samples.batch
        if output.dim() != cotangent.dim() or output.shape[0] != each * len(rows):
            return None
        found = []
        for here, there in zip(output.shape[1:], cotangent.shape[1:], strict=True):
            if here > there or (here < there and self._lone is None):
                return None
            at_end = self._lone is not None and self._lone.padded_left
            found.append(slice(there - here, there) if at_end else slice(0, here))
        return tuple(found)

    def _narrowed(self, number: int, rows: list[int], region: tuple[slice, ...] | None) -> bool:
        """Let a unit's cotangent vanish outside of a region; True if it did not before."""
        cotangent = self._cotangents[number]
        assert cotangent is not None and region is not None
        if not region or all(part == slice(0, size) for part, size in zip(region, cotangent.shape[1:], strict=True)):
            return False
        each = cotangent.shape[0] // self._samples.batch
        mine = slice(rows[0] * each, (rows[-1] + 1) * each)
        inside = torch.zeros_like(cotangent[mine])
        inside[(slice(None), *region)] = cotangent[(mine, *region)]
        cotangent = cotangent.clone()
        cotangent[mine] = inside
        self._cotangents[number] = cotangent
        return True

    def _cotangent_alone(
        self, number: int, rows: list[int], region: tuple[slice, ...] | None, output: Tensor
    ) -> Tensor:
        cotangent = self._cotangents[number]
        assert cotangent is not None and region is not None
        if not self._rows_of(cotangent):
            return torch.ones_like(output)
        each = cotangent.shape[0] // self._samples.batch
        picked = cotangent.unflatten(0, (self._samples.batch, each))[rows].flatten(0, 1)
        return picked[(slice(None), *region)]

    # ---- comparisons -----------------------------------------------------------------------------------------------

    def _moved(
        self,
        base: Run,
        run: Run,
        rows: Sequence[int],
        places: Sequence[int],
        tolerances: dict[torch.dtype, float] | None = None,
    ) -> str | None:
        """The first tensor of which a row is not what it was, in words; None: all are.

        Args:
            base: the batch as it is.
            run: another one.
            rows: rows of the first that are compared.
            places: where the second has them.
            tolerances: relative, by dtype; None: bit for bit, or as far as two equal runs are apart.
        """
        if base.rows.keys() != run.rows.keys():
            odd = sorted(base.rows.keys() ^ run.rows.keys())[0]
            return f"{odd[1] or 'model'}: is called another number of times"
        pairs: list[tuple[str, Fingerprint, Fingerprint, Key | int]] = [
            (f"{key[1] or 'model'}: the {base.sides[key]}", base.rows[key], run.rows[key], key) for key in base.rows
        ]
        pairs.sort(
            key=lambda pair: pair[0].endswith("gradient")
        )  # inputs first, in the order of the backward: reversed
        outputs = zip(base.outputs, run.outputs, strict=True)
        pairs += [
            (f"output {i}: the row", one, other, i) for i, (one, other) in enumerate(outputs) if i in self._row_outputs
        ]
        for words, one, other, key in pairs:
            if one.shape != other.shape:
                return f"{words} has another shape"
            equal = one.hashes_R[list(rows)] == other.hashes_R[list(places)]
            if bool(equal.all()):
                continue
            apart = (one.projections_RK[list(rows)] - other.projections_RK[list(places)]).square().mean(1).sqrt()
            allowed = self._allowed(base, run, key, one, tolerances)
            off = ~equal & ~(apart <= allowed)
            if bool(off.any()):
                return f"{words} of sample {list(rows)[int(off.nonzero()[0])]} changes"
        return None

    def _allowed(
        self, base: Run, run: Run, key: "Key | int", one: Fingerprint, tolerances: dict[torch.dtype, float] | None
    ) -> float:
        if tolerances is not None:
            narrow = max((fingerprint.eps for fingerprint in base.rows.values()), default=one.eps)
            return next((t for dtype, t in tolerances.items() if torch.finfo(dtype).eps >= narrow), 5e-2) * one.largest
        if self._repeat is None:
            self._repeat = self._tapped(range(self._samples.batch))
        again = self._repeat.outputs[key] if isinstance(key, int) else self._repeat.rows.get(key)
        differ = any(
            not torch.equal(f.hashes_R, self._repeat.rows[k].hashes_R)
            for k, f in base.rows.items()
            if k in self._repeat.rows
        )
        if not differ and sorted(base.calls) == sorted(run.calls):
            return -1.0  # bit for bit
        between = 0.0 if again is None else float(one.moved(again).max())
        return max(4 * between, 64 * one.eps * one.largest)

    def _compare_outputs(self, plain: list[Fingerprint], base: Run) -> None:
        for number, (one, other) in enumerate(zip(plain, base.outputs, strict=True)):
            same = one.shape == other.shape and torch.equal(one.hashes_R, other.hashes_R)
            if not same and one.shape == other.shape:
                allowed = self._allowed(base, base, number, one, None)
                same = bool((one.moved(other) <= allowed).all())
            if not same:
                layers = ", ".join(sorted(self.shared)) or "model"
                raise Refuted(
                    f"{layers}: returns one row for all samples, and the model returns something else once that row stands for "
                    f"each of them (output {number}); expected code behind it that broadcasts the row over the batch"
                )

    def _compare_sums(self, base: Run, gradients: dict[str, Tensor | None]) -> None:
        bad = disagreement(base.recorder.totals, gradients, AGREES)
        if bad is not None:
            raise Refuted(
                f"{bad[0]}: the taps explain a gradient of norm {bad[1]:.4g}, autograd computed {bad[2]:.4g}; expected the "
                "weight to be used through its own module only (not F.linear(x, layer.weight)), or a registered site"
            )

    # ---- single runs -----------------------------------------------------------------------------------------------

    def outputs(self) -> list[Tensor]:
        """The outputs of the untapped model."""
        outputs, _ = self._forward(self._samples.take(range(self._samples.batch)))
        return outputs

    def _untapped(self, chosen: Sequence[int]) -> tuple[list[Fingerprint], dict[str, Tensor | None]]:
        outputs, weights = self._forward(self._samples.take(range(self._samples.batch)))
        self._cotangents = [self._cotangent(i, y) if i in chosen else None for i, y in enumerate(outputs)]
        self._row_outputs = {i for i, y in enumerate(outputs) if self._rows_of(y)}
        prints = [self._fingerprint(y) for y in outputs]
        return prints, self._backward([(outputs[i], self._cotangents[i]) for i in chosen], weights)

    def _forward(self, arguments: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
        """The untapped model's outputs, and the weights that it read."""
        self.runs += 1
        self._generators.restore(self._states)
        with self._hub.untapped() as weights:
            outputs = output_tensors(self._execute(arguments))
        return outputs, weights

    def _backward(
        self, pairs: Sequence[tuple[Tensor, Tensor | None]], weights: dict[str, Tensor]
    ) -> dict[str, Tensor | None]:
        names = list(weights)
        pairs = [(y, g) for y, g in pairs if y.requires_grad]
        if not pairs or not names:
            return dict.fromkeys(names)
        with self._hub.untapped():
            found = torch.autograd.grad(
                [y for y, _ in pairs], [weights[n] for n in names], [g for _, g in pairs], allow_unused=True
            )
        return dict(zip(names, found, strict=True))

    def _tapped(self, source: Source, *, sums: bool = False, alone: Sequence[int] = ()) -> Run:
        """One run of the tapped model on other samples; each brings its own cotangent."""
        self.runs += 1
        tokens = isinstance(source, Tensor)
        arguments = self._samples.take_tokens(source) if tokens else self._samples.take(source)  # type: ignore[arg-type]
        recorder = Recorder(self._seed, self._units, self._hub.batch_size, sums=sums, alone=list(alone))
        self._generators.restore(self._states)
        with self._hub.rehearsal(recorder) as rehearsal:
            try:
                outputs = output_tensors(self._execute(arguments))
                drew = self._generators.moved(self._states)
                pairs = [
                    (y, self._moved_cotangent(g, source))
                    for y, g in zip(outputs, self._cotangents, strict=False)
                    if g is not None and y.requires_grad
                ]
                odd = next((i for i, (y, g) in enumerate(pairs) if y.shape != g.shape), None)
                if odd is not None:
                    raise Refuted(
                        f"output {odd}: has another shape when other samples are replaced; expected rows of samples"
                    )
                prints = [self._fingerprint(y) for y in outputs]
                if pairs:
                    torch.autograd.grad(
                        [y for y, _ in pairs], [self._hub.probe], [g for _, g in pairs], allow_unused=True
                    )
            except (GramianError, Refuted):
                raise
            except Exception as error:
                if not rehearsal.expanded:
                    raise
                layers = ", ".join(sorted(rehearsal.expanded))
                raise Refuted(
                    f"{layers}: returns one row for all samples, and the code behind it fails once that row stands for each of "
                    f"them ({type(error).__name__}); expected code that broadcasts the row over the batch"
                ) from error
        self.shared |= rehearsal.expanded
        return Run(recorder.rows, recorder.sides, prints, list(rehearsal.calls), drew, recorder)

    def _fingerprint(self, output: Tensor) -> Fingerprint:
        rows = self._rows_of(output)
        units = self._units
        if units is not None and units.ids.dim() == 2 and output.shape[:2] == units.ids.shape:
            return Fingerprint.of(units.gather_tokens(output.detach()), self._seed)
        return Fingerprint.of(
            output.detach().reshape(-1, *output.shape[1:]) if not rows else _grouped(output, rows), self._seed
        )

    def _rows_of(self, output: Tensor) -> int:
        return rows_of(output, self._samples.batch)

    def _cotangent(self, number: int, output: Tensor) -> Tensor:
        if not self._rows_of(output):
            return torch.ones_like(output)
        generator = torch.Generator(output.device).manual_seed(self._seed * 7919 + number)
        return torch.randn(output.shape, generator=generator, device=output.device, dtype=output.dtype)

    def _moved_cotangent(self, cotangent: Tensor, source: Source) -> Tensor:
        if not self._rows_of(cotangent):
            return cotangent
        if isinstance(source, Tensor):
            moved: Tensor = self._samples.tokens_of(cotangent, source)
            return moved
        index = torch.tensor(list(source), device=cotangent.device)
        each = cotangent.shape[0] // self._samples.batch
        return cotangent.unflatten(0, (self._samples.batch, each)).index_select(0, index).flatten(0, 1)

    def _other_tokens(self, replaced: set[int]) -> Tensor:
        """For every token of the replaced units another token of the batch: [B, T]."""
        assert self._units is not None
        ids_BT = self._units.ids.cpu()
        places = torch.arange(ids_BT.numel())
        generator = torch.Generator().manual_seed(self._draw.getrandbits(62))
        shuffled = places[torch.randperm(len(places), generator=generator)]
        goes = torch.isin(ids_BT.flatten(), torch.tensor(sorted(replaced)))
        return torch.where(goes, shuffled, places).view(ids_BT.shape)


def rows_of(output: Tensor, batch: int) -> int:
    """Rows of an output that belong to one sample; 0 if its first axis is not a multiple of B."""
    if not output.dim() or not output.shape[0] or output.shape[0] % batch:
        return 0
    return output.shape[0] // batch


def _grouped(output: Tensor, rows: int) -> Tensor:
    return output.detach().unflatten(0, (output.shape[0] // rows, rows))


def output_tensors(output: Any, depth: int = 3) -> list[Tensor]:
    """Floating-point tensors of an output in a fixed order: in tuples, lists, dicts, and attributes of other objects."""
    found: list[Tensor] = []
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor):
            found += [leaf] if leaf.is_floating_point() else []
        elif depth and hasattr(leaf, "__dict__") and not callable(leaf):
            found += [t for value in vars(leaf).values() for t in output_tensors(value, depth - 1)]
    return found
