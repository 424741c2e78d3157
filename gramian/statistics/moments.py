"""Mean and variance of named tensors that arrive one after another, with weights, over any split of the data.

Weights are reliability weights: they say how much an observation counts beside the others, not how often it was made, so
that a common factor changes nothing. With W = Σ w and W₂ = Σ w²,

    μ = Σ w x / W,   s² = M₂ / (W − W₂/W) with M₂ = Σ w (x − μ)²,   SE = s / √n_eff,   n_eff = W² / W₂.

For observations of one variance σ², s² and SE² are unbiased for σ² and the variance of μ. An observation that was made k times
is k observations. The mean of k samples is one observation of variance σ²/k: give the samples themselves (`extend`), since
means weighted by k make SE² too large, by (n − 1)/(n_eff − 1).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gramian.errors import GramianError
from gramian.parallel.exchange import exchange_of


@dataclass
class Moment:
    """What is known of one tensor, float64."""

    mean: Tensor
    """μ."""
    deviations: Tensor
    """M₂."""
    weight: float
    """W."""
    squared_weight: float
    """W₂."""
    observations: int

    @property
    def effective(self) -> float:
        """n_eff, as many observations of equal weight as would tell the mean as well."""
        return self.weight**2 / self.squared_weight

    def variance(self) -> Tensor:
        """s², NaN after one observation."""
        if self.observations < 2:
            return torch.full_like(self.mean, float("nan"))
        return self.deviations / (self.weight - self.squared_weight / self.weight)

    def absorb(self, other: "Moment") -> None:
        """Take another's observations in (Chan et al.): one temporary of the tensor's size."""
        self.deviations += other.deviations.to(self.deviations.device)
        self._move(other.mean, other.weight, other.squared_weight, other.observations)

    def observe(self, value: Tensor, weight: float) -> None:
        """Take one observation in (Welford): one temporary of the tensor's size."""
        self._move(value, weight, weight**2, 1)

    def _move(self, mean: Tensor, weight: float, squared_weight: float, observations: int) -> None:
        """Count observations with this mean, whose deviations from it are in already."""
        total = self.weight + weight
        shift = mean.to(self.mean) - self.mean
        self.deviations.addcmul_(shift, shift, value=self.weight * weight / total)
        self.mean.add_(shift, alpha=weight / total)
        self.weight = total
        self.squared_weight += squared_weight
        self.observations += observations

    def copy(self) -> "Moment":
        """One that owns its tensors."""
        return replace(self, mean=self.mean.clone(), deviations=self.deviations.clone())


