"""Exact per-sample clipping as a gradient rule: Σ_i min(1, C/‖g_i‖) g_i from one ordinary backward.

g_i is the gradient of sample i's own loss, C the clip norm. The backward itself contains g_i times the loss scale, divided by
the batch size B for a mean loss.

Taps (hooks) run every layer on detached weights, so autograd forms no weight gradient at all. As the backward passes a
parameter's layer, its per-sample norms are computed (`sample_norms`), and the tensors that its weighted sum needs later (input
and output gradient, or the per-sample gradients themselves) are saved. At the end of the backward all norms are known, and the
clipped sums are formed parameter by parameter (`weighted_sums`), each freeing its saved tensors. With two passes nothing is
saved: the first backward computes norms alone, the second forms the sums as it runs.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gramian.core.errors import GramianError
from gramian.parallel.rendezvous import ONCE, TWICE
from gramian.privacy.clipping.clip_factors import SLACK, ClipFunction, ClippedBatch
from gramian.privacy.clipping.clipping_plan import ClippingPlan, ClippingRow
from gramian.privacy.clipping.clipping_planner import REMEMBERED, ClippingPlanner, share_of
from gramian.privacy.clipping.clipping_work import ClippingWork, SavedForClipping, SumReceiver
from gramian.privacy.clipping.sample_norms import add_metric_norms, add_norms, find_factors, let_wait
from gramian.privacy.clipping.step_timing import Stopwatch
from gramian.privacy.clipping.weighted_sums import sum_in_second_pass, sum_small, take_sum
from gramian.privacy.metric.public_metric import PublicMetric
from gramian.privacy.options import PrivacyOptions
from gramian.taps.gradients.per_sample_gradient import flat
from gramian.taps.hub import Hub
from gramian.taps.passes import accumulates
from gramian.taps.records import LayerRecord, ParameterRecord, PassInfo
from gramian.taps.units import Units


class Clipping:
    """The gradient rule of private training: it receives the taps' records and computes norms and clipped sums from them."""

    withholds = True
    per_sample = True
    batch_size: int | None = None
    takes_shares = True
    reads_calls = False
    only: frozenset[str] | None = None
    statistics = ()
    sample_ids: Tensor | None = None
    """The unit of each row [B] or token [B, T] of the next forward, 0, 1, 2 …; −1: padding. None: each row is a unit."""

    def __init__(
        self,
        hub: Hub,
        trained: Mapping[str, nn.Parameter],
        receiver: SumReceiver,
        options: PrivacyOptions,
        stopwatch: Stopwatch,
        proof: str | int,
        clip: ClipFunction,
        metric: PublicMetric | None = None,
    ) -> None:
        """Create the rule for the model of `hub`; nothing is installed yet.

        Norms cover the parameters in `trained`; `receiver` gets their clipped sums in this order, and `clip` scales gradients
        by their norms in the `metric`, if there is one. `proof` is the option of `make_private`.
        """
        self._clip, self._metric = clip, metric
        self.proof = proof
        self.proof_is_due: Callable[[], bool] = lambda: False
        """Function called before every forward; True: repeat the row proof (each row depends on its sample alone) on this
        batch."""
        self.proof_failed: Callable[[], None] = lambda: None
        """Function called when a repeated row proof failed."""
        self._hub, self._trained, self._receiver = hub, dict(trained), receiver
        self._options, self._stopwatch = options, stopwatch
        self.another_backward_follows = False
        """True in the FIRST of two backwards through one forward, which computes norms only; False otherwise."""
        self._allows_two_passes = False
        self.last: ClippedBatch | None = None
        self.on_begin: Callable[[int, int | None], None] = lambda rows, units: None
        """Called with the number of rows of a backward, and of their units (None: each row is one), before anything is summed;
        may raise."""
        self.on_done: Callable[[], None] = lambda: None
        """Called when all clipped sums of a backward were passed to the receiver."""
        self.on_watch: Callable[[str, Tensor], None] = lambda name, tensor: None
        """Called with (name, tensor) for every tensor that a forward uses for a parameter."""
        self.plan: ClippingPlan | None = None
        self.planner = ClippingPlanner(self._trained, options.clipping, options.norm_algorithm, options.budget)
        self._works: dict[int, ClippingWork] = {}
        self._batches: dict[int, tuple[int, int | None, list[int] | None]] = {}
        """{number of a recent pass: (rows of its batch, units, bounds of shares)}, of which a tensor-parallel model's processes
        each clip a share; None: each row is a unit, or shares are even."""
        self._placeholders: set[int] = set()
        """Numbers of the passes whose batch has no samples, and which run on a row of zeros."""
        self._leaf = torch.autograd.graph.get_gradient_edge(hub.probe).node
        """Autograd node of the hub's probe, a leaf of every tapped forward: only `backward()` runs it, not
        `torch.autograd.grad`."""

    def backward(self, loss: Tensor) -> None:
        """Run `loss.backward()`; as two backwards if the clipping plan says that nothing may be stored, on any process."""
        plan = self.planner.newest()
        twice = plan is not None and plan.two_pass
        if self._hub.refusals.in_backward:
            twice = self._hub.refusals.meet(TWICE if twice else ONCE)
        self._allows_two_passes = True
        try:
            if not twice:
                loss.backward()
                return
            self.another_backward_follows = True
            try:
                with self._stopwatch.time("backward", "first", cuda=loss.is_cuda):
                    loss.backward(retain_graph=True)
            finally:
                self.another_backward_follows = False
            with self._stopwatch.time("backward", "second", cuda=loss.is_cuda):
                loss.backward()
        finally:
            self._allows_two_passes = False

    def recover(self) -> None:
        """Do nothing: a backward that broke off has written no gradient (see `failed_pass`)."""

    # ---- listening -------------------------------------------------------------------------------------------------

    def foresee(self, tap: Any, kept: list[Tensor], output: Any) -> None:
        """Record the shapes of the saved inputs (`kept`) and the output of one call of a layer, for the clipping plan."""
        self.planner.see(tap, kept, output)

    def foresee_product(self, name: str, layout: Any, y: Tensor, saved: list[Tensor]) -> None:
        """Record the sizes of one product y of a parameter inside a layer and what is saved of it, for the clipping plan."""
        self.planner.see_product(name, layout, y, saved)

    def pass_info(self, number: int, batch: int) -> PassInfo:
        """Begin pass `number`, a forward of `batch` rows and its backward.

        Returns:
            The units of its rows, and the factor and loss scale by which gradients of the backward become those of each
            sample's own loss.

        Raises:
            GramianError: if `sample_ids` do not fit the batch, or are given by token with the loss_reduction "mean".
        """
        reduction, units = self._options.loss_reduction, None
        if self.sample_ids is not None and not self._hub.blank:
            units = Units.of(self.sample_ids, batch, padding=True, field="ids", ragged=True)
        if units is not None and units.by_token and reduction == "mean":
            raise GramianError(
                'loss_reduction: is "mean", and what a mean over rows is of a unit depends on how units are packed into rows; '
                'expected "sum", or the coefficient of one token\'s loss, with ids by token'
            )
        factor = {"mean": float(batch), "sum": 1.0}[reduction] if isinstance(reduction, str) else 1.0 / reduction
        self.planner.begin(number, batch)
        count = None if units is None else units.count - units.padded
        recent = {n for n in self._placeholders if n > number - REMEMBERED}
        self._placeholders = recent | ({number} if self._hub.blank else set())
        shares, rows = self._hub.tensor_parallel, batch
        if shares is not None:
            shares.divide(None if units is None else self.sample_ids)
            mine = shares.share(batch)
            batch = mine.stop - mine.start
            units = None if units is None else units.of_rows(mine)
        recent_batches = {n: known for n, known in self._batches.items() if n > number - REMEMBERED}
        self._batches = recent_batches | {number: (rows, count, None if shares is None else shares.bounds)}
        return PassInfo(number, batch, units, None, None, factor, self._options.loss_scale)

    def layer(self, record: LayerRecord) -> None:
        """Do nothing, and not called: clipping works on parameter records."""

    def watch(self, parameter: str, tensor: Tensor) -> None:
        """Check that a forward uses the optimizer's own tensor for a parameter, and report it to `on_watch`.

        Raises:
            GramianError: if it is another tensor; those that FSDP2 gathers are allowed.
        """
        known = self._trained.get(parameter)
        if known is not None and tensor is not known and not isinstance(known, DTensor):
            raise GramianError(
                f"{parameter}: ran on another tensor than the optimizer's parameter (functional_call?), which would get no "
                "gradient; expected a call of the module on its own parameters"
            )
        self.on_watch(parameter, tensor)

    def proof_stays_open(self) -> None:
        """Raise a `GramianError` for a batch of equal samples, which cannot show that each row depends on its sample alone."""
        raise GramianError(
            "batch: all its samples are equal, so that it cannot be shown whose row is which; expected samples that differ, or "
            'proof="off"'
        )

    def failed_pass(self, info: PassInfo) -> None:
        """Drop the state of a backward that broke off: no gradient of it was written."""
        self._works.pop(info.number, None)
        if self._hub.tensor_parallel is not None:
            self._hub.tensor_parallel.forget_noted()

    def parameter(self, record: ParameterRecord) -> None:
        """Add one parameter's per-sample squared norms, all uses joined, and save the tensors that its clipped sum needs."""
        work = self._open(record.info)
        if work.ignored or work.placeholder or record.parameter not in self._trained or not record.info.batch:
            return
        if work.factors is not None:
            sum_in_second_pass(work, record)
            return
        row = self._row(work, record)
        work.slack = max(work.slack, SLACK[record.gradient.dtype])
        block = None if work.metric is None else work.metric.blocks.get(record.parameter)
        gradient = let_wait(work, record, row) if block is None else None
        if gradient is None:
            with work.time("norm", record.parameter, record.gradient, row.way):
                if block is None and row.way == "sum":
                    work.small_gradients[record.parameter] = flat(record.gradient.per_sample())
                    return
                gradient = add_norms(work, record, row) if block is None else add_metric_norms(work, record, row, block)
        if not work.norms_only:
            work.saved[record.parameter] = SavedForClipping.of(gradient)
            work.saved_bytes += row.held

    def _open(self, info: PassInfo) -> ClippingWork:
        """The `ClippingWork` of a pass, created when its backward reaches the first layer.

        Raises:
            GramianError: if the backward reaches a second forward, or the plan does not fit into the memory budget.
        """
        work = self._works.get(info.number)
        if work is not None:
            return work
        running = next(iter(self._works.values()), None)
        if running is not None and not running.ignored and running.factors is None:
            raise GramianError(
                "backward: goes through two forwards of the model, so a sample's gradient would be clipped in two parts; "
                "expected one forward for each backward (rows of one sample next to each other in one batch)"
            )
        units = info.units
        even = None if units is None else units.count - units.padded, None
        batch, count, bounds = self._batches.get(info.number, (info.batch, *even))
        if self._hub.tensor_parallel is not None and self._hub.tensor_parallel.bounds != bounds:
            raise GramianError(
                "backward: follows a forward whose rows processes divided otherwise, by its units; expected each backward "
                "before the next forward"
            )
        work = self._works[info.number] = ClippingWork(
            info,
            self.planner.take(info.number, batch),
            self._trained,
            self._clip,
            self._stopwatch,
            norms_only=self.another_backward_follows,
            ignored=not accumulates(self._leaf),
            placeholder=info.number in self._placeholders,
            metric=self._metric,
            start_time=self._stopwatch.now(self._cuda),
        )
        if work.plan is not None:
            self.plan = work.plan
        if not work.ignored:
            self._refuse_over_budget(work)
            self.on_begin(0 if work.placeholder else batch, count)
        return work

    def _refuse_over_budget(self, work: ClippingWork) -> None:
        unplanned = work.plan is None and self._options.clipping == "two_pass" and not self.another_backward_follows
        if not unplanned and (work.plan is None or not work.plan.two_pass or self._allows_two_passes):
            return
        self._works.clear()
        if unplanned and self._allows_two_passes:
            raise GramianError(
                'clipping: "two_pass" through a compiled graph; expected eager mode, or another clipping'
            )
        if self._options.clipping == "two_pass":
            raise GramianError('clipping: "two_pass" needs two backwards; expected engine.backward(loss)')
        raise GramianError(
            f"memory_budget: the plan does not fit; expected a larger one, a smaller max_physical_batch, or "
            f"engine.backward(loss), which may take two passes\n{work.plan}"
        )

    def _row(self, work: ClippingWork, record: ParameterRecord) -> ClippingRow:
        """How this parameter is clipped: as planned if the plan has its number of tokens, otherwise chosen now."""
        row = None if work.plan is None else work.plan.get(record.parameter)
        if row is None or row.tokens != record.gradient.tokens:
            share = share_of(record.parameter, record.gradient)
            row = self.planner.choose(share, None if work.norms_only else work.saved_bytes)
        work.rows[record.parameter] = row
        return row

    def end_of_pass(self, info: PassInfo) -> None:
        """End a backward: compute the clipped sums and pass them to the receiver; after the first of two, only the factors."""
        work, refusals = self._open(info), self._hub.refusals
        second = work.factors is not None
        try:
            with refusals.held():
                if self._hub.tensor_parallel is not None:
                    self._hub.tensor_parallel.require_same_noted()
                if not (work.ignored or second):
                    if not work.norms_only:
                        self._stopwatch.add("backward", work.start_time, self._cuda)
                    self._find_factors(work)
            if refusals.in_backward and not work.ignored:
                refusals.meet("the end of a backward")
        except GramianError:
            del self._works[info.number]
            raise
        if work.norms_only and not (work.ignored or second):
            work.squares.clear()
            return
        del self._works[info.number]
        if work.ignored:
            return
        if work.plan is None and not second:
            self.plan = ClippingPlan(tuple(work.rows.values()), self._options.budget, two_pass=False)
        for name in self._trained:
            self._receiver.receive(name, take_sum(work, name))
        with refusals.told():
            self._receiver.settle()
        self.on_done()

    def _find_factors(self, work: ClippingWork) -> None:
        """Compute the clip factors, and with them the sums of biases and norm layers."""
        with self._stopwatch.time("factors", cuda=self._cuda):
            self.last = find_factors(work)
        if not work.norms_only:
            sum_small(work)
        work.small_gradients.clear()
        work.small_groups.clear()
        if work.padding is not None and bool(work.padding != 0):
            raise GramianError(
                f"ids: rows or tokens of no unit (-1) have a gradient of norm {float(work.padding):.3g}, which would be left "
                "out; expected labels of -100 for them, and no unit that depends on them"
            )

    @property
    def _cuda(self) -> bool:
        return next(iter(self._trained.values())).is_cuda
