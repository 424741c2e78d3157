"""The two roles on top of a capture: statistics that observe, and the one rule that decides about weight gradients."""

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
    """What a statistic may know about a parameter before the first batch."""

    name: str
    layers: tuple[str, ...]
    """The layers that have it: several if it is tied."""
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Statistic(Protocol):
    """A sum over samples and a count; averages and inverses are made in `finish`.

    `start` must make the same keys on every process, so that states add up over any split of the data into backward
    passes and ranks, also where one of them saw nothing.
    """

    needs: Needs
    """Which records `update` wants: every use of a layer, or every parameter with all its uses joined."""
    per_sample: bool
    """True if samples must be told apart: layers that mix them are then refused."""

    def start(self, parameters: Mapping[str, ParameterInfo]) -> Any:
        """Empty sums for these trainable parameters."""

    def update(self, sums: Any, record: Any) -> None:
        """Add one record to the sums."""

    def count(self, sums: Any, samples: int) -> None:
        """One pass is over: count its samples (units)."""

    def merge(self, left: Any, right: Any) -> Any:
        """Sums over both."""

    def finish(self, sums: Any) -> Any:
        """The result that users see."""


SAMPLES = "(samples)"
"""Key under which an additive statistic counts samples."""


@runtime_checkable
class HasAlgorithm(Protocol):
    """A statistic that forms norms, and by which algorithm; the coverage names it."""

    algorithm: Algorithm


@runtime_checkable
class Forgets(Protocol):
    """A statistic that keeps passes apart, and can take one out again whose backward failed half-way."""

    def forget(self, sums: Any, number: int) -> None:
        """Take a pass out of the sums."""


class AdditiveStatistic:
    """The common case: sums are named tensors and merge by addition, the count of samples among them."""

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


def zero_sums(parameters: Mapping[str, ParameterInfo]) -> Sums:
    """A zero of every parameter's shape, in the dtype of its sums, and no samples."""
    sums: Sums = {SAMPLES: torch.zeros((), dtype=torch.float64, device=next(iter(parameters.values())).device)}
    for name, info in parameters.items():
        dtype = torch.float64 if info.dtype == torch.float64 else torch.float32
        sums[name] = torch.zeros(info.shape, dtype=dtype, device=info.device)
    return sums


class GradientRule(Protocol):
    """Decides what becomes of the weight gradients; a model has at most one. It sees records by listening, like anybody."""

    withholds: bool
    """True if autograd must not form weight gradients: the tapped layer then runs on detached weights."""
    again: bool
    """True while the backward under way is the first of two through one forward; the second reports to the rule alone."""

    def foresee(self, tap: Any, kept: list[Tensor], output: Any) -> None:
        """A layer whose weight gradient is withheld ran, in eager mode: shapes to plan with."""


class Ordinary:
    """`p.grad` is what it would be without gramian."""

    withholds = False
    again = False

    def foresee(self, tap: Any, kept: list[Tensor], output: Any) -> None:
        """Nothing to plan."""


class Withheld:
    """No weight gradient is formed; statistics still see every record. Saves a third of a linear layer's work."""

    withholds = True
    again = False

    def foresee(self, tap: Any, kept: list[Tensor], output: Any) -> None:
        """Nothing to plan."""
