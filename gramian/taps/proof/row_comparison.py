"""Compare two runs of a row proof: rows must be unchanged, and the taps' gradient sums equal to autograd's, up to rounding.

A row is what a layer's input, output gradient or the model's output has for one sample. Rows must be equal bit for bit if two
runs of the same batch are, and if layers have as many rows in both runs. Otherwise (mixtures of experts, ragged rows, atomic
additions, products of other shapes inside a layer) they may differ by 4 times the difference of two runs of the same batch, or
by 64 ε of the tensor's largest value (8 ε in half precision), whichever is larger. On a GPU, where atomic additions change a
run now and then, each of two runs that differ is repeated up to `REPEATS` times before they are taken to be deterministic.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gramian.taps.audit import AGREES
from gramian.taps.model.dropout import WithoutDropout
from gramian.taps.proof.proof_runs import SCALE, ProofRuns, Refuted, TappedRun
from gramian.taps.proof.row_fingerprint import Fingerprint, relative_rounding
from gramian.taps.proof.row_recorder import Key, Sketch, disagreement, sketches_of
from gramian.taps.sites.generic import REPRODUCES

ONE_ROW = "; or a batch axis of 1 where a layer sees no sample: positions of shape [1, T], not [T]"
SOMETIMES = (
    "; or layers that every batch calls equally often (a full softmax in place of nn.AdaptiveLogSoftmaxWithLoss, which skips "
    "clusters without labels)"
)
BIT_FOR_BIT = -1.0
"""The largest difference allowed between rows that must be equal."""
REPEATS = 4
"""Maximum number of repetitions of each of two runs on a GPU; 1 elsewhere, of the first one."""
Repeat = Callable[[], TappedRun]
"""Function that makes a run once more, on the same samples."""
EQUAL = {dtype: 64 * torch.finfo(dtype).eps for dtype in REPRODUCES}
"""Largest relative difference between two runs on the same samples, by dtype: 64 ε."""


class RowComparison:
    """Compares runs of one proof with each other: their rows, outputs and gradient sums."""

    def __init__(self, runs: ProofRuns, order: Sequence[int] | None = None) -> None:
        """Store the proof's runs; `order` has the sample in each place of the run that others are compared with.

        None: the order of the batch.
        """
        self._runs = runs
        self.order = runs.everyone if order is None else order
        self._repeats: list[TappedRun] = []
        """Further runs of the samples in `order`, the first of which is made when rows first differ in a bit."""
        self._varies: set[str] = set()
        """Passes, "forward" or "backward", that were seen to differ between two runs of the same samples."""
        self._sorts = False
        """True if some operation was seen to have another number of rows once other samples were there."""

    @property
    def exact(self) -> bool:
        """True if rows were equal bit for bit in all comparisons so far, except those with `tolerances`."""
        return not self._repeats

    def first_change(
        self,
        base: TappedRun,
        run: TappedRun,
        rows: Sequence[int],
        places: Sequence[int],
        tolerances: Mapping[torch.dtype, float] | None = None,
        repeat: Repeat | None = None,
    ) -> tuple[str, str] | None:
        """Find the first tensor with a row that differs between two runs.

        Args:
            base: the run to compare with, in the order `order`.
            run: another run.
            rows: numbers of the rows of `base` that are compared.
            places: numbers of the rows of `run` that they are compared with, in the same order.
            tolerances: largest relative difference by dtype; None: bit for bit, or as two runs of the same batch differ.
            repeat: makes `run` once more, to see on a GPU whether it is deterministic; None: that is not looked at.

        Returns:
            Error text that names layer and tensor, and advice to append (may be empty); None if no row differs.
        """
        here, there = list(rows), list(places)
        for odd in sorted(base.rows.keys() ^ run.rows.keys()):
            found, at = (base, here) if odd in base.rows else (run, there)
            # an expert without tokens is not called: the samples that are compared must have none in the other run either
            if odd[1] not in found.recorder.ragged or bool((found.rows[odd].projections_RK[at] != 0).any()):
                return f"{odd[1] or 'model'}: is called another number of times", SOMETIMES
        for title, one, other, key in self._pairs(base, run):
            if one.shape != other.shape:
                return f"{title} has another shape", ""
            equal = one.hashes_R[here] == other.hashes_R[there]
            if bool(equal.all()):
                continue
            apart = (one.projections_RK[here] - other.projections_RK[there]).square().mean(1).sqrt()
            relative = None if tolerances is None else _tolerance(tolerances, base)
            allowed = self._allowed(base, run, key, one, repeat) if relative is None else relative * one.largest
            numbers = one.finite()[here] | other.finite()[there]  # else neither row is finite
            off = ~equal & ~(apart <= allowed) & numbers
            if bool(off.any()) and allowed == BIT_FOR_BIT and repeat is not None and self._sorts_rows(repeat):
                off = ~equal & ~(apart <= self._allowed(base, run, key, one)) & numbers
            if bool(off.any()):
                gradient = not isinstance(key, int) and base.sides[key] == "output gradient"
                constant = gradient and _sees_no_sample(base, run, key)
                return f"{title} of sample {here[int(off.nonzero()[0])]} changes", ONE_ROW if constant else ""
        return None

    def compare_outputs(self, untapped: list[Fingerprint], base: TappedRun) -> None:
        """Raise Refuted if the outputs of the tapped run `base` differ from those of the untapped run."""
        runs = self._runs
        for number, (one, other) in enumerate(zip(untapped, base.outputs, strict=True)):
            same = one.shape == other.shape and len(one.hashes_R) == len(other.hashes_R)
            if same and not torch.equal(one.hashes_R, other.hashes_R):
                # rounding: products have other kernels where weights need no gradient, or where one row is several
                # terms of a single number may cancel
                largest = one.largest if number in runs.row_outputs else max(1.0, one.largest)
                allowed = max(self._allowed(base, base, number, one), _tolerance(REPRODUCES, base) * largest)
                same = bool((~(one.finite() | other.finite()) | (one.moved(other) <= allowed)).all())
            if not same and not runs.shared:
                raise Refuted(
                    f"model: two equal forwards differ in {runs.titles[number]}; expected a forward that writes into no "
                    "weight, and remembers nothing but in buffers and attributes of its modules"
                )
            if not same:
                layers = ", ".join(sorted(runs.shared))
                raise Refuted(
                    f"{layers}: returns one row for all samples, and the model returns something else once that row stands for "
                    f"each of them ({runs.titles[number]}); expected code behind it that broadcasts the row over the batch"
                )

    def compare_sums(self, base: TappedRun, gradients: dict[str, Tensor | None]) -> bool:
        """True if the taps' gradient sums in the run `base` agree with autograd's; False if one is not finite (nothing shown).

        `gradients` {parameter: SCALE times autograd's gradient} are from the run without taps.

        Raises:
            Refuted: naming a parameter whose sum differs.
        """
        halved, totals = sketches_of(gradients), base.recorder.totals
        bad = disagreement(totals, halved, AGREES, floor=base.rounding, factors=(SCALE,))
        half = half_precision(self._runs, base)
        if bad is not None and bad[0] in totals and half is not None:
            bad = disagreement(totals, halved, AGREES, factors=(SCALE,), noise=self._noise(halved), half=half)
        if bad is not None and bad[0] not in totals:
            raise Refuted(
                f"{bad[0]}: got a gradient, but none through its layer; expected the weight to be used through its own module "
                "only (not F.linear(x, layer.weight)), or a registered site",
                bad[0],
            )
        if bad is not None:
            raise Refuted(
                f"{bad[0]}: the taps explain a gradient of norm {bad[1] / SCALE:.4g}, autograd computed {bad[2] / SCALE:.4g} "
                f"({SCALE} times the loss, over {SCALE}); expected the weight to be used through its own module only (not "
                "F.linear(x, layer.weight)), or a registered site, and a backward that is linear (no hook that normalises)",
                bad[0],
            )
        return all(sketch.finite for sketch in (*totals.values(), *halved.values()))

    def _noise(self, halved: Mapping[str, Sketch]) -> dict[str, float]:
        """{parameter: how far SCALE times autograd's gradient moves where everything rounds otherwise}: cotangents times 3/4.

        In half precision the rounding of some thirty layers adds up to 2 % of a gradient and more.
        """
        moved = sketches_of(self._runs.scaled(0.75 * SCALE))
        return {
            name: float((sketch.projections_K - moved[name].projections_K / 0.75).square().mean().sqrt())
            for name, sketch in halved.items()
            if name in moved
        }

    def refuse_shared_samples(self, base: TappedRun, by_sample: bool) -> None:
        """Raise Refuted if one row for all samples is not one, or its copies are not each sample's own, in a rolled batch.

        The row that a layer sees must not change. If rows are those of samples (`by_sample`), the gradient of a copy must move
        with its sample.
        """
        rolled = [*range(1, len(self._runs.everyone)), 0]
        run = self._runs.tapped(rolled)
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
        if base.drew:
            with WithoutDropout():
                base, run = (self._runs.tapped(order) for order in (self._runs.everyone, rolled))
        if base.drew or not by_sample:  # rows differ by what they draw
            return

        def copies(one: TappedRun) -> TappedRun:
            """The run with the output gradients of layers whose one row was expanded alone."""
            shared = [key for key in one.rows if key[1] in self._runs.shared and one.sides[key] == "output gradient"]
            return replace(one, rows={key: one.rows[key] for key in shared}, outputs=[])

        change = self.first_change(copies(base), copies(run), rolled, self._runs.everyone, REPRODUCES)
        if change is not None:
            raise Refuted(
                f"{change[0]} when the batch is rolled by one: its one row was taken for all samples; expected code that "
                "broadcasts the row over the batch"
            ) from IndexError(
                "the code behind it reads rows of another axis"
            )  # as if it had failed on a row for each sample

    def _pairs(self, base: TappedRun, run: TappedRun) -> list[tuple[str, Fingerprint, Fingerprint, "Key | int"]]:
        """(title, tensor of `base`, of `run`, key) of all tensors to compare, in the order in which errors are reported.

        First inputs of layers, then output gradients, gradients joined over several calls, and outputs of the model.
        """
        pairs: list[tuple[str, Fingerprint, Fingerprint, Key | int]] = [
            (f"{key[1] or 'model'}: the {base.sides[key]}", base.rows[key], run.rows[key], key)
            for side in ("input", "output gradient", "sum over calls")
            for key in (reversed(base.rows) if side == "input" else base.rows)
            if base.sides[key] == side and key in run.rows
        ]
        outputs, runs = enumerate(zip(base.outputs, run.outputs, strict=True)), self._runs
        with_gradient = {i for i in runs.row_outputs if runs.cotangents[i] is not None}
        return pairs + [(f"{runs.titles[i]}: the row", *both, i) for i, both in outputs if i in with_gradient]

    def _allowed(
        self, base: TappedRun, run: TappedRun, key: "Key | int", one: Fingerprint, repeat: Repeat | None = None
    ) -> float:
        """Largest difference allowed between rows of the tensor `key` (`one` in `base`); −1: they must be equal bit for bit.

        It is −1 if runs of the same samples are equal bit for bit, all calls have as many rows in `run` as in `base`, and no
        layer sorts rows by what they contain (mixtures of experts): how a product rounds depends on the rows beside it. For
        inputs and outputs it is enough that the forwards are equal, whatever their backwards are.
        """
        if not self._repeats:
            self._repeats.append(self._runs.tapped(self.order))
        direction = "forward" if isinstance(key, int) or base.sides[key] == "input" else "backward"
        if direction not in self._varies and not self._deterministic(base, run, direction, repeat):
            self._varies.add(direction)
        ragged = self._sorts or bool(base.recorder.ragged) or sorted(base.calls) != sorted(run.calls)
        if direction not in self._varies and not ragged:
            return BIT_FOR_BIT
        repeats = [again.outputs[key] if isinstance(key, int) else again.rows.get(key) for again in self._repeats]
        between = max((float(one.moved(again).max()) for again in repeats if again is not None), default=0.0)
        return max(4 * between, relative_rounding(one.eps) * one.largest)

    def _sorts_rows(self, repeat: Repeat) -> bool:
        """Whether operations have other shapes with other samples, as in experts that a layer selects in its own code.

        Two runs, before a proof would fail: one of the batch, and one of `repeat`.
        """
        with _Shapes() as here:
            self._runs.tapped(self.order)
        with _Shapes() as there:
            repeat()
        self._sorts = here.found != there.found
        return self._sorts

    def _deterministic(self, base: TappedRun, run: TappedRun, direction: str, repeat: Repeat | None) -> bool:
        """Whether repetitions of `base`, and on a GPU of `run` too, are equal to them bit for bit in one direction."""
        if not all(_same_bits(base, again, direction) for again in self._repeats):
            return False
        if repeat is None or not self._runs.on_gpu:
            return True
        for _ in range(REPEATS):
            if not _same_bits(run, repeat(), direction):
                return False
            if len(self._repeats) < REPEATS:
                self._repeats.append(self._runs.tapped(self.order))
                if not _same_bits(base, self._repeats[-1], direction):
                    return False
        return True


def half_precision(runs: ProofRuns, base: TappedRun) -> torch.dtype | None:
    """The half precision of some layer, output or frozen weight: gradients of float32 adapters beside it round alike."""
    seen = {torch.finfo(p.dtype).eps for p in runs.root.parameters() if p.is_floating_point()}
    seen |= {print_.eps for print_ in (*base.rows.values(), *base.outputs)}
    return next((dtype for dtype in (torch.bfloat16, torch.float16) if torch.finfo(dtype).eps in seen), None)


class _Shapes(TorchFunctionMode):
    """Torch function mode that stores the shapes of the tensors that functions of torch return, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, ...]] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.found.append(tuple(result.shape))
        return result


def _same_bits(run: TappedRun, again: TappedRun, direction: str) -> bool:
    """Whether two runs have the same bits in all rows of layers; "forward": in those of inputs."""
    return all(
        key in again.rows and torch.equal(rows.hashes_R, again.rows[key].hashes_R)
        for key, rows in run.rows.items()
        if run.sides[key] == "input" or direction == "backward"
    )


def _sees_no_sample(base: TappedRun, run: TappedRun, key: "Key | int") -> bool:
    """True if all inputs of the layer call `key` are equal in two runs on different samples."""
    inputs = [k for k, side in base.sides.items() if side == "input" and not isinstance(key, int) and k[:3] == key[:3]]
    return bool(inputs) and all(torch.equal(base.rows[k].hashes_R, run.rows[k].hashes_R) for k in inputs)


def _tolerance(tolerances: Mapping[torch.dtype, float], base: TappedRun) -> float:
    """The tolerance of the narrowest dtype among the tensors of a run."""
    narrowest = max((print_.eps for print_ in (*base.rows.values(), *base.outputs)), default=0.0)
    return next(tolerance for dtype, tolerance in tolerances.items() if torch.finfo(dtype).eps >= narrowest)
