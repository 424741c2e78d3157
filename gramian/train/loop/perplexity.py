"""Perplexity of a model on a token stream, by a named protocol: numbers of different protocols are not comparable.

Legend: B rows, T tokens of a window.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.data.token_stream import Stream
from gramian.parallel.process_grid import ProcessGrid
from gramian.train.loop.objective import IGNORED, Measured, summed_loss

Logits = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Perplexity(Measured):
    """Perplexity of a token stream: exp of the mean loss over all predicted tokens, each predicted once."""

    protocol: str
    """"non-overlapping": a token is predicted from those before it in its window; "sliding": from length − stride or more."""
    length: int
    stride: int
    bits_per_byte: float | None
    """The loss in bits per byte of the stream's text; None: its bytes are not known, or a part of it was scored."""

    @property
    def perplexity(self) -> float:
        """exp(mean loss per token); infinite where that overflows."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    def __str__(self) -> str:
        how = f"windows of {self.length}" + (f", stride {self.stride}" if self.protocol == "sliding" else "")
        bits = "" if self.bits_per_byte is None else f", {self.bits_per_byte:.4f} bits per byte"
        return f"perplexity {self.perplexity:.3f}{bits} ({self.protocol}, {how}, {self.tokens:,} tokens)"


def perplexity(
    logits: Logits,
    stream: Stream,
    grid: ProcessGrid,
    *,
    length: int,
    stride: int | None = None,
    pack: bool = True,
    rows: int = 16,
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Perplexity of a model on a token stream; every token but the first of the stream or document is scored once (collective).

    Cost: length/stride forwards of every token.

    Args:
        logits: maps ids [B, T] to logits [B, T, V].
        stream: the documents.
        grid: each process scores a part; all get the same result.
        length: tokens that one forward sees.
        stride: tokens that one forward scores; None scores all, which is "non-overlapping".
        pack: concatenate documents; False scores each by itself.
        rows: windows of one forward.
        limit: maximum number of windows, from the first on; None: all.
        progress: called with the number of this process's windows that are done, and of all its windows; None: no report.

    Raises:
        GramianError: if the stride is not between 1 and length − 1.

    Example:
        >>> perplexity(lambda ids: model(ids), stream, grid, length=128, stride=64)  # doctest: +SKIP
    """
    if stride is not None and not 1 <= stride < length:
        raise GramianError(f"stride: expected from 1 to {length - 1}, less than the window, got {stride}")
    places = list(_places(stream, length, stride or length, pack))
    whole = limit is None or limit >= len(places)
    places = places[:limit]
    share = -(-len(places) // grid.size)
    mine = places[grid.rank * share : (grid.rank + 1) * share]
    total = torch.zeros(2, dtype=torch.float64, device=grid.device)
    for first in range(0, len(mine), rows):
        tokens_BT, targets_BT = (t.to(grid.device) for t in _stack(stream, mine[first : first + rows], length))
        logits_BTV = logits(tokens_BT)
        total[0] += summed_loss(logits_BTV, targets_BT)
        total[1] += (targets_BT != IGNORED).sum()
        if progress is not None:
            progress(min(len(mine), first + rows), len(mine))
    nats, tokens = grid.sum_(total).tolist()
    name = "non-overlapping" if stride is None else "sliding"
    bits = stream.bits_per_byte(nats / tokens) if tokens and whole else None
    return Perplexity(nats, int(tokens), name, length, stride or length, bits)


def _places(stream: Stream, length: int, stride: int, pack: bool) -> Iterator[tuple[int, int, int]]:
    """Yield (first token read, token after the last, first token that is scored) of every window of the stream."""
    edges = stream.edges[[0, -1]] if pack else stream.edges
    for begin, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        scored = begin + 1
        while scored < stop:
            # The first window scores all it sees, later ones what the window before did not.
            first = max(begin, scored - 1 - (length - stride)) if scored > begin + 1 else begin
            last = min(stop, first + length + 1)
            yield first, last, scored
            scored = last


def _stack(stream: Stream, places: list[tuple[int, int, int]], length: int) -> tuple[Tensor, Tensor]:
    tokens_BS: npt.NDArray[np.int64] = np.full((len(places), length + 1), stream.end, dtype=np.int64)
    targets_BT: npt.NDArray[np.int64] = np.full((len(places), length), IGNORED, dtype=np.int64)
    for row, (first, last, scored) in enumerate(places):
        tokens_BS[row, : last - first] = stream.read(first, last)
        targets_BT[row, scored - first - 1 : last - first - 1] = tokens_BS[row, scored - first : last - first]
    return torch.from_numpy(np.ascontiguousarray(tokens_BS[:, :-1])), torch.from_numpy(targets_BT)
