"""The diagonal of the empirical Fisher from true per-sample (or per-token) squares."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from gramian.errors import GramianError
from gramian.taps.record import ParameterRecord
from gramian.taps.statistic import AdditiveStatistic, ParameterInfo, Sums


class DiagonalFisher(AdditiveStatistic):
    """diag F = (1/N) Σ_i g_i ⊙ g_i.

    Per sample, g_i is summed over the sample's tokens and over all uses of a parameter before it is squared; linear layers
    with several tokens form it a chunk of samples at a time (2·T·M·N FLOPs per sample). Per token, every token is a sample
    of its own, (G⊙G)ᵀ(A⊙A), and N counts samples still.
    """

    needs: Literal["parameter"] = "parameter"
    per_sample = True

    def __init__(self, per: Literal["sample", "token"] = "sample") -> None:
        """Set what is squared.

        Args:
            per: "sample" or "token".

        Raises:
            GramianError: for another word.
        """
        if per not in ("sample", "token"):
            raise GramianError(f'per: expected "sample" or "token", got "{per}"')
        self.per = per

    def start(self, parameters: Mapping[str, ParameterInfo]) -> Sums:
        """Zeros of every parameter's shape, and a count of samples for each."""
        sums: Sums = {}
        for name, info in parameters.items():
            dtype = torch.float64 if info.dtype == torch.float64 else torch.float32
            sums[name] = torch.zeros(info.shape, dtype=dtype, device=info.device)
        device = next(iter(parameters.values())).device
        sums[_SAMPLES] = torch.zeros((), dtype=torch.float64, device=device)
        self._passes: set[int] = set()
        return sums

    def update(self, sums: Sums, record: ParameterRecord) -> None:
        """Add one parameter's squares."""
        squares = record.sum_of_squares() if self.per == "sample" else record.token_squares()
        sums[record.parameter] += squares
        if record.info.number not in self._passes:
            self._passes.add(record.info.number)
            sums[_SAMPLES] += record.info.count

    def finish(self, sums: Sums) -> dict[str, Tensor]:
        """{parameter: mean square}, zeros where nothing was seen."""
        samples = sums[_SAMPLES].clamp(min=1)
        return {name: total / samples.to(total.dtype) for name, total in sums.items() if name != _SAMPLES}


_SAMPLES = "(samples)"
