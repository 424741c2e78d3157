"""SIGTERM, SIGHUP (a closed terminal) and Ctrl-C: the first asks the run to save and end, the second ends it at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Interrupts:
    """Context manager for SIGTERM and Ctrl-C: the first signal is recorded, so that the loop can finish its step and save.

    The first signal also restores the system's default handlers: a second one needs no Python to run and ends the process even
    inside a collective or a kernel that never returns, with the status of a killed process (130 and 143 in a shell). Previous
    handlers are restored on exit.

    Only the main thread can install handlers: in any other, signals stay as they are and `requested` is None. Processes forked
    inside, such as data workers, survive the first Ctrl-C of a terminal, which reaches all of them, so the loop still gets its
    batch. A SIGTERM ends them.

    Attributes:
        requested: name of the first signal; None if there was none.

    Example:
        >>> with Interrupts() as interrupts:
        ...     interrupts.requested is None
        True
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            handled = [number for number in SIGNALS if not (under_nohup and number == signal.SIGHUP)]
            self._before = {number: signal.signal(number, self._note) for number in handled}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            # None: installed by something other than Python, which cannot be put back from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested is None:
            self.requested = signal.Signals(number).name
        for again in self._before:
            signal.signal(again, signal.SIG_DFL)
        if number == signal.SIGTERM and os.getpid() != self._process:
            os.kill(os.getpid(), number)
