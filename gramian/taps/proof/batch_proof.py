"""The row proof of one batch: every output of the model that a loss may use is proven, or reported as not proven.

Outputs with rows of samples are proven together, every single number by itself, and attributes of modules together. If an axis
of an argument or output may have size B by chance (a mask [T, T] where T is B), a failed proof is repeated under the assumption
that it does not have samples.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from gramian.core.errors import GramianError
from gramian.taps.model.preserve_state import InitialState
from gramian.taps.model.whole_layers import whole_classes
from gramian.taps.proof.isolated_runs import undisturbed
from gramian.taps.proof.output_kinds import OutputKinds, counts_differ
from gramian.taps.proof.proof_runs import Execute, ProofRuns, Refuted, SecondAxis, refuse
from gramian.taps.proof.prover import Proven, Prover
from gramian.taps.proof.remedies.layer_assumptions import LayerAssumptions
from gramian.taps.proof.sample_arguments import SampleArguments
from gramian.taps.proof.single_unit import SampleAlone
from gramian.taps.tapped_model import LayerUses, TappedModel

logger = logging.getLogger("gramian.taps")

MOST_ALONE = 12
"""Largest number of outputs that are proven in parts where all together fail."""
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

    @cached_property
    def layers(self) -> LayerAssumptions:
        """What is assumed of the model's layers."""
        return LayerAssumptions(self.model, self.execute, self.samples, self.seed)

    def calls(self) -> LayerUses:
        """How a forward on the batch uses its layers.

        Raises:
            GramianError: if a tap refuses a layer, or the model fails once one row for all samples is expanded to B rows.
        """
        with undisturbed(self.model.root_module, self.samples.leaves, self.model.tensor_parallel):
            runs = ProofRuns(self.model, self.execute, self.samples, 0)
            try:
                return runs.calls()
            except Refuted as failure:
                if failure.__cause__ is None:
                    refuse(failure)
                return LayerUses(frozenset(), frozenset({0}), past_a_tap=False)  # code that fails on expanded rows

    def prove(self, *, sums_only: bool = False) -> Proven | None:
        """Prove the batch; if that fails, again with what is then found out about the model's layers (arguments as in `once`).

        What that is: `remedies.layer_assumptions`. If some outputs are proven, and nothing proves more, these are the result.

        Raises:
            GramianError: of the first attempt, if the last one fails, too.
        """
        model, layers, failure, best = self.model, self.layers, None, None
        before, remedies = layers.present, layers.remedies(sums_only)
        if not sums_only:
            layers.begin()
        while True:
            fallbacks, found = model.fallbacks, None
            try:
                found = self.once(sums_only=sums_only, left=best[0].open_outputs if best else ())
                if found is None or not layers.failure or not found.open_outputs:
                    best = None if found is None else (found, layers.present)
                    break
                if best is None or len(found.open_outputs) < len(best[0].open_outputs):
                    best = found, layers.present
            except GramianError as error:
                if model.fallbacks != fallbacks:
                    continue
                layers.failure, failure = error, failure or error
            except Exception:  # the user's code may not run on copies, and is then refused as without them
                if model.fallbacks != fallbacks:
                    continue  # a layer began anew, and its first start saved tensors in a checkpoint
                if failure is None and best is None:
                    raise
            if not next(remedies, False):
                break
        layers.assume(before if best is None else best[1])
        for kind in whole_classes(model.root_module) - before[1]:
            logger.warning("%s: %s; run again sample by sample, as one layer", kind.__name__, layers.reasons[kind])
        if best is None and failure is not None:
            raise failure
        return None if best is None else best[0]

    def once(self, *, sums_only: bool = False, left: Collection[int] = ()) -> Proven | None:
        """Prove the batch as its layers are tapped; if some output fails and an axis may have size B by chance, without it.

        Args:
            sums_only: True to show only that the taps' sums are autograd's gradients (part 1 of the proof).
            left: indices of outputs that an earlier attempt has left open. If none of them is proven now either, this attempt
                cannot show more than that one, and fails without a proof of the others.

        Returns:
            What was shown; None if all samples are equal, so that nothing can be shown.

        Raises:
            GramianError: if the proof fails under every assumption about these axes.
        """
        samples, self.layers.failure = self.samples, None
        with undisturbed(self.model.root_module, samples.leaves, self.model.tensor_parallel):
            beginning = InitialState(self.model.root_module, samples.leaves)
            first = self._prover(samples, beginning)
            try:
                found, failure = self._attempt(first, sums_only, left)
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
                        found, _ = self._attempt(prover, sums_only, best.open_outputs if best else left)
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
        with undisturbed(self.model.root_module, samples.leaves, self.model.tensor_parallel):
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

    def _attempt(self, prover: Prover, sums_only: bool, left: Collection[int]) -> tuple[Proven | None, Refuted | None]:
        """What `_prove_outputs` shows, and its failure if it is refuted; (None, None) if all samples are equal.

        If none of the outputs in `left` is proven by itself, the others are not looked at.
        """
        failure = None
        for number in left if not prover.open else ():
            try:
                prover.prove(partial(OutputKinds(self.samples, prover.runs).choose_one, number))
                failure = None
                break
            except (Refuted, GramianError) as error:
                failure = Refuted(str(error), getattr(error, "parameter", ""), getattr(error, "layer", ""))
        try:
            return (None, failure) if failure else (self._prove_outputs(prover, sums_only), None)
        except Refuted as refuted:
            return None, refuted

    def _prove_outputs(self, prover: Prover, sums_only: bool) -> Proven | None:
        """Prove outputs with rows, then single numbers, then attributes of modules; None if all samples are equal.

        Raises:
            Refuted: if outputs with rows are not proven, or if there are none and no single number is proven either.
        """
        samples = self.samples
        outputs = OutputKinds(samples, prover.runs)
        if sums_only:
            try:
                return prover.prove(outputs.choose_all, sums_only=True)
            except GramianError:  # of a tap, on an output that couples samples
                found, _ = self._rows_alone(prover, outputs, sums_only=True)
                if found is None:
                    raise
                return found
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
                self.layers.failure = error
            else:
                failure = error
        reasons |= outputs.odd
        if failure is not None and outputs.scalars:
            reasons[outputs.scalars[0]] = outputs.couples(outputs.scalars[0], failure)
        for scalar in outputs.scalars[0 if outputs.rows else 1 :]:
            try:
                alone = prover.prove(lambda _, scalar=scalar: [scalar])  # type: ignore[misc]
                found = _joined(found, alone)
            except Refuted as refuted:
                failure, reasons[scalar] = refuted, outputs.couples(scalar, refuted)
        if outputs.attributes:
            try:
                alone = prover.prove(lambda _: outputs.attributes)
                found = _joined(found, alone)
            except (Refuted, GramianError) as error:
                reasons |= {number: outputs.couples(number, error) for number in outputs.attributes}
        reason = next(iter(reasons.values()), "output 0 of the model is not differentiable")
        if found is None and failure is not None:
            raise Refuted(reason) if counts_differ(samples) else failure
        if found is None or not (outputs.rows or outputs.scalars):
            prover.prove(lambda _: list(outputs.odd), sums_only=True)  # a tap that refuses a layer says more
            raise Refuted(f"{reason}; expected one row for each sample")
        return replace(found, open_outputs=reasons, runs=prover.runs.count)

    def _rows_alone(
        self, prover: Prover, outputs: OutputKinds, sums_only: bool = False
    ) -> tuple[Proven | None, dict[int, str]]:
        """What is shown of some outputs with rows, and {output: why it is not} of others, where together they failed.

        Of a model that returns logits between all samples and embeddings of each (CLIP) a loss may use the embeddings. Halves
        that fail are halved again: 2 k log₂ n proofs if k of n outputs fail, most of which end with the first refusal.
        """
        found, reasons = None, dict[int, str]()
        groups = list(_halves(outputs.rows)) if 1 < len(outputs.rows) <= MOST_ALONE else []
        while groups:
            group = groups.pop()
            try:
                part = prover.prove(lambda _, group=group: group, sums_only=sums_only)  # type: ignore[misc]
                found = _joined(found, part)
            except (Refuted, GramianError) as error:
                if len(group) > 1:
                    groups += _halves(group)
                else:
                    reasons[group[0]] = outputs.couples(group[0], error)
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


def _joined(found: Proven | None, part: Proven) -> Proven:
    """What was shown of some outputs, and of others."""
    if found is None:
        return part
    return replace(
        found, calls=found.calls | part.calls, shared=found.shared | part.shared, silent=found.silent & part.silent
    )


def _halves(group: list[int]) -> tuple[list[int], list[int]]:
    """The two halves of a group, the second one first."""
    return group[len(group) // 2 :], group[: len(group) // 2]


def _readings(inputs: Sequence[int], outputs: bool) -> list[tuple[tuple[int, ...], SecondAxis]]:
    """Assumptions to try, in order, about axes whose size may be the batch size B by chance.

    `inputs`: indices of the inputs whose first axis is in doubt. `outputs`: True if the batch axis of an output is in doubt.
    Returns pairs: inputs that are taken to have no batch axis, and which outputs have theirs on axis 1 (see `ProofRuns`).
    """
    readings: list[tuple[tuple[int, ...], SecondAxis]] = [((i,), "certain") for i in inputs[:4]]
    readings += [(tuple(inputs), "certain")] if len(inputs) > 1 else []
    return readings + ([((), "later"), ((), "all")] if outputs else [])
