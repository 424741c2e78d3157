"""A refresh on the user's own passes: one backward or several, each with its own terms and weights."""

import math
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.curvature.estimate.refresh_sums import KroneckerSums, RefreshPass, RemainderSums
from gramian.parallel.exchange import Exchange
from gramian.parallel.tensor_parallel import Dealt, TensorParallel
from gramian.taps.capture import Capture
from gramian.taps.model.user_names import is_compiled, unwrap
from gramian.taps.records import PassInfo

if TYPE_CHECKING:
    from gramian.curvature.kfac import KFACNaturalGradient

ONE_BACKWARD = "capture: got a second backward; expected cap.next(num_terms=...) before each further one's forward"


class KFACCapture(Capture):
    """What `kfac.capture(...)` gives on a step that refreshes."""

    takes_shares = True

    def __init__(
        self,
        kfac: "KFACNaturalGradient",
        model: nn.Module,
        kronecker: KroneckerSums,
        remainder: RemainderSums,
        *,
        loss_reduction: str | float,
        num_terms: float | None,
        token_weights: Tensor | None,
        loss_scale: "float | torch.amp.GradScaler",
        batch_size: int | None,
        sample_ids: Tensor | None,
        estimate: str,
        others: Exchange | None,
    ) -> None:
        """Check the arguments; the model is not touched before the block is entered."""
        super().__init__(
            model,
            kronecker,
            remainder,
            loss_reduction=loss_reduction,
            batch_size=batch_size,
            token_weights=token_weights,
            loss_scale=loss_scale,
        )
        self._kfac, self.kronecker, self.remainder, self.estimate = kfac, kronecker, remainder, estimate
        self.others = others
        """The processes that share the refresh; None: this one alone."""
        self.dealt = dealt_out(model, others)
        """How the samples are dealt out to them; None: this process has all."""
        self.draw = 0
        """Number of the draw of labels that the next pass has."""
        self.silence = ""
        """What is to be said if no process had a backward."""
        self.terms = 0.0
        self._told: tuple[float | None, Tensor | None, Tensor | None] | None = None
        self._tellings = 0
        self._counted: dict[int, int] = {}
        self._samples = 0
        self.samples = 0
        """Samples whose backward is over."""
        self._tell(num_terms, token_weights, sample_ids)

    @property
    def passes(self) -> int:
        """Backwards that are over."""
        return self._passes

    def next(
        self,
        *,
        num_terms: float | None = None,
        token_weights: Tensor | None = None,
        sample_ids: Tensor | None = None,
    ) -> None:
        """Say how many loss terms stand behind the next backward, which tokens count in it, and whose they are."""
        self._tell(num_terms, token_weights, sample_ids)

    def _tell(self, num_terms: float | None, token_weights: Tensor | None, sample_ids: Tensor | None) -> None:
        check_terms(num_terms, token_weights)
        self._told = (num_terms, token_weights, sample_ids)
        self._tellings += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the taps off; if all went well, make the factors."""
        try:
            self._leave(kind, error, trace)
        finally:
            self._sums = []  # rows of activations, which must not live as long as the user's variable

    def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """What went wrong here is told to the other processes, whatever it is: they wait for this one."""
        try:
            super().__exit__(kind, error, trace)
        except BaseException as problem:
            expected = isinstance(problem, GramianError) and not self._passes
            if not expected or not (
                self._failed or self.others is not None
            ):  # no backward ran: one failed, or others' did
                self._kfac._fail(self, str(problem))
                raise
            self.silence = str(problem)
        if kind is not None:
            self._kfac._fail(self, f"{kind.__name__} inside the capture", f" ({error})")
        else:
            self._kfac._finish(self)

    @property
    def problem(self) -> str:
        """Why the sums are of no use; "" if they are."""
        return "a backward failed half-way inside the capture" if self._failed else ""

    def __enter__(self) -> Self:
        """Install the taps."""
        self._kfac._refuse_nested()
        try:
            super().__enter__()
        except BaseException as error:  # the others are inside theirs
            self._kfac._fail(self, f"{type(error).__name__} on entering the capture", f" ({error})")
            raise
        if self._hub.tensor_parallel is not None and self.others is not None:
            self._hub.tensor_parallel.exchange.sent = self.others.sent  # one account
        self._kfac._open = True
        return self

    def pass_info(self, number: int, batch: int) -> PassInfo:
        """One term's coefficient in the loss of this pass."""
        if self._told is None:
            raise GramianError(ONE_BACKWARD)
        terms, weights, ids = self._told
        if weights is not None and (weights.dim() != 2 or weights.shape[0] != batch):
            raise GramianError(f"token_weights: expected shape [{batch}, T], got {list(weights.shape)}")
        if weights is not None and not bool(((weights >= 0) & weights.isfinite()).all()):
            raise GramianError(
                "token_weights: hold a negative number or NaN, or infinity; expected weights of 0 or more"
            )
        count = float(weights.sum()) if terms is None and weights is not None else float(terms or 0)
        mean = count if count > 0 else 1.0  # a pass without terms has no gradient either
        given = self._loss_reduction
        factor = {"mean": mean, "sum": 1.0}[given] if isinstance(given, str) else 1.0 / given
        first, self._samples = self._samples, self._samples + batch
        samples_B = global_ids(ids, first, batch, self.dealt)
        forwards = self.kronecker.forwards
        forwards[self._tellings] = forwards.get(self._tellings, 0) + 1
        spread = self._hub.tensor_parallel
        mine = slice(0, batch) if spread is None else spread.share(batch)
        return RefreshPass(
            number=number,
            batch=mine.stop - mine.start,
            units=None,
            sample_ids=None,
            token_weights=None if weights is None else weights[mine],
            factor=factor,
            loss_scale=self._loss_scale,
            num_terms=count,
            samples_B=samples_B[mine],
            draw=self.draw,
            telling=self._tellings,
            whole_batch=batch,
            spread=spread,
        )

    def end_of_pass(self, info: PassInfo) -> None:
        """One backward is over: count its terms, once if it went through several forwards."""
        super().end_of_pass(info)
        assert isinstance(info, RefreshPass)
        backward = torch._C._current_graph_task_id()
        if info.telling not in self._counted:
            self._counted[info.telling] = backward
            if info.spread is None or info.spread.first:  # one process of those that see the same terms
                self.terms += info.num_terms
        elif self._counted[info.telling] != backward:
            raise GramianError(ONE_BACKWARD)
        self.samples += info.batch
        self._told = None

    def output_layer(self) -> str | None:
        """The layer whose output the model returns."""
        return self._hub.output_layer

    def collected(self) -> tuple[Any, Any]:
        """The sums of both statistics; none if they are of no use."""
        return ({}, {}) if self.problem else (self._sums_of(self.kronecker), self._sums_of(self.remainder))


