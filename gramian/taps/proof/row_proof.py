"""When a row proof runs: on the first batch of every structure of inputs, and for calls of layers that no proof has seen.

The row proof checks that each row depends on its own sample alone. `RowProof` stores the proofs of one model and runs a
`BatchProof` if none of them covers a batch: before an eager forward (`guard`), before a compiled one (`before_compiled`), and
before an FSDP2 one on all processes together (`together`).
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.parallel.data_parallel import reshard
from gramian.parallel.shared_refusals import RefusedElsewhere
from gramian.taps.model.preserve_state import Generators, InitialState, preserve_state
from gramian.taps.model.python_state import graph_tensors
from gramian.taps.model.whole_layers import whole_classes
from gramian.taps.proof.batch_proof import BatchProof, CollateAlone
from gramian.taps.proof.batch_structure import structure_of
from gramian.taps.proof.isolated_runs import zeros_filled
from gramian.taps.proof.model_outputs import output_tensors, refuse_backward_through
from gramian.taps.proof.proof_runs import Execute, Refuted, blamed_on
from gramian.taps.proof.prover import Proven
from gramian.taps.proof.row_recorder import Recorder
from gramian.taps.proof.sample_arguments import SampleArguments
from gramian.taps.proof.single_unit import SampleAlone
from gramian.taps.tap import LayerRefused
from gramian.taps.tapped_model import BatchFreeCalls, Call, Layouts, TappedModel, refuse_unseen

Forward = Callable[[Any, Any], Any]
"""Function that runs one forward of the root on (args, kwargs), with or without taps."""


def check_proof(proof: Any, field: str = "proof") -> None:
    """Raise GramianError unless `proof` is "auto", "off" or a positive integer; `field` is the option's name in the message."""
    period = isinstance(proof, int) and not isinstance(proof, bool) and proof > 0
    if proof not in ("auto", "off") and not period:
        raise GramianError(f'{field}: expected "auto", "off" or a number of steps above 0, got {proof!r}')


def no_loader(samples: SampleArguments, among: Collection[int]) -> list[SampleAlone]:
    """Return an empty list: without a loader, no sample of `samples` can be collated alone."""
    return []


