"""`python -m gramian`, also under torchrun, and the command `gramian`: the command line, where Ctrl-C is one line at any time.

The signal is caught from the first statement of `run` on, before anything else is imported.
"""

import io
import os
import signal
import sys
from types import FrameType
from typing import Any, NoReturn


def run() -> int:
    """Run the command line of this process; returns its exit code.

    Ctrl-C ends it with one line and exit code 1, unless the command has a handler of its own, such as the training loop, which
    saves first. A second Ctrl-C ends the process at once.
    """
    main_process = os.getpid()

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if os.getpid() != main_process:  # a worker, which a terminal's Ctrl-C reaches too
            os._exit(1)
        while frame is not None:
            if frame.f_code.co_filename.startswith("<frozen importlib"):  # some modules do not survive an exception
                _end()
            frame = frame.f_back
        raise KeyboardInterrupt

    def report_unraisable(unraisable: Any) -> None:
        if unraisable.exc_type is KeyboardInterrupt:  # in a destructor, which cannot pass it on
            _end()
        sys.__unraisablehook__(unraisable)

    # A job in the background ignores the signal, and goes on doing so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
        sys.unraisablehook = report_unraisable

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a character, such as ε, shows another
            stream.reconfigure(errors="replace" if stream is sys.stdout else "backslashreplace")
    try:
        from gramian.cli import main

        status = main()
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # all is done: nothing is left to say
        return status
    except KeyboardInterrupt:  # while an error was printed
        _end()


def _end() -> NoReturn:
    """Print the line and end the process at once."""
    os.write(2, b"gramian: interrupted\n")
    os._exit(1)


if __name__ == "__main__":
    raise SystemExit(run())
