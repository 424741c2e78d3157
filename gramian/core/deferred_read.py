"""Read a small result of the device later, so that the host does not wait for it now."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def read_later(t: Tensor) -> Callable[[], list[Any]]:
    """Start to copy a vector to the host; returns a function that waits for this copy alone and returns its values."""
    if not t.is_cuda:
        return t.tolist
    copied = t.to("cpu", non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(t.device))

    def read() -> list[Any]:
        arrived.synchronize()
        return list(copied.tolist())

    return read
