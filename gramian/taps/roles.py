"""The two roles in a capture: statistics observe a backward, and at most one gradient rule decides about weight gradients."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.plan.norm_algorithm import Algorithm

Needs = Literal["layer", "parameter"]
Sums = dict[str, Tensor]
"""State of a statistic: {name: tensor}, every one additive over samples. Two states of the same statistic add up by key."""


@dataclass(frozen=True)
class ParameterInfo:
    """Name, layers, kind, shape, dtype and device of a trainable parameter, known before the first batch."""

    name: str
    layers: tuple[str, ...]
    """Names of the layers that use the parameter: several if it is tied."""
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Statistic(Protocol):
    """A statistic of a capture: sums over samples and a count of them; `finish` computes the result.

    `start` must make the same keys on every process, so that states add up over any split of the data into backward
    passes and ranks, also where one of them saw nothing.
    """

    needs: Needs
    """Records that `update` receives: "layer": one per use of a layer; "parameter": one per parameter, all uses joined."""
    per_sample: bool
    """True if the statistic needs per-sample gradients: layers that mix samples are then refused."""

    def start(self, parameters: Mapping[str, ParameterInfo]) -> Any:
        """Return empty sums for these trainable parameters, {name: info}."""

    def update(self, sums: Any, record: Any) -> None:
        """Add one record of a backward (of a layer or of a parameter) to the sums, in place."""

    def count(self, sums: Any, samples: int) -> None:
        """Add the number of samples (units) of a finished pass to the sums, in place."""

    def merge(self, left: Any, right: Any) -> Any:
        """Return the sums over the samples of two states, `left` and `right`, of this statistic."""

    def finish(self, sums: Any) -> Any:
        """Compute the result that users see from the sums."""


SAMPLES = "(samples)"
"""Key under which an additive statistic counts samples."""


@runtime_checkable
class HasAlgorithm(Protocol):
    """A statistic with an `algorithm` by which per-sample gradient norms are computed; the coverage report names it."""

    algorithm: Algorithm


@runtime_checkable
class Forgets(Protocol):
    """A statistic that stores passes separately, and can remove one whose backward failed half-way."""

    def forget(self, sums: Any, number: int) -> None:
        """Remove the pass of this number from the sums."""


class AdditiveStatistic:
    """Base of statistics whose state is {name: tensor}, with the count of samples, and merges by addition."""

    per_parameter = False
    """True if `finish` gives {parameter: tensor of its shape}; under FSDP2 these are then placed like the parameter."""

    def count(self, sums: Sums, samples: int) -> None:
        """Add `samples` to the count of samples in the sums, in place."""
        sums[SAMPLES] += samples

    def merge(self, left: Sums, right: Sums) -> Sums:
        """Add two states of sums key by key.

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
    """Zeros for each parameter, float32 or float64, of its shape or, if `rows`, of its first axis; and a sample count of 0."""
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
    """Decides whether autograd forms weight gradients; a model has at most one. It also receives records as a listener."""

    withholds: bool
    """True if autograd must not form weight gradients: the tapped layer then runs on detached weights."""
    another_backward_follows: bool
    """True in the FIRST of two backwards through one forward, so that the pass stays open; False in the second, or if there is
    only one. The second backward reports to the rule alone."""

    def foresee(self, tap: Any, saved: list[Tensor], output: Any) -> None:
        """Plan memory or algorithms from the saved tensors and output of a layer that just ran (eager mode), if `withholds`."""


class Ordinary:
    """The default gradient rule: autograd forms weight gradients, `p.grad` is what it would be without gramian."""

    withholds = False
    another_backward_follows = False

    def foresee(self, tap: Any, saved: list[Tensor], output: Any) -> None:
        """Do nothing: the ordinary rule plans nothing from the shapes of a layer that ran."""


class Withheld:
    """Gradient rule under which autograd forms no weight gradient, which saves work; statistics still see every record."""

    withholds = True
    another_backward_follows = False

    def foresee(self, tap: Any, saved: list[Tensor], output: Any) -> None:
        """Do nothing: this rule plans nothing from the shapes of a layer that ran."""
