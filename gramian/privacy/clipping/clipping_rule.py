"""Exact per-sample clipping as a gradient rule: Σ_i min(1, C/‖g_i‖) g_i from one ordinary backward.

Legend: B samples, C the clip norm, c the clip factors, "carried" what the backward brings: a sample's gradient divided by B for
a mean loss, times the loss scale.

Taps run every layer on detached weights, so autograd forms no weight gradient at all. Each parameter's records bring its norm
as the backward passes it; what its weighted sum needs later (input and output gradient, or the per-sample gradients
themselves) is held. When the backward is over all norms are known, and the clipped sums are formed parameter by parameter, each
freeing what it held. In two passes nothing is held: the first backward brings norms alone, the second forms the sums as it
goes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gramian.core.errors import GramianError
from gramian.kernels.sums.weighted_sum import row_squares
from gramian.linalg.wide import wide_dtype
from gramian.privacy.clipping.clipping_plan import ClippingPlan, ClippingRow, NormAlgorithm
from gramian.privacy.clipping.clipping_planner import REMEMBERED, Foresight, Storage, share_of
from gramian.privacy.clipping.step_timing import Stopwatch
from gramian.taps.gradients import ExplicitGradient, Outer, PerSampleGradient
from gramian.taps.gradients.outer import direct_of, gram_of, same_tensor
from gramian.taps.gradients.per_sample_gradient import flat
from gramian.taps.hub import Hub
from gramian.taps.passes import accumulates
from gramian.taps.records import LayerRecord, ParameterRecord, PassInfo

SLACK = {torch.float64: 2.0**-36, torch.float32: 2.0**-17, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-8}
"""By the narrowest dtype that takes part: what rounding may add to a norm or to a clipped gradient. Factors of clipped samples
are smaller by this much, so that what is summed stays within C."""
MOST_TOGETHER = 4
"""Layers that share an input, and whose Gram matrices are multiplied in one go."""
PRODUCTS_AHEAD = 4
KEPT_AHEAD = 0.5
"""Sums that are begun before it is known whether a sample is in doubt, for the device to work on meanwhile: so many products,
and those of kept gradients, which are quick, as long as they take no more than this share of the kept bytes."""


@dataclass(frozen=True)
class Tuning:
    """Optimisations that can be switched off, to see what each is worth."""

    overlap: bool = True
    """Reduce one parameter's sum over processes while the next is formed."""
    release: bool = True
    """Free what a parameter held as soon as its sum is formed."""
    adaptive: bool = True
    """Choose the way by shape; off: the direct norm everywhere."""
    layerwise: bool = True
    """Hand each sum on before the next is formed; off: all sums are formed first."""


@dataclass
class Doubt:
    """Samples of layers in which tokens cancel, so that a norm, or a sum, may have lost its digits; looked at once for all."""

    outers: Mapping[str, Outer]
    squares_B: Tensor
    doubtful_B: Tensor


@dataclass
class SavedForClipping:
    """What one parameter's weighted sum will be formed from."""

    gradient: PerSampleGradient
    versions: tuple[int, ...]

    @classmethod
    def of(cls, gradient: PerSampleGradient) -> "SavedForClipping":
        """Remember the tensors' versions: somebody who writes into them afterwards spoils the sum."""
        return cls(gradient, tuple(t._version for t in gradient.tensors()))

    def check(self, parameter: str) -> None:
        """Raise if one of the tensors was written to.

        Raises:
            GramianError: naming the parameter.
        """
        if self.versions != tuple(t._version for t in self.gradient.tensors()):
            raise GramianError(
                f"{parameter}: its layer's input or output gradient was changed in place during the backward; "
                'expected custom backwards to leave them alone, or clipping="two_pass"'
            )


