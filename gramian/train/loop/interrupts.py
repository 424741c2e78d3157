"""SIGTERM and Ctrl-C: the first one is a wish, the second one is obeyed at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupts:
    """While inside, the first signal is noted; finish the step, save and leave.

    The first one also gives both signals back to the system, whose default is to end the process: a second one needs no Python
    to run and ends it even inside a collective or a kernel that never returns, with the status of a killed process (130 and
    143 in a shell). What was there before is restored on leaving.

    Only a process's main thread can do this: elsewhere signals stay as they are and `requested` stays None. Processes forked
    inside, such as data workers, outlive the first Ctrl-C of a terminal, which reaches all of them: the loop still gets its
    batch. A SIGTERM ends them as ever.

    Attributes:
        requested: name of the first signal; None: none came.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # None: installed by something other than Python, which cannot be put back from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested is None:
            self.requested = signal.Signals(number).name
        for again in SIGNALS:
            signal.signal(again, signal.SIG_DFL)
        if number == signal.SIGTERM and os.getpid() != self._process:
            os.kill(os.getpid(), number)
