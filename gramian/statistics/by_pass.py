"""Statistics with one result for each sample: their state is {number of the pass: result}, in the order of forwards.

A pass is one forward of the model and the backward through it.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gramian.taps.records import ParameterRecord
from gramian.taps.roles import ParameterInfo


class ByPass:
    """Base of statistics whose state is {number of the pass (a forward and its backward): one result per sample}."""

    per_sample = True

    def start(self, parameters: Mapping[str, ParameterInfo]) -> dict[int, Any]:
        """An empty state: no pass has been observed."""
        return {}

    def add(self, sums: dict[int, Any], record: ParameterRecord, values: Tensor) -> None:
        """Add one parameter's part, `values` with one entry per sample, to the tensor of its pass, on that tensor's device."""
        number = record.info.number
        sums[number] = values if number not in sums else sums[number] + values.to(sums[number].device)

    def count(self, sums: dict[int, Any], samples: int) -> None:
        """Do nothing with the number of samples: the results already have one entry for each."""

    def forget(self, sums: dict[int, Any], number: int) -> None:
        """Remove the results of the pass `number`, whose backward failed half-way."""
        sums.pop(number, None)

    def merge(self, left: dict[int, Any], right: dict[int, Any]) -> dict[int, Any]:
        """One state with the passes of `right` after those of `left`, renumbered."""
        behind = max(left, default=0) + 1
        return {**left, **{behind + number: result for number, result in right.items()}}
