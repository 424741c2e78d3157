"""Single runs of a row proof: one forward and one backward each, with random output gradients (cotangents).

Every run starts from the same random states, buffers and attributes (`InitialState`). An untapped run, without taps, returns
outputs and autograd's gradients. A tapped run, on the batch or with other samples in its places, returns fingerprints of the
rows that the taps attribute to each sample. Cotangents are drawn once and move with their samples.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.distributed.tensor import DTensor

from gramian.core.errors import GramianError
from gramian.parallel.tensor_parallel import full_tensor
from gramian.taps.model import user_names
from gramian.taps.model.frozen_parameters import checksums_of, refuse_written
from gramian.taps.model.preserve_state import InitialState
from gramian.taps.model.python_state import graph_tensors
from gramian.taps.proof.model_outputs import left_in_attributes, output_tensors, parameters_behind, rows_of
from gramian.taps.proof.row_fingerprint import HALF, Fingerprint
from gramian.taps.proof.row_recorder import Key, Recorder
from gramian.taps.proof.sample_arguments import SampleArguments
from gramian.taps.tap import LayerRefused
from gramian.taps.tapped_model import Call, LayerUses, Layouts, TappedModel, rows_over_batch

Source = Sequence[int] | Tensor
"""Content of a run's batch: the index of the sample in each place [B], or of the token in each place [B, T]."""
SCALE = 0.5
"""Factor of all cotangents in the untapped run: its gradients are then half of the tapped run's only if the backward is
linear in the loss."""
SecondAxis = Literal["certain", "later", "all"]
Execute = Callable[[Any], Any]
"""Function that runs the model, or a loss behind it, on arguments and returns the outputs."""


class Refuted(Exception):  # noqa: N818
    """Raised if a run of a row proof shows that rows cannot be attributed to samples; names the layer and what differs."""

    def __init__(self, message: str, parameter: str = "", layer: str = "") -> None:
        """Store the message, and the parameter whose gradient the taps do not explain, or the layer that is refused, or ""."""
        super().__init__(message)
        self.parameter, self.layer = parameter, layer


def refuse(failure: Refuted) -> NoReturn:
    """Raise GramianError, the error that users get, with the message of a failed proof."""
    raise LayerRefused(str(failure), failure.layer, failure.parameter) from failure.__cause__


@dataclass
class TappedRun:
    """Results of one run of the tapped model: fingerprints of rows and outputs, calls, and the state that it changed."""

    rows: dict[Key, Fingerprint]
    sides: dict[Key, str]
    outputs: list[Fingerprint]
    calls: list[Call]
    drew: bool
    """True if the run drew a random number."""
    recorder: Recorder
    buffers: dict[str, Tensor | None]
    """Values of the buffers that the run changed."""
    remembered: dict[str, Any]
    """Values of attributes of modules that the run changed; empty unless `sums` was set or the model is private."""

    @property
    def rounding(self) -> float:
        """Rounding error of sums of the largest terms: 64 ε · largest input · largest output gradient; 0 in half precision.

        In half precision it would be up to half of these terms themselves. The largest input is at least 1; indices of
        embedding tables are not counted.
        """
        sides: dict[str, float] = {"input": 1.0, "output gradient": 0.0, "sum over calls": 0.0}
        for key, fingerprint in self.rows.items():
            if fingerprint.eps:
                sides[self.sides[key]] = max(sides[self.sides[key]], fingerprint.largest)
        eps = max((fingerprint.eps for fingerprint in self.rows.values()), default=0.0)
        return 64 * eps * sides["input"] * sides["output gradient"] if eps < HALF else 0.0


