"""When a model is proven: on the first batch of every structure of inputs, and when a call appears that no proof has seen."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from gramian.errors import GramianError
from gramian.taps.preserve_state import Generators, preserve_state
from gramian.taps.proof.prover import Lone, Proven, Prover, Refuted, output_tensors, rows_of
from gramian.taps.proof.samples import Samples
from gramian.taps.units import Units

if TYPE_CHECKING:
    from gramian.taps.hub import Hub

Forward = Callable[[Any, Any], Any]
"""One forward of the root on (args, kwargs), with or without taps."""
PROOFS = ("auto", "off")


def check_proof(proof: Any) -> None:
    """Raise GramianError unless the option is "auto", "off" or a period in steps."""
    period = isinstance(proof, int) and not isinstance(proof, bool) and proof > 0
    if proof not in PROOFS and not period:
        raise GramianError(f'proof: expected "auto", "off" or a number of steps above 0, got {proof!r}')


@dataclass
class RowProof:
    """What has been proven of one model."""

    hub: "Hub"
    proven: dict[Any, Proven] = field(default_factory=dict)
    open_batches: int = 0
    """Batches of equal samples, on which nothing could be shown."""
    lone: Callable[[Samples], Lone | None] = lambda samples: None
    """One sample as the loader collates it alone, where a loader is known."""
    _generators: Generators | None = None
    _calls: set[Any] = field(default_factory=set)

    def forget_loader(self) -> None:
        """No loader is known any more."""
        self.lone = lambda samples: None

    def guard(self, forward: Forward, args: Any, kwargs: Any, batch: int) -> Any:
        """Run the user's forward, proven before or after, whichever comes first."""
        key, samples = self._key(args, kwargs, batch)
        tells_apart = self.hub.tells_samples_apart
        execute = partial(_execute, forward)
        if tells_apart and batch > 1:
            if key not in self.proven:
                self._prove(key, samples, execute)
            elif self.hub.proof_is_due():
                self.repeat(key, samples, execute)
        root = self.hub.root()
        assert root is not None
        self._generators = self._generators or Generators(root)
        states = self._generators.states()
        self.hub.calls = []
        output = forward(args, kwargs)
        unseen = [call for call in self.hub.calls if call not in self._calls] if batch > 1 else []
        if unseen and (tells_apart or any(rows == 0 for _, _, rows in unseen)):
            self._prove(key, samples, execute, whole=tells_apart)
            if any(rows == 0 for _, _, rows in unseen):  # it ran without the row of each sample
                self._generators.restore(states)
                output = forward(args, kwargs)
        if key in self.proven:
            self._refuse_backward_through(output, self.proven[key].open_outputs)
        return output

    def _key(self, args: Any, kwargs: Any, batch: int) -> tuple[Any, list[Samples]]:
        root, hub = self.hub.root(), self.hub
        assert root is not None
        given = hub.batch_size is not None
        found = []
        for ids in hub.groupings():
            units = None if ids is None else Units.of(ids, batch)
            found.append(Samples.of((args, kwargs), batch, given=given, units=units))
        autocast = (torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu"))
        return (tuple(s.structure for s in found), root.training, autocast, frozenset(hub.parameters)), found

    def _prove(self, key: Any, groupings: Sequence[Samples], execute: Callable[[Any], Any], whole: bool = True) -> None:
        """Prove for every grouping of rows into units that somebody asks for.

        Raises:
            GramianError: if it fails.
        """
        for samples in groupings:
            found = self._attempt(samples, execute, whole)
            if found is None:
                return
            self.hub.shared |= found.shared
            self._calls |= found.calls
            if whole:
                before = self.proven.get(key)
                if before is not None:
                    found = replace(found, open_outputs={**before.open_outputs, **found.open_outputs})
                self.proven[key] = found

    def _attempt(self, samples: Samples, execute: Callable[[Any], Any], whole: bool) -> Proven | None:
        """Prove on one batch; where an input may have B rows by chance, a second time with that input left alone.

        Returns:
            What was shown; None if all samples are equal, so that nothing can be.
        """
        root = self.hub.root()
        assert root is not None
        with preserve_state(root):
            try:
                return self._run(samples, execute, whole)
            except Refuted as failure:
                fixed = samples.ambiguous
                if not fixed:
                    refuse(failure)
                rows = [0 if i in fixed else count for i, count in enumerate(samples.rows)]
                try:
                    found = self._run(replace(samples, rows=rows), execute, whole)
                except Refuted:
                    refuse(failure)
                return None if found is None else replace(found, fixed=tuple(fixed))

    def _run(self, samples: Samples, execute: Callable[[Any], Any], whole: bool) -> Proven | None:
        prover = Prover(self.hub, execute, samples, seed=self._seed(), lone=partial(self.lone, samples))
        if whole and prover.open:
            self.open_batches += 1
            self.hub.proof_stays_open()
            return None
        outputs = prover.outputs()
        differentiable = [i for i, y in enumerate(outputs) if y.requires_grad]
        rows = [i for i in differentiable if rows_of(outputs[i], samples.batch)]
        scalars = [i for i in differentiable if outputs[i].numel() == 1 and i not in rows]
        odd = {
            i: f"has the shape {list(outputs[i].shape)}, whose first axis is not the batch of {samples.batch}"
            for i in differentiable
            if i not in rows and i not in scalars
        }
        del outputs
        if not whole:
            return prover.prove([*rows, *scalars], whole=False)
        found = prover.prove(rows) if rows else None
        for scalar in scalars:
            try:
                alone = prover.prove([scalar])
                found = found or alone
                found = replace(found, calls=found.calls | alone.calls)
            except Refuted as failure:
                odd[scalar] = f"couples samples ({failure})"
        if found is None:
            reason = next(iter(odd.values()), "no output is differentiable")
            raise Refuted(f"model: {reason}; expected an output with one row for each sample")
        return replace(found, open_outputs=odd, runs=prover.runs)

    def repeat(self, key: Any, groupings: Sequence[Samples], execute: Callable[[Any], Any]) -> None:
        """One separating run more, on the batch at hand.

        Raises:
            GramianError: if rows changed; the hub's listeners are told before.
        """
        root = self.hub.root()
        assert root is not None
        for samples in groupings:
            fixed = self.proven[key].fixed
            rows = [0 if i in fixed else count for i, count in enumerate(samples.rows)]
            with preserve_state(root):
                prover = Prover(self.hub, execute, replace(samples, rows=rows), seed=self._seed())
                if prover.open:
                    continue
                outputs = prover.outputs()
                chosen = [
                    i for i, y in enumerate(outputs) if y.requires_grad and i not in self.proven[key].open_outputs
                ]
                del outputs
                try:
                    sets = prover.separating_sets()
                    prover.separate(prover.base(chosen), sets[self._seed() % len(sets)])
                except Refuted as failure:
                    self.hub.proof_failed()
                    refuse(failure)

    def _seed(self) -> int:
        """Another number at every proof, the same in every run of a program."""
        digest = hashlib.blake2b(f"{len(self.proven)} {self.open_batches} {self.hub.passes_begun}".encode())
        return int.from_bytes(digest.digest()[:6], "little")

    def _refuse_backward_through(self, output: Any, reasons: dict[int, str]) -> None:
        if not reasons:
            return
        for number, tensor in enumerate(output_tensors(output)):
            if number in reasons and tensor.requires_grad:
                tensor.register_hook(partial(_refuse_gradient, number, reasons[number]))


def _execute(forward: Forward, arguments: Any) -> Any:
    return forward(*arguments)


def _refuse_gradient(number: int, reason: str, gradient: Tensor) -> NoReturn:
    raise GramianError(
        f"output {number} of the model {reason}, and a backward goes through it; expected a loss of outputs with one row for "
        "each sample"
    )


def refuse(failure: Refuted) -> NoReturn:
    """The user's error."""
    raise GramianError(str(failure)) from failure.__cause__
