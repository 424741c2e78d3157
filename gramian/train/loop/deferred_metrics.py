"""Numbers of a step, read when they are there: the host never waits for the device in the middle of training."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepAttempt:
    """One optimizer step that was tried."""

    number: int
    """Counts all of them, also those rolled back later."""
    step: int
    """Of the run, the first is 0."""
    position: int
    """Of its batch in the data."""
    rate: float
    stepped: bool
    scale: float | None
    """Of the loss, after the step."""
    repeated: bool = False
    """Computed again on the way from a restored state to where a fault began; judged and told the first time."""


@dataclass(frozen=True)
class StepOutcome:
    """What came of it."""

    attempt: StepAttempt
    loss: float
    """Mean per token, in nats."""
    grad_norm: float
    tokens: int
    flagged: bool
    extra: dict[str, float] = field(default_factory=dict)
    """What else was told, by name."""


class DeferredMetrics:
    """Values on their way to the host, in order.

    Args:
        names: of the values behind the first four.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._names = tuple(names)
        self._waiting: deque[tuple[StepAttempt, Tensor, torch.cuda.Event | None]] = deque()

    def add(self, attempt: StepAttempt, values: Tensor) -> None:
        """Start the copy."""
        if values.is_cuda:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            host.copy_(values, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._waiting.append((attempt, host, event))
        else:
            self._waiting.append((attempt, values.detach().clone(), None))

    def read(self, wait: bool) -> list[StepOutcome]:
        """What has arrived: on a GPU all but the newest, which nobody waits for unless told to."""
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
        """Forget the rest."""
        self._waiting.clear()
