"""Processes that ran the same checks exchange their failures, so that all reach the same verdict."""

import json
from collections.abc import Sequence

from gramian.parallel.process_grid import ProcessGrid
from gramian.verify.checks import VerifyOutcome


def agree(grid: ProcessGrid, outcomes: Sequence[VerifyOutcome]) -> dict[str, str]:
    """Collect the failed checks of all processes, {title of a check: what is wrong}; every process returns the same.

    Call it after the process group is destroyed: only then do processes return that were waiting for a crashed one.
    """
    mine = {outcome.check.title: outcome.problem for outcome in outcomes if not outcome.passed}
    if grid.size == 1:
        return mine
    grid.store.set(f"verdict {grid.rank}", json.dumps(mine))
    found: dict[str, str] = {}
    for rank in range(grid.size):
        try:
            theirs = json.loads(grid.store.get(f"verdict {rank}"))
        except RuntimeError as gone:  # the store's own errors are RuntimeErrors
            theirs = {f"process {rank}": f"no answer: {str(gone).splitlines()[0]}"}
        for title, problem in theirs.items():
            found.setdefault(title, f"process {rank}: {problem}")
    return found
