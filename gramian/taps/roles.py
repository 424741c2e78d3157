"""Interfaces of a capture: statistics, which observe backwards, and the rule that sets whether weight gradients are formed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.plan.norm_algorithm import Algorithm

Needs = Literal["layer", "parameter"]
Sums = dict[str, Tensor]
"""State of a statistic: {name: sum over samples}. Two states of the same statistic are merged by adding the tensors by name."""


@dataclass(frozen=True)
class ParameterInfo:
    """Name, layers, kind of layer, shape, dtype and device of a trainable parameter, known before the first batch."""

    name: str
    layers: tuple[str, ...]
    """Names of the layers that use the parameter: several if it is tied."""
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Statistic(Protocol):
    """Interface of a statistic: its state has sums over samples and their number, from which `finish` computes the result.

    `start` must return the same keys on every process, so that states can be added over any split of the data into backward
    passes and ranks, even if a rank saw no data.
    """

    needs: Needs
    """Records that `update` receives: "layer": one per call of a layer; "parameter": one per parameter, all uses summed."""
    per_sample: bool
    """True if the statistic needs per-sample gradients: layers that mix samples (batch norm) then raise GramianError."""

    def start(self, parameters: Mapping[str, ParameterInfo]) -> Any:
        """Return the initial state, sums of zero, for the trainable parameters {name: info}."""

    def update(self, sums: Any, record: Any) -> None:
        """Add one record of a backward (of a layer or of a parameter) to the sums, in place."""

    def count(self, sums: Any, samples: int) -> None:
        """Add the number of samples of a finished backward (or of units, groups that count as one) to the sums, in place."""

    def merge(self, left: Any, right: Any) -> Any:
        """Return the state for all samples of `left` and `right`, two states of this statistic."""

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
    """A statistic that stores passes (a forward and its backward) separately, and can remove one whose backward failed."""

    def forget(self, sums: Any, number: int) -> None:
        """Remove from the sums what the pass of this number added."""


class AdditiveStatistic:
    """Base class of statistics whose state is {name: tensor}, including the count of samples, and is merged by addition."""

    per_parameter = False
    """True if `finish` returns {parameter: tensor of its shape}; after a sum over processes they are sharded like it."""

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
    """Initial state {parameter: zeros of its shape} in float32 (float64 for float64 parameters), and a sample count of 0.

    With `rows`, zeros of the size of the first axis instead; parameters with fewer than two axes are left out.
    """
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
    """Interface of a rule that sets whether autograd forms weight gradients; a model has one. It may be a listener, too."""

    withholds: bool
    """True if autograd must not form weight gradients: the tapped layer then runs on detached weights."""
    another_backward_follows: bool
    """True in the first of two backwards through one forward, so that the second one does not raise. False in the second,
    which reports to the rule alone, and if there is only one backward."""

    def foresee(self, tap: Any, saved: list[Tensor], output: Any) -> None:
        """Plan memory or algorithms from the shapes of a layer's saved tensors and output, after it ran in eager mode.

        Called only if `withholds` is True.
        """

    def foresee_product(self, name: str, layout: Any, y: Tensor, saved: list[Tensor]) -> None:
        """The same for one product y of the parameter `name` inside a layer, read by `layout`; `saved` is stored of it."""


class Ordinary:
    """The default gradient rule: autograd forms weight gradients, `p.grad` is what it would be without gramian."""

    withholds = False
    another_backward_follows = False

    def foresee(self, tap: Any, saved: list[Tensor], output: Any) -> None:
        """Do nothing: the ordinary rule plans neither memory nor algorithms from the shapes of a layer that ran."""

    def foresee_product(self, name: str, layout: Any, y: Tensor, saved: list[Tensor]) -> None:
        """Do nothing, as in `foresee`."""


class Withheld:
    """Gradient rule under which autograd forms no weight gradient, which saves work; statistics still see every record."""

    withholds = True
    another_backward_follows = False

    def foresee(self, tap: Any, saved: list[Tensor], output: Any) -> None:
        """Do nothing: this rule plans neither memory nor algorithms from the shapes of a layer that ran."""

    def foresee_product(self, name: str, layout: Any, y: Tensor, saved: list[Tensor]) -> None:
        """Do nothing, as in `foresee`."""