@dataclass
class ClippingWork:
    """One backward under way."""

    info: PassInfo
    plan: ClippingPlan | None
    idle: bool = False
    """True if this is no `backward()` but `torch.autograd.grad` of something else: parameters get nothing then."""
    blank: bool = False
    """True if the batch has no samples: what comes is of a row of zeros that stands in for them."""
    begun: Any = None
    """When the backward reached the first layer."""
    squares_B: Tensor | None = None
    held: dict[str, SavedForClipping] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Per-sample gradients [B, n] of biases and norms: small and many, so they are handled all at once."""
    small: list[tuple[Tensor, list[str]]] = field(default_factory=list)
    """The same side by side."""
    totals: dict[str, Tensor] = field(default_factory=dict)
    doubts: list[Doubt] = field(default_factory=list)
    together: dict[str, Outer] = field(default_factory=dict)
    written: dict[str, tuple[Tensor, ExplicitGradient | None]] = field(default_factory=dict)
    """{parameter: (samples, their gradients)} that were in doubt: clipped as they stand there. None: to be written again."""
    slack: float = 0.0
    bytes_held: int = 0
    rows: dict[str, ClippingRow] = field(default_factory=dict)
    factors_B: Tensor | None = None
    """c, known before a second pass."""
    finite: list[tuple[int, int]] | None = None
    """Runs of samples that take part; None: all."""
    weights: dict[torch.device, Tensor] = field(default_factory=dict)
    """What carried gradients are weighted with, on every device that has some."""

    def add(self, squares_B: Tensor) -> None:
        """One parameter's share of the squared norms."""
        if self.squares_B is None:
            self.squares_B = squares_B
        else:
            self.squares_B = self.squares_B + squares_B.to(self.squares_B.device)


@dataclass(frozen=True)
class Clipped:
    """What a backward did, for whoever looks at it. Not covered by ε."""

    norms_B: Tensor
    """Of each sample's gradient."""
    factors_B: Tensor
    nonfinite: int
    """Samples that were left out."""


class Sink(Protocol):
    """Takes the clipped sums."""

    def receive(self, name: str, total: Tensor | None) -> None:
        """A parameter's sum; None if it has none."""

    def settle(self) -> None:
        """All of this backward were handed over."""


