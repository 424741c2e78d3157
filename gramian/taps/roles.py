"""The two roles on top of a capture: statistics observe a backward, and at most one rule decides about weight gradients."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.plan.norm_algorithm import Algorithm

Needs = Literal["layer", "parameter"]
Sums = dict[str, Tensor]
"""State of a statistic: named sums, every one additive over samples. Two states of the same statistic add up by key."""


@dataclass(frozen=True)
class ParameterInfo:
    """Facts about a trainable parameter before the first batch."""

    name: str
    layers: tuple[str, ...]
    """Layers that use it: several if it is tied."""
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Statistic(Protocol):
    """A sum over samples and a count; `finish` makes averages and inverses of them.

    `start` must make the same keys on every process, so that states add up over any split of the data into backward
    passes and ranks, also where one of them saw nothing.
    """

    needs: Needs
    """The records that `update` receives: every use of a layer, or every parameter with all its uses joined."""
    per_sample: bool
    """True if samples must be told apart: layers that mix them are then refused."""

    def start(self, parameters: Mapping[str, ParameterInfo]) -> Any:
        """Empty sums for these trainable parameters."""

    def update(self, sums: Any, record: Any) -> None:
        """Add one record to the sums."""

    def count(self, sums: Any, samples: int) -> None:
        """Count the samples (units) of a pass that is over."""

    def merge(self, left: Any, right: Any) -> Any:
        """Sums over both."""

    def finish(self, sums: Any) -> Any:
        """The result that users see."""


SAMPLES = "(samples)"
"""Key under which an additive statistic counts samples."""


@runtime_checkable
class HasAlgorithm(Protocol):
    """A statistic that forms norms by an algorithm, which the coverage report names."""

    algorithm: Algorithm


@runtime_checkable
class Forgets(Protocol):
    """A statistic that stores passes apart, and can remove one whose backward failed half-way."""

    def forget(self, sums: Any, number: int) -> None:
        """Remove a pass from the sums."""


class AdditiveStatistic:
    """A statistic whose state is named tensors, the count of samples among them, that merge by addition."""

    per_parameter = False
    """True if `finish` gives {parameter: tensor of its shape}; under FSDP2 these are then placed like the parameter."""

    def count(self, sums: Sums, samples: int) -> None:
        """Add to the count."""
        sums[SAMPLES] += samples

    def merge(self, left: Sums, right: Sums) -> Sums:
        """Add key by key.

        Raises:
            GramianError: if the two are sums over different parameters.
        """
        if left.keys() != right.keys():
            odd = sorted(left.keys() ^ right.keys())[0]
            raise GramianError(
                f"merge: {odd} is in one of the sums only; expected captures of the same trainable parameters"
            )
        return {key: left[key] + right[key] for key in left}


def zero_sums(parameters: Mapping[str, ParameterInfo], rows: bool = False) -> Sums:
    """Zeros in the dtype of each parameter's sums, of its shape or of its first axis (`rows`), and a count of no samples."""
    sums: Sums = {SAMPLES: torch.zeros((), dtype=torch.float64, device=next(iter(parameters.values())).device)}
    for name, info in parameters.items():
        if not rows or len(info.shape) > 1:
            dtype = torch.float64 if info.dtype == torch.float64 else torch.float32
            sums[name] = torch.zeros(info.shape[:1] if rows else info.shape, dtype=dtype, device=info.device)
    return sums


def means(sums: Sums) -> dict[str, Tensor]:
    """{name: sum over samples divided by their number}; zeros where no sample was seen."""
    samples = sums[SAMPLES].clamp(min=1)
    return {name: total / samples.to(total.dtype) for name, total in sums.items() if name != SAMPLES}


class GradientRule(Protocol):
    """Decides what becomes of the weight gradients; a model has at most one. It receives records as a listener."""

    withholds: bool
    """True if autograd must not form weight gradients: the tapped layer then runs on detached weights."""
    again: bool
    """True while the backward under way is the first of two through one forward; the second reports to the rule alone."""

    def foresee(self, tap: Any, saved: list[Tensor], output: Any) -> None:
        """Plan with the shapes of a layer that just ran (eager mode), whose weight gradient is withheld."""


class Ordinary:
    """The default rule: `p.grad` is what it would be without gramian."""

    withholds = False
    again = False

    def foresee(self, tap: Any, saved: list[Tensor], output: Any) -> None:
        """Plan nothing."""


class Withheld:
    """No weight gradient is formed; statistics still see every record. Saves a third of a linear layer's work."""

    withholds = True
    again = False

    def foresee(self, tap: Any, saved: list[Tensor], output: Any) -> None:
        """Plan nothing."""
