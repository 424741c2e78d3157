"""Mean and variance of named tensors that arrive one after another, with weights, over any split of the data.

Weights are reliability weights: they say how much an observation counts beside the others, not how often it was made, so that a
common factor of all weights changes nothing. With W = Σ w, W₂ = Σ w² and C = Σ_{i<j} w_i w_j,

    μ = Σ w x / W,   s² = M₂ / (W − W₂/W) with M₂ = Σ w (x − μ)²,   SE = s / √n_eff,   n_eff = W² / W₂.

They are computed by W − W₂/W = 2C/W and n_eff − 1 = 2C/W₂, which do not cancel where one weight is nearly all of W.

For observations of one variance σ², s² and SE² are unbiased for σ² and the variance of μ. An observation that was made k times
is k observations. The mean of k samples is one observation of variance σ²/k: give the samples themselves (`extend`), since
means weighted by k make SE² too large, by (n − 1)/(n_eff − 1).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.parallel.exchange import exchange_of
from gramian.statistics.argument_checks import check_mapping, check_real, check_state
from gramian.statistics.reliability_weights import Weights, check_weight, check_weights


@dataclass
class WeightedMoment:
    """Weighted mean and squared deviations of the observations of one tensor, float64."""

    mean: Tensor
    """The weighted mean μ of the observations."""
    deviations: Tensor
    """M₂ = Σ w (x − μ)², the weighted sum of squared deviations from the mean μ."""
    weights: Weights

    def variance(self) -> Tensor:
        """Variance s² of one observation, entry by entry; NaN after one observation."""
        if self.weights.observations < 2:
            return torch.full_like(self.mean, float("nan"))
        return self.deviations / self.weights.divisor

    def standard_error(self) -> Tensor:
        """Standard error √(s²/n_eff) of the mean, entry by entry; NaN after one observation."""
        return (self.variance() / self.weights.effective).sqrt()

    def absorb(self, other: "WeightedMoment") -> None:
        """Add the observations of another moment (Chan et al. 1983); allocates one temporary of the tensor's size."""
        self.deviations += other.deviations.to(self.deviations.device)
        self._move(other.mean, other.weights)

    def observe(self, value: Tensor, weight: float) -> None:
        """Add one observation (Welford 1962); allocates one temporary of the tensor's size."""
        self._move(value, Weights(weight, weight**2, 0.0, 1))

    def _move(self, mean: Tensor, weights: Weights) -> None:
        """Add observations, given by their mean and weights, to mean and weights.

        The observations' own squared deviations must have been added to `deviations` before.
        """
        both = self.weights + weights
        shift = mean.to(self.mean) - self.mean
        self.deviations.addcmul_(shift, shift, value=self.weights.total * weights.total / both.total)
        self.mean.add_(shift, alpha=weights.total / both.total)
        self.weights = both

    def copy(self) -> "WeightedMoment":
        """A copy of this moment with tensors of its own."""
        return replace(self, mean=self.mean.clone(), deviations=self.deviations.clone())