class Idle:
    """What `kfac.capture(...)` gives on a step that does not refresh: nothing happens."""

    def __enter__(self) -> Self:
        """Do nothing."""
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def next(
        self,
        *,
        num_terms: float | None = None,
        token_weights: Tensor | None = None,
        sample_ids: Tensor | None = None,
    ) -> None:
        """Check the arguments, as a refreshing capture would."""
        check_terms(num_terms, token_weights)


def dealt_out(model: nn.Module, others: Exchange | None) -> Dealt | None:
    """Who has which samples: each process its own, or all processes of a tensor-parallel group the same; None: this one all.

    Raises:
        GramianError: if a tensor-parallel model is compiled, or its group is not among the processes that join their sums.
    """
    spread = TensorParallel.of(unwrap(model))
    if spread is not None and any(is_compiled(module) for module in model.modules()):
        raise GramianError("model: is tensor parallel and compiled, which K-FAC cannot see into; expected eager mode")
    if spread is None or spread.size == 1:
        return None if others is None else Dealt(others.rank, others.size)
    if others is None:
        raise GramianError(
            'kfac_distributed_reduce: is "none", but no process has whole features of a tensor-parallel layer; '
            'expected "gram", "gather" or "dense"'
        )
    return spread.dealt(others)


def global_ids(given: Any, first: int, batch: int, others: Dealt | Exchange | None) -> Tensor:
    """Ids of a batch's samples among those of all processes, [B].

    Where none are given, the i-th sample of process r of W is sample i·W + r: as a `DistributedSampler` deals them out, so
    that one process which sees them in their order has the same ids.

    Args:
        given: the user's own ids, or None.
        first: samples that came before.
        batch: B.
        others: how samples are dealt out; None: this process has all.

    Raises:
        GramianError: for ids that are none.
    """
    if given is None:
        local_B = torch.arange(first, first + batch)
        return local_B if others is None else local_B * others.size + others.rank
    if isinstance(given, Tensor) and given.shape == (batch,) and not given.is_floating_point():
        return given
    got = list(given.shape) if isinstance(given, Tensor) else type(given).__name__
    raise GramianError(f"sample_ids: expected integers of shape [{batch}], got {got}")


def check_terms(num_terms: Any, token_weights: Any) -> None:
    """Refuse a number of terms that is none, or none at all.

    Raises:
        GramianError: naming the argument.
    """
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
