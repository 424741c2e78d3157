"""Statistics of a Goose's spikes (ternary activations): firing rates, dead and saturated channels, and entropy, per matrix.

A site is one matrix of one block, with the spikes that are its input. A channel fires if its spike is not 0. Forward hooks
count spikes and tokens of every site, so a segment that activation checkpointing recomputes counts twice at the same rate.

Legend: N tokens, C channels of a site.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.models.goose.goose import Goose
from gramian.models.goose.spike import Spike
from gramian.models.token_sampling import evaluation_mode

DEAD = 0.001
"""A channel is dead if it fires on less than this fraction of tokens; measuring that takes several thousand tokens."""
SATURATED = 0.999
"""A channel is saturated if it fires on more than this fraction of tokens."""
MAX_ENTROPY = math.log2(3)
"""Maximum entropy of a ternary spike, in bits."""


@dataclass(frozen=True)
class SiteHealth:
    """Statistics of the spikes (ternary activations) that are the input of one matrix."""

    layer: int
    """Index of the block, from 1."""
    site: str
    """Name of the matrix: "key", "value", "receptance", "memory_out", "fc" or "mlp_out"."""
    tokens: int
    channels: int
    firing: float
    """Fraction of spikes that are not 0, over tokens and channels."""
    dead: float
    """Fraction of channels that fire on less than 0.1 % of tokens."""
    saturated: float
    """Fraction of channels that fire on more than 99.9 % of tokens."""
    entropy: float
    """Entropy in bits of a channel's distribution over −1, 0 and 1, mean over channels; at most log2 3 = 1.585."""


@dataclass(frozen=True)
class SpikeHealth:
    """Statistics of the spikes that are the input of every matrix (site) of a model, block by block."""

    sites: tuple[SiteHealth, ...]

    @property
    def firing(self) -> float:
        """Fraction of spikes that are not 0, over all channels of the model."""
        return self._mean("firing")

    @property
    def dead(self) -> float:
        """Fraction of all channels that fire on less than 0.1 % of tokens."""
        return self._mean("dead")

    @property
    def saturated(self) -> float:
        """Fraction of all channels that fire on more than 99.9 % of tokens."""
        return self._mean("saturated")

    @property
    def entropy(self) -> float:
        """Entropy in bits of a channel's distribution over −1, 0 and 1, mean over all channels of the model."""
        return self._mean("entropy")

    def events(self, dead: float = 0.05, saturated: float = 0.10) -> list[str]:
        """One warning, with a hint, for every site (matrix) whose fraction of dead or of saturated channels exceeds the bound.

        `dead`, `saturated`: the bounds, as fractions of a site's channels.
        """
        events = []
        for s in self.sites:
            where = f"layer {s.layer} {s.site}"
            if s.dead > dead:
                events.append(
                    f"{where}: {s.dead:.1%} of channels are dead (above {dead:.1%}); a lower learning rate leaves fewer, and "
                    "thresholds learn their way back, by about the sum of learning rates at most"
                )
            if s.saturated > saturated:
                events.append(
                    f"{where}: {s.saturated:.1%} of channels always fire (above {saturated:.1%}); they say nothing but their "
                    "sign: a lower learning rate, or weight decay on what feeds them"
                )
        return events

    def table(self) -> str:
        """The statistics as a plain-text table with one row per site (matrix of a block)."""
        header = f"layer  site         firing    dead  saturated  entropy of {MAX_ENTROPY:.3f} bit"
        rows = (
            f"{s.layer:>5}  {s.site:<10}  {s.firing:>7.1%}  {s.dead:>6.1%}  {s.saturated:>9.1%}  {s.entropy:.3f}"
            for s in self.sites
        )
        return "\n".join([header, *rows])

    def _mean(self, field: str) -> float:
        channels = sum(s.channels for s in self.sites)
        return sum(float(getattr(s, field)) * s.channels for s in self.sites) / channels


