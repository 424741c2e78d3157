"""The diagonal of the empirical Fisher, (1/N) Σ_i g_i ⊙ g_i, from squares of every sample's (or token's) gradient."""

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from gramian.core.errors import GramianError
from gramian.taps.records import ParameterRecord
from gramian.taps.roles import AdditiveStatistic, Needs, ParameterInfo, Sums, means, zero_sums


class DiagonalFisher(AdditiveStatistic):
    """The statistic diag F = (1/N) Σ_i g_i ⊙ g_i over the gradients g_i of N samples.

    ```python
    fisher = gramian.DiagonalFisher()
    with gramian.observe(model, fisher) as seen:
        F.cross_entropy(model(x), y).backward()
    seen[fisher]["fc.weight"]
    ```

    Per sample, g_i is summed over the sample's T tokens and over all uses of a parameter before it is squared; linear layers
    M×N with several tokens form it a chunk of samples at a time (2·T·M·N FLOPs per sample). Per token, every use of every token
    is squared by itself: (G⊙G)ᵀ(A⊙A) with inputs A and output gradients G, as in K-FAC's expand setting; N is still the number
    of samples.
    """

    needs: Needs = "parameter"
    per_sample = True
    per_parameter = True

    def __init__(self, per: Literal["sample", "token"] = "sample") -> None:
        """Set what is squared: the gradient of each "sample" or of each "token"; another value raises a `GramianError`."""
        if per not in ("sample", "token"):
            raise GramianError(f'per: expected "sample" or "token", got "{per}"')
        self.per = per

    def start(self, parameters: Mapping[str, ParameterInfo]) -> Sums:
        """{parameter: zeros of its shape}, and a sample count of 0."""
        return zero_sums(parameters)

    def update(self, sums: Sums, record: ParameterRecord) -> None:
        """Add the squared gradients of one parameter in one pass to its sum."""
        sums[record.parameter] += record.sum_of_squares() if self.per == "sample" else record.token_squares()

    def finish(self, sums: Sums) -> dict[str, Tensor]:
        """{parameter: mean squared gradient over samples}, zeros for a parameter that no pass used."""
        return means(sums)