class WeightedMoments:
    """Weighted means and variances of named tensors; each has its own sum of weights, and updates may leave tensors out.

    ```python
    moments = WeightedMoments()
    moments.update({"loss": loss, "norm": norm}, weight=tokens)
    low_high = moments.interval(0.95)["loss"]
    ```

    `merge` is associative and commutative up to rounding. State: 16 bytes per entry.
    """

    def __init__(self) -> None:
        """Create moments without observations."""
        self.moments: dict[str, WeightedMoment] = {}

    def __contains__(self, name: str) -> bool:
        """True if a tensor of this name was observed."""
        return name in self.moments

    # ---- observations ------------------------------------------------------------------------------------------------

    def update(self, values: Mapping[str, Tensor], weight: float = 1.0) -> None:
        """Add one observation of each of the named tensors.

        Args:
            values: {name: tensor}, of the same shape every time.
            weight: weight of all of them; 0: they do not count.

        Raises:
            GramianError: for an invalid weight or value, or another shape than before; nothing is added.
        """
        checked = check_weight(weight)
        check_mapping("values", values)
        for name, value in values.items():
            check_real(name, value)
            self._known(name, value.shape)
        for name, value in values.items() if checked else ():
            mine = self.moments.get(name)
            if mine is None:
                mean = value.detach().double().clone()
                self.moments[name] = WeightedMoment(mean, torch.zeros_like(mean), Weights(checked, checked**2, 0.0, 1))
            else:
                mine.observe(value.detach(), checked)

    def extend(self, rows: Mapping[str, Tensor], weights: Tensor | None = None) -> None:
        """Add several observations of each of the named tensors at once.

        Args:
            rows: {name: [n, *shape]}, one observation per row.
            weights: [n], weights of the rows; None: all 1. Rows of weight 0 do not count, whatever their values.

        Raises:
            GramianError: for invalid weights or rows, or another shape than before; nothing is added.
        """
        check_mapping("rows", rows)
        for name, rows_N in rows.items():
            check_real(name, rows_N, axes=1)
            self._known(name, rows_N.shape[1:])
            if weights is not None:
                check_weights(weights, len(rows_N))
        for name, rows_N in rows.items():
            w_N = None
            if weights is not None:
                w_N = weights.detach().cpu().to(torch.float64)
                rows_N, w_N = rows_N[w_N > 0], w_N[w_N > 0]
            if len(rows_N) == 1 and w_N is None:
                self.update({name: rows_N[0]})
            elif len(rows_N):
                self.add(name, _of_rows(rows_N.detach().double(), w_N))

    def merge(self, other: "WeightedMoments") -> None:
        """Add all observations of `other`, which is not changed.

        Raises:
            GramianError: if `other` is not a `WeightedMoments`, or a tensor has another shape there; nothing is added.
        """
        if not isinstance(other, WeightedMoments):
            raise GramianError(f"merge: got {type(other).__name__}; expected WeightedMoments")
        self.check_shapes(other)
        for name, moment in other.moments.items():
            self.add(name, moment if name in self else moment.copy())

    def add(self, name: str, moment: WeightedMoment) -> None:
        """Add observations of tensor `name`, given as their moments; the first ones are stored as they are, not copied.

        Raises:
            GramianError: if the tensor had another shape before.
        """
        mine = self._known(name, moment.mean.shape)
        if mine is None:
            self.moments[name] = moment
        else:
            mine.absorb(moment)

    def check_shapes(self, other: "WeightedMoments") -> None:
        """Raise GramianError if a tensor has another shape in `other` than here."""
        for name, moment in other.moments.items():
            self._known(name, moment.mean.shape)

    def _known(self, name: str, shape: torch.Size) -> WeightedMoment | None:
        """The moment of tensor `name`; None if there is none yet. A `GramianError` if it has another shape than `shape`."""
        mine = self.moments.get(name)
        if mine is not None and mine.mean.shape != shape:
            raise GramianError(f"{name}: has shape {list(shape)}; expected {list(mine.mean.shape)}, as before")
        return mine

    def over(self, process_group: Any = None) -> "WeightedMoments":
        """The moments of the observations of all processes, the same on each; this object is not changed. Collective.

        The common mean is computed first, and deviations are taken from it. All means enter as differences from the mean of the
        process with the largest weight, which therefore is not rounded. Traffic: a broadcast of 8 and an all-reduce of 16 bytes
        per entry; a tensor that some processes have not seen takes part there with weight 0.

        Args:
            process_group: the processes; None: all processes.

        Raises:
            GramianError: on all processes, if shapes differ among them.
        """
        device = next((moment.mean.device for moment in self.moments.values()), torch.device("cpu"))
        exchange = exchange_of(process_group, device)
        joined = WeightedMoments()
        if exchange is None:
            joined.merge(self)
            return joined
        shapes: dict[str, list[int]] = {}
        weights: dict[str, list[Weights]] = {}
        mine = {name: (list(moment.mean.shape), astuple(moment.weights)) for name, moment in self.moments.items()}
        for rank, theirs in enumerate(exchange.gather_messages(mine)):
            for name, (shape, sums) in theirs.items():
                if shapes.setdefault(name, shape) != shape:
                    raise GramianError(f"{name}: has shape {shape} on process {rank}; expected {shapes[name]}")
                weights.setdefault(name, [Weights()] * exchange.size)[rank] = Weights(*sums)
        for name in sorted(shapes):
            total = sum(weights[name], Weights())
            zeros = torch.zeros(shapes[name], dtype=torch.float64, device=device)
            moment = self.moments.get(name, WeightedMoment(zeros, zeros, Weights()))
            heaviest = max(range(exchange.size), key=lambda rank: weights[name][rank].total)
            origin = exchange.broadcast(moment.mean, shapes[name], moment.mean, heaviest)
            offset = moment.mean - origin
            shift = exchange.sum(offset * (moment.weights.total / total.total))
            deviations = exchange.sum(moment.deviations + moment.weights.total * (offset - shift).square())
            joined.moments[name] = WeightedMoment(origin + shift, deviations, total)
        return joined

    # ---- results -----------------------------------------------------------------------------------------------------

    def mean(self) -> dict[str, Tensor]:
        """{name: weighted mean}, float64."""
        return self._each(lambda moment: moment.mean.clone())

    def variance(self) -> dict[str, Tensor]:
        """{name: variance s² of one observation}, float64; NaN after one observation."""
        return self._each(WeightedMoment.variance)

    def standard_error(self) -> dict[str, Tensor]:
        """{name: standard error of the mean, √(s²/n_eff)}, float64; NaN after one observation."""
        return self._each(WeightedMoment.standard_error)

    def effective_samples(self) -> dict[str, float]:
        """{name: n_eff = (Σ w)²/Σ w², the effective number of observations}."""
        return {name: moment.weights.effective for name, moment in self.moments.items()}

    def interval(self, level: float = 0.95) -> dict[str, tuple[Tensor, Tensor]]:
        """{name: confidence interval of the mean}, entry by entry: μ ± t·SE, with t Student's quantile at n_eff − 1.

        Args:
            level: share of such intervals that contain the true mean, where observations are nearly normal or many.

        Returns:
            {name: (low, high)}, float64; NaN after one observation. Infinite where the observations differ and one weight is
            nearly all (n_eff − 1 below 0.01).

        Raises:
            GramianError: unless `level` is between 0 and 1 and scipy is installed.
        """
        if not isinstance(level, Real) or not 0 < level < 1:
            raise GramianError(f"level: expected a number between 0 and 1, got {level!r}")
        try:
            from scipy.special import stdtrit
        except ImportError:
            raise GramianError("interval: scipy is not here; expected gramian[privacy], or scipy installed") from None
        found = {}
        for name, moment in self.moments.items():
            freedom, error = moment.weights.freedom, moment.standard_error()
            t = float(stdtrit(freedom, 0.5 + level / 2)) if freedom >= 0.01 else math.inf
            half = torch.where(error == 0, 0.0, t * error)
            found[name] = (moment.mean - half, moment.mean + half)
        return found

    def _each(self, function: Callable[[WeightedMoment], Tensor]) -> dict[str, Tensor]:
        return {name: function(moment) for name, moment in self.moments.items()}

    # ---- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """{key: tensor} for safetensors: mean, deviations and weights [Σ w, Σ w², Σ_{i<j} w_i w_j, count] of every name."""
        state = {}
        for name, moment in self.moments.items():
            state[f"mean.{name}"] = moment.mean.clone()
            state[f"deviations.{name}"] = moment.deviations.clone()
            state[f"weights.{name}"] = torch.tensor(astuple(moment.weights), dtype=torch.float64)
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a result of `state_dict`.

        Raises:
            GramianError: for any other state; nothing is changed then.
        """
        check_state(state)
        found = {}
        names = [key.removeprefix("mean.") for key in state if key.startswith("mean.")]
        for name in names:
            parts = [state.get(f"{part}.{name}") for part in ("mean", "deviations", "weights")]
            mean, deviations, sums = (t if t is not None and t.dtype == torch.float64 else None for t in parts)
            if mean is None or deviations is None or sums is None or deviations.shape != mean.shape:
                raise GramianError(f"{name}: is not whole; expected mean, deviations and weights, float64")
            weights = Weights(*sums.tolist()) if sums.shape == (4,) else Weights()
            if not weights.possible() or bool((deviations < 0).any()):
                raise GramianError(f"{name}: has sums that no observations give; expected what state_dict gave")
            weights = replace(weights, observations=int(weights.observations))
            found[name] = WeightedMoment(mean.clone(), deviations.clone(), weights)
        if len(state) != 3 * len(found):
            raise GramianError("state: holds other keys; expected what state_dict gave")
        self.moments = found


def _of_rows(rows_N: Tensor, weights_N: Tensor | None) -> WeightedMoment:
    """The moments of the rows [n, *shape] with these weights (None: all 1), in two passes, so that nothing cancels.

    With weights a third pass removes the rounding error of the mean, which a weight of 1e20 would multiply in the deviations.
    """
    if weights_N is None:
        mean = rows_N.mean(0)
        return WeightedMoment(mean, (rows_N - mean).square_().sum(0), Weights.equal(len(rows_N)))
    w, weights = weights_N.to(rows_N.device), Weights.of(weights_N)
    mean = torch.tensordot(w, rows_N, dims=1) / weights.total
    centred_N = rows_N - mean
    rounding = torch.tensordot(w, centred_N, dims=1) / weights.total
    deviations = torch.tensordot(w, centred_N.sub_(rounding).square_(), dims=1)
    return WeightedMoment(mean + rounding, deviations, weights)
