"""Metrics of a step are copied to the host and read one step later, so that the host does not wait for the device."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from gramian.core.deferred_read import read_later


@dataclass(frozen=True)
class StepAttempt:
    """One optimizer step that was tried: its number, batch and learning rate."""

    number: int
    """Number of the attempt, counting also those that were rolled back later."""
    step: int
    """Index of the optimizer step in the run; the first is 0."""
    position: int
    """Data position of the step's batch: its index in the run's sequence of batches."""
    rate: float
    """Learning rate of the step."""
    stepped: bool
    """Whether the optimizer stepped; False if the loss scaler skipped the step."""
    scale: float | None
    """Loss scale after the step; None without a loss scaler."""
    repeated: bool = False
    """Whether the step was taken before and is computed again after a rollback; it is not logged twice."""


@dataclass(frozen=True)
class StepOutcome:
    """A tried optimizer step and its metrics, after they have arrived on the host."""

    attempt: StepAttempt
    loss: float
    """Mean loss per token, in nats."""
    grad_norm: float
    tokens: int
    flagged: bool
    """Whether any process received a signal to end the run."""
    extra: dict[str, float] = field(default_factory=dict)
    """Further metrics that the kind of training reports, {name: value}."""


class DeferredMetrics:
    """Metrics of recent steps that are being copied from the device to the host, in the order of their steps.

    `names` are the names (`Stepper.extra`) of the values that follow loss, flags, tokens and gradient norm.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._names = tuple(names)
        self._waiting: deque[tuple[StepAttempt, Callable[[], list[float]], bool]] = deque()
        """(step, function that waits for its values, whether they come from a GPU)."""

    def add(self, attempt: StepAttempt, values: Tensor) -> None:
        """Start to copy the values of a step (`TakenStep.values`) to the host."""
        self._waiting.append((attempt, read_later(values), values.is_cuda))

    def read(self, wait: bool) -> list[StepOutcome]:
        """Return the metrics that have arrived on the host: on a GPU all but the newest step's; `wait` waits for all."""
        found = []
        while self._waiting and (wait or len(self._waiting) > 1 or not self._waiting[0][2]):
            attempt, values, _ = self._waiting.popleft()
            nats, flags, tokens, norm, *rest = values()
            extra = dict(zip(self._names, rest, strict=True))
            found.append(StepOutcome(attempt, nats / max(1.0, tokens), norm, int(tokens), flags > 0, extra))
        return found

    def clear(self) -> None:
        """Discard all metrics that were not read yet."""
        self._waiting.clear()
