"""The row proof of one batch: every output that a loss may read is proven, or reported as not proven.

Outputs with rows of samples are proven together, single numbers and attributes each by itself. Where an axis of an argument or
output may be B by chance (a mask [T, T] where T is B), a failed proof is tried again with that axis read the other way.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

from gramian.core.errors import GramianError
from gramian.taps.model.preserve_state import InitialState
from gramian.taps.proof.isolated_runs import undisturbed
from gramian.taps.proof.output_kinds import OutputKinds, counts_differ
from gramian.taps.proof.proof_runs import Execute, ProofRuns, Refuted, SecondAxis, refuse
from gramian.taps.proof.prover import Proven, Prover
from gramian.taps.proof.sample_arguments import SampleArguments
from gramian.taps.proof.single_unit import SampleAlone
from gramian.taps.tapped_model import Call, TappedModel

CollateAlone = Callable[[SampleArguments, Collection[int]], list[SampleAlone]]
"""Function that returns some of the given samples, each collated alone as the loader would; empty if no loader is known."""


@dataclass
class BatchProof:
    """Runs the row proof on one batch, for one grouping of its rows into units (samples, users, documents)."""

    model: TappedModel
    execute: Execute
    samples: SampleArguments
    seed: Callable[[], int]
    """Function that returns a random seed for the next proof."""
    collate_alone: CollateAlone = lambda samples, among: []

    def calls(self) -> set[Call]:
        """Set of calls (layer, ordinal, rows over B) of tapped layers in a forward on the batch. One run."""
        with undisturbed(self.model.root_module, self.samples.leaves):
            runs = ProofRuns(self.model, self.execute, self.samples, 0)
            try:
                return set(runs.tapped(runs.everyone).calls)
            except Refuted as failure:
                refuse(failure)

    def prove(self, *, sums_only: bool = False) -> Proven | None:
        """Prove the batch; where an axis may have size B by chance, a second time with it read the other way.

        Args:
            sums_only: True to show only that the taps' sums are autograd's gradients (part 1 of the proof).

        Returns:
            What was shown; None if all samples are equal, so that nothing can be.

        Raises:
            GramianError: if no reading of the axes is proven.
        """
        samples = self.samples
        with undisturbed(self.model.root_module, samples.leaves):
            beginning = InitialState(self.model.root_module, samples.leaves)
            first = self._prover(samples, beginning)
            try:
                found = self._prove_outputs(first, sums_only)
                return found if sums_only else self._of_units(found, samples, beginning)
            except Refuted as failure:
                for fixed, second_axis in _readings(
                    samples.ambiguous(self.model.rule.withholds), first.runs.ambiguous_outputs
                ):
                    rows = [0 if i in fixed else count for i, count in enumerate(samples.rows)]
                    read = replace(samples, rows=rows)
                    prover = self._prover(read, beginning, second_axis)
                    try:
                        found = self._prove_outputs(prover, sums_only)
                    except Refuted:
                        continue
                    if fixed and found is not None and not prover.fits_alone:
                        continue  # a sample that runs alone with all of an input shows that samples have no part of it
                    found = found if sums_only else self._of_units(found, read, beginning)
                    return found and replace(found, fixed=fixed)
                refuse(failure)
            except GramianError:
                raise
            except Exception:  # of the user's own model, raised again below
                first.runs.tapped(first.runs.everyone)  # a tap's refusal says more than the layer's own failure
                raise

    def repeat(self, proven: Proven) -> None:
        """Repeat one run with replaced samples on this batch, for the outputs that were proven before.

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

    def _prove_outputs(self, prover: Prover, sums_only: bool) -> Proven | None:
        """Prove outputs with rows, then single numbers, then attributes of modules; None if all samples are equal."""
        samples = self.samples
        outputs = OutputKinds(samples, prover.runs)
        if sums_only:
            return prover.prove(outputs.choose_all, sums_only=True)
        self._refuse_irreplaceable()
        if prover.open:
            return None
        found, failure = None, None
        try:
            found = prover.prove(outputs.choose_rows)
        except Refuted as refuted:
            if outputs.rows:
                raise
            failure = refuted
        reasons = dict(outputs.odd)
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

    def _of_units(self, found: Proven | None, samples: SampleArguments, beginning: InitialState) -> Proven | None:
        """Show whether rows inside units of several rows are independent, so that any grouping is proven. 2⌈log₂ B⌉ + 2 runs.

        If they are not, the proof `found` holds for this grouping of rows alone.
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
        """Raise Refuted if no argument carries samples, or an object contains them, so that none can be replaced."""
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
    """Other readings of axes that may be B by chance: (inputs without samples, which outputs have samples on axis 1)."""
    readings: list[tuple[tuple[int, ...], SecondAxis]] = [((i,), "certain") for i in inputs[:4]]
    readings += [(tuple(inputs), "certain")] if len(inputs) > 1 else []
    return readings + ([((), "later"), ((), "all")] if outputs else [])