class SpikeRecorder:
    """Counts positive spikes, negative spikes and tokens of every channel on the model's device; only `health` waits."""

    def __init__(self, spikes: Mapping[tuple[int, str], Spike]) -> None:
        """Start with counts of zero for the spike modules {(block number, name of the matrix): module}."""
        self._counts = {
            place: torch.zeros(3, spike.log_alpha.shape[0], dtype=torch.int64, device=spike.log_alpha.device)
            for place, spike in spikes.items()
        }

    def add(self, place: tuple[int, str], spikes: Tensor) -> None:
        """Add spikes [..., C] to the counts of the matrix `place` = (block number, name of the matrix)."""
        spikes_NC = spikes.detach().flatten(0, -2)
        positive_C, negative_C = (spikes_NC > 0).sum(dim=0), (spikes_NC < 0).sum(dim=0)
        self._counts[place] += torch.stack([positive_C, negative_C, torch.full_like(positive_C, len(spikes_NC))])

    def each(self, change: Callable[[Tensor], Any]) -> None:
        """Call `change` on the counts [3, C] of every matrix; it may change them in place, such as by a sum over processes.

        The three rows are the numbers of positive spikes, of negative spikes and of tokens.
        """
        for counts_3C in self._counts.values():
            change(counts_3C)

    def health(self) -> SpikeHealth:
        """Statistics of all spikes counted so far. Waits for the device.

        Raises:
            GramianError: if nothing was counted: no forward pass, or only compiled ones, which do not call hooks.
        """
        counts = {place: found.cpu().double() for place, found in self._counts.items()}
        if any(not found_3C[2].all() for found_3C in counts.values()):
            raise GramianError("spikes: none were seen; expected a forward that is not compiled, on at least one token")
        return SpikeHealth(tuple(_site(place, found_3C) for place, found_3C in counts.items()))


@contextmanager
def record_spikes(model: Goose) -> Iterator[SpikeRecorder]:
    """Context manager that counts the spikes of every forward pass that is not compiled. Cost: one read of each spike tensor.

    Example:
        >>> with record_spikes(model) as recorder:
        ...     model(tokens_BT)
        >>> print(recorder.health().table())

    Raises:
        GramianError: for a model with `spikes=False`, which has no spikes.
    """
    spikes = spikes_of(model)
    if not spikes:
        raise GramianError("model: has no spikes; expected a Goose with spikes=True")
    recorder = SpikeRecorder(spikes)

    def hook(place: tuple[int, str]) -> Any:
        return lambda module, inputs, output: recorder.add(place, output)

    handles = [spike.register_forward_hook(hook(place)) for place, spike in spikes.items()]
    try:
        yield recorder
    finally:
        for handle in handles:
            handle.remove()


def measure_spikes(model: Goose, batches: Iterable[Tensor]) -> SpikeHealth:
    """Statistics of a model's spikes on batches of token ids [B, T], in evaluation mode. Cost: one forward pass per batch.

    Raises:
        GramianError: for a model with `spikes=False`, or no batches.
    """
    with evaluation_mode(model), record_spikes(model) as recorder:
        for tokens_BT in batches:
            model.hidden(tokens_BT)  # the call of the module may be compiled
    return recorder.health()


def spikes_of(model: nn.Module) -> dict[tuple[int, str], Spike]:
    """{(block number from 1, name of the matrix): its spike module} of a Goose; {} for one with `spikes=False`."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Spike):
            layer, site = name.rsplit(".", 3)[-3:-1]  # blocks.LAYER.SITE.spike
            found[int(layer) + 1, site] = module
    return found


def _site(place: tuple[int, str], counts_3C: Tensor) -> SiteHealth:
    tokens_C = counts_3C[2]
    shares_3C = torch.stack([counts_3C[0], counts_3C[1], tokens_C - counts_3C[0] - counts_3C[1]]) / tokens_C
    fires_C = shares_3C[0] + shares_3C[1]
    bits_C = -torch.xlogy(shares_3C, shares_3C).sum(dim=0) / math.log(2)
    return SiteHealth(
        layer=place[0],
        site=place[1],
        tokens=int(tokens_C[0]),
        channels=len(fires_C),
        firing=float(fires_C.mean()),
        dead=float((fires_C < DEAD).double().mean()),
        saturated=float((fires_C > SATURATED).double().mean()),
        entropy=float(bits_C.mean()),
    )
