"""Choose the representation of a side of a block (dense, low rank, diagonal) from widths, token counts and options alone.

| policy       | G of width o is low rank                                 |
|--------------|----------------------------------------------------------|
| "all"        | while T < o and T ≤ kfac_auto_t_max                      |
| "auto"       | while T ≤ kfac_auto_rho·o and T ≤ kfac_auto_t_max        |
| "hybrid"     | as "all" for the head and where o ≥ kfac_big_threshold   |
| "small_only" | never; nor with kfac_use_woodbury=False                  |

T is the number of tokens of a refresh. A of width m is low rank while T < m and T ≤ kfac_auto_t_max, unless low rank is off.
Otherwise a side is dense. A side wider than `WIDEST_DENSE` is never dense: it is low rank on a random, rescaled subset of
kfac_auto_t_max tokens, or, with low rank off, its diagonal. `memory_budget` may reduce it further; `representation` then
applies to the reduced `StoragePolicy`.
"""

from typing import Literal

from gramian.curvature.estimate.token_moments import StoragePolicy
from gramian.curvature.options import Options
from gramian.linalg import WIDEST_DENSE

Side = Literal["A", "G"]
Representation = Literal["dense", "low rank", "diagonal"]


def representation(keep: StoragePolicy, kept: int) -> Representation:
    """How a side (A or G) is stored if all processes together have `kept` of its tokens: "diagonal", "low rank" or "dense"."""
    if keep.diagonal:
        return "diagonal"
    return "low rank" if kept <= keep.rows_up_to else "dense"


def low_rank_up_to(side: Side, width: int, is_head: bool, options: Options) -> int:
    """The largest number of tokens for which a side (A or G) of this width is low rank; 0: it is never low rank."""
    if not options.low_rank:
        return 0
    if side == "G":
        if options.kfac_policy == "auto":
            return min(int(options.kfac_auto_rho * width), options.kfac_auto_t_max)
        if options.kfac_policy == "hybrid" and not (is_head or width >= options.kfac_big_threshold):
            return 0
    return min(width - 1, options.kfac_auto_t_max)


def keep_for(side: Side, width: int, is_head: bool, options: Options) -> StoragePolicy:
    """The `StoragePolicy` of a side (A or G) of this width: how many tokens are stored as rows, before they are summed."""
    if width > WIDEST_DENSE:
        if not options.low_rank:
            return StoragePolicy(diagonal=True)
        limit = min(options.max_tokens or options.kfac_auto_t_max, options.kfac_auto_t_max)
        return StoragePolicy(rows_up_to=limit, limit=limit)
    return StoragePolicy(rows_up_to=low_rank_up_to(side, width, is_head, options), limit=options.max_tokens)
