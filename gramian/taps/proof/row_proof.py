"""When a model is proven: on the first batch of every structure of inputs, and when a call appears that no proof has seen."""

import hashlib
import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.parallel.data_parallel import local, reshard
from gramian.taps.model.preserve_state import Beginning, Generators, preserve_state
from gramian.taps.model.python_state import graph_tensors
from gramian.taps.model.run_eagerly import run_eagerly
from gramian.taps.proof.proof_runs import (
    Execute,
    ProofRuns,
    Refuted,
    SecondAxis,
    blamed_on,
    left_in_attributes,
    output_tensors,
    rows_of,
)
from gramian.taps.proof.prover import Proven, Prover
from gramian.taps.proof.row_recorder import Recorder
from gramian.taps.proof.sample_arguments import SampleArguments
from gramian.taps.proof.single_unit import Lone
from gramian.taps.units import Units

if TYPE_CHECKING:
    from gramian.taps.hub import Hub

Forward = Callable[[Any, Any], Any]
"""One forward of the root on (args, kwargs), with or without taps."""
PROOFS = ("auto", "off")
_numbers: "weakref.WeakKeyDictionary[nn.Module, int]" = weakref.WeakKeyDictionary()
_count = itertools.count()


def check_proof(proof: Any, field: str = "proof") -> None:
    """Raise GramianError unless the option, of this name, is "auto", "off" or a period in steps."""
    period = isinstance(proof, int) and not isinstance(proof, bool) and proof > 0
    if proof not in PROOFS and not period:
        raise GramianError(f'{field}: expected "auto", "off" or a number of steps above 0, got {proof!r}')


def nobody(samples: SampleArguments, among: Collection[int]) -> list[Lone]:
    """No sample alone: no loader is known."""
    return []


