"""Validation loss: the same windows every time, each process a part of them."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gramian.data import Windows
from gramian.models.goose import Goose, record_spikes
from gramian.parallel.world import World
from gramian.train.build.run_parts import Parts
from gramian.train.loop.objective import IGNORED, Measured
from gramian.train.loop.stepper import evaluating


def evaluate(parts: Parts, windows: int) -> Measured:
    """Loss on so many validation windows, spread evenly over all of them; every process gets the same answer.

    Args:
        parts: of the run.
        windows: how many; fewer where there are fewer.
    """
    count = min(windows, len(parts.validation))
    chosen = np.unique(np.linspace(0, len(parts.validation) - 1, count).round().astype(np.int64))
    rows = max(1, parts.config.data.micro_batch or 16)
    total = torch.zeros(2, dtype=torch.float64, device=parts.world.device)
    with evaluating(parts.module), parts.numbers.autocast():
        for tokens_BT, targets_BT, documents_BT in _pieces(parts.validation, chosen, rows, parts.world):
            total[0] += parts.module(tokens_BT, targets_BT, 1.0, documents_BT)[1]
            total[1] += (targets_BT != IGNORED).sum()
    nats, tokens = parts.world.sum_(total).tolist()
    return Measured(nats, int(tokens))


def health_of(parts: Parts) -> tuple[dict[str, Any], list[str]]:
    """How a student is, beside its loss: its spikes, and how like the teacher's its hidden states are.

    Returns:
        Numbers for the log, and what is wrong with them.
    """
    numbers: dict[str, Any] = {}
    wrong: list[str] = []
    windows, world, options = parts.validation, parts.world, parts.config.eval
    with evaluating(parts.module), parts.numbers.autocast():
        if isinstance(parts.model, Goose) and parts.model.config.spikes and parts.config.compile.mode == "off":
            with record_spikes(parts.model) as recorder:
                for tokens_BT, targets_BT, documents_BT in _pieces(windows, np.arange(min(8, len(windows))), 8, world):
                    parts.module(tokens_BT, targets_BT, 1.0, documents_BT)
            recorder.each(world.sum_)
            health = recorder.health()
            names = ("firing", "dead", "saturated", "entropy")
            numbers["spikes"] = {name: getattr(health, name) for name in names}
            wrong += health.events(options.dead, options.saturated)
        if parts.teaching is not None:
            rows = parts.training.stack(np.arange(min(4, len(parts.training))))
            batch = {name: values.to(world.device) for name, values in rows.items()}
            batch["windows"] = torch.arange(len(batch["tokens"]))
            similarity = parts.teaching.similarity(parts.module, batch)
            if similarity is not None:
                numbers["teacher_cka"] = similarity
    return numbers, wrong


def _pieces(
    windows: Windows, chosen: np.ndarray, rows: int, world: World
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Every process runs as many pieces as the others; one without windows gets a row that does not count."""
    share = -(-len(chosen) // world.size)
    mine = chosen[world.rank * share : (world.rank + 1) * share]
    for start in range(0, share, rows):
        piece = windows.stack(mine[start : start + rows] if start < len(mine) else chosen[:1])
        if start >= len(mine):
            piece["targets"].fill_(IGNORED)
        piece = {name: value.to(world.device) for name, value in piece.items()}
        yield piece["tokens"], piece["targets"], piece.get("documents")
