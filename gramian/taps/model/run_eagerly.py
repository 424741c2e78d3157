"""Run compiled modules eagerly, as they were written."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_lock = threading.Lock()
_inside = 0
_stance: Any = None
"""Object of `torch.compiler.set_stance` whose `__exit__` restores the earlier stance; None outside of `run_eagerly`."""


@contextmanager
def run_eagerly() -> Iterator[None]:
    """Context manager: modules that `torch.compile` has wrapped run their own Python, and nothing is compiled.

    The compiler's stance (`torch.compiler.set_stance`) is one for the process: the first thread that enters changes it, and the
    last that leaves restores it. In a process that never imported the compiler nothing is done.
    """
    global _inside, _stance
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with _lock:
        if _inside == 0:
            _stance = torch.compiler.set_stance("force_eager")
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _stance.__exit__(None, None, None)
                _stance = None
