"""Compare a few rows of a cache with the signal of the live teacher."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from gramian.data.windows import Windows
from gramian.distill.cache.kind_registry import KINDS
from gramian.distill.cache.reader import Cache
from gramian.distill.teacher.live_teacher import LiveTeacher


@dataclass(frozen=True)
class RowCheck:
    """Errors of some windows of a cache relative to the live teacher, beside the errors that its manifest states."""

    windows: tuple[int, ...]
    worst: Mapping[str, float]
    """{name of the error: largest absolute error}, with the manifest's names. "layer-…" is relative to the largest number of
    the layer; "drawn", of sampled caches, is the fraction of draws that fall on other ids.
    """
    stated: Mapping[str, float]
    """{name of the error: largest error that the manifest states}."""

    def holds(self, slack: float = 1e-3) -> bool:
        """True if no error exceeds twice the stated one plus `slack`: forwards with another batch size round differently."""
        return all(value <= 2 * self.stated.get(name, 0.0) + slack for name, value in self.worst.items())


@torch.no_grad()
def check_rows(cache: Cache, live: LiveTeacher, windows: Windows, n: int = 8, seed: int = 0) -> RowCheck:
    """Compare `n` random windows of a cache with the signal of its live teacher; `windows` is the data that was cached.

    Cost: n forwards of one window.
    """
    identity = cache.manifest.identity
    count = identity.count
    chosen = np.sort(np.random.default_rng(seed).choice(count, size=min(n, count), replace=False)).astype(np.int64)
    worst: dict[str, float] = {}
    for window in chosen:
        index = np.array([window])
        batch = {**windows.stack(index), "windows": torch.from_numpy(index)}
        batch = {name: rows if name == "windows" else rows.to(live.device) for name, rows in batch.items()}
        stored, expected = cache(batch), live(batch)
        found = dict(KINDS[identity.kind].compare(stored, expected, batch["windows"], identity.facts).worst)
        for layer in set(stored.layers) & set(expected.layers):
            one, other = stored.layers[layer].float(), expected.layers[layer].float()
            found[f"layer-{layer}"] = float((one - other).abs().max() / other.abs().max())
        worst = {name: max(worst.get(name, 0.0), value) for name, value in found.items()}
    return RowCheck(tuple(chosen.tolist()), worst, cache.manifest.errors.worst)
