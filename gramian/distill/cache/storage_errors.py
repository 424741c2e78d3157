"""Errors of stored values relative to the teacher's signal: maximum and mean over tokens, combined over shards."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor


@dataclass(frozen=True)
class StorageErrors:
    """Absolute errors of stored values by name: maximum, sum, and number of measured values of each."""

    worst: Mapping[str, float] = field(default_factory=dict)
    sums: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, errors: Mapping[str, Tensor]) -> Self:
        """Maximum, sum and count of each tensor of absolute errors, {name: tensor}. Waits for the device."""
        return cls(
            {name: float(values.max()) for name, values in errors.items()},
            {name: float(values.double().sum()) for name, values in errors.items()},
            {name: values.numel() for name, values in errors.items()},
        )

    @classmethod
    def combined(cls, parts: Iterable["StorageErrors"]) -> Self:
        """Combine the errors of several shards or batches: maxima of `worst`, sums of `sums` and `counts`.

        Sums are taken in the given order, so the result does not depend on which process computed a shard.
        """
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
        """{name: mean absolute error}."""
        return {name: self.sums[name] / self.counts[name] for name in self.sums}

    def to_json(self) -> dict[str, Any]:
        """The errors as JSON values: {"worst", "mean", "counts", "sums"}, each {name: number}."""
        return {"worst": dict(self.worst), "mean": self.means, "counts": dict(self.counts), "sums": dict(self.sums)}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Self:
        """The errors from JSON values that `to_json` made."""
        return cls(plain["worst"], plain["sums"], plain["counts"])
