"""What processes that ran the same checks tell each other."""

import json
from collections.abc import Sequence

from gramian.parallel.world import World
from gramian.verify.checks import VerifyOutcome


def agree(where: World, outcomes: Sequence[VerifyOutcome]) -> dict[str, str]:
    """What failed on any process, the same everywhere.

    To be called when the process group is gone: a process that waits for one that crashed wakes up then.

    Args:
        where: this process.
        outcomes: of its checks.

    Returns:
        {title of a check: what is wrong}, in the order of the first process that says so.
    """
    mine = {outcome.check.title: outcome.problem for outcome in outcomes if not outcome.passed}
    if where.size == 1:
        return mine
    where.store.set(f"verdict {where.rank}", json.dumps(mine))
    found: dict[str, str] = {}
    for rank in range(where.size):
        try:
            theirs = json.loads(where.store.get(f"verdict {rank}"))
        except RuntimeError as gone:  # the store's own errors are RuntimeErrors
            theirs = {f"process {rank}": f"no answer: {str(gone).splitlines()[0]}"}
        for title, problem in theirs.items():
            found.setdefault(title, f"process {rank}: {problem}")
    return found
