"""Errors of stored values relative to the teacher's signal: maximum and mean over tokens, combined over shards."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor


@dataclass(frozen=True)
class StorageErrors:
    """Absolute errors by name, with one or several values per token."""

    worst: Mapping[str, float] = field(default_factory=dict)
    sums: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, errors: Mapping[str, Tensor]) -> Self:
        """Summarise tensors of absolute errors. Waits for the device."""
        return cls(
            {name: float(values.max()) for name, values in errors.items()},
            {name: float(values.double().sum()) for name, values in errors.items()},
            {name: values.numel() for name, values in errors.items()},
        )

    @classmethod
    def combined(cls, parts: Iterable["StorageErrors"]) -> Self:
        """The errors of all parts, summed in their order, so that the result does not depend on who computed a part."""
        worst: dict[str, float] = {}
        sums: dict[str, float] = {}
        counts: dict[str, int] = {}
        for part in parts:
            for name in part.worst:
                worst[name] = max(worst.get(name, 0.0), part.worst[name])
                sums[name] = sums.get(name, 0.0) + part.sums[name]
                counts[name] = counts.get(name, 0) + part.counts[name]
        return cls(worst, sums, counts)

    @property
    def means(self) -> dict[str, float]:
        """Mean errors by name."""
        return {name: self.sums[name] / self.counts[name] for name in self.sums}

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"worst": dict(self.worst), "mean": self.means, "counts": dict(self.counts), "sums": dict(self.sums)}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`."""
        return cls(plain["worst"], plain["sums"], plain["counts"])