class Clipping:
    """The rule, and the listener that carries it out."""

    withholds = True
    per_sample = True
    batch_size: int | None = None
    takes_shares = False
    statistics = ()
    sample_ids: Tensor | None = None

    def __init__(
        self,
        hub: Hub,
        trained: Mapping[str, nn.Parameter],
        sink: Sink,
        *,
        max_grad_norm: float,
        loss_reduction: str | float = "mean",
        loss_scale: "float | torch.amp.GradScaler" = 1.0,
        storage: Storage = "auto",
        algorithm: NormAlgorithm = "auto",
        budget: int | None = None,
        tuning: Tuning | None = None,
        stopwatch: Stopwatch | None = None,
        proof: str | int = "auto",
    ) -> None:
        """Nothing is installed yet.

        Args:
            hub: of the model.
            trained: the parameters that the norm covers and that get a sum, in a fixed order.
            sink: takes each sum.
            max_grad_norm: C.
            loss_reduction: "mean" or "sum" over samples, or the coefficient of one sample's loss.
            loss_scale: what the loss is multiplied by, or the scaler that does it.
            storage: what is held between the norms and the sums.
            algorithm: forced on linear layers, or "auto".
            budget: bytes that may be held; None: as much as the step's own activations.
            tuning: optimisations to leave out.
            stopwatch: where times go.
            proof: whether it is shown that each row depends on its sample alone.
        """
        self.proof = proof
        self.on_proof_due: Callable[[], bool] = lambda: False
        """Asked before every forward whether one run of the proof is to be repeated."""
        self.on_proof_failed: Callable[[], None] = lambda: None
        """Called when a repeated run failed."""
        self._hub, self._trained, self._sink = hub, dict(trained), sink
        self.max_grad_norm, self.loss_reduction, self.loss_scale = max_grad_norm, loss_reduction, loss_scale
        self.storage, self.budget = storage, budget
        self.tuning, self.stopwatch = tuning or Tuning(), stopwatch or Stopwatch(on=False)
        self.again = False
        self.paused = False
        """True while norms are looked at and no sum is to be formed."""
        self.allows_two_passes = False
        self.last: Clipped | None = None
        self.passes = 0
        """Backwards that were carried out."""
        self._guessed_right = True
        """False after a backward with a sample in doubt: the next one begins no sum that it may have to throw away."""
        self.on_begin: Callable[[int], None] = lambda rows: None
        """Called with the rows of a backward before anything is summed; may refuse."""
        self.on_done: Callable[[], None] = lambda: None
        """Called when a backward was carried out."""
        self.on_watch: Callable[[str, Tensor], None] = lambda name, tensor: None
        """Shown every tensor that stands for a parameter."""
        self.plan: ClippingPlan | None = None
        adaptive = self.tuning.adaptive or algorithm != "auto"
        self.foresight = Foresight(self._trained, storage, algorithm if adaptive else "direct", budget)
        self._works: dict[int, ClippingWork] = {}
        self._blank: set[int] = set()
        self._leaf = torch.autograd.graph.get_gradient_edge(hub.probe).node
        """Runs in every `backward()`, and in none of `torch.autograd.grad`."""

    # ---- listening -------------------------------------------------------------------------------------------------

    def foresee(self, tap: Any, kept: list[Tensor], output: Any) -> None:
        """Note the shapes of one use of a layer."""
        self.foresight.see(tap, kept, output)

    def pass_info(self, number: int, batch: int) -> PassInfo:
        """How the carried gradients of a pass are read."""
        reduction = self.loss_reduction
        factor = {"mean": float(batch), "sum": 1.0}[reduction] if isinstance(reduction, str) else 1.0 / reduction
        self.foresight.begin(number, batch)
        self._blank = {n for n in self._blank if n > number - REMEMBERED} | ({number} if self._hub.blank else set())
        return PassInfo(number, batch, None, None, None, factor, self.loss_scale)

    def layer(self, record: LayerRecord) -> None:
        """Parameters say it all."""

    def watch(self, parameter: str, tensor: Tensor) -> None:
        """The tensor that stands for a parameter in this forward.

        Raises:
            GramianError: if it is none of the optimizer's.
        """
        known = self._trained.get(parameter)
        if known is not None and tensor is not known and not isinstance(known, DTensor):
            raise GramianError(
                f"{parameter}: ran on another tensor than the optimizer's parameter (functional_call?), which would get no "
                "gradient; expected a call of the module on its own parameters"
            )
        self.on_watch(parameter, tensor)

    def proof_is_due(self) -> bool:
        """True on the steps that the engine draws."""
        return self.on_proof_due()

    def proof_failed(self) -> None:
        """A repeated run failed."""
        self.on_proof_failed()

    def proof_stays_open(self) -> None:
        """Nothing may be released of a batch that proves nothing.

        Raises:
            GramianError: always.
        """
        raise GramianError(
            "batch: all its samples are equal, so that it cannot be shown whose row is which; expected samples that differ, or "
            'proof="off"'
        )

    def failed_pass(self, info: PassInfo) -> None:
        """A backward broke off: nothing of it was written, and nothing is held any longer."""
        self._works.pop(info.number, None)

    def parameter(self, record: ParameterRecord) -> None:
        """One parameter, all uses joined: add its norm, hold what its sum needs."""
        work = self._open(record.info)
        if work.idle or work.blank or record.parameter not in self._trained or not record.info.batch:
            return
        if work.factors_B is not None:
            self._sum_now(work, record)
            return
        row = self._row(work, record)
        work.slack = max(work.slack, SLACK[record.gradient.dtype])
        with self._time("norm", record.parameter, record.gradient, row.way):
            if row.way == "sum":
                work.sums[record.parameter] = flat(record.gradient.per_sample())
                return
            held = self._norm(work, record, row)
        if not self._norms_alone(work):
            work.held[record.parameter] = SavedForClipping.of(held)
            work.bytes_held += row.held

    def _open(self, info: PassInfo) -> ClippingWork:
        work = self._works.get(info.number)
        if work is None:
            if (
                self._works
                and not next(iter(self._works.values())).idle
                and next(iter(self._works.values())).factors_B is None
            ):
                raise GramianError(
                    "backward: goes through two forwards of the model, so a sample's gradient would be clipped in two parts; "
                    "expected one forward for each backward (rows of one sample next to each other in one batch)"
                )
            work = self._works[info.number] = ClippingWork(info, self.foresight.take(info.number, info.batch))
            work.idle, work.blank = not accumulates(self._leaf), info.number in self._blank
            work.begun = self.stopwatch.now(next(iter(self._trained.values())).is_cuda)
            if work.plan is not None:
                self.plan = work.plan
            if not work.idle:
                self._refuse_over_budget(work)
                if not self.paused:
                    self.on_begin(0 if work.blank else info.batch)
        return work

    def _refuse_over_budget(self, work: ClippingWork) -> None:
        unplanned = work.plan is None and self.storage == "two_pass" and not self.again
        if self.paused or (not unplanned and (work.plan is None or not work.plan.two_pass or self.allows_two_passes)):
            return
        self._works.clear()
        if unplanned and self.allows_two_passes:
            raise GramianError(
                'clipping: "two_pass" through a compiled graph; expected eager mode, or another clipping'
            )
        if self.storage == "two_pass":
            raise GramianError('clipping: "two_pass" needs two backwards; expected engine.backward(loss)')
        raise GramianError(
            f"memory_budget: the plan does not fit; expected a larger one, a smaller max_physical_batch, or "
            f"engine.backward(loss), which may take two passes\n{work.plan}"
        )

    def _norms_alone(self, work: ClippingWork) -> bool:
        return self.again or self.paused

    def _row(self, work: ClippingWork, record: ParameterRecord) -> ClippingRow:
        """How this parameter is handled: as planned, if the plan foresaw these shapes."""
        row = None if work.plan is None else work.plan.get(record.parameter)
        if row is None or row.tokens != record.gradient.tokens:
            share = share_of(record.parameter, record.gradient)
            row = self.foresight.choose(share, None if self._norms_alone(work) else work.bytes_held)
        work.rows[record.parameter] = row
        return row

    # ---- norms -----------------------------------------------------------------------------------------------------

    def _norm(self, work: ClippingWork, record: ParameterRecord, row: ClippingRow) -> PerSampleGradient:
        """Add the parameter's norms; what is to be held of it."""
        gradient = record.gradient
        if row.way == "keep" and not self._norms_alone(work):
            kept = ExplicitGradient(_per_sample_in_own_dtype(gradient), gradient.dtype)
            work.add(kept.squared_norms())
            return kept
        if record.borrowed and not self._norms_alone(work):
            gradient = gradient.copy()
        if isinstance(gradient, Outer) and gradient.tokens > 1:
            if row.way == "gram":
                self._join_grams(work, record.parameter, gradient, at_once=record.borrowed)
            else:
                self._doubt(work, {record.parameter: gradient}, *direct_of(gradient))
        else:
            work.add(gradient.squared_norms())
        return gradient

    def _join_grams(self, work: ClippingWork, name: str, gradient: Outer, at_once: bool) -> None:
        """Wait for layers that share a side with this one (q/k/v, gate/up): they come one after the other."""
        waiting = work.together
        if waiting and (len(waiting) == MOST_TOGETHER or not _share_a_side([*waiting.values(), gradient])):
            self._flush(work)
        work.together[name] = gradient
        if at_once:
            self._flush(work)

    def _flush(self, work: ClippingWork) -> None:
        if work.together:
            outers, work.together = work.together, {}
            self._doubt(work, outers, *gram_of([*outers.values()]))

    def _doubt(self, work: ClippingWork, outers: Mapping[str, Outer], squares_B: Tensor, doubtful_B: Tensor) -> None:
        doubt = Doubt(outers, squares_B, doubtful_B)
        if self._norms_alone(work):  # nothing will be there later
            self._settle(work, doubt, bool(doubtful_B.any()))
            work.add(doubt.squares_B)
        else:
            work.doubts.append(doubt)

    def _settle(self, work: ClippingWork, doubt: Doubt, doubtful: bool) -> None:
        """Write the gradients of doubtful samples down, wide: their norms are then those of what is summed."""
        if not doubtful:
            return
        chosen, squares_K = doubt.doubtful_B.nonzero()[:, 0], []
        for name, outer in doubt.outers.items():
            written = ExplicitGradient(Outer(outer.left_BTM[chosen], outer.right_BTN[chosen]).per_sample())
            squares_K.append(written.squared_norms())
            work.written[name] = (chosen, None if self._norms_alone(work) else written)
        doubt.squares_B[chosen] = torch.stack(squares_K).sum(0)

    def _guess(self, work: ClippingWork) -> tuple[Tensor, Callable[[], list[bool]]]:
        """Set c as if no sample were in doubt and all were finite; nobody waits for the device.

        Returns:
            The squared norms [B] without those that may be in doubt, and what `_confirm` waits for.
        """
        self._flush(work)
        work.small = self._groups(work)
        for sums_BN, _ in work.small:
            work.add(row_squares(sums_BN))
        if work.squares_B is None:
            work.squares_B = torch.zeros(0 if work.blank else work.info.batch)
        sure_B, flags = work.squares_B, self._flags(work, work.squares_B)
        for doubt in work.doubts:
            work.add(doubt.squares_B)
        self._weigh(work)
        return sure_B, flags

    def _confirm(self, work: ClippingWork, sure_B: Tensor, flags: list[bool]) -> bool:
        """True if the guess was right; else doubtful samples are written down, others left out, and c is set again."""
        if not any(flags):
            return True
        work.totals.clear()
        work.squares_B = sure_B
        for doubt, doubtful in zip(work.doubts, flags, strict=False):
            self._settle(work, doubt, doubtful)
            work.add(doubt.squares_B)
        clipped = self._weigh(work)
        finite_B = clipped.norms_B.isfinite()
        if not bool(finite_B.all()):
            work.finite = _runs(finite_B.tolist())
            left_out = work.info.batch - sum(stop - start for start, stop in work.finite)
            self.last = replace(clipped, nonfinite=left_out)
        return False

    def _weigh(self, work: ClippingWork) -> Clipped:
        """c [B] from the squared norms; 0 for a sample that is not finite."""
        assert work.squares_B is not None
        squares_B = work.squares_B
        norms_B = squares_B.clamp(min=0).sqrt() * work.info.scale
        limit = self.max_grad_norm / (1 + work.slack)
        work.factors_B = torch.where(norms_B.isfinite(), (limit / norms_B).clamp(max=1.0), 0.0)
        work.weights.clear()
        self.last = Clipped(norms_B, work.factors_B, nonfinite=0)
        return self.last

    @staticmethod
    def _flags(work: ClippingWork, squares_B: Tensor) -> Callable[[], list[bool]]:
        """Whether each group of Grams is in doubt, and whether anything is not finite; reading it waits for the device."""
        device = squares_B.device
        squares_KB = torch.stack([squares_B, *(doubt.squares_B.to(squares_B) for doubt in work.doubts)])
        finite = squares_KB.isfinite().all()[None]
        doubtful = [doubt.doubtful_B.to(device) for doubt in work.doubts]
        found = torch.cat([torch.stack(doubtful).any(1), ~finite] if doubtful else [~finite])
        return read_later(found)

    # ---- sums ------------------------------------------------------------------------------------------------------

    def end_of_pass(self, info: PassInfo) -> None:
        """The backward is over: clip and sum, or after the first of two passes remember the factors."""
        work = self._works[info.number] if info.number in self._works else self._open(info)
        cuda = next(iter(self._trained.values())).is_cuda
        if work.idle:
            del self._works[info.number]
            return
        if work.factors_B is not None:
            del self._works[info.number]
            self._hand_on(work, lambda name: work.totals.pop(name, None))
            return
        if not self.again:
            self.stopwatch.add("backward", work.begun, cuda)
            del self._works[info.number]
        with self.stopwatch.time("factors", cuda=cuda):
            sure_B, flags = self._guess(work)
        ahead = [] if self._norms_alone(work) else self._sum_ahead(work)
        with self.stopwatch.time("factors", cuda=cuda):
            right = self._guessed_right = self._confirm(work, sure_B, flags())
        work.doubts.clear()
        if not right and not self._norms_alone(work):
            self._sum_small(work)
        work.sums.clear()
        work.small.clear()
        if self.again:
            work.squares_B = None
        if self._norms_alone(work):
            return
        for name in ahead if right and self.tuning.release else ():
            del work.held[name]
        if work.plan is None:
            self.plan = ClippingPlan(tuple(work.rows.values()), self.budget, two_pass=False)
        if self.tuning.layerwise:
            self._hand_on(work, lambda name: self._sum_held(work, name))
        else:
            totals = {name: self._sum_held(work, name) for name in self._trained}
            self._hand_on(work, lambda name: totals.pop(name))

    def _hand_on(self, work: ClippingWork, total_of: Callable[[str], Tensor | None]) -> None:
        for name in self._trained:
            self._sink.receive(name, total_of(name))
        self._sink.settle()
        self.passes += 1
        self.on_done()

    def _groups(self, work: ClippingWork) -> list[tuple[Tensor, list[str]]]:
        """The small per-sample gradients side by side, [B, N], for each device and dtype of the parameters."""
        groups: dict[Any, list[str]] = {}
        for name, sums_BN in work.sums.items():
            groups.setdefault((sums_BN.device, sums_BN.dtype, self._trained[name].dtype), []).append(name)
        return [(torch.cat([work.sums[name] for name in names], dim=1), names) for names in groups.values()]

    def _sum_ahead(self, work: ClippingWork) -> list[str]:
        """Let the device begin with sums while the host waits to hear whether c is right: those that are handed on first."""
        self._sum_small(work)
        if not self._guessed_right:
            return []
        ahead, products = [], PRODUCTS_AHEAD
        kept = [held.gradient for held in work.held.values() if isinstance(held.gradient, ExplicitGradient)]
        room = KEPT_AHEAD * sum(gradient.gradients_B.nbytes for gradient in kept)
        for name, p in self._trained.items():
            if name in work.held:
                if isinstance(work.held[name].gradient, ExplicitGradient):
                    room -= p.numel() * wide_dtype(p).itemsize
                else:
                    products -= 1
                if min(products, room) < 0:
                    break
                work.totals[name] = self._sum_of(work, name, work.held[name])
                ahead.append(name)
        return ahead

    def _sum_small(self, work: ClippingWork) -> None:
        """The sums of all biases and norms at once, as views of one tensor."""
        for sums_BN, names in work.small:
            with self.stopwatch.time("clip", "biases and norms", "sum", cuda=sums_BN.is_cuda):
                total_N = self._sum(work, wide_dtype(self._trained[names[0]]), ExplicitGradient(sums_BN))
            sizes = [work.sums[name].shape[1] for name in names]
            for name, total in zip(names, total_N.split(sizes), strict=True):
                work.totals[name] = total.reshape(self._trained[name].shape)

    def _sum_held(self, work: ClippingWork, name: str) -> Tensor | None:
        if name in work.totals:
            return work.totals.pop(name)
        held = work.held.pop(name, None) if self.tuning.release else work.held.get(name)
        return None if held is None else self._sum_of(work, name, held)

    def _sum_of(self, work: ClippingWork, name: str, held: SavedForClipping) -> Tensor:
        held.check(name)
        with self._time("clip", name, held.gradient, work.rows[name].way):
            return self._sum(work, wide_dtype(self._trained[name]), held.gradient, name)

    def _sum_now(self, work: ClippingWork, record: ParameterRecord) -> None:
        """In the second pass: the parameter's sum at once."""
        with self._time("clip", record.parameter, record.gradient, "two_pass"):
            dtype = wide_dtype(self._trained[record.parameter])
            work.totals[record.parameter] = self._sum(work, dtype, record.gradient, record.parameter)

    def _sum(self, work: ClippingWork, dtype: torch.dtype, gradient: PerSampleGradient, name: str = "") -> Tensor:
        """Σ c_i g_i times the loss scale: the carried gradients, weighted with c_i·B for a mean loss."""
        assert work.factors_B is not None
        device = gradient.tensors()[0].device
        if device not in work.weights:
            work.weights[device] = (work.factors_B * work.info.factor).to(device)
        weights_B = work.weights[device]
        if name in work.written:
            return self._sum_with_written(work, dtype, gradient, name)
        if work.finite is None:
            return gradient.weighted_total(weights_B, dtype)
        total = torch.zeros(gradient.shape, dtype=dtype, device=device)
        for start, stop in work.finite:
            total += gradient.select(start, stop).weighted_total(weights_B[start:stop], dtype)
        return total

    def _sum_with_written(
        self, work: ClippingWork, dtype: torch.dtype, gradient: PerSampleGradient, name: str
    ) -> Tensor:
        """The doubtful samples from what was written down, the others as ever; wide, rounded at the end."""
        assert isinstance(gradient, Outer)
        chosen, written = work.written.pop(name)
        if written is None:
            written = ExplicitGradient(Outer(gradient.left_BTM[chosen], gradient.right_BTN[chosen]).per_sample())
        weights_B = work.weights[chosen.device]
        total = written.weighted_total(weights_B[chosen], written.gradients_B.dtype)
        sure = torch.ones(gradient.batch, dtype=torch.bool, device=chosen.device)
        sure[chosen] = False
        runs = work.finite if work.finite is not None else [(0, gradient.batch)]
        for start, stop in runs:
            weights = torch.where(sure, weights_B, 0.0)[start:stop]
            total += gradient.select(start, stop).weighted_total(weights, total.dtype)
        return total.to(dtype)

    def _time(self, phase: str, name: str, gradient: PerSampleGradient, way: str) -> Any:
        if not self.stopwatch.on:
            return self.stopwatch.time(phase)
        tensors = gradient.tensors()
        flops = 0.0
        if isinstance(gradient, Outer):
            rows, columns = gradient.shape
            batch, tokens = gradient.batch, gradient.tokens
            norms = {"gram": tokens * (tokens + 1) * (rows + columns), "rank1": 2 * (rows + columns)}
            product = 2 * tokens * rows * columns
            flops = float(batch * (norms.get(way, product) if phase == "norm" else product))
        nbytes = float(sum(t.nbytes for t in tensors))
        return self.stopwatch.time(phase, name, way, flops, nbytes, tensors[0].is_cuda)


