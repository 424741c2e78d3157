"""Commands under torchrun: the first process alone prints and complains, all of them return one exit code."""

import os
from collections.abc import Callable

from gramian.cli import RunFailed
from gramian.core.errors import GramianError


def first_speaks(run: Callable[[bool], int]) -> int:
    """The exit code of a command; its errors go on from the first process, the others end with their codes and say nothing.

    Args:
        run: told whether this process is the first.
    """
    first = os.environ.get("RANK", "0") == "0"
    try:
        return run(first)
    except (GramianError, RunFailed) as problem:
        if first:
            raise
        return 2 if isinstance(problem, GramianError) else 1
