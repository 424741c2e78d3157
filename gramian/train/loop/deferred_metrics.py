"""Metrics of a step are copied to the host and read one step later, so that the host does not wait for the device."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepAttempt:
    """One optimizer step that was tried."""

    number: int
    """Counts all attempts, also those rolled back later."""
    step: int
    """Step of the run; the first is 0."""
    position: int
    """Position of its batch in the data."""
    rate: float
    """Learning rate."""
    stepped: bool
    """False if the loss scaler skipped the step."""
    scale: float | None
    """Loss scale after the step."""
    repeated: bool = False
    """Computed again after a rollback, on the way to the step that failed; it was judged and logged the first time."""


@dataclass(frozen=True)
class StepOutcome:
    """An attempt and its metrics."""

    attempt: StepAttempt
    loss: float
    """Mean per token, in nats."""
    grad_norm: float
    tokens: int
    flagged: bool
    """Whether a process raised a flag: it was asked to end."""
    extra: dict[str, float] = field(default_factory=dict)
    """Further metrics of the stepper, by name."""


class DeferredMetrics:
    """Metrics that are being copied to the host, in the order of their steps.

    `names` are those of the values behind the first four (`Stepper.extra`).
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._names = tuple(names)
        self._waiting: deque[tuple[StepAttempt, Tensor, torch.cuda.Event | None]] = deque()

    def add(self, attempt: StepAttempt, values: Tensor) -> None:
        """Start to copy the values of a step (`TakenStep.values`)."""
        if values.is_cuda:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            host.copy_(values, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._waiting.append((attempt, host, event))
        else:
            self._waiting.append((attempt, values.detach().clone(), None))

    def read(self, wait: bool) -> list[StepOutcome]:
        """Metrics that have arrived: on a GPU all but those of the newest step, unless `wait`."""
        found = []
        while self._waiting and (wait or len(self._waiting) > 1 or self._waiting[0][2] is None):
            attempt, host, event = self._waiting.popleft()
            if event is not None:
                event.synchronize()
            nats, flags, tokens, norm, *rest = host.tolist()
            extra = dict(zip(self._names, rest, strict=True))
            found.append(StepOutcome(attempt, nats / max(1.0, tokens), norm, int(tokens), flags > 0, extra))
        return found

    def clear(self) -> None:
        """Forget metrics that were not read."""
        self._waiting.clear()