def read_later(t: Tensor) -> Callable[[], list[Any]]:
    """Copy a vector to the host without waiting; what is returned waits for it, and not for what was queued since."""
    if not t.is_cuda:
        return t.tolist
    copied = t.to("cpu", non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(t.device))

    def read() -> list[Any]:
        arrived.synchronize()
        return list(copied.tolist())

    return read


def _per_sample_in_own_dtype(gradient: PerSampleGradient) -> Tensor:
    """[B, *shape] in the narrowest dtype that took part."""
    if isinstance(gradient, Outer) and gradient.left_BTM.dtype == gradient.right_BTN.dtype:
        return torch.bmm(gradient.left_BTM.mT, gradient.right_BTN)  # accumulated wide, rounded once
    return gradient.per_sample().to(gradient.dtype)


def _share_a_side(outers: Sequence[Outer]) -> bool:
    first, rest = outers[0], outers[1:]
    return all(same_tensor(first.right_BTN, outer.right_BTN) for outer in rest) or all(
        same_tensor(first.left_BTM, outer.left_BTM) for outer in rest
    )


def _runs(flags: Sequence[bool]) -> list[tuple[int, int]]:
    """[start, stop) of every run of True."""
    runs, start = [], None
    for i, flag in enumerate([*flags, False]):
        if flag and start is None:
            start = i
        elif not flag and start is not None:
            runs.append((start, i))
            start = None
    return runs
