"""The row proof of one batch: every output of the model that a loss may use is proven, or reported as not proven.

Outputs with rows of samples are proven together, every single number by itself, and attributes of modules together. If an axis
of an argument or output may have size B by chance (a mask [T, T] where T is B), a failed proof is repeated under the assumption
that it does not have samples.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from gramian.core.errors import GramianError
from gramian.taps.model.preserve_state import InitialState
from gramian.taps.model.whole_layers import restore, take_whole, whole_classes
from gramian.taps.proof.isolated_runs import undisturbed
from gramian.taps.proof.output_kinds import OutputKinds, counts_differ
from gramian.taps.proof.proof_runs import Execute, ProofRuns, Refuted, SecondAxis, refuse
from gramian.taps.proof.prover import Proven, Prover
from gramian.taps.proof.sample_axes import SampleAxes
from gramian.taps.proof.sample_arguments import SampleArguments
from gramian.taps.proof.single_unit import SampleAlone
from gramian.taps.tapped_model import Call, Layouts, TappedModel

logger = logging.getLogger("gramian.taps")

MOST_ALONE = 12
"""Largest number of outputs that are proven each by itself where all together fail."""
CollateAlone = Callable[[SampleArguments, Collection[int]], list[SampleAlone]]
"""Function of a batch and row numbers that returns some of these rows, each collated alone by the loader; [] without one."""


@dataclass
class BatchProof:
    """Runs the row proof on one batch, for one grouping of its rows into units (samples, users, documents)."""

    model: TappedModel
    execute: Execute
    samples: SampleArguments
    seed: Callable[[], int]
    """Function that returns a seed for the next proof."""
    collate_alone: CollateAlone = lambda samples, among: []
    failure: Exception | None = None
    """Why the last attempt failed, for all outputs or for some that have rows of samples; None: it did not."""
    _reasons: dict[type, str] = field(default_factory=dict)
    """{class of layers that are tapped as one: why}, as the log has it."""

    def calls(self) -> set[Call]:
        """Run a forward on the batch and return the calls of tapped layers in it (layer, number of earlier calls, rows over B).

        Raises:
            GramianError: if a tap refuses a layer, or the model fails once one row for all samples is expanded to B rows.
        """
        with undisturbed(self.model.root_module, self.samples.leaves):
            runs = ProofRuns(self.model, self.execute, self.samples, 0)
            try:
                return set(runs.tapped(runs.everyone).calls)
            except Refuted as failure:
                refuse(failure)

    def refuse_compiled(self) -> None:
        """Raise GramianError where samples on other axes than the first cannot be followed in a compiled graph. One forward."""
        layouts, samples = self.model.layouts, self.samples
        with undisturbed(self.model.root_module, samples.leaves):
            sizes = ProofRuns(self.model, self.execute, samples, 0).first_axes(range(samples.batch))
        for layer, calls in layouts.items():
            if len(set(calls)) > 1 or 1 in sizes.get(layer, ()):
                raise GramianError(
                    f"{layer}: has its samples on another axis than the first, behind one of size 1 or not in every call, which "
                    "a compiled graph cannot follow; expected eager mode for this model"
                )

    def batch_free(self, ones: bool = False) -> dict[str, frozenset[int] | None]:
        """{layer: numbers of calls that return as many rows in a forward with one more sample, but not one; None: all}.

        `ones`: calls that return one row count as well, which otherwise stands for all samples. Two forwards;
        {} if one of them fails, rows are grouped, or other processes gather weights in every run.
        """
        batch = self.samples.batch
        if self.model.batch_size is not None or self.samples.units is not None or not self.model.lockstep.alone:
            return {}
        with undisturbed(self.model.root_module, self.samples.leaves):
            runs = ProofRuns(self.model, self.execute, self.samples, 0)
            here, there = runs.first_axes(range(batch)), runs.first_axes([*range(batch), 0])
        found: dict[str, frozenset[int] | None] = {}
        for name, sizes in here.items():
            pairs = enumerate(zip(sizes, there.get(name, []), strict=False))
            moved = {number for number, call in enumerate(self.model.layouts.get(name, ())) if call.moved}
            calls = frozenset(n for n, (size, other) in pairs if n not in moved and size == other and (ones or size != 1))
            found |= {name: calls if len(calls) < len(sizes) else None} if calls else {}
        return found

    def layouts(self) -> Layouts:
        """Where the samples lie in the calls of layers that have them elsewhere than on axis 0; 2⌈log₂ B⌉ + 1 runs.

        {} if the model fails in one of them, or all samples are equal. A layer of products whose calls differ goes on with its
        fallback.
        """
        model, samples = self.model, replace(self.samples, units=None)
        axes = SampleAxes(samples.batch, 0)
        with undisturbed(model.root_module, samples.leaves):
            prover = Prover(model, self.execute, samples, seed=self.seed())
            try:
                model.watcher = axes
                prover.watched(axes)
            except Exception:  # the user's code may not run so, which the proof itself reports
                return {}
            finally:
                model.watcher = None
        found = axes.found()
        for tap in model.taps:
            if tap.products is not None and len(set(found.get(tap.name, ()))) > 1:
                tap.products, tap.site = None, tap.products.fallback
        return found

    def prove(self, *, sums_only: bool = False) -> Proven | None:
        """Prove the batch; if that fails, again with what is then found out about the model's layers (arguments as in `once`).

        Samples that lie elsewhere than on axis 0 are looked for (`sample_axes`), at once if a module has batch_first=False.
        Layers that use a child's weight without calling the child are tapped as one (`whole_layers`), and so are, at last, those
        around a layer that is refused. Results without a batch axis carry a copy for each sample (`batch_free`).

        Raises:
            GramianError: of the first attempt, if the last one fails, too.
        """
        model, root = self.model, self.model.root_module
        before, failure, best = self._assumed(), None, None
        remedies = self._remedies(sums_only)
        if not sums_only and not model.layouts and any(getattr(m, "batch_first", True) is False for m in root.modules()):
            model.layouts = self.layouts()
        while True:
            fallbacks, found = model.fallbacks, None
            try:
                found = self.once(sums_only=sums_only)
                if found is None or not self.failure:
                    best = None
                    break
                if best is None or len(found.open_outputs) < len(best[0].open_outputs):
                    best = found, self._assumed()
            except GramianError as error:
                if model.fallbacks != fallbacks:
                    continue
                self.failure = error
                failure = failure or error
            except Exception:  # the user's code may not run on copies, and is then refused as without them
                if (
                    model.fallbacks != fallbacks
                ):  # a layer began anew, and its first start saved tensors in a checkpoint
                    continue
                if failure is None and best is None:
                    raise
            if not next(remedies, False):
                break
        if found is None or self.failure:
            self._assume(*(before if best is None else best[1]))
            found = None if best is None else best[0]
        for kind in whole_classes(root) - before[1]:
            logger.warning("%s: %s; run again sample by sample, as one layer", kind.__name__, self._reasons.get(kind, ""))
        if failure is not None and found is None:
            raise failure
        return found

    def _remedies(self, sums_only: bool) -> Iterator[bool]:
        """Assume something else of the model's layers, one after the other; True each time, when the proof is to be repeated."""
        model, free = self.model, self.model.batch_free
        while True:
            known = model.layouts
            model.layouts = known if sums_only else self.layouts()
            if model.layouts != known:
                yield True
            if getattr(self.failure, "parameter", "") and self._take_whole():
                yield True
                continue
            for ones in (False, True):
                if ones and getattr(self.failure, "__cause__", None) is None:
                    continue  # only if the user's code failed where one row became a row for each sample
                without = self.batch_free(ones)
                if without and without != model.batch_free:
                    model.batch_free = free | without
                    yield True
            if not self._take_whole():
                return
            model.batch_free = free
            yield True

    def _take_whole(self) -> bool:
        """Tap the next layer around the parameter or layer of the last failure as one; False if none is left or may be taken.

        None may be if a listener needs records of every layer, or if a process waits for this one.
        """
        model, root = self.model, self.model.root_module
        layers = any(statistic.needs == "layer" for one in model.listeners for statistic in one.statistics)
        parameter, layer = (getattr(self.failure, name, "") for name in ("parameter", "layer"))
        known = whole_classes(root)
        if layers or not model.lockstep.alone or model.tensor_parallel is not None or not (parameter or layer):
            return False
        if not take_whole(root, parameter or layer):
            return False
        model.retap()
        why = "uses weights of its children without calling them" if parameter else f"has a layer inside that is refused by itself ({layer})"
        self._reasons |= dict.fromkeys(whole_classes(root) - known, why)
        return True

    def _assumed(self) -> tuple[dict[str, frozenset[int] | None], frozenset[type], Layouts]:
        """What is assumed of the model's layers: calls without a batch axis, layers tapped as one, and where samples lie."""
        return self.model.batch_free, whole_classes(self.model.root_module), self.model.layouts

    def _assume(self, free: dict[str, frozenset[int] | None], whole: frozenset[type], layouts: Layouts) -> None:
        """Assume of the model's layers what `_assumed` has returned."""
        self.model.batch_free, self.model.layouts = free, layouts
        if whole_classes(self.model.root_module) != whole:
            restore(self.model.root_module, whole)
            self.model.retap()

    def once(self, *, sums_only: bool = False) -> Proven | None:
        """Prove the batch as its layers are tapped; if some output fails and an axis may have size B by chance, without it.

        Args:
            sums_only: True to show only that the taps' sums are autograd's gradients (part 1 of the proof).

        Returns:
            What was shown; None if all samples are equal, so that nothing can be shown.

        Raises:
            GramianError: if the proof fails under every assumption about these axes.
        """
        samples, self.failure = self.samples, None
        with undisturbed(self.model.root_module, samples.leaves):
            beginning = InitialState(self.model.root_module, samples.leaves)
            first = self._prover(samples, beginning)
            try:
                found, failure = self._attempt(first, sums_only)
                if found is None and failure is None:
                    return None
                best, read = found, samples
                for fixed, second_axis in _readings(
                    samples.ambiguous(self.model.rule.withholds), first.runs.ambiguous_outputs
                ):
                    if best is not None and not best.open_outputs:
                        break
                    rows = [0 if i in fixed else count for i, count in enumerate(samples.rows)]
                    other = replace(samples, rows=rows)
                    prover = self._prover(other, beginning, second_axis)
                    try:
                        found, _ = self._attempt(prover, sums_only)
                    except GramianError:  # of a layer that cannot be read in this way
                        continue
                    if found is None or (fixed and not prover.fits_alone):
                        continue  # a sample that runs alone with all of an input shows that samples have no part of it
                    if best is None or len(found.open_outputs) < len(best.open_outputs):
                        best, read = replace(found, fixed=fixed), other
                if best is None:
                    assert failure is not None
                    refuse(failure)
                return best if sums_only else self._of_units(best, read, beginning)
            except GramianError:
                raise
            except Exception:  # of the user's own model, raised again below
                first.runs.tapped(first.runs.everyone)  # a tap's refusal says more than the layer's own failure
                raise

    def repeat(self, proven: Proven) -> None:
        """Repeat one run with replaced samples on this batch, for the outputs that were proven before.

        Nothing is shown, and nothing raised, if all samples are equal.

        Raises:
            GramianError: if rows of samples that were not replaced changed; the listeners are notified first.
        """
        samples = self.samples
        rows = [0 if i in proven.fixed else count for i, count in enumerate(samples.rows)]
        with undisturbed(self.model.root_module, samples.leaves):
            prover = Prover(self.model, self.execute, replace(samples, rows=rows), seed=self.seed())
            outputs = OutputKinds(samples, prover.runs)
            if prover.open:
                return
            try:
                prover.runs.untapped(partial(outputs.choose_all, but=proven.open_outputs))
                sets = prover.separating_sets()
                prover.separate(prover.runs.tapped(prover.runs.everyone), sets[self.seed() % len(sets)])
            except Refuted as failure:
                self.model.proof_failed()
                refuse(failure)

    def _attempt(self, prover: Prover, sums_only: bool) -> tuple[Proven | None, Refuted | None]:
        """What `_prove_outputs` shows, and its failure if it is refuted; (None, None) if all samples are equal."""
        try:
            return self._prove_outputs(prover, sums_only), None
        except Refuted as failure:
            return None, failure

    def _prove_outputs(self, prover: Prover, sums_only: bool) -> Proven | None:
        """Prove outputs with rows, then single numbers, then attributes of modules; None if all samples are equal.

        Raises:
            Refuted: if outputs with rows are not proven, or if there are none and no single number is proven either.
        """
        samples = self.samples
        outputs = OutputKinds(samples, prover.runs)
        if sums_only:
            return prover.prove(outputs.choose_all, sums_only=True)
        self._refuse_irreplaceable()
        if prover.open:
            return None
        found, failure, reasons = None, None, dict[int, str]()
        try:
            found = prover.prove(outputs.choose_rows)
        except (Refuted, GramianError) as error:
            if outputs.rows or isinstance(error, GramianError):
                found, reasons = self._rows_alone(prover, outputs)
                if found is None:
                    raise
                self.failure = error
            else:
                failure = error
        reasons |= outputs.odd
        if failure is not None and outputs.scalars:
            reasons[outputs.scalars[0]] = outputs.couples(outputs.scalars[0], failure)
        for scalar in outputs.scalars[0 if outputs.rows else 1 :]:
            try:
                alone = prover.prove(lambda _, scalar=scalar: [scalar])  # type: ignore[misc]
                found = alone if found is None else replace(found, calls=found.calls | alone.calls)
            except Refuted as refuted:
                failure, reasons[scalar] = refuted, outputs.couples(scalar, refuted)
        if outputs.attributes:
            try:
                alone = prover.prove(lambda _: outputs.attributes)
                found = alone if found is None else replace(found, calls=found.calls | alone.calls)
            except (Refuted, GramianError) as error:
                reasons |= {number: outputs.couples(number, error) for number in outputs.attributes}
        reason = next(iter(reasons.values()), "output 0 of the model is not differentiable")
        if found is None and failure is not None:
            raise Refuted(reason) if counts_differ(samples) else failure
        if found is None or not (outputs.rows or outputs.scalars):
            prover.prove(lambda _: list(outputs.odd), sums_only=True)  # a tap that refuses a layer says more
            raise Refuted(f"{reason}; expected one row for each sample")
        return replace(found, open_outputs=reasons, runs=prover.runs.count)

    def _rows_alone(self, prover: Prover, outputs: OutputKinds) -> tuple[Proven | None, dict[int, str]]:
        """What is shown of outputs with rows each by itself, and {output: why it is not}, where together they failed.

        Of a model that returns logits between all samples and embeddings of each (CLIP) a loss may use the embeddings.
        """
        found, reasons = None, dict[int, str]()
        for number in outputs.rows if 1 < len(outputs.rows) <= MOST_ALONE else ():
            try:
                alone = prover.prove(lambda _, number=number: [number])  # type: ignore[misc]
                found = alone if found is None else replace(found, calls=found.calls | alone.calls)
            except (Refuted, GramianError) as error:
                reasons[number] = outputs.couples(number, error)
        return found, reasons

    def _of_units(self, found: Proven | None, samples: SampleArguments, beginning: InitialState) -> Proven | None:
        """Check whether rows of one unit are independent too, so that the proof `found` holds for any grouping into units.

        If they are not, the result says that it holds for this grouping alone (`Proven.partition`). 2⌈log₂ B⌉ + 2 runs.
        """
        if found is None or samples.partition is None:
            return found
        rows = replace(samples, units=None)
        prover = Prover(self.model, self.execute, rows, seed=self.seed(), beginning=beginning)
        partition = samples.partition if prover.open else None
        try:
            prover.runs.untapped(OutputKinds(rows, prover.runs).choose_rows)
            base = prover.runs.tapped(prover.runs.everyone)
            for replaced in prover.separating_sets():
                prover.separate(base, replaced)
        except Refuted:
            partition = samples.partition
        return replace(found, partition=partition, runs=found.runs + prover.runs.count)

    def _refuse_irreplaceable(self) -> None:
        """Raise Refuted if samples cannot be replaced: no argument has rows of samples, or an opaque object contains them."""
        samples = self.samples
        if not any(samples.rows) and samples.units is None:
            raise Refuted(
                f"model: no argument has the batch of {samples.batch} as its first axis, so that no sample can be replaced by "
                'another; expected tensors or lists of numbers, one row or entry for each sample, or proof="off"'
            )
        for found in samples.opaque():
            raise Refuted(
                f"model: is given a {found}, in which no sample can be replaced by another; expected tensors, alone or in "
                "tuples, lists and dicts"
            )

    def _prover(self, samples: SampleArguments, beginning: InitialState, second_axis: SecondAxis = "certain") -> Prover:
        alone = partial(self.collate_alone, samples)
        return Prover(
            self.model,
            self.execute,
            samples,
            seed=self.seed(),
            lone=alone,
            second_axis=second_axis,
            beginning=beginning,
        )


def _readings(inputs: Sequence[int], outputs: bool) -> list[tuple[tuple[int, ...], SecondAxis]]:
    """Assumptions to try, in order, about axes whose size may be the batch size B by chance.

    `inputs`: indices of the inputs whose first axis is in doubt. `outputs`: True if the batch axis of an output is in doubt.
    Returns pairs: inputs that are taken to have no batch axis, and which outputs have theirs on axis 1 (see `ProofRuns`).
    """
    readings: list[tuple[tuple[int, ...], SecondAxis]] = [((i,), "certain") for i in inputs[:4]]
    readings += [(tuple(inputs), "certain")] if len(inputs) > 1 else []
    return readings + ([((), "later"), ((), "all")] if outputs else [])
