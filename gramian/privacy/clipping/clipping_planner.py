"""From the shapes of a forward to the plan of its backward: how each parameter's norms and sum will be formed.

Every tapped layer shows its inputs and output as it runs. Its site is then asked, on meta tensors, which per-sample gradients
it will bring, and the planner is told their shapes. A forward of the same shapes is planned once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.privacy.clipping.clipping_plan import (
    MACHINES,
    ClippingPlan,
    ClippingRow,
    Machine,
    NormAlgorithm,
    Share,
    default_budget,
    plan_clipping,
    ways,
)
from gramian.taps.gradients import Convolved, Indexed, Outer, PerSampleGradient, Summed
from gramian.taps.gradients.joined import Joined

Storage = Literal["auto", "bookkeeping", "keep", "two_pass"]
REMEMBERED = 16
"""Forwards whose shapes are kept until their backward comes."""


class Foresight:
    """Shapes of the forwards under way, and the plans made from them."""

    def __init__(
        self, trained: Mapping[str, nn.Parameter], storage: Storage, algorithm: NormAlgorithm, budget: int | None
    ) -> None:
        """Have seen nothing.

        Args:
            trained: the parameters that are planned.
            storage: what is held between the norms and the sums.
            algorithm: forced on linear layers, or "auto".
            budget: bytes that may be held; None: as much as the step's own activations.
        """
        self._trained, self._storage, self._algorithm, self._budget = trained, storage, algorithm, budget
        self._plans: dict[Any, ClippingPlan] = {}
        self._seen: dict[int, list[Any]] = {}
        self._number, self._batch = -1, 0

    def begin(self, number: int, batch: int) -> None:
        """A forward begins."""
        self._number, self._batch = number, batch
        self._seen = {n: uses for n, uses in self._seen.items() if n > number - REMEMBERED}
        self._seen[number] = []

    def see(self, tap: Any, kept: list[Tensor], output: Any) -> None:
        """Note the shapes of one use of a layer."""
        made = (tuple(output.shape), output.dtype) if isinstance(output, Tensor) else None
        self._seen.setdefault(self._number, []).append((tap, tuple((tuple(t.shape), t.dtype) for t in kept), made))

    def newest(self) -> ClippingPlan | None:
        """The plan for the last forward; None where its shapes are not known (compiled)."""
        return self._planned(self._number, self._batch)

    def take(self, number: int, batch: int) -> ClippingPlan | None:
        """The plan for a forward whose backward begins; its shapes are forgotten."""
        plan = self._planned(number, batch)
        self._seen.pop(number, None)
        return plan

    def choose(self, share: Share, bytes_held: int | None) -> ClippingRow:
        """How a parameter that no plan foresaw is handled, with so much held already; None: only its norms are wanted.

        Raises:
            GramianError: if nothing fits into what is left of the budget.
        """
        storage = "bookkeeping" if bytes_held is None else self._storage
        open_ways = ways(share, self._machine([share]), self._algorithm, storage)
        if bytes_held is None:
            return open_ways[0]
        if self._budget is None:  # compiled: what the step holds is not known, so keep only where that holds no more
            return next((way for way in open_ways if way.way != "keep" or way.held <= share.held), open_ways[0])
        fitting = [way for way in open_ways if bytes_held + way.held <= self._budget]
        if not fitting:
            raise GramianError(
                f"memory_budget: {share.parameter} needs {min(way.held for way in open_ways)} bytes, more than are left "
                f"of {self._budget}; expected a larger one, a smaller max_physical_batch, or eager mode with "
                "engine.backward(loss)"
            )
        return fitting[0]

    def _planned(self, number: int, batch: int) -> ClippingPlan | None:
        uses = self._seen.get(number, [])
        if not uses:
            return None
        key = (batch, *((tap.name, kept, made) for tap, kept, made in uses))
        if key not in self._plans:
            self._plans[key] = self._make_plan([*self._shares(uses, batch).values()])
        return self._plans[key]

    def _shares(self, uses: Sequence[Any], batch: int) -> dict[str, Share]:
        shares: dict[str, Share] = {}
        for tap, kept, made in uses:
            module = tap.owner()
            locals_ = {local: name for local, name in tap.parameters.items() if name in self._trained}
            if made is None or not tap.site.compiles:  # the generic fallback writes per-sample gradients down
                found = {name: self._written(name, batch) for name in locals_.values()}
            else:
                inputs = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in kept]
                output = torch.empty(made[0], dtype=made[1], device="meta")
                try:
                    gradients = tap.site.gradients(module, inputs, [output], batch, None)
                except RuntimeError:  # it reads numbers of the module, not shapes alone: handled when they are there
                    continue
                found = {
                    locals_[local]: share_of(locals_[local], gradient)
                    for local, gradient in gradients.items()
                    if local in locals_
                }
            for name, share in found.items():
                shares[name] = share if name not in shares else _joined(shares[name], share)
        return shares

    def _written(self, name: str, batch: int) -> Share:
        p = self._trained[name]
        return Share(name, "other", batch, 1, tuple(p.shape), max(p.element_size(), 4), 0)

    def _make_plan(self, shares: Sequence[Share]) -> ClippingPlan:
        storage = "bookkeeping" if self._storage == "two_pass" else self._storage
        budget = default_budget(shares) if self._budget is None else self._budget
        limit = None if self._storage == "keep" and self._budget is None else budget
        plan = plan_clipping(shares, self._machine(shares), limit, self._algorithm, storage)
        return replace(plan, two_pass=plan.two_pass or self._storage == "two_pass")

    def _machine(self, shares: Sequence[Share]) -> Machine:
        if next(iter(self._trained.values())).device.type != "cuda":
            return MACHINES["cpu"]
        return MACHINES["cuda half" if min(share.itemsize for share in shares) == 2 else "cuda float"]


def share_of(name: str, gradient: PerSampleGradient) -> Share:
    """What the planner must know of a gradient."""
    tensors = gradient.tensors()
    itemsize = gradient.dtype.itemsize
    held = sum(t.nbytes for t in tensors)
    if isinstance(gradient, Outer):
        narrow = min(tensors, key=lambda t: t.shape[2])
        return Share(name, "outer", gradient.batch, gradient.tokens, gradient.shape, itemsize, held, narrow.nbytes)
    if isinstance(gradient, Summed):
        return Share(name, "sum", gradient.batch, gradient.tokens, gradient.shape, itemsize, held)
    form = "rows" if isinstance(gradient, Indexed) else "parts" if isinstance(gradient, Joined) else "other"
    if isinstance(gradient, Convolved):
        form = "parts"
    return Share(name, form, gradient.batch, gradient.tokens, gradient.shape, itemsize, held)


def _joined(one: Share, other: Share) -> Share:
    """Two uses of one parameter."""
    same = one.form == other.form
    if same and one.form == "outer":
        return replace(
            one, tokens=one.tokens + other.tokens, held=one.held + other.held, scaled=one.scaled + other.scaled
        )
    if same and one.form in ("sum", "rows"):
        return replace(one, tokens=one.tokens + other.tokens, held=one.held + other.held)
    return replace(one, form="parts", tokens=max(one.tokens, other.tokens), held=one.held + other.held)
