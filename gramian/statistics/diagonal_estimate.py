"""The diagonal of the empirical Fisher of a model over any number of batches, with its standard error.

diag F = E[g ⊙ g] is a mean over samples, so its standard error is that of a mean over samples. Every sample's squares are one
observation, in float64, since squares of squares leave the range of float32; the result and its error do not depend on how the
samples were split into batches, captures (`with` blocks) or processes. Moments of batch means would depend on it, and the
square of a batch's mean gradient does not estimate the Fisher at all: it shrinks as the batch grows.
"""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.statistics.argument_checks import check_state
from gramian.statistics.moving_average import MovingAverage
from gramian.statistics.square_moments import Reduction, SquareMoments
from gramian.statistics.weighted_moments import WeightedMoment, WeightedMoments
from gramian.taps import Capture
from gramian.taps.roles import Statistic

LARGEST = 1e150
"""Largest squared gradient that is accepted: the squared deviations of 10⁸ such squares have a finite sum in float64."""


class DiagonalFisherEstimate:
    """The diagonal of a model's empirical Fisher over any number of batches, with its standard error.

    ```python
    fisher = gramian.statistics.DiagonalFisherEstimate()
    for x, y in batches:
        with fisher.capture(model):
            F.cross_entropy(model(x), y).backward()
    fisher.diagonal()["fc.weight"], fisher.standard_error()["fc.weight"], fisher.samples
    ```

    There is no floor and no clamp: a parameter that no sample touches has exactly 0. Cost of a capture: 2·T·M·N FLOPs per
    sample for a linear layer with T tokens and a weight of M×N; per-sample gradients are formed a chunk of samples at a time.
    State: 16 bytes per parameter element, 24 with a moving average.
    """

    def __init__(
        self,
        per: Literal["sample", "token"] = "sample",
        ema_decay: float | None = None,
        reduce: Reduction | None = None,
    ) -> None:
        """Create an estimate without samples.

        Args:
            per: what is squared, as in `DiagonalFisher`: "sample": a sample's gradient; "token": the gradient of each of its
                tokens, and the squares are summed over tokens.
            ema_decay: decay β of a moving average over captures, beside the mean; None: no moving average.
            reduce: a linear function of (parameter, its diagonal), such as sums over rows or heads (`by_row`, `by_head`), that
                is applied to every sample's squares. The state is as small as its results, and errors are those of the sums
                themselves, which do not follow from errors of entries. None: every entry.

        Raises:
            GramianError: for another value of an argument.
        """
        if per not in ("sample", "token"):
            raise GramianError(f'per: expected "sample" or "token", got "{per}"')
        if reduce is not None and not callable(reduce):
            raise GramianError(f"reduce: got {reduce!r}; expected a function of (parameter, its diagonal), or None")
        self.per, self.reduce = per, reduce
        self.moments = WeightedMoments()
        """Moments of the squared gradients over samples; for each parameter, over the captures in which it was trainable."""
        self.average = None if ema_decay is None else MovingAverage(ema_decay)
        """Moving average of the captures' means, each weighted by its number of samples; None without `ema_decay`."""
        self.samples = 0
        self.dropped = 0
        """Number of captures that were left out because a squared gradient was not finite or above `LARGEST`."""

    # ---- estimation --------------------------------------------------------------------------------------------------

    def capture(
        self,
        model: nn.Module,
        *statistics: Statistic,
        loss_reduction: str | float = "mean",
        batch_size: int | None = None,
        sample_ids: Tensor | None = None,
        loss_scale: "float | torch.amp.GradScaler" = 1.0,
        process_group: Any = None,
        audit: bool = True,
    ) -> Capture:
        """A context that observes all backwards inside it, and adds their samples to the estimate at its end.

        Args:
            model: the user's model, or any wrapper of it.
            *statistics: further statistics of the same backwards; the capture returned has their results.
            loss_reduction: "mean" or "sum" over the samples of the batch, or the coefficient of one sample's loss.
            batch_size: B, if it is not the first axis of the model's first tensor argument; None: it is.
            sample_ids: [B] or [B, T]: number of the sample that each row or token belongs to; None: row i is sample i.
            loss_scale: the factor of the loss before `backward`, or the `GradScaler` that multiplies by it.
            process_group: add the samples of all these processes, on each of them (collective); None: only of this one.
            audit: compare with autograd's gradients in every backward.
        """
        return FisherCapture(
            self,
            model,
            *statistics,
            loss_reduction=loss_reduction,
            batch_size=batch_size,
            sample_ids=sample_ids,
            loss_scale=loss_scale,
            process_group=process_group,
            audit=audit,
        )

    def _take(self, moments: WeightedMoments) -> None:
        """Add the samples of one capture, given as moments; their tensors are stored, not copied.

        Nothing but `dropped` changes if a square is out of range; a `GramianError` if a shape has changed.
        """
        self.moments.check_shapes(moments)
        if not all(_in_range(moment) for moment in moments.moments.values()):
            self.dropped += 1
            return
        samples = max((moment.weights.observations for moment in moments.moments.values()), default=0)
        if self.average is not None:
            self.average.update(moments.mean(), samples)
        for name, moment in moments.moments.items():
            self.moments.add(name, moment)
        self.samples += samples

    def merge(self, other: "DiagonalFisherEstimate") -> None:
        """Add the samples of another estimate, which is not changed, as if they had been seen by this one.

        Raises:
            GramianError: if the other has another `per` or other shapes, or one of them has a moving average, which depends on
                the order; nothing is added.
        """
        if not isinstance(other, DiagonalFisherEstimate):
            raise GramianError(f"merge: got {type(other).__name__}; expected a DiagonalFisherEstimate")
        if other.per != self.per:
            raise GramianError(f"merge: the other estimate is per {other.per}; expected per {self.per}")
        if self.average is not None or other.average is not None:
            raise GramianError("merge: a moving average depends on the order; expected estimates without ema_decay")
        self.moments.merge(other.moments)
        self.samples += other.samples
        self.dropped += other.dropped

    # ---- results -----------------------------------------------------------------------------------------------------

    def diagonal(self, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """{parameter: mean over all samples of the squared gradient}, of the parameter's shape or that of `reduce`'s result.

        Args:
            dtype: float64 or float32; others raise a `GramianError`, since narrower ones flush such squares to zero.
        """
        return _as(self.moments.mean(), dtype)

    def moving_average(self, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """{parameter: debiased moving average over captures of the squared gradient}, in `dtype`, float64 or float32.

        Raises:
            GramianError: for another dtype, or if the estimate has no `ema_decay`.
        """
        if self.average is None:
            raise GramianError("ema_decay: was not given; expected it for a moving average")
        return _as(self.average.value(), dtype)

    def standard_error(self) -> dict[str, Tensor]:
        """{parameter: standard error of the mean squared gradient, entry by entry}, float64; NaN after one sample."""
        return self.moments.standard_error()

    def interval(self, level: float = 0.95) -> dict[str, tuple[Tensor, Tensor]]:
        """{parameter: (low, high)}, confidence intervals of `diagonal` entry by entry, by Student's t.

        Squares have long tails: with few samples, or for entries that few samples touch, a smaller share than `level` of the
        intervals contains the true value.

        Raises:
            GramianError: unless `level` is between 0 and 1 and scipy is installed.
        """
        return self.moments.interval(level)

    # ---- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """The state of the estimate as a flat mapping of tensors, as safetensors stores it."""
        state = {f"moments.{key}": value for key, value in self.moments.state_dict().items()}
        if self.average is not None:
            state |= {f"average.{key}": value for key, value in self.average.state_dict().items()}
        return {**state, "counts": torch.tensor([self.samples, self.dropped, self.per == "token"])}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the `state_dict` of an estimate with the same `per` and `ema_decay`.

        Raises:
            GramianError: for any other state; nothing is changed then.
        """
        check_state(state)
        if "counts" not in state or ("average.clock" in state) != (self.average is not None):
            raise GramianError("state: is that of another estimate; expected the same per and ema_decay")
        counts = state["counts"]
        if counts.dtype != torch.int64 or counts.shape != (3,) or bool((counts < 0).any()):
            raise GramianError(f"counts: the state has {counts.tolist()}; expected [samples, dropped, per token]")
        samples, dropped, token = counts.tolist()
        if bool(token) != (self.per == "token"):
            raise GramianError("state: is that of another estimate; expected the same per and ema_decay")
        parts = {
            part: {key.removeprefix(f"{part}."): t for key, t in state.items() if key.startswith(f"{part}.")}
            for part in (("moments",) if self.average is None else ("moments", "average"))
        }
        if len(state) != 1 + sum(map(len, parts.values())):
            raise GramianError("state: holds other keys; expected what state_dict gave")
        moments = WeightedMoments()
        moments.load_state_dict(parts["moments"])
        if self.average is not None:
            self.average.load_state_dict(parts["average"])
        self.moments, self.samples, self.dropped = moments, samples, dropped


def _in_range(moment: WeightedMoment) -> bool:
    """True if mean and summed squared deviations of a moment show that all squares are at most `LARGEST`; False for NaN."""
    most = moment.weights.observations * LARGEST**2
    return bool(((moment.mean <= LARGEST) & (moment.deviations <= most)).all())


def _as(values: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    if dtype not in (torch.float32, torch.float64):
        raise GramianError(f"dtype: expected torch.float32 or torch.float64, got {dtype}")
    return {name: value.to(dtype) for name, value in values.items()}


class FisherCapture(Capture):
    """The capture that `DiagonalFisherEstimate.capture` returns: at its end it adds the observed samples to the estimate."""

    def __init__(
        self, estimate: DiagonalFisherEstimate, model: nn.Module, *statistics: Statistic, **options: Any
    ) -> None:
        """Observe the estimate's own statistic and the given `statistics`; `options` are those of `Capture`."""
        self._estimate, self._squares = estimate, SquareMoments(estimate.per, estimate.reduce)
        super().__init__(model, self._squares, *statistics, **options)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop observing and, if no error occurred, add the samples (of all processes of the group) to the estimate."""
        super().__exit__(kind, error, trace)
        if kind is None:
            found = self._squares.completed(self._sums_of(self._squares))
            self._sums[0] = None  # the estimate has them now
            self._estimate._take(found if self._group is None else found.over(self._group))
