"""Statistics that keep one result for each sample: their state is {number of the pass: result}, in the order of forwards."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gramian.taps.records import ParameterRecord
from gramian.taps.roles import ParameterInfo


class ByPass:
    """The part of a statistic's protocol that is the same wherever passes stay apart."""

    per_sample = True

    def start(self, parameters: Mapping[str, ParameterInfo]) -> dict[int, Any]:
        """Start with no pass."""
        return {}

    def add(self, sums: dict[int, Any], record: ParameterRecord, values: Tensor) -> None:
        """Add one parameter's share to the tensor of its pass; layers may sit on several devices."""
        number = record.info.number
        sums[number] = values if number not in sums else sums[number] + values.to(sums[number].device)

    def count(self, sums: dict[int, Any], samples: int) -> None:
        """Do nothing: the results have one entry for each sample."""

    def forget(self, sums: dict[int, Any], number: int) -> None:
        """Remove a pass whose backward failed half-way."""
        sums.pop(number, None)

    def merge(self, left: dict[int, Any], right: dict[int, Any]) -> dict[int, Any]:
        """Put the passes of the right behind those of the left."""
        behind = max(left, default=0) + 1
        return {**left, **{behind + number: result for number, result in right.items()}}
