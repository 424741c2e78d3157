"""Noise that is correlated over releases, y = C⁻¹z, made in the place of the independent noise z of each release.

    bandmf:  y_t = (z_t - Σ_{i=1}^{b-1} c_i y_{t-i}) / c_0        b - 1 buffers: the last y of every element
    bisr:    y_t = Σ_{i=0}^{b-1} d_i z_{t-i}                      no buffer: the last z are drawn again from the key stream

The draws z are those of `NoisePlan`, so any sharding draws the same. Where a release does not follow the one before (releases
that a crash lost, a new key after a resume), the correlation begins anew: what C couples over that place is cut out. Its
columns only get shorter by that, so the sensitivity is never above that of C.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gramian.core.dtypes import wide_dtype
from gramian.core.errors import GramianError
from gramian.linalg.wide import wide
from gramian.parallel.data_parallel import as_sharded, local, local_box
from gramian.privacy.noise.element_noise import Box, NoisePlan, Place
from gramian.privacy.noise.noise_strategy import NoiseStrategy, buffers_of
from gramian.privacy.noise.secrets import is_count


@dataclass
class _Past:
    """The correlated releases of one tensor so far."""

    first: int
    """Number of the release with which the correlation began."""
    next: int
    """Number of the release that follows."""
    buffers: Tensor
    """Noise y of release t in row t mod (b - 1): [b - 1, elements], float32 or float64; no row for "bisr"."""


class CorrelatedNoise:
    """Adds the correlated noise of a strategy to sums; it is used as a `NoisePlan` is."""

    def __init__(self, plan: NoisePlan, strategy: NoiseStrategy) -> None:
        """Begin without releases; `plan` draws the independent noise."""
        self._plan, self.strategy = plan, strategy
        self._rows = buffers_of(strategy.name, strategy.bands)
        self._past: dict[tuple[Place, int], _Past] = {}
        """By (place, number of elements), as two empty tensors may have one place."""

    def place(self, name: str, shape: Sequence[int], box: Box | None = None) -> Place:
        """Where the noise of a part of a parameter lies in the key stream: `NoisePlan.place`."""
        return self._plan.place(name, shape, box)

    def add_noise_to(
        self,
        targets: Sequence[Tensor],
        sums: Sequence[Tensor],
        places: Sequence[Place],
        std: float | Tensor,
        release: int,
        factor: float = 1.0,
    ) -> None:
        """targets[i] = (sums[i] + std · correlated noise of this release at places[i]) · factor, rounded once.

        Arguments as of `NoisePlan.add_noise_to`; releases must come in order. Sums in float32 and float64 are written to. Cost
        for "bandmf": one draw of noise, and b - 1 passes over buffers; for "bisr": b draws.
        """
        totals, c = [wide(total.detach()) for total in sums], self.strategy.coefficients
        pasts = [self._of(place, total, release) for place, total in zip(places, totals, strict=True)]
        if self.strategy.name == "bisr":
            self._add_earlier_draws(totals, places, std, release, pasts)
            self._plan.add_noise_to(targets, totals, places, std, release, factor)
        elif not self._rows:
            self._plan.add_noise_to(targets, totals, places, std * (1 / c[0]), release, factor)
        else:
            scaled = torch._foreach_mul(self._next_noise(places, release, pasts), std)
            torch._foreach_add_(scaled, [total.view(-1) for total in totals])
            torch._foreach_mul_(scaled, factor)
            torch._foreach_copy_([target.detach().view(-1) for target in targets], scaled)
        for past in pasts:
            past.next = release + 1

    def _of(self, place: Place, total: Tensor, release: int) -> _Past:
        """The past of a tensor; a new one unless the last release was the one before."""
        key = (place, total.numel())
        if key not in self._past or self._past[key].next != release:
            self._past[key] = _Past(release, release, total.new_empty(self._rows, total.numel()))
        return self._past[key]

    def _add_earlier_draws(
        self, totals: list[Tensor], places: Sequence[Place], std: float | Tensor, release: int, pasts: list[_Past]
    ) -> None:
        """Add Σ_{i≥1} d_i z_{t-i}, all of whose d_i are negative: -(Σ_i |d_i| z_{t-i} - sum), with noise of std ≥ 0."""
        for total, past in zip(totals, pasts, strict=True):
            if release > past.first and self.strategy.bands > 1:
                total.neg_()
        for lag in range(self.strategy.bands - 1, 0, -1):
            some = [i for i, past in enumerate(pasts) if release - lag >= past.first]
            if some:
                chosen, scale = [totals[i] for i in some], std * -self.strategy.coefficients[lag]
                sign = -1.0 if lag == 1 else 1.0
                self._plan.add_noise_to(chosen, chosen, [places[i] for i in some], scale, release - lag, sign)

    def _next_noise(self, places: Sequence[Place], release: int, pasts: list[_Past]) -> list[Tensor]:
        """y_t of standard deviation 1 for each tensor, flat, in the place of the oldest y in its buffers."""
        c, rows = self.strategy.coefficients, self._rows
        ages = [release - past.first for past in pasts]
        noise = [past.buffers[release % rows] for past in pasts]
        for y_N, age in zip(noise, ages, strict=True):
            if age < rows:
                y_N.zero_()
        torch._foreach_mul_(noise, -c[rows] / c[0])  # the oldest, y_{t-b+1}
        for lag in range(1, rows):
            some = [i for i, age in enumerate(ages) if age >= lag]
            if some:
                earlier = [pasts[i].buffers[(release - lag) % rows] for i in some]
                torch._foreach_add_([noise[i] for i in some], earlier, alpha=-c[lag] / c[0])
        self._plan.add_noise_to(noise, noise, places, 1 / c[0], release)
        return noise

    def numbers(self) -> list[tuple[int, int]]:
        """(first, next) of all tensors with a release, in the order in which they began: the same on every process."""
        return [(past.first, past.next) for past in self._past.values()]

    # ---- state -----------------------------------------------------------------------------------------------------

    def state_dict(self, trained: Mapping[str, nn.Parameter]) -> dict[str, Any]:
        """{parameter: {"first", "next", "rows", "buffers": [y of each row, sharded as the parameter]}} of what has a release.

        "rows" is (start, stop) of dim 0 that this process stores of the parameter, or of every axis; None: all.
        """
        found = {}
        for name, p in trained.items():
            past = self._past.get(self._key(name, p))
            if past is not None:
                shape = local(p.detach()).shape
                rows = [as_sharded(row.clone().view(shape), p) for row in past.buffers]
                found[name] = {"first": past.first, "next": past.next, "rows": _stored(p), "buffers": rows}
        return found

    def load_state_dict(self, state: Mapping[str, Any], trained: Mapping[str, nn.Parameter]) -> None:
        """Go on from a `state_dict` of this process, or from one whose buffers are whole tensors.

        Raises:
            GramianError: naming the parameter that has none, or of another shape, or of another process's rows.
        """
        if state:
            self._past = {self._key(name, p): self._loaded(name, p, state.get(name)) for name, p in trained.items()}

    def _loaded(self, name: str, p: nn.Parameter, own: Any) -> _Past:
        part = local(p.detach())
        try:
            first, following, rows = own["first"], own["next"], list(own["buffers"])
            fits = is_count(first) and is_count(following) and first < following and len(rows) == self._rows
            fits = fits and all(tuple(row.shape) == tuple(p.shape) for row in rows)
            mine = list(own["rows"] or ()) == list(_stored(p) or ())
            fits = fits and (mine or not any(isinstance(row, DTensor) for row in rows))
        except (TypeError, KeyError, AttributeError):
            fits = False
        if not fits:
            raise GramianError(
                f"state: the noise of {name} is missing, of another shape or of another process; expected what "
                "engine.state_dict() gave on this one"
            )
        buffers = torch.empty(self._rows, part.numel(), dtype=wide_dtype(part), device=part.device)
        for into, row in zip(buffers, rows, strict=True):
            into.copy_(_own_rows(row, p).reshape(-1))
        return _Past(first, following, buffers)

    def _key(self, name: str, p: nn.Parameter) -> tuple[Place, int]:
        part = local(p.detach())
        return self.place(name, part.shape, local_box(p)), part.numel()


def buffer_bytes(strategy: NoiseStrategy, trained: Mapping[str, nn.Parameter]) -> int:
    """Bytes that this process stores to correlate noise: those of `buffers_of` buffers of the parameters' elements."""
    rows = buffers_of(strategy.name, strategy.bands)
    return sum(rows * local(p.detach()).numel() * wide_dtype(p).itemsize for p in trained.values())


def _own_rows(t: Tensor, like: nn.Parameter) -> Tensor:
    """The part of a whole tensor, or of one that is sharded as the parameter, which this process stores of the parameter."""
    box = local_box(like)
    if isinstance(t, DTensor):
        return t.to_local()
    return t if box is None else t[box]


def _stored(p: nn.Parameter) -> tuple[int, ...] | None:
    """(start, stop) of the rows that this process stores of a parameter, of every axis if it has columns; None: all."""
    box = local_box(p)
    if box is None:
        return None
    whole = all(part == slice(0, size) for part, size in zip(box[1:], p.shape[1:], strict=True))
    return tuple(bound for part in box[: 1 if whole else None] for bound in (part.start, part.stop))
