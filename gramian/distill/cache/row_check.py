"""Is a cache what its teacher says? A few rows, compared with the live model."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from gramian.distill.cache.builder import WindowRows
from gramian.distill.cache.manifest import KINDS
from gramian.distill.cache.reader import Cache
from gramian.distill.teacher.live_teacher import LiveTeacher


@dataclass(frozen=True)
class RowCheck:
    """What came of a comparison."""

    windows: tuple[int, ...]
    worst: Mapping[str, float]
    """Largest absolute errors, under the manifest's names; "layer-…": largest relative to the largest number of the layer;
    "sampled" caches: "drawn", the share of the mass that was drawn elsewhere."""
    stated: Mapping[str, float]
    """What the manifest says of the same."""

    def holds(self, slack: float = 1e-3) -> bool:
        """Whether no error is above twice what is stated plus `slack`: forwards of other batches round differently."""
        return all(value <= 2 * self.stated.get(name, 0.0) + slack for name, value in self.worst.items())


@torch.no_grad()
def check_rows(cache: Cache, live: LiveTeacher, windows: WindowRows, n: int = 8, seed: int = 0) -> RowCheck:
    """Compare random rows with what a live teacher says of them now. Cost: n forwards of one window.

    Args:
        cache: to be checked.
        live: the teacher that it should be of.
        windows: that it should be of.
        n: rows.
        seed: of their choice.
    """
    identity = cache.manifest.identity
    count = identity.count
    chosen = np.sort(np.random.default_rng(seed).choice(count, size=min(n, count), replace=False)).astype(np.int64)
    worst: dict[str, float] = {}
    for window in chosen:
        index = np.array([window])
        batch = {**windows.stack(index), "windows": torch.from_numpy(index)}
        batch = {name: rows if name == "windows" else rows.to(live.device) for name, rows in batch.items()}
        stored, told = cache(batch), live(batch)
        found = dict(KINDS[identity.kind].compare(stored, told, batch["windows"], identity.facts).worst)
        for layer in set(stored.layers) & set(told.layers):
            one, other = stored.layers[layer].float(), told.layers[layer].float()
            found[f"layer-{layer}"] = float((one - other).abs().max() / other.abs().max())
        worst = {name: max(worst.get(name, 0.0), value) for name, value in found.items()}
    return RowCheck(tuple(chosen.tolist()), worst, cache.manifest.errors.worst)
