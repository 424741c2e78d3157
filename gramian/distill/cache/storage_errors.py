"""How far what is stored is from what the teacher said: largest and mean over tokens, added up shard by shard."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor


@dataclass(frozen=True)
class Errors:
    """Absolute errors by name, each of one number per token or several."""

    worst: Mapping[str, float] = field(default_factory=dict)
    sums: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, errors: Mapping[str, Tensor]) -> Self:
        """Of tensors of absolute errors. Waits for the device."""
        return cls(
            {name: float(values.max()) for name, values in errors.items()},
            {name: float(values.double().sum()) for name, values in errors.items()},
            {name: values.numel() for name, values in errors.items()},
        )

    @property
    def means(self) -> dict[str, float]:
        """By name."""
        return {name: self.sums[name] / self.counts[name] for name in self.sums}

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {"worst": dict(self.worst), "mean": self.means, "counts": dict(self.counts), "sums": dict(self.sums)}

    @classmethod
    def from_plain(cls, told: Mapping[str, Any]) -> Self:
        """From JSON."""
        return cls(told["worst"], told["sums"], told["counts"])


def added(parts: Iterable[Errors]) -> Errors:
    """Over all parts, in their order, so that the sum is the same whoever computed them."""
    worst: dict[str, float] = {}
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    for part in parts:
        for name in part.worst:
            worst[name] = max(worst.get(name, 0.0), part.worst[name])
            sums[name] = sums.get(name, 0.0) + part.sums[name]
            counts[name] = counts.get(name, 0) + part.counts[name]
    return Errors(worst, sums, counts)
