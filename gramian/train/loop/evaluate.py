"""Validation: loss and health of the model on the same windows every time, divided among the processes."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from gramian.data import Windows
from gramian.models.goose import Goose, record_spikes
from gramian.models.token_sampling import evaluation_mode
from gramian.parallel.process_grid import ProcessGrid
from gramian.train.build.run_parts import Parts
from gramian.train.loop.objective import IGNORED, Measured


def evaluate(parts: Parts, windows: int) -> Measured:
    """Summed loss of `windows` validation windows, spread evenly over the data; the same on every process (collective)."""
    count = min(windows, len(parts.validation))
    chosen = np.unique(np.linspace(0, len(parts.validation) - 1, count).round().astype(np.int64))
    rows = max(1, parts.config.data.micro_batch or 16)
    total = torch.zeros(2, dtype=torch.float64, device=parts.grid.device)
    with evaluation_mode(parts.module), parts.numbers.autocast():
        for tokens_BT, targets_BT, documents_BT in _pieces(parts.validation, chosen, rows, parts.grid):
            total[0] += parts.module(tokens_BT, targets_BT, 1.0, documents_BT)[1]
            total[1] += (targets_BT != IGNORED).sum()
    nats, tokens = parts.grid.sum_(total).tolist()
    return Measured(nats, int(tokens))


def health_of(parts: Parts) -> tuple[dict[str, Any], list[str]]:
    """Health of a model: spike rates of a `Goose`, and the similarity (CKA) of a student to its teacher (collective).

    Returns {name: value} for the log, and a line of text for each value that is out of bounds.
    """
    numbers: dict[str, Any] = {}
    wrong: list[str] = []
    windows, grid, options = parts.validation, parts.grid, parts.config.eval
    with evaluation_mode(parts.module), parts.numbers.autocast():
        if isinstance(parts.model, Goose) and parts.model.config.spikes and parts.config.compile.mode == "off":
            with record_spikes(parts.model) as recorder:
                for tokens_BT, targets_BT, documents_BT in _pieces(windows, np.arange(min(8, len(windows))), 8, grid):
                    parts.module(tokens_BT, targets_BT, 1.0, documents_BT)
            recorder.each(grid.sum_)
            health = recorder.health()
            names = ("firing", "dead", "saturated", "entropy")
            numbers["spikes"] = {name: getattr(health, name) for name in names}
            wrong += health.events(options.dead, options.saturated)
        if parts.teaching is not None:
            rows = parts.training.stack(np.arange(min(4, len(parts.training))))
            batch = {name: values.to(grid.device) for name, values in rows.items()}
            batch["windows"] = torch.arange(len(batch["tokens"]))
            similarity = parts.teaching.similarity(parts.module, batch)
            if similarity is not None:
                numbers["teacher_cka"] = similarity
    return numbers, wrong


def weights_are_finite(parts: Parts) -> bool:
    """Whether all weights are finite on all processes (collective)."""
    parameters = [p.to_local() if isinstance(p, DTensor) else p for p in parts.module.parameters()]
    finite = torch.stack([p.detach().isfinite().all() for p in parameters]).all() if parameters else True
    return not parts.grid.most(float(not finite))


def _pieces(
    windows: Windows, chosen: np.ndarray, rows: int, grid: ProcessGrid
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Yield (tokens, targets, documents or None) of at most `rows` of this process's windows at a time.

    All processes yield equally often; one without windows left yields a row without targets.
    """
    share = -(-len(chosen) // grid.size)
    mine = chosen[grid.rank * share : (grid.rank + 1) * share]
    for start in range(0, share, rows):
        piece = windows.stack(mine[start : start + rows] if start < len(mine) else chosen[:1])
        if start >= len(mine):
            piece["targets"].fill_(IGNORED)
        piece = {name: value.to(grid.device) for name, value in piece.items()}
        yield piece["tokens"], piece["targets"], piece.get("documents")