@dataclass
class RowProof:
    """What has been proven of one model."""

    hub: "Hub"
    proven: dict[Any, Proven] = field(default_factory=dict)
    open_batches: int = 0
    """Batches of equal samples, on which nothing could be shown."""
    lone: Callable[[SampleArguments, Collection[int]], list[Lone]] = nobody
    """Some of these samples, each as the loader collates it alone, where a loader is known."""
    _generators: Generators | None = None
    _stateful: bool = False
    """True if forwards were seen to change buffers or attributes, which a forward that runs again must find as they were."""
    _calls: set[Any] = field(default_factory=set)
    _silent: frozenset[Any] = frozenset()
    """Calls whose output gradient was zero in every proof so far, so that nothing of it was shown."""
    _waited: int = 0
    _without_padding: int = 0
    """Batches since a proof that saw no padding, or no sample as the loader collates it."""
    _summed: set[Any] = field(default_factory=set)
    """Structures of which part 1 alone was shown, where a layer sees one row for all samples."""
    _sizes: set[Any] = field(default_factory=set)
    """Sizes of arguments of compiled forwards whose calls are known."""

    def know_loader(self, lone: Callable[[SampleArguments, Collection[int]], list[Lone]]) -> None:
        """A loader can collate samples alone; what was proven without it, or with another one, covers none of its batches."""
        self.lone = lone
        self.proven.clear()

    def forget_loader(self) -> None:
        """No loader is known any more."""
        self.lone = nobody

    def guard(self, forward: Forward, args: Any, kwargs: Any, batch: int, proven_before: bool = False) -> Any:
        """Run the user's forward: proven before, and once more if it made calls that no proof has seen.

        Args:
            forward: of the root.
            args: its arguments.
            kwargs: its keyword arguments.
            batch: B.
            proven_before: True if `together` has proven it.
        """
        key, samples = self._key(args, kwargs, batch)
        tells_apart = self.hub.tells_samples_apart
        execute = partial(_execute, forward)
        if tells_apart and not proven_before:
            if self._lacks(key, samples):
                self._prove(key, samples, execute)
            elif self.hub.proof_is_due():
                self.repeat(key, samples, execute)
        elif not tells_apart and not proven_before and key not in self._summed:
            if any(rows == 0 for _, _, rows in self._calls_of(samples[0], execute)):
                self._prove(key, samples, execute, whole=False)
            self._summed.add(key)
        root = self.hub.root()
        assert root is not None
        self._generators = self._generators or Generators(root)
        states = self._generators.states()
        beginning = Beginning(root) if self._stateful else None
        watched = key in self.proven and bool(self.proven[key].open_outputs)
        before = {id(t) for t in graph_tensors(root).values()} if watched else set()
        self.hub.calls, shared = [], set(self.hub.shared)
        output = forward(args, kwargs)
        unseen = [call for call in self.hub.calls if call not in self._calls]
        if tells_apart and not unseen and not proven_before and self._silent.intersection(self.hub.calls):
            self._waited += 1
            if self._waited.bit_count() == 1:  # after 1, 2, 4, 8 … forwards: their gradient may not vanish any more
                unseen = [call for call in self.hub.calls if call in self._silent]
        tells_apart = tells_apart and key in self.proven  # else all samples are equal, and nothing can be told
        if unseen and (tells_apart or any(rows == 0 for _, _, rows in unseen)):
            if proven_before:
                self.refuse_unseen(unseen)
            self._prove(key, samples, execute, whole=tells_apart)
            if any(
                rows == 0 and layer not in shared for layer, _, rows in unseen
            ):  # it ran without a row for each sample
                self._generators.restore(states)
                if beginning is not None:
                    beginning.restore()
                output = forward(args, kwargs)
        if key in self.proven:
            self._refuse_backward_through(output, before, self.proven[key].open_outputs)
        return output

    def together(self, forward: Forward, args: Any, kwargs: Any, batch: int) -> None:
        """Prove on all processes that gather weights for each other, or on none; those with less to do run along.

        Raises:
            GramianError: on every process, if the proof fails on one.
        """
        hub, root = self.hub, self.hub.root()
        assert root is not None
        key, samples, wanted, due, refusal = None, list[SampleArguments](), False, False, None
        try:
            if batch > 1:
                key, samples = self._key(args, kwargs, batch)
                wanted = (
                    self._lacks(key, samples) if hub.tells_samples_apart else key not in (*self.proven, *self._summed)
                )
                due = not wanted and hub.tells_samples_apart and hub.proof_is_due()
        except GramianError as error:
            refusal = error  # the other processes wait for this one
        if not hub.lockstep.any(wanted or due or refusal is not None):
            return
        with self.in_company(partial(forward, args, kwargs), repeated=due):
            if refusal is not None:
                raise refusal
            if wanted:
                with preserve_state(root):
                    # what a tap refuses may bring autograd down without one (weights that are gone)
                    hub.lockstep.announce()
                    self._run_along(partial(forward, args, kwargs))
                self._prove(key, samples, partial(_execute, forward), whole=hub.tells_samples_apart)
                if (
                    key not in self.proven and hub.tells_samples_apart
                ):  # all samples are equal: the calls are known at least
                    self._prove(key, samples, partial(_execute, forward), whole=False)
                self._summed.add(key)
            elif due:
                self.repeat(key, samples, partial(_execute, forward))

    @contextmanager
    def in_company(self, forward: Callable[[], Any], *, repeated: bool = False) -> Iterator[None]:
        """A proof of processes that gather weights for each other: who is done runs along until the last one is.

        Weights that are zero stay replaced by random ones until every rank is done: other ranks gather the shards of this one.

        Args:
            forward: of the model on this process's batch.
            repeated: True if this process repeats a run of a proof that it had before.

        Raises:
            GramianError: on every process, if the proof failed on one.
        """
        hub, root, failure = self.hub, self.hub.root(), None
        assert root is not None
        reshard(root)
        with _zeros_filled(root):
            try:
                yield
            except GramianError as error:
                failure = error
            except Refuted as refuted:
                failure = GramianError(str(refuted))
            with preserve_state(root, counters=True):
                hub.lockstep.keep_company(partial(self._keep_company, forward))
        reshard(root)
        if hub.lockstep.any(failure is not None):
            if hub.lockstep.any(repeated and failure is not None) and not (repeated and failure):
                hub.proof_failed()  # of another process, whose releases are this one's too
            raise failure or GramianError(
                "model: the row proof failed on another process; expected what its error says"
            )

    def refuse_unseen(self, calls: Sequence[Any]) -> None:
        """A sharded model made these calls.

        Raises:
            GramianError: if no proof has seen one of them: one process alone cannot prove it.
        """
        for layer, ordinal, rows in calls:
            if (layer, ordinal, rows) not in self._calls:
                raise GramianError(
                    f"{layer or 'model'}: is called in a way that no proof has seen (call {ordinal}, {rows} rows a sample), "
                    "and a sharded model cannot be proven by one process alone; expected the same calls in every batch"
                )

    def _run_along(self, forward: Callable[[], Any]) -> None:
        """A forward and a backward that gather what the other processes need; nothing is looked at."""
        with self.hub.rehearsal(Recorder(0, None, self.hub.batch_size)) as run, blamed_on(run.expanded):
            outputs = [y for y in output_tensors(forward()) if y.requires_grad]
            if outputs:
                ones = [torch.ones_like(y) for y in outputs]
                torch.autograd.grad(outputs, [self.hub.probe], ones, allow_unused=True)

    def _keep_company(self, forward: Callable[[], Any]) -> None:
        with suppress(GramianError, Refuted):  # what a tap refuses here was refused before
            self._run_along(forward)

    def before_compiled(self, forward: Forward, args: Any, kwargs: Any, batch: int) -> None:
        """Prove a compiled forward before it runs: of every size of arguments the calls are listed by an eager forward.

        Raises:
            GramianError: if the proof fails, or leaves an output open, which a graph cannot watch.
        """
        key, samples = self._key(args, kwargs, batch)
        tells_apart, execute = self.hub.tells_samples_apart, partial(_execute, forward)
        sizes = (key, *(tuple(leaf.shape) for leaf in samples[0].leaves if isinstance(leaf, Tensor)))
        if tells_apart and self._lacks(key, samples):
            self._prove(key, samples, execute)
        elif tells_apart and self.hub.proof_is_due():
            self.repeat(key, samples, execute)
        elif sizes not in self._sizes:
            calls = self._calls_of(samples[0], execute)
            unseen = calls if not tells_apart and key not in self._summed else calls - self._calls
            if unseen and (tells_apart or any(rows == 0 for _, _, rows in unseen)):
                self._prove(key, samples, execute, whole=tells_apart)
            self._summed.add(key)
        self._sizes.add(sizes)
        for reason in self.proven[key].open_outputs.values() if key in self.proven else ():
            raise GramianError(
                f"{reason}, which a compiled graph cannot keep a backward from; expected eager mode, or a model that does not "
                "return or keep it"
            )

    def _calls_of(self, samples: SampleArguments, execute: Execute) -> set[Any]:
        root = self.hub.root()
        assert root is not None
        with undisturbed(root, samples.leaves):
            runs = ProofRuns(self.hub, execute, samples, 0)
            try:
                return set(runs.tapped(runs.everyone).calls)
            except Refuted as failure:
                refuse(failure)

    def _key(self, args: Any, kwargs: Any, batch: int) -> tuple[Any, list[SampleArguments]]:
        root, hub = self.hub.root(), self.hub
        assert root is not None
        given = hub.batch_size is not None
        found = []
        for ids in hub.groupings():
            units = None if ids is None else Units.of(ids, batch)
            found.append(SampleArguments.of((args, kwargs), batch, given=given, units=units))
            if hub.tells_samples_apart:
                found[-1].refuse_layouts()
        autocast = (torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu"))
        modules = tuple((_number(module), *_flags(module), *_hooks(module)) for module in root.modules())
        private = hub.rule.withholds  # proves more: the loader's own collation, buffers, inputs that are left alone
        key = (tuple(s.structure for s in found), modules, autocast, frozenset(hub.parameters), private)
        return self._covering((key, found[0].uneven() if hub.tells_samples_apart else ())), found

    def _covering(self, key: Any) -> Any:
        """The key of what covers a batch: what is shown where numbers of tokens differ covers batches where they are equal."""
        covers = (
            other
            for other, proven in self.proven.items()
            if other[0] == key[0] and set(other[1]) > set(key[1]) and not proven.open_outputs
        )
        return key if key in self.proven else next(covers, key)

    def _lacks(self, key: Any, groupings: Sequence[SampleArguments]) -> bool:
        """True if no proof covers a batch: of its structure, of its grouping into units, and of padding.

        Where no padding was seen, though a loader is known, samples are collated alone again: those of batches of other sizes,
        and of the 1st, 2nd, 4th, 8th … further one. Without a model's run, unless one of them is shorter.
        """
        proven = self.proven.get(key)
        if proven is None:
            return True
        if proven.partition is not None and any(samples.partition != proven.partition for samples in groupings):
            return True
        samples, sliced = groupings[0], proven.alone.startswith("slice") and self.lone is not nobody
        if (proven.unpadded is None and not sliced) or samples.units is not None:
            return False
        self._without_padding += 1
        if (sliced or samples.sizes == proven.unpadded) and self._without_padding.bit_count() > 1:
            return False
        alone = [samples.of_one(one.arguments).sizes for one in self.lone(samples, range(samples.batch))]
        return bool(alone) if sliced else any(sizes != samples.sizes for sizes in alone)

    def _prove(self, key: Any, groupings: Sequence[SampleArguments], execute: Execute, whole: bool = True) -> None:
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
            self._stateful |= found.stateful
            self._silent = (self._silent | found.silent) - (found.calls - found.silent)
            if whole and found.shows:
                before = self.proven.get(key)
                if before is not None:
                    found = replace(found, open_outputs={**before.open_outputs, **found.open_outputs})
                    padded = before.unpadded is None and before.alone.startswith("collated")
                    found = replace(found, unpadded=None if padded else found.unpadded)
                self.proven[key] = found

    def _attempt(self, samples: SampleArguments, execute: Execute, whole: bool) -> Proven | None:
        """Prove on one batch; where an axis may be B by chance, a second time with it read the other way.

        Returns:
            What was shown; None if all samples are equal, so that nothing can be.
        """
        root = self.hub.root()
        assert root is not None
        with undisturbed(root, samples.leaves):
            beginning = Beginning(root, samples.leaves)
            first = self._prover(samples, execute, beginning)
            try:
                found = self._run(first, samples, whole)
                return self._of_units(found, samples, execute, beginning) if whole else found
            except Refuted as failure:
                for fixed, second_axis in _readings(
                    samples.ambiguous(self.hub.rule.withholds), first.runs.ambiguous_outputs
                ):
                    rows = [0 if i in fixed else count for i, count in enumerate(samples.rows)]
                    read = replace(samples, rows=rows)
                    prover = self._prover(read, execute, beginning, second_axis)
                    try:
                        found = self._run(prover, samples, whole)
                    except Refuted:
                        continue
                    if fixed and found is not None and not prover.fits_alone:
                        continue  # that a sample alone goes with the whole of an input shows that samples have no part of it
                    found = self._of_units(found, read, execute, beginning) if whole else found
                    return found and replace(found, fixed=fixed)
                refuse(failure)
            except GramianError:
                raise
            except Exception:
                first.runs.tapped(
                    first.runs.everyone
                )  # a tap that refuses the layer says more than the layer's own failure
                raise

    def _of_units(
        self, found: Proven | None, samples: SampleArguments, execute: Execute, beginning: Beginning
    ) -> Proven | None:
        """What was shown holds for these units of several rows alone, unless each row depends on itself. 2⌈log₂ B⌉ + 2 runs."""
        if found is None or samples.partition is None:
            return found
        rows = replace(samples, units=None)
        prover = Prover(self.hub, execute, rows, seed=self._seed(), beginning=beginning)
        partition = samples.partition if prover.open else None
        try:
            prover.runs.untapped(Outputs(rows, prover.runs).choose_rows)
            base = prover.runs.tapped(prover.runs.everyone)
            for replaced in prover.separating_sets():
                prover.separate(base, replaced)
        except Refuted:
            partition = samples.partition
        return replace(found, partition=partition, runs=found.runs + prover.runs.count)

    def _prover(
        self, samples: SampleArguments, execute: Execute, beginning: Beginning, second_axis: SecondAxis = "certain"
    ) -> Prover:
        lone = partial(self.lone, samples)
        return Prover(
            self.hub, execute, samples, seed=self._seed(), lone=lone, second_axis=second_axis, beginning=beginning
        )

    def _run(self, prover: Prover, samples: SampleArguments, whole: bool) -> Proven | None:
        if whole and not any(samples.rows) and samples.units is None:
            raise Refuted(
                f"model: no argument has the batch of {samples.batch} as its first axis, so that no sample can be replaced by "
                'another; expected tensors or lists of numbers, one row or entry for each sample, or proof="off"'
            )
        for words in samples.opaque() if whole else ():
            raise Refuted(
                f"model: is given a {words}, in which no sample can be replaced by another; expected tensors, alone or in "
                "tuples, lists and dicts"
            )
        if whole and prover.open:
            self.open_batches += 1
            self.hub.proof_stays_open()
            return None
        outputs = Outputs(samples, prover.runs)
        if not whole:
            return prover.prove(outputs.choose_all, whole=False)
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
                alone = prover.prove(partial(_only, scalar))
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
            raise Refuted(reason) if _counts_differ(samples) else failure
        if found is None or not (outputs.rows or outputs.scalars):
            prover.prove(lambda _: list(outputs.odd), whole=False)  # a tap that refuses a layer says more
            raise Refuted(f"{reason}; expected one row for each sample")
        return replace(found, open_outputs=reasons, runs=prover.runs.count)

    def repeat(self, key: Any, groupings: Sequence[SampleArguments], execute: Execute) -> None:
        """One separating run more, on the batch at hand.

        Raises:
            GramianError: if rows changed; the hub's listeners are told before.
        """
        root, proven = self.hub.root(), self.proven[key]
        assert root is not None
        for samples in groupings:
            rows = [0 if i in proven.fixed else count for i, count in enumerate(samples.rows)]
            with undisturbed(root, samples.leaves):
                prover = Prover(self.hub, execute, replace(samples, rows=rows), seed=self._seed())
                outputs = Outputs(samples, prover.runs)
                if prover.open:
                    continue
                try:
                    prover.runs.untapped(partial(outputs.choose_all, but=proven.open_outputs))
                    sets = prover.separating_sets()
                    prover.separate(prover.runs.tapped(prover.runs.everyone), sets[self._seed() % len(sets)])
                except Refuted as failure:
                    self.hub.proof_failed()
                    refuse(failure)

    def _seed(self) -> int:
        """Another number at every proof, the same in every run of a program."""
        digest = hashlib.blake2b(f"{len(self.proven)} {self.open_batches} {self.hub.passes_begun}".encode())
        return int.from_bytes(digest.digest()[:6], "little")

    def _refuse_backward_through(self, output: Any, before: Collection[int], reasons: dict[int, str]) -> None:
        root = self.hub.root()
        if not reasons or root is None:
            return
        returned = output_tensors(output)
        for number, tensor in enumerate([*returned, *left_in_attributes(root, before, returned).values()]):
            if number in reasons and tensor.requires_grad:
                tensor.register_hook(partial(_refuse_gradient, reasons[number]))


@dataclass
class Outputs:
    """The differentiable outputs of a model by kind: rows of samples, single numbers, and whatever else."""

    samples: SampleArguments
    runs: ProofRuns
    rows: list[int] = field(default_factory=list)
    attributes: list[int] = field(default_factory=list)
    """Rows of samples that the model does not return but leaves in attributes, of which a loss may make nothing."""
    scalars: list[int] = field(default_factory=list)
    odd: dict[int, str] = field(default_factory=dict)

    def choose_all(self, outputs: list[Tensor], but: Collection[int] = ()) -> list[int]:
        """All that can have a cotangent, but for some."""
        self.choose_rows(outputs)
        return [i for i in (*self.rows, *self.attributes, *self.scalars) if i not in but]

    def choose_rows(self, outputs: list[Tensor]) -> list[int]:
        """Those with rows of samples, which are proven together; where there is none, the first single number."""
        differentiable = [i for i, y in enumerate(outputs) if y.requires_grad]
        with_rows = [i for i in differentiable if rows_of(outputs[i], self.samples)]
        self.rows = [i for i in with_rows if i < self.runs.returned]
        self.attributes = [i for i in with_rows if i not in self.rows]
        self.scalars = [i for i in differentiable if outputs[i].numel() == 1 and i not in with_rows]
        batch, units = self.samples.batch, self.samples.units
        wanted = f"first axis is not the batch of {batch}"
        if units is not None and units.ids.dim() == 2:
            wanted = f"first axes are not the tokens {list(units.ids.shape)} of the units"
        self.odd = {
            i: f"{self.runs.titles[i]} has the shape {list(outputs[i].shape)}, whose {wanted}"
            for i in differentiable
            if i not in with_rows and i not in self.scalars
        }
        return self.rows or self.scalars[:1]

    def couples(self, number: int, failure: Exception) -> str:
        """Which output it is and what was seen, with the remedy for a mean over tokens."""
        words = f"{self.runs.titles[number]} couples samples ({failure})"
        if not _counts_differ(self.samples):
            return words
        return (
            f"{words}; some samples have more tokens that do not count (−100, or 0 in a mask) than others, and a mean over the "
            "tokens of the batch then depends on all of them: pass a constant num_items_in_batch=N with loss_reduction=1/N, or "
            "take the mean of each sample's own loss"
        )


@contextmanager
def undisturbed(root: nn.Module, arguments: Iterable[Any]) -> Iterator[None]:
    """Runs of a proof: no trace is left, compiled modules run as they were written, checkpoints around the model see nothing.

    Weights that are all zero are random inside: behind them no gradient would flow, and nothing could be shown.

    Args:
        root: the model.
        arguments: values that it is given, among which may be generators.
    """
    with (
        preserve_state(root, counters=True, arguments=arguments),
        run_eagerly(),
        torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        _zeros_filled(root),
    ):
        yield


@contextmanager
def _zeros_filled(root: nn.Module) -> Iterator[None]:
    weights = [local(p.detach()) for p in root.parameters() if p.requires_grad and p.is_floating_point() and p.numel()]
    zeros = [w for w in weights if w.numel() and w.dim() > 1 and not bool(w.any())]
    for number, weight in enumerate(zeros):
        generator = torch.Generator(weight.device).manual_seed(number)
        drawn = torch.randn(weight.shape, generator=generator, device=weight.device, dtype=torch.float32)
        weight.data.copy_(drawn / max(1, weight[0].numel()) ** 0.5)
    torch.clear_autocast_cache()  # of weights in half precision, which autocast keeps until the user leaves it
    try:
        yield
    finally:
        for weight in zeros:
            weight.data.zero_()
        torch.clear_autocast_cache()


def _number(module: nn.Module) -> int:
    """A number that no other module has or had; an `id` is given again once its module is gone."""
    return _numbers.setdefault(module, next(_count))


def _flags(module: nn.Module) -> list[Any]:
    """Truth values that a forward may branch on: the mode, and the user's own. Numbers and words may count or log."""
    return [value for key, value in vars(module).items() if type(value) is bool and key != "_is_full_backward_hook"]


def _hooks(module: nn.Module) -> list[Any]:
    """The code of a user's hooks on a module, or the numbers that torch gives out once each."""
    several = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return [
        getattr(hook, "__code__", number)
        for hooks in several
        for number, hook in hooks.items()
        if not (getattr(hook, "__module__", None) or "").startswith("gramian.")
    ]


def _counts_differ(samples: SampleArguments) -> bool:
    return any(kind != "values" for _, kind in samples.uneven())


def _readings(inputs: Sequence[int], outputs: bool) -> list[tuple[tuple[int, ...], SecondAxis]]:
    """Other ways to read axes that may be B by chance: inputs that are left alone, and samples on axis 1 of outputs."""
    readings: list[tuple[tuple[int, ...], SecondAxis]] = [((i,), "certain") for i in inputs[:4]]
    readings += [(tuple(inputs), "certain")] if len(inputs) > 1 else []
    return readings + ([((), "later"), ((), "all")] if outputs else [])


def _only(number: int, outputs: list[Tensor]) -> list[int]:
    return [number]


def _execute(forward: Forward, arguments: Any) -> Any:
    return forward(*arguments)


def _refuse_gradient(reason: str, gradient: Tensor) -> NoReturn:
    raise GramianError(
        f"{reason}, and a backward goes through it; expected a loss of outputs with one row for each sample, and a model that "
        "does not return what it goes on with (use_cache=False)"
    )


def refuse(failure: Refuted) -> NoReturn:
    """The user's error."""
    raise GramianError(str(failure)) from failure.__cause__