class WeightedMoments:
    """Welford moments of named tensors, each with weights of its own: one that is first seen late starts then.

    ```python
    moments = WeightedMoments()
    moments.update({"loss": loss, "norm": norm}, weight=tokens)
    low_high = moments.interval(0.95)["loss"]
    ```

    `merge` is associative and commutative up to rounding. State: 16 bytes per entry.
    """

    def __init__(self) -> None:
        """Nothing seen."""
        self.moments: dict[str, Moment] = {}
        """By name."""

    def __contains__(self, name: str) -> bool:
        """True if it was observed."""
        return name in self.moments

    # ---- observations ------------------------------------------------------------------------------------------------

    def update(self, values: Mapping[str, Tensor], weight: float = 1.0) -> None:
        """Add one observation of each tensor.

        Args:
            values: {name: tensor}, of the same shape every time.
            weight: of all of them; 0: they do not count.
        """
        checked = check_weight(weight)
        for name, value in values.items():
            check_real(name, value)
            self._known(name, value.shape)
        for name, value in values.items() if checked else ():
            mine = self.moments.get(name)
            if mine is None:
                mean = value.detach().double().clone()
                self.moments[name] = Moment(mean, torch.zeros_like(mean), checked, checked**2, 1)
            else:
                mine.observe(value.detach(), checked)

    def extend(self, rows: Mapping[str, Tensor], weights: Tensor | None = None) -> None:
        """Add several observations of each tensor at once.

        Args:
            rows: {name: [n, *shape]}.
            weights: [n], of the rows; None: all 1.
        """
        for name, rows_N in rows.items():
            check_real(name, rows_N, axes=1)
            self._known(name, rows_N.shape[1:])
            if weights is not None:
                check_weights(weights, len(rows_N))
        for name, rows_N in rows.items():
            if len(rows_N) == 1 and weights is None:
                self.update({name: rows_N[0]})
            elif len(rows_N):
                self.add(name, _of_rows(rows_N.detach().double(), weights))

    def merge(self, other: "WeightedMoments") -> None:
        """Take all of another's observations in; the other stays as it is."""
        for name, moment in other.moments.items():
            self.add(name, moment if name in self else moment.copy())

    def add(self, name: str, moment: Moment) -> None:
        """Take observations of one tensor in, as moments of their own; the first ones are kept as they are, not copied."""
        mine = self._known(name, moment.mean.shape)
        if mine is not None and moment.weight:
            mine.absorb(moment)
        elif moment.weight:
            self.moments[name] = moment

    def _known(self, name: str, shape: torch.Size) -> Moment | None:
        """What was seen before under this name, which must have this shape."""
        mine = self.moments.get(name)
        if mine is not None and mine.mean.shape != shape:
            raise GramianError(f"{name}: has shape {list(shape)}; expected {list(mine.mean.shape)}, as before")
        return mine

    def over(self, process_group: Any = None) -> "WeightedMoments":
        """The moments of all processes' observations, the same on each of them; this object stays as it is. Collective.

        The means are joined first, so that deviations are taken from the common mean. Traffic: an all-reduce of 16 bytes per
        entry; a tensor that some processes have not seen takes part with weight 0.

        Args:
            process_group: None: all processes.

        Raises:
            GramianError: on all processes, if shapes differ among them.
        """
        device = next((moment.mean.device for moment in self.moments.values()), torch.device("cpu"))
        others = exchange_of(process_group, device)
        joined = WeightedMoments()
        if others is None:
            joined.merge(self)
            return joined
        shapes: dict[str, list[int]] = {}
        for rank, said in enumerate(others.tell({name: list(m.mean.shape) for name, m in self.moments.items()})):
            for name, shape in said.items():
                if shapes.setdefault(name, shape) != shape:
                    raise GramianError(f"{name}: has shape {shape} on process {rank}; expected {shapes[name]}")
        for name in sorted(shapes):
            mine = self.moments.get(name)
            if mine is None:
                zeros = torch.zeros(shapes[name], dtype=torch.float64, device=device)
                mine = Moment(zeros, zeros, 0.0, 0.0, 0)
            counts = torch.tensor([mine.weight, mine.squared_weight, mine.observations], dtype=torch.float64)
            weight, squared_weight, observations = others.sum(counts).tolist()
            mean = others.sum(mine.mean * (mine.weight / weight))
            deviations = others.sum(mine.deviations + mine.weight * (mine.mean - mean).square())
            joined.moments[name] = Moment(mean, deviations, weight, squared_weight, int(observations))
        return joined

    # ---- what they say -----------------------------------------------------------------------------------------------

    def mean(self) -> dict[str, Tensor]:
        """μ of every tensor, float64."""
        return self._each(lambda moment: moment.mean.clone())

    def variance(self) -> dict[str, Tensor]:
        """s² of one observation, float64; NaN after one."""
        return self._each(Moment.variance)

    def standard_error(self) -> dict[str, Tensor]:
        """√(s²/n_eff) of the mean, float64; NaN after one observation."""
        return self._each(lambda moment: (moment.variance() / moment.effective).sqrt())

    def effective_samples(self) -> dict[str, float]:
        """n_eff of every tensor."""
        return {name: moment.effective for name, moment in self.moments.items()}

    def interval(self, level: float = 0.95) -> dict[str, tuple[Tensor, Tensor]]:
        """Confidence intervals of the means, entry by entry: μ ± t·SE, with t Student's quantile at n_eff − 1.

        Args:
            level: share of such intervals that hold the true mean, where observations are nearly normal or many.

        Returns:
            {name: (low, high)}, float64; NaN after one observation.
        """
        if not 0 < level < 1:
            raise GramianError(f"level: expected a number between 0 and 1, got {level!r}")
        try:
            from scipy.special import stdtrit
        except ImportError:
            raise GramianError("scipy: is not installed; expected it for intervals") from None
        found = {}
        for name, moment in self.moments.items():
            t = float(stdtrit(max(moment.effective - 1, 0.0), 0.5 + level / 2)) if moment.observations > 1 else 0.0
            half = t * (moment.variance() / moment.effective).sqrt()
            found[name] = (moment.mean - half, moment.mean + half)
        return found

    def _each(self, function: Callable[[Moment], Tensor]) -> dict[str, Tensor]:
        return {name: function(moment) for name, moment in self.moments.items()}

    # ---- at rest -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Flat and of tensors only, as safetensors takes it: mean, deviations and weights of every name."""
        state = {}
        for name, moment in self.moments.items():
            counts = (moment.weight, moment.squared_weight, moment.observations)
            state[f"mean.{name}"] = moment.mean.clone()
            state[f"deviations.{name}"] = moment.deviations.clone()
            state[f"weights.{name}"] = torch.tensor(counts, dtype=torch.float64)
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state_dict` gave; nothing changes if it is something else."""
        found = {}
        names = [key.removeprefix("mean.") for key in state if key.startswith("mean.")]
        for name in names:
            parts = [state.get(f"{part}.{name}") for part in ("mean", "deviations", "weights")]
            mean, deviations, counts = (t if t is not None and t.dtype == torch.float64 else None for t in parts)
            if mean is None or deviations is None or counts is None or deviations.shape != mean.shape:
                raise GramianError(f"{name}: is not whole; expected mean, deviations and weights, float64")
            weight, squared_weight, observations = counts.tolist()
            found[name] = Moment(mean.clone(), deviations.clone(), weight, squared_weight, int(observations))
        if len(state) != 3 * len(found):
            raise GramianError("state: holds other keys; expected what state_dict gave")
        self.moments = found


LEAST, MOST = 1e-100, 1e100
"""Of weights other than 0: their squares are numbers, too."""


def check_weight(weight: Any) -> float:
    """A weight as a float.

    Raises:
        GramianError: unless it is 0, or a number whose square is one.
    """
    try:
        found = float(weight)
    except (TypeError, ValueError):
        found = float("nan")
    if not (found == 0 or LEAST <= found <= MOST):
        raise GramianError(f"weight: got {weight!r}; expected 0, or a number from {LEAST:g} to {MOST:g}")
    return found


def check_weights(weights_N: Any, n: int) -> None:
    """Refuse what are no n weights.

    Raises:
        GramianError: unless each is 0, or a number whose square is one.
    """
    if not isinstance(weights_N, Tensor) or weights_N.shape != (n,):
        got = list(weights_N.shape) if isinstance(weights_N, Tensor) else type(weights_N).__name__
        raise GramianError(f"weights: got {got}; expected a tensor [{n}], one for each row")
    w = weights_N.double()
    if not bool(((w == 0) | (w >= LEAST) & (w <= MOST)).all()):
        raise GramianError(f"weights: hold another number; expected 0, or from {LEAST:g} to {MOST:g}")


def check_real(name: str, value: Any, axes: int = 0) -> None:
    """Refuse what is no observation.

    Raises:
        GramianError: unless it is a tensor of real numbers with so many axes or more.
    """
    if not isinstance(value, Tensor) or value.is_complex() or value.dim() < axes:
        got = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        rows = " with one row for each observation" * bool(axes)
        raise GramianError(f"{name}: got {got}; expected a tensor of real numbers{rows}")


def _of_rows(rows_N: Tensor, weights_N: Tensor | None) -> Moment:
    """The moments of some rows by themselves: two passes, so that nothing cancels."""
    n = len(rows_N)
    if weights_N is None:
        mean = rows_N.mean(0)
        return Moment(mean, (rows_N - mean).square_().sum(0), float(n), float(n), n)
    w = weights_N.to(rows_N)
    weight, squared_weight = float(w.sum()), float(w.square().sum())
    if not weight:
        return Moment(torch.zeros_like(rows_N[0]), torch.zeros_like(rows_N[0]), 0.0, 0.0, 0)
    mean = torch.tensordot(w, rows_N, dims=1) / weight
    deviations = torch.tensordot(w, (rows_N - mean).square(), dims=1)
    return Moment(mean, deviations, weight, squared_weight, int((w > 0).sum()))
