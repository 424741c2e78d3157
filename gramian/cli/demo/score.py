"""Perplexity of a model on a fixed part of the validation data, and its agreement with its teacher.

Legend: B windows, T tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from gramian.data import Windows
from gramian.distill.distill_objective import DistillObjective
from gramian.distill.loss.loss_metrics import SUMS, metrics_of
from gramian.distill.teacher.live_teacher import LiveTeacher
from gramian.kernels.distillation.distill_rows import RowObjective
from gramian.models.token_sampling import evaluation_mode
from gramian.parallel.process_grid import ProcessGrid
from gramian.train.loop.objective import logits_of
from gramian.train.loop.perplexity import perplexity
from gramian.train.loop.precision import Precision

ROWS = 16
"""Number of windows per forward."""


@dataclass(frozen=True)
class Score:
    """Perplexity of a model by two protocols, non-overlapping and sliding windows, and its agreement with a teacher."""

    tokens: int
    loss: float
    """Cross entropy in nats per byte, with non-overlapping windows."""
    perplexity: float
    sliding: float
    """Perplexity with sliding windows: every byte after the first window has at least half a window of context."""
    agreement: float | None = None
    """Share of bytes for which model and teacher rank the same next byte first; None without a teacher."""
    correlation: float | None = None
    """Pearson's r, over bytes, of the target's log-probabilities under the model and under the teacher; None without one."""
    kl: float | None = None
    """KL(teacher‖model) at temperature 1, in nats per byte; None without a teacher."""


def work(validation: Windows, windows: int, compared: bool) -> int:
    """Number of windows that `score` runs the model on, over all its passes; `compared` adds the comparison with a teacher."""
    count, sliding = _counts(validation, windows)
    return count + sliding + (count if compared else 0)


def _counts(validation: Windows, windows: int) -> tuple[int, int]:
    """Numbers of non-overlapping and of sliding windows that score the same tokens, for the first `windows` windows.

    A sliding window scores `stride` tokens, the first one all of its tokens.
    """
    count = min(windows, len(validation))
    return count, 1 + -(-(count - 1) * validation.length // _stride(validation))


def _stride(validation: Windows) -> int:
    return max(1, validation.length // 2)


def score(
    model: nn.Module,
    teacher: LiveTeacher | None,
    validation: Windows,
    numbers: Precision,
    grid: ProcessGrid,
    windows: int,
    progress: Callable[[int], None],
) -> Score:
    """Compute the perplexity of a model with non-overlapping and sliding windows and, if a teacher is given, the agreement.

    Non-overlapping takes the first `windows` windows; sliding, with a stride of half a window, as many as score the same
    tokens. `progress` is called with the part of `work` that is done. Cost: 3 forwards of every token; with a teacher 4, and
    one of the teacher.
    """
    (count, sliding), stride = _counts(validation, windows), _stride(validation)
    found = []
    with evaluation_mode(model), numbers.autocast():
        for step, limit, before in ((None, count, 0), (stride, sliding, count)):
            found.append(
                perplexity(
                    lambda tokens_BT: logits_of(model, tokens_BT),
                    validation.stream,
                    grid,
                    length=validation.length,
                    stride=step,
                    rows=ROWS,
                    limit=limit,
                    progress=lambda done, _, before=before: progress(before + done),  # type: ignore[misc]
                )
            )
    plain, slid = found
    if teacher is None:
        return Score(plain.tokens, plain.loss, plain.perplexity, slid.perplexity)
    compared = _compare(model, teacher, validation, numbers, grid, count, lambda done: progress(count + sliding + done))
    return Score(plain.tokens, plain.loss, plain.perplexity, slid.perplexity, **compared)


def _compare(
    model: nn.Module,
    teacher: LiveTeacher,
    validation: Windows,
    numbers: Precision,
    grid: ProcessGrid,
    count: int,
    progress: Callable[[int], None],
) -> dict[str, float | None]:
    """Agreement, correlation and KL between model and teacher at temperature 1, on the first `count` windows.

    A value that is not finite is None.
    """
    objective = DistillObjective(model, RowObjective())
    sums = torch.zeros(len(SUMS), dtype=torch.float64, device=grid.device)
    with evaluation_mode(objective), numbers.autocast():
        for first in range(0, count, ROWS):
            rows_B = np.arange(first, min(first + ROWS, count), dtype=np.int64)
            batch = {name: rows.to(grid.device) for name, rows in validation.stack(rows_B).items()}
            _, sums_and_more = objective(batch["tokens"], batch["targets"], 1.0, signal=teacher(batch), temperature=1.0)
            sums += sums_and_more[1 : 1 + len(SUMS)]
            progress(int(rows_B[-1]) + 1)
    metrics = {name: float(value) for name, value in metrics_of(sums).items()}
    chosen = {name: metrics[name] for name in ("agreement", "correlation", "kl")}
    return {name: value if math.isfinite(value) else None for name, value in chosen.items()}
