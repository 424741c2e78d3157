"""A refresh on the user's own passes: one backward or several, each with its own loss terms and token weights.

`KFACCapture` is the context that `kfac.capture(...)` returns on a step that refreshes. Its two statistics (Kronecker sums
of layers, exact sums of the remaining parameters) observe every backward in the `with` block; leaving it makes factors.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.curvature.estimate.eigenvalue_sums import EigenvalueSums
from gramian.curvature.estimate.kronecker_sums import KroneckerSums
from gramian.curvature.estimate.refresh_pass import RefreshPass
from gramian.curvature.estimate.remainder_sums import RemainderSums
from gramian.curvature.refresh.refresh_schedule import fail_refresh
from gramian.curvature.state import CurvatureState
from gramian.parallel.exchange import Exchange
from gramian.parallel.tensor_parallel import SampleAssignment, TensorParallel
from gramian.taps.capture import Capture, check_arguments
from gramian.taps.model.user_names import is_compiled, unwrap
from gramian.taps.model.whole_layers import whole_classes
from gramian.taps.records import PassInfo

ONE_BACKWARD = "capture: got a second backward; expected cap.next(num_terms=...) before each further one's forward"


@dataclass(frozen=True)
class LossArguments:
    """The arguments of `kfac.capture` that describe the loss; each field is explained there."""

    loss_reduction: str | float
    num_terms: float | None
    token_weights: Tensor | None
    loss_scale: "float | torch.amp.GradScaler" = 1.0
    batch_size: int | None = None
    sample_ids: Tensor | None = None

    def check(self) -> None:
        """Raise a GramianError for the first argument with a value that cannot describe a loss."""
        check_arguments(self.loss_reduction, self.batch_size, None, self.token_weights, self.loss_scale)
        check_terms(self.num_terms, self.token_weights)


class KFACCapture(Capture):
    """The context of a K-FAC refresh on the user's own forwards and backwards.

    ```python
    with kfac.capture(model, num_terms=y0.numel()) as cap:
        loss(model(x0), y0).backward()
        cap.next(num_terms=y1.numel())  # before each further forward and backward
        loss(model(x1), y1).backward()
    ```
    """

    takes_shares = True

    def __init__(
        self,
        state: CurvatureState,
        model: nn.Module,
        kronecker: KroneckerSums | EigenvalueSums,
        remainder: RemainderSums | None,
        finish: "Callable[[CurvatureState, KFACCapture], None]",
        loss: LossArguments,
        estimate: str,
        exchange: Exchange | None,
    ) -> None:
        """Set up both statistics; the model is not touched before the `with` block. `remainder` None: K-FAC blocks alone.

        `finish` is called at its end and makes factors from the sums. `estimate` is "empirical" or "mc", for the record.
        """
        super().__init__(
            model,
            *self._needed(kronecker, remainder),
            loss_reduction=loss.loss_reduction,
            batch_size=loss.batch_size,
            token_weights=loss.token_weights,
            loss_scale=loss.loss_scale,
        )
        self._curvature, self._finish = state, finish
        self.kronecker, self.remainder, self.estimate = kronecker, remainder, estimate
        self.exchange = exchange
        """Collectives among the processes that share the refresh; None: this process alone."""
        self.sample_sharding = sample_sharding(model, exchange)
        """(rank, size) by which samples are numbered over the processes that share the refresh; None: one process has all."""
        self.draw = 0
        """Number of the draw of labels that the next pass uses."""
        self.other_weights: tuple[Tensor, ...] = ()
        """Token weights [B, T] for layers that see another number of tokens than token_weights have (an encoder's)."""
        self.no_backward = ""
        """Text of the error to raise if no process had a backward inside the capture."""
        self.terms = 0.0
        """Number of loss terms of the backwards so far."""
        self.samples = 0
        """Number of samples whose backward has ended."""
        self._next: tuple[float | None, Tensor | None, Tensor | None] | None = None
        self._announcements = 0
        self._counted: dict[int, int] = {}
        self._whole = whole_classes(self._hub.root_module)
        self._started_samples = 0
        self.next(num_terms=loss.num_terms, token_weights=loss.token_weights, sample_ids=loss.sample_ids)

    @staticmethod
    def _needed(kronecker: KroneckerSums | EigenvalueSums, remainder: RemainderSums | None) -> list[Any]:
        """The statistics of the capture: without the second one if all blocks are K-FAC's."""
        outside = remainder is not None and any(spec.kind != "kronecker" for spec in remainder.specs.values())
        return [kronecker, remainder] if outside else [kronecker]

    def _take_whole_layers(self) -> None:
        """Begin anew with the blocks of a model some of whose layers a proof has just found to be tapped as one.

        A GramianError is raised if blocks have sums of earlier passes, or factors of earlier refreshes.
        """
        root, state, now = self._hub.root_module, self._curvature, whole_classes(self._hub.root_module)
        if now == self._whole:
            return
        new = ", ".join(sorted(kind.__name__ for kind in now - self._whole))
        if self._started_samples or not isinstance(self.kronecker, KroneckerSums):
            raise GramianError(
                f"{new}: uses weights of its children in this forward, and did not in those before; expected the same in "
                "every forward of a refresh"
            )
        state.specs = self.kronecker.specs = state.checked_specs(root)
        if self.remainder is not None:
            self.remainder.specs = state.specs_without_assumptions(root)
        self.statistics, self._whole = self._needed(self.kronecker, self.remainder), now
        self._sums = [statistic.start(self._hub.parameters) for statistic in self.statistics]

    @property
    def passes(self) -> int:
        """Number of backwards inside this capture that have ended."""
        return self._passes

    @property
    def problem(self) -> str:
        """Why the sums of this capture cannot be used, as a text; "" if they can."""
        return "a backward failed half-way inside the capture" if self._failed else ""

    def next(
        self, *, num_terms: float | None = None, token_weights: Tensor | None = None, sample_ids: Tensor | None = None
    ) -> None:
        """Announce the next backward: its number of loss terms, its token weights [B, T], the global ids of its samples [B].

        None for num_terms: the sum of token_weights, which must then be given (else a GramianError); None for token_weights:
        found from the output gradients; None for sample_ids: samples are numbered over processes (`global_ids`).
        """
        check_terms(num_terms, token_weights)
        self._next = (num_terms, token_weights, sample_ids)
        self._announcements += 1

    def __enter__(self) -> Self:
        """Begin to observe the model's forwards and backwards."""
        self._curvature.refuse_nested()
        try:
            super().__enter__()
        except BaseException as error:  # other processes are inside theirs
            self._fail(f"{type(error).__name__} on entering the capture", f" ({error})")
            raise
        if self._hub.tensor_parallel is not None and self.exchange is not None:
            self._hub.tensor_parallel.exchange.sent = self.exchange.sent  # one account of bytes
        self._curvature.capturing = True
        self._curvature.private |= self._hub.private
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop observing the model and, if no error occurred, make new factors from the sums. Collective."""
        try:
            self._leave(kind, error, trace)
        finally:
            self._sums = []  # rows of activations, which must not live as long as the user's variable

    def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop observing and finish the refresh; announce any error to the other processes, which wait for this one."""
        try:
            super().__exit__(kind, error, trace)
        except BaseException as problem:
            expected = isinstance(problem, GramianError) and not self._passes
            if not expected or not (self._failed or self.exchange is not None):
                self._fail(str(problem))
                raise
            self.no_backward = str(problem)  # none ran here: one failed, or other processes had some
        if kind is not None:
            self._fail(f"{kind.__name__} inside the capture", f" ({error})")
        else:
            self._finish(self._curvature, self)

    def _fail(self, reason: str, detail: str = "") -> None:
        fail_refresh(self._curvature, self.exchange, reason, detail)

    def pass_info(self, number: int, batch: int) -> PassInfo:
        """Describe forward `number` of `batch` samples: their ids, token weights, and 1 / the coefficient of one loss term.

        A GramianError is raised if `next` was not called after the last backward, or for token weights of a wrong shape.
        """
        if self._next is None:
            raise GramianError(ONE_BACKWARD)
        self._take_whole_layers()
        terms, weights, ids = self._next
        if weights is not None and (weights.dim() != 2 or weights.shape[0] != batch):
            raise GramianError(f"token_weights: expected shape [{batch}, T], got {list(weights.shape)}")
        if weights is not None and not bool(((weights >= 0) & weights.isfinite()).all()):
            raise GramianError(
                "token_weights: contain a negative number, NaN or infinity; expected weights of 0 or more"
            )
        count = float(weights.sum()) if terms is None and weights is not None else float(terms or 0)
        mean = count if count > 0 else 1.0  # a pass without terms has no gradient either
        given = self._loss_reduction
        factor = {"mean": mean, "sum": 1.0}[given] if isinstance(given, str) else 1.0 / given
        first, self._started_samples = self._started_samples, self._started_samples + batch
        samples_B = global_ids(ids, first, batch, self.sample_sharding)
        forwards = self.kronecker.selection.forwards
        forwards[self._announcements] = forwards.get(self._announcements, 0) + 1
        tensor_parallel = self._hub.tensor_parallel
        mine = slice(0, batch) if tensor_parallel is None else tensor_parallel.share(batch)
        return RefreshPass(
            number=number,
            batch=mine.stop - mine.start,
            units=None,
            sample_ids=None,
            token_weights=None if weights is None else weights[mine],
            other_weights=tuple(other[mine] for other in self.other_weights),
            factor=factor,
            loss_scale=self._loss_scale,
            num_terms=count,
            samples_B=samples_B[mine],
            draw=self.draw,
            announcement=self._announcements,
            whole_batch=batch,
            tensor_parallel=tensor_parallel,
        )

    def end_of_pass(self, info: PassInfo) -> None:
        """Count the loss terms of a backward that ended: once, even if it went through several forwards.

        A GramianError is raised for a second backward without `next` before it.
        """
        super().end_of_pass(info)
        assert isinstance(info, RefreshPass)
        backward = torch._C._current_graph_task_id()
        if info.announcement not in self._counted:
            self._counted[info.announcement] = backward
            # Of the processes that see the same terms one counts them.
            if info.tensor_parallel is None or info.tensor_parallel.first:
                self.terms += info.num_terms
        elif self._counted[info.announcement] != backward:
            raise GramianError(ONE_BACKWARD)
        self.samples += info.batch
        self._next = None

    def output_layer(self) -> str | None:
        """Name of the layer whose output the model's forward returned; None while it is not known."""
        return self._hub.output_layer

    def collected(self) -> tuple[Any, Any]:
        """({K-FAC block: its sums}, {other parameter: its sum}); both empty if a backward failed half-way."""
        if self.problem:
            return {}, {}
        there = self.remainder is not None and self.remainder in self.statistics
        outside = self._sums_of(self.remainder) if there and self.remainder is not None else {}
        return self._sums_of(self.kronecker), outside


class IdleCapture:
    """The context that `kfac.capture(...)` returns on a step that does not refresh: it observes nothing."""

    def __enter__(self) -> Self:
        """Observe nothing: this step does not refresh the factors."""
        return self

    def __exit__(self, *_: object) -> None:
        """Change nothing: this step does not refresh the factors."""

    def next(
        self, *, num_terms: float | None = None, token_weights: Tensor | None = None, sample_ids: Tensor | None = None
    ) -> None:
        """Check the arguments of the next backward, as a refreshing capture does, and do nothing else."""
        check_terms(num_terms, token_weights)


def sample_sharding(model: nn.Module, exchange: Exchange | None) -> SampleAssignment | None:
    """(rank, size) by which this process numbers its samples; a tensor-parallel group counts as one; None: one process has all.

    A GramianError is raised for a tensor-parallel model that is compiled, or whose processes do not join their sums.
    """
    tensor_parallel = TensorParallel.of(unwrap(model))
    if tensor_parallel is not None and any(is_compiled(module) for module in model.modules()):
        raise GramianError("model: is tensor parallel and compiled, which K-FAC cannot see into; expected eager mode")
    if tensor_parallel is None or tensor_parallel.size == 1:
        return None if exchange is None else SampleAssignment(exchange.rank, exchange.size)
    if exchange is None:
        raise GramianError(
            'kfac_distributed_reduce: is "none", but no process has all features of a tensor-parallel layer; '
            'expected "gram", "gather" or "dense"'
        )
    return tensor_parallel.assignment(exchange)


def global_ids(given: Any, first: int, batch: int, sharding: SampleAssignment | Exchange | None) -> Tensor:
    """Ids [B] of a batch's samples among those of all processes: `given` by the user, or numbered.

    If `given` is None, the i-th sample of process r of W (`sharding`; None: one process) is sample i·W + r, as a
    `DistributedSampler` numbers them; one process that sees all samples in order has the same ids. `first` is the number of
    samples on this process before this batch. A GramianError is raised if `given` are not integers [B].
    """
    if given is None:
        local_B = torch.arange(first, first + batch)
        return local_B if sharding is None else local_B * sharding.size + sharding.rank
    if isinstance(given, Tensor) and given.shape == (batch,) and not given.is_floating_point():
        return given
    got = list(given.shape) if isinstance(given, Tensor) else type(given).__name__
    raise GramianError(f"sample_ids: expected integers of shape [{batch}], got {got}")


def check_terms(num_terms: Any, token_weights: Any) -> None:
    """Raise a GramianError unless `num_terms`, a number of 0 or more, or a tensor of token weights [B, T] is given."""
    if token_weights is not None and not isinstance(token_weights, Tensor):
        raise GramianError(f"token_weights: expected a tensor of shape [B, T], got {type(token_weights).__name__}")
    if num_terms is None:
        if token_weights is None:
            raise GramianError(
                "num_terms: expected the number of loss terms behind this loss (targets that are not ignored), or token_weights"
            )
        return
    number = isinstance(num_terms, int | float) and not isinstance(num_terms, bool)
    number = number or (isinstance(num_terms, Tensor) and num_terms.numel() == 1)
    if not number or not 0 <= float(num_terms) < math.inf:
        got = f"a tensor of shape {list(num_terms.shape)}" if isinstance(num_terms, Tensor) else repr(num_terms)
        raise GramianError(f"num_terms: expected a number of loss terms, got {got}")