@dataclass
class RowProof:
    """The row proofs of one model: runs them before batches that are not covered, and stores their results."""

    model: TappedModel
    proven: dict[Any, Proven] = field(default_factory=dict)
    """{structure of a batch (see `batch_structure`): result of its proof}."""
    layouts: dict[Any, Layouts] = field(default_factory=dict)
    """{structure of a batch: where the samples lie in layers that have them elsewhere than on axis 0}, as proven."""
    free: dict[Any, BatchFreeCalls] = field(default_factory=dict)
    """{structure of a batch: calls of layers that return no batch axis}, as proven."""
    open_batches: int = 0
    """Number of batches whose samples were all equal, on which nothing could be shown."""
    lone: CollateAlone = no_loader
    _generators: Generators | None = None
    _stateful: bool = False
    """True if forwards change buffers or attributes, which are restored before a forward runs a second time."""
    _silent: frozenset[Any] = frozenset()
    """Calls of layers whose output gradient was zero in every proof so far, so that nothing was shown about them."""
    _silent_forwards: int = 0
    """Number of forwards with a call in `_silent`."""
    _without_padding: int = 0
    """Number of batches covered only by a proof in which no sample was padded, or none was collated alone by the loader."""
    _summed: set[Any] = field(default_factory=set)
    """Structures that were checked for layers with one row for all samples; if there are any, the taps' sums were proven."""
    _sizes: set[Any] = field(default_factory=set)
    """Structure and argument shapes of compiled forwards whose calls of layers are covered by a proof."""

    def know_loader(self, lone: CollateAlone) -> None:
        """Set `lone`, which collates samples alone as a loader does, and drop earlier proofs, which ran no such sample."""
        self.lone = lone
        self.proven.clear()

    def forget_loader(self) -> None:
        """Set `lone` back to `no_loader`: samples are no longer collated alone."""
        self.lone = no_loader

    # ---- three kinds of forwards -----------------------------------------------------------------------------------

    def guard(self, forward: Forward, args: Any, kwargs: Any, batch: int, proven_before: bool = False) -> Any:
        """Run the user's forward and return its output; a row proof runs before it, and after it for calls not yet proven.

        The proof runs only if no earlier one covers the batch, or one is to be repeated. After the forward, outputs that could
        not be proven get a hook that raises in a backward.

        Args:
            forward: runs the root on (args, kwargs).
            args: positional arguments.
            kwargs: keyword arguments.
            batch: number B of samples.
            proven_before: True if `together` has proven the batch on all processes (FSDP2).

        Raises:
            GramianError: if the proof fails, or an FSDP2 model makes a call of a layer that was not proven.
        """
        model, root = self.model, self.model.root_module
        if not proven_before:
            model.on_batch((args, kwargs))
        key, samples = self._key(args, kwargs, batch)
        tells_apart, execute = model.tells_samples_apart, partial(_execute, forward)
        self._assume(key, tells_apart)
        if tells_apart and not proven_before:
            if self._lacks(key, samples):
                self._prove(key, samples, execute)
            elif model.proof_is_due():
                self.repeat(key, samples, execute)
        elif not tells_apart and not proven_before and key not in self._summed:
            self._find_axes(key, samples[0], execute)
            uses = self._on(samples[0], execute).calls()
            shown = uses.past_a_tap or 0 in uses.rows
            known = model.batch_free
            if not uses.rows <= {0, 1} or samples[0].alike:
                model.batch_free = known | self._on(samples[0], execute).layers.batch_free()
            try:
                if shown or model.batch_free:
                    self._prove(key, samples, execute, sums_only=True)
            except GramianError:
                if model.batch_free == known:
                    raise
                model.batch_free = known
                if shown:
                    self._prove(key, samples, execute, sums_only=True)
            self._summed.add(key)
            self.free[key] = model.batch_free
        self._generators = self._generators or Generators(root)
        states = self._generators.states()
        beginning = InitialState(root) if self._stateful else None
        watched = key in self.proven and bool(self.proven[key].open_outputs)
        before = {id(t) for t in graph_tensors(root).values()} if watched else set()
        model.calls, shared = [], set(model.shared)
        output = forward(args, kwargs)
        unseen, assumed = self._unseen(key, model.calls), self._assumed()
        if tells_apart and not unseen and not proven_before and self._silent.intersection(model.calls):
            self._silent_forwards += 1
            if self._silent_forwards.bit_count() == 1:  # after 1, 2, 4, 8 … forwards: the gradient may not vanish now
                unseen = [call for call in model.calls if call in self._silent]
        tells_apart = tells_apart and key in self.proven  # else all samples are equal, and nothing can be shown
        if unseen and (tells_apart or any(rows == 0 for _, _, rows in unseen)):
            if proven_before:
                with model.refusals.held():
                    refuse_unseen(unseen)
                return output
            self._prove(key, samples, execute, sums_only=not tells_apart)
            # it ran without a row for each sample, or as layers were understood before the proof
            if self._assumed() != assumed or any(rows == 0 and layer not in shared for layer, _, rows in unseen):
                self._generators.restore(states)
                if beginning is not None:
                    beginning.restore()
                output = forward(args, kwargs)
        if key in self.proven:
            refuse_backward_through(root, output, before, self.proven[key].open_outputs)
        return output

    def _assumed(self) -> tuple[Any, ...]:
        """What a forward assumes of layers: calls without a batch axis, layers tapped as one, where samples lie."""
        return self.model.batch_free, whole_classes(self.model.root_module), self.model.layouts

    def _assume(self, key: Any, tells_apart: bool) -> None:
        """Assume of layers what was proven for this structure; for a new one what the last one had, or nothing for sums."""
        self.model.layouts = self.layouts.get(key, {})
        self.model.batch_free = self.free.get(key, self.model.batch_free if tells_apart else {})

    def _find_axes(self, key: Any, samples: SampleArguments, execute: Execute) -> None:
        """Find where samples lie for sums, which are not proven; per-sample statistics with proof="off" trust shapes."""
        model, known = self.model, key in self.proven or key in self._summed or self.model.per_sample
        if not known and model.lockstep.alone and model.tensor_parallel is None:
            model.layouts = self.layouts[key] = self._on(samples, execute).layers.layouts(brief=True)

    def before_compiled(self, forward: Forward, args: Any, kwargs: Any, batch: int) -> None:
        """Run the row proof before a compiled forward, unless earlier proofs cover it; arguments as in `guard`.

        For each new set of argument shapes, an eager forward lists the calls of layers to be covered.

        Raises:
            GramianError: if the proof fails, or does not prove some output: a compiled graph cannot stop a backward through it.
        """
        self.model.on_batch((args, kwargs))
        key, samples = self._key(args, kwargs, batch)
        tells_apart, execute = self.model.tells_samples_apart, partial(_execute, forward)
        self._assume(key, tells_apart)
        sizes = (key, *(tuple(leaf.shape) for leaf in samples[0].leaves if isinstance(leaf, Tensor)))
        if tells_apart and self._lacks(key, samples):
            self._prove(key, samples, execute)
        elif tells_apart and self.model.proof_is_due():
            self.repeat(key, samples, execute)
        elif sizes not in self._sizes:
            self._find_axes(key, samples[0], execute)
            calls = self._on(samples[0], execute).calls().calls
            unseen = calls if not tells_apart and key not in self._summed else self._unseen(key, calls)
            if not calls or unseen and (tells_apart or any(rows == 0 for _, _, rows in unseen)):
                self._prove(key, samples, execute, sums_only=not tells_apart)
            self._summed.add(key)
        if self.model.layouts and sizes not in self._sizes:
            self._on(samples[0], execute).layers.refuse_compiled()
        for layer in self.model.batch_free:
            raise GramianError(
                f"{layer}: returns no batch axis, which no graph can give it; expected eager mode, or requires_grad_(False)"
            )
        for reason in self.proven[key].open_outputs.values() if key in self.proven else ():
            raise GramianError(
                f"{reason}, which a compiled graph cannot keep a backward from; expected eager mode, or a model that does not "
                "return or keep it"
            )
        self._sizes.add(sizes)

    def together(self, forward: Forward, args: Any, kwargs: Any, batch: int) -> None:
        """Run the row proof before an FSDP2 forward if any process needs one; arguments as in `guard`. Collective.

        Processes that need none make as many forwards and backwards, because each run gathers weights from all processes.

        Raises:
            GramianError: on every process, if the proof fails on one.
        """
        model = self.model
        key, samples, wanted, due, refusal = None, list[SampleArguments](), False, False, None
        try:
            if model.units_in(batch) > 1:
                model.on_batch((args, kwargs))
                key, samples = self._key(args, kwargs, batch)
                self._assume(key, model.tells_samples_apart)
                known = (*self.proven, *self._summed)
                wanted = self._lacks(key, samples) if model.tells_samples_apart else key not in known
                due = not wanted and model.tells_samples_apart and model.proof_is_due()
        except GramianError as error:
            refusal = error  # the other processes wait for this one
        if not model.lockstep.any(wanted or due or refusal is not None):
            return
        run, execute = partial(forward, args, kwargs), partial(_execute, forward)
        with self.in_company(run, repeated=due):
            if refusal is not None:
                raise refusal
            if wanted:
                with preserve_state(self.model.root_module):
                    # what a tap refuses may bring autograd down without one (weights that are gone)
                    model.lockstep.announce()
                    try:
                        self._run_along(run)
                    except LayerRefused as refused:
                        self._on(samples[0], execute).layers.look(refused)
                self._prove(key, samples, execute, sums_only=not model.tells_samples_apart)
                if key not in self.proven and model.tells_samples_apart:  # all are equal: learn the calls
                    self._prove(key, samples, execute, sums_only=True)
                self._summed.add(key)
            elif due:
                self.repeat(key, samples, execute)

    @contextmanager
    def in_company(self, forward: Callable[[], Any], *, repeated: bool = False) -> Iterator[None]:
        """Context manager for a proof on several processes: one that is done makes further runs until all are done.

        Weights that are all zero have random values until every rank is done: other ranks gather this one's shards.

        Args:
            forward: the forward of the model on this process's batch.
            repeated: True if this process repeats an earlier proof; if one fails, the listeners of all processes are notified.

        Raises:
            GramianError: on every process, if the proof failed on one.
        """
        lockstep, root, failure = self.model.lockstep, self.model.root_module, None
        reshard(root)
        with zeros_filled(root, self.model.tensor_parallel):
            try:
                yield
            except GramianError as error:
                failure = error
            except Refuted as refuted:
                failure = GramianError(str(refuted))
            with preserve_state(root, counters=True):
                lockstep.join_remaining_runs(partial(self._keep_company, forward))
        reshard(root)
        if reason := lockstep.first_reason(failure):
            if lockstep.any(repeated and failure is not None) and not (repeated and failure):
                self.model.proof_failed()  # of another process, whose releases are this one's too
            raise failure or RefusedElsewhere(reason)

    def _run_along(self, forward: Callable[[], Any]) -> None:
        """Run a forward and a backward whose results are ignored, so that other processes can gather weights from this one."""
        with self.model.recorded_by(Recorder(0, None, self.model.batch_size)) as run, blamed_on(run.expanded):
            outputs = [y for y in output_tensors(forward()) if y.requires_grad]
            if outputs:
                ones = [torch.ones_like(y) for y in outputs]
                torch.autograd.grad(outputs, [self.model.probe], ones, allow_unused=True)

    def _keep_company(self, forward: Callable[[], Any]) -> None:
        with suppress(GramianError, Refuted):  # what a tap refuses here was refused before
            self._run_along(forward)

    def _unseen(self, key: Any, calls: Iterable[Call]) -> list[Call]:
        """The calls that no proof has seen; of a model with samples elsewhere than on axis 0, none of this structure."""
        seen = self.proven[key].calls if self.model.layouts and key in self.proven else self.model.proven_calls
        return [call for call in calls if call not in seen]

    # ---- what covers a batch ---------------------------------------------------------------------------------------

    def _key(self, args: Any, kwargs: Any, batch: int) -> tuple[Any, list[SampleArguments]]:
        """The structure under which a batch is proven, and its arguments by sample for every grouping of rows into units.

        A proof of a batch whose samples have different numbers of tokens that count also covers batches with equal numbers.
        """
        key, found = structure_of(self.model, args, kwargs, batch)
        if key in self.proven:
            return key, found
        covers = (
            other
            for other, proven in self.proven.items()
            if other[0] == key[0] and set(other[1]) > set(key[1]) and not proven.open_outputs
        )
        return next(covers, key), found

    def _lacks(self, key: Any, groupings: Sequence[SampleArguments]) -> bool:
        """True if no proof covers a batch: its structure `key`, its groupings of rows into units, and its padding.

        If a loader is known but no sample of the proof was padded, samples are collated alone to look for padding: in batches
        with new shapes, and in the 1st, 2nd, 4th, 8th … other batch. True then if one is shorter alone than in the batch. If no
        sample of the proof was collated by the loader, it is asked in the same batches, and True if it collates one.
        """
        proven = self.proven.get(key)
        if proven is None:
            return True
        if proven.partition is not None and any(samples.partition != proven.partition for samples in groupings):
            return True
        samples, sliced = groupings[0], proven.alone.startswith("slice") and self.lone is not no_loader
        by_token = samples.units is not None and samples.units.by_token
        if (proven.unpadded is None and not sliced) or by_token:
            return False
        self._without_padding += 1
        if (sliced or samples.sizes == proven.unpadded) and self._without_padding.bit_count() > 1:
            return False
        alone = [samples.of_one(one.arguments).sizes for one in self.lone(samples, range(samples.batch))]
        return bool(alone) if sliced else any(sizes != samples.sizes for sizes in alone)

    # ---- proofs ----------------------------------------------------------------------------------------------------

    def _prove(self, key: Any, groupings: Sequence[SampleArguments], execute: Execute, sums_only: bool = False) -> None:
        """Prove a batch of structure `key` for every grouping of rows into units that a listener uses, and store the result.

        What an earlier proof of the structure covers counts no longer if samples lie elsewhere now.
        `sums_only`: show only that the taps' sums are autograd's gradients. If all samples are equal, nothing is stored, and
        the listeners are notified (`proof_stays_open`).

        Raises:
            GramianError: if the proof fails.
        """
        for samples in groupings:
            found = self._on(samples, execute).prove(sums_only=sums_only)
            if found is None:
                self.open_batches += 1
                self.model.proof_stays_open()
                return
            self.model.shared |= found.shared
            self.model.proven_calls |= found.calls
            self._stateful |= found.stateful
            self._silent = (self._silent | found.silent) - (found.calls - found.silent)
            if not sums_only:
                known = self.layouts.get(key, {}), self.free.get(key, self.model.batch_free)
                if known != (self.model.layouts, self.model.batch_free):
                    self.proven.pop(key, None)
                self.layouts[key], self.free[key] = self.model.layouts, self.model.batch_free
            if not sums_only and found.shows:
                before = self.proven.get(key)
                if before is not None:
                    outputs = {**before.open_outputs, **found.open_outputs}
                    found = replace(found, calls=found.calls | before.calls, open_outputs=outputs)
                    padded = before.unpadded is None and before.alone.startswith("collated")
                    found = replace(found, unpadded=None if padded else found.unpadded)
                self.proven[key] = found

    def repeat(self, key: Any, groupings: Sequence[SampleArguments], execute: Execute) -> None:
        """Repeat one run with replaced samples on this batch, whose structure `key` was proven before.

        Raises:
            GramianError: if rows of samples that were not replaced changed; the listeners are notified first.
        """
        for samples in groupings:
            self._on(samples, execute).repeat(self.proven[key])

    def _on(self, samples: SampleArguments, execute: Execute) -> BatchProof:
        return BatchProof(self.model, execute, samples, self._seed, self.lone)

    def _seed(self) -> int:
        """A seed that changes with the number of proofs and forwards so far, and is the same in every run of a program."""
        digest = hashlib.blake2b(f"{len(self.proven)} {self.open_batches} {self.model.passes.begun}".encode())
        return int.from_bytes(digest.digest()[:6], "little")


def _execute(forward: Forward, arguments: Any) -> Any:
    return forward(*arguments)