class ProofRuns:
    """Runs a model forward and backward on the arguments of one call, or on these with other samples in their places."""

    def __init__(
        self,
        model: TappedModel,
        execute: Execute,
        samples: SampleArguments,
        seed: int,
        second_axis: SecondAxis = "certain",
        beginning: InitialState | None = None,
    ) -> None:
        """Copy the state from which every run begins; nothing runs yet.

        Args:
            model: the tapped model.
            execute: runs the model, or the loss, on arguments.
            samples: the arguments by sample.
            seed: seed of the cotangents and fingerprints.
            second_axis: which outputs of the model, of those whose axis 1 has size B, have their samples there (states of
                recurrent layers). "certain": those whose axis 0 is not a multiple of B; "all": all of them; "later": as "all",
                but output 0 as in "certain".
            beginning: the state from which every run begins; None: the present one.
        """
        self._model, self._execute, self._samples, self._seed = model, execute, samples, seed
        self.root = model.root_module
        self.beginning = beginning or InitialState(self.root, samples.leaves)
        """The state from which every run begins."""
        self.count = 0
        self.cotangents: list[Tensor | None] = []
        """Cotangent of every output, samples in the order of the batch; None: no backward goes through the output."""
        self.row_outputs: set[int] = set()
        """Indices of the outputs that have rows of samples."""
        self.second_axis = second_axis
        self.ambiguous_outputs = False
        """True if an output has B on its axis 1, and a multiple of B on axis 0."""
        self._second: set[int] = set()
        """Indices of the outputs whose samples lie on axis 1."""
        self.returned = 0
        """Number of outputs that the model returns; later ones are attributes of modules, where a loss may use them."""
        self.titles: list[str] = []
        """Name of each output in error messages."""
        self.shared: set[str] = set()
        """Layers whose output, one row for all samples, was expanded to a row for each sample."""

    @property
    def everyone(self) -> range:
        """The batch as it is, as the `Source` of a run: sample i is in place i."""
        return range(self._samples.batch)

    @property
    def layouts(self) -> Layouts:
        """Where the samples lie in layers that have them elsewhere than on axis 0, as the runs assume."""
        return self._model.layouts

    @property
    def on_gpu(self) -> bool:
        """Whether the outputs are on a GPU, where atomic additions may give other bits from run to run."""
        return any(cotangent is not None and cotangent.is_cuda for cotangent in self.cotangents)

    def rows_of(self, output: Tensor) -> int:
        """Rows of an output per sample; 0 if its axes do not fit the batch (see `model_outputs.rows_of`)."""
        return rows_of(output, self._samples)

    def untapped(
        self, choose: Callable[[list[Tensor]], Sequence[int]]
    ) -> tuple[list[Fingerprint], dict[str, Tensor | None]]:
        """Run the model without taps, and draw the cotangents of the outputs whose indices `choose(outputs)` returns.

        Returns:
            Fingerprints of all outputs, and {parameter: SCALE times autograd's gradient}, None for one without a gradient.

        Raises:
            GramianError: if the forward writes into a frozen parameter.
        """
        self._begin()
        frozen = {name: p for name, p in user_names.named_parameters(self.root) if not p.requires_grad}
        before = checksums_of(frozen)
        with self._model.untapped() as weights:
            outputs = self._find_second(self._results(self._samples.take(self.everyone)))
            refuse_written(frozen, before)
            chosen = set(choose(outputs))
            self.cotangents = [self._cotangent(i, y) if i in chosen else None for i, y in enumerate(outputs)]
            self.row_outputs = {i for i, y in enumerate(outputs) if self.rows_of(y)}
            self._model.add_uncalled(weights)
            return [self._fingerprint(y) for y in outputs], _gradients(self._scaled(outputs, SCALE), weights)

    def on(
        self, arguments: Any, cotangents: Callable[[list[Tensor]], list[tuple[Tensor, Tensor]] | None]
    ) -> dict[str, Tensor | None] | None:
        """Autograd's gradients {parameter: tensor} of the model without taps, on other arguments.

        `cotangents(outputs)` returns (output, cotangent) pairs for the backward, or None if the outputs do not fit; the result
        is then None, too. A parameter without a gradient has None.
        """
        self._begin()
        with self._model.untapped() as weights:
            outputs = self._outputs(arguments)
            pairs = cotangents(outputs)
            found = _gradients([(y, torch.ones_like(y)) for y in outputs] if pairs is None else pairs, weights)
            return None if pairs is None else found

    def scaled(self, factor: float) -> dict[str, Tensor | None]:
        """Autograd's gradients of the model without taps on the batch, its cotangents times `factor`."""
        return self.on(self._samples.take(self.everyone), lambda outputs: self._scaled(outputs, factor)) or {}

    def _scaled(self, outputs: list[Tensor], factor: float) -> list[tuple[Tensor, Tensor]]:
        return [(y, factor * g) for y, g in zip(outputs, self.cotangents, strict=True) if g is not None]

    def tapped(
        self, source: Source, *, sums: bool = False, alone: Sequence[int] = (), forget: bool = True
    ) -> TappedRun:
        """Run the tapped model with the samples of `source` in the places of the batch, each with its own cotangent.

        Args:
            source: the sample, or token, in each place.
            sums: True to record projections of each parameter's gradient summed over samples.
            alone: units (samples, or groups that count as one) whose own gradients are recorded as projections.
            forget: False to start with the attributes of modules as the last run left them.

        Raises:
            Refuted: if outputs have other shapes, or the model fails on rows that were expanded.
        """
        self._begin(forget)
        arguments = self._samples.take_tokens(source) if isinstance(source, Tensor) else self._samples.take(source)
        recorder = Recorder(self._seed, self._samples.units, self._model.batch_size, sums=sums, alone=alone)
        with self._model.recorded_by(recorder) as run, blamed_on(run.expanded):
            outputs = self._outputs(arguments)
            drew = self.beginning.drew
            prints = [self._fingerprint(y) for y in outputs]
            pairs, misfits = self._pairs(outputs, source)
            shares = self._model.tensor_parallel
            if shares is not None:
                shares.forget_noted()
            _grad(pairs, [self._model.probe])  # also of what does not fit: other processes may gather for it
            if shares is not None:
                shares.require_same_noted()
        if misfits:
            raise Refuted(
                f"{self.titles[misfits[0]]}: has another shape when other samples are there; expected rows of samples"
            )
        self.shared |= run.expanded
        calls, buffers = list(run.calls), self.beginning.buffers.changed()
        remembered = self.beginning.python.values() if sums or self._model.rule.withholds else {}
        return TappedRun(recorder.rows, recorder.sides, prints, calls, drew, recorder, buffers, remembered)

    def turned(self, source: Tensor) -> TappedRun:
        """Run the tapped model with token source[b, t] of the batch, with its unit and cotangent, in place [b, t]."""
        samples, cotangents = self._samples, self.cotangents
        self.cotangents = [samples.tokens_of(g, source) if g is not None and self.rows_of(g) else g for g in cotangents]
        self._samples = samples.turned(source)
        try:
            return self.tapped(self.everyone)
        finally:
            self._samples, self.cotangents = samples, cotangents

    def calls(self) -> LayerUses:
        """How a forward on the batch uses its layers. Raises Refuted as `tapped`."""
        self._begin()
        recorder = Recorder(self._seed, self._samples.units, self._model.batch_size)
        with self._model.recorded_by(recorder) as run, blamed_on(run.expanded):
            reached = {id(p) for p in parameters_behind(self._results(self._samples.take(self.everyone)))}
        called = {name for name, _, _ in run.calls}
        taps = (tap.parameters.values() for tap in self._model.taps if tap.name in called)
        called |= {name for names in taps for name in names}
        known = {id(p): name for name, p in user_names.named_parameters(self.root) if name in self._model.parameters}
        returned = {rows_over_batch(size, self._samples.batch) for sizes in run.first_axes.values() for size in sizes}
        return LayerUses(
            frozenset(run.calls),
            frozenset(rows for _, _, rows in run.calls) | returned,
            any(name not in called for place, name in known.items() if place in reached),
        )

    def first_axes(self, samples: Sequence[int]) -> dict[str, list[int]]:
        """{layer: sizes of the first axis of what its calls return} of a forward on these samples; {} if it fails."""
        self._begin()
        with suppress(Exception), self._model.recorded_by(Recorder(self._seed, None, None)) as run:
            run.expands = False
            self._results(self._samples.take(samples))
            return run.first_axes
        return {}

    def _outputs(self, arguments: Any) -> list[Tensor]:
        """Outputs of the model on these arguments, with samples moved to axis 0 where the model has them on axis 1."""
        found = self._results(arguments)
        return [y.movedim(1, 0) if number in self._second else y for number, y in enumerate(found)]

    def _results(self, arguments: Any) -> list[Tensor]:
        """The floating-point tensors that the model returns on these arguments, then those that it stores in attributes."""
        before = {id(t) for t in graph_tensors(self.root).values()}
        returned = output_tensors(self._execute(arguments))
        left = left_in_attributes(self.root, before, returned)
        returned = [y.full_tensor() if isinstance(y, DTensor) else y for y in returned]
        self.returned = len(returned)
        self.titles = [f"output {i} of the model" for i in range(len(returned))]
        self.titles += [f"attribute {name} of the model" for name in left]
        return [*returned, *left.values()]

    def _find_second(self, outputs: list[Tensor]) -> list[Tensor]:
        batch = self._samples.batch
        candidates = {i for i, y in enumerate(outputs) if y.dim() > 1 and y.shape[1] == batch}
        doubtful = {i for i in candidates if outputs[i].shape[0] % batch == 0}
        self.ambiguous_outputs = bool(doubtful)
        first = doubtful & {0} if self.second_axis == "later" else set()
        self._second = candidates - (doubtful if self.second_axis == "certain" else first)
        return [y.movedim(1, 0) if number in self._second else y for number, y in enumerate(outputs)]

    def _begin(self, forget: bool = True) -> None:
        self._model.lockstep.announce()
        self.count += 1
        self.beginning.restore(forget=forget)

    def _pairs(self, outputs: list[Tensor], source: Source) -> tuple[list[tuple[Tensor, Tensor]], list[int]]:
        """(output, cotangent) of every output with a cotangent, and the indices of outputs with another shape than it."""
        pairs, misfits = [], []
        for number, (y, g) in enumerate(zip(outputs, self.cotangents, strict=False)):
            if g is None or not y.requires_grad:
                continue
            moved = self._moved(g, source)
            fits = y.shape == moved.shape
            pairs.append((y, moved if fits else torch.ones_like(y)))
            misfits += [] if fits else [number]
        return pairs, misfits

    def _fingerprint(self, output: Tensor) -> Fingerprint:
        rows, units = self.rows_of(output), self._samples.units
        if rows and (units is None or units.ids.dim() == 1):
            output = output.reshape(output.shape[0] // rows, rows, *output.shape[1:])
        if rows and units is not None:
            output = units.gather_tokens(output)
        return Fingerprint.of(output if output.dim() else output.reshape(1), self._seed)

    def _cotangent(self, number: int, output: Tensor) -> Tensor:
        if not self.rows_of(output):
            return torch.ones_like(output)
        generator = torch.Generator(output.device).manual_seed(self._seed * 7919 + number)
        return self._without_padding(
            torch.randn(output.shape, generator=generator, device=output.device, dtype=output.dtype)
        )

    def _without_padding(self, cotangent: Tensor) -> Tensor:
        """A cotangent that is zero in the places of padding, whose gradient must be zero."""
        units = self._samples.units
        if units is not None and units.padded:
            rows = cotangent.shape[0] // len(units.ids)
            padding = (units.ids == units.count - 1).to(cotangent.device)
            cotangent[padding.repeat_interleave(rows, 0)] = 0
        return cotangent

    def _moved(self, cotangent: Tensor, source: Source) -> Tensor:
        if not self.rows_of(cotangent):
            return cotangent
        if isinstance(source, Tensor):
            return self._without_padding(self._samples.tokens_of(cotangent, source))
        return self._without_padding(self.samples_of(cotangent, list(source)))

    def samples_of(self, cotangent: Tensor, samples: Sequence[int]) -> Tensor:
        """Rows of a cotangent that belong to these samples, in the order in which they are given."""
        index = torch.tensor(list(samples), device=cotangent.device)
        grouped = cotangent.reshape(self._samples.batch, -1, *cotangent.shape[1:])
        return grouped.index_select(0, index).flatten(0, 1)


@contextmanager
def blamed_on(expanded: set[str]) -> Iterator[None]:
    """Context manager that turns an error of the user's code into Refuted if `expanded` is not empty; the message names it.

    `expanded`: names of layers that return one row for all samples, which was expanded to a row for each sample.
    """
    try:
        yield
    except GramianError:
        raise
    except Exception as error:  # of the user's own code
        if not expanded:
            raise
        raise Refuted(
            f"{', '.join(sorted(expanded))}: returns one row for all samples, and the code behind it fails once that row "
            f"stands for each of them ({type(error).__name__}); expected code that broadcasts the row over the batch",
            layer=min(expanded),
        ) from error


def _gradients(pairs: Sequence[tuple[Tensor, Tensor]], weights: dict[str, Tensor]) -> dict[str, Tensor | None]:
    names = list(weights)
    pairs = [(y, g) for y, g in pairs if y.requires_grad]
    if not pairs or not names:
        return dict.fromkeys(names)
    found = _grad(pairs, [weights[name] for name in names])
    return {name: None if g is None else full_tensor(g) for name, g in zip(names, found, strict=True)}


def _grad(pairs: Sequence[tuple[Tensor, Tensor]], inputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Gradients of (output, cotangent) pairs with respect to `inputs`, without the user's hooks on these; None: no gradient.

    `torch.autograd.grad` would leave the torch function mode `WithoutDropout`, in which a checkpoint's second run must run too.

    Raises:
        GramianError: for a reentrant checkpoint, which cannot be differentiated in this way.
    """
    if not pairs:
        return [None] * len(inputs)
    hooks = [(t._backward_hooks, dict(t._backward_hooks)) for t in inputs if t._backward_hooks]
    for found, _ in hooks:
        found.clear()  # what the user does to a weight's gradient is not the layer's
    try:
        outputs, cotangents = zip(*pairs, strict=True)
        return _engine_run_backward(outputs, cotangents, False, False, tuple(inputs), True, accumulate_grad=False)
    except RuntimeError as error:
        if "use_reentrant=True" not in str(error):
            raise
        raise GramianError("model: has a reentrant checkpoint; expected checkpoint(..., use_reentrant=False)") from None
    finally:
        for found, before in hooks:
            found.update(before)
