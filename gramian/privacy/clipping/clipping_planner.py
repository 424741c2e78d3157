"""Plan a backward from the shapes of its forward: how each parameter's norms and clipped sum will be computed.

Every tapped (hooked) layer reports its inputs and output as it runs. Its site (the gradient formulas for its type of layer) is
then called on meta tensors, which gives the shapes of its per-sample gradients, and `plan_clipping` chooses by these. Forwards
of the same shapes share one plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

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
from gramian.privacy.options import Storage
from gramian.taps.gradients import (
    Convolved,
    GroupedIndexed,
    GroupedOuter,
    GroupedSum,
    Indexed,
    Outer,
    PerSampleGradient,
    Summed,
)
from gramian.taps.gradients.joined import Joined

REMEMBERED = 16
"""Number of recent forwards whose shapes are stored until their backward runs."""


class ClippingPlanner:
    """Collects the shapes of forwards as they run, and makes and caches a clipping plan for each set of shapes."""

    def __init__(
        self, trained: Mapping[str, nn.Parameter], storage: Storage, algorithm: NormAlgorithm, budget: int | None
    ) -> None:
        """Plan for the parameters in `trained`; no forward has been seen.

        `storage` and `algorithm` are the options `clipping` and `norm_algorithm` of `make_private`. A `budget` of None allows
        about as many bytes as the step's own activations take.
        """
        self._trained, self._storage, self._algorithm, self._budget = trained, storage, algorithm, budget
        self._plans: dict[Any, ClippingPlan] = {}
        self._uses: dict[int, list[Any]] = {}
        """{number of a forward: (tap, shapes of its saved inputs, shape of its output) of every use of a layer}."""
        self._products: dict[int, dict[str, Share]] = {}
        """{number of a forward: {parameter: share}} of products inside layers."""
        self._number, self._batch = -1, 0

    def begin(self, number: int, batch: int) -> None:
        """Begin to collect the shapes of the forward of this number and batch size."""
        self._number, self._batch = number, batch
        self._uses = {n: uses for n, uses in self._uses.items() if n > number - REMEMBERED}
        self._uses[number] = []
        self._products = {n: products for n, products in self._products.items() if n in self._uses}

    def see_product(self, name: str, layout: Any, y: Tensor, saved: list[Tensor]) -> None:
        """Record the sizes of one product of a weight inside a layer, with result y; products of one weight are added up."""
        if name not in self._trained or not self._batch:
            return
        rows, form, p = y.numel() // max(y.shape[-1 - layout.columns], 1), "sum", self._trained[name]
        if layout.form == "product":
            form = "grouped" if layout.order == "owners" else "outer"
        sides = [y.nbytes, *(t.nbytes for t in saved[:1] if layout.form == "product")]
        tokens = -(-rows // self._batch)
        share = Share(name, form, self._batch, tokens, tuple(p.shape), p.element_size(), sum(sides), min(sides))
        _join(self._products.setdefault(self._number, {}), share)

    def see(self, tap: Any, inputs: list[Tensor], output: Any) -> None:
        """Record the shapes of the inputs and the output of one call of a layer in the present forward."""
        made = (output.shape, output.dtype) if isinstance(output, Tensor) else None
        self._uses.setdefault(self._number, []).append((tap, tuple([(t.shape, t.dtype) for t in inputs]), made))

    def newest(self) -> ClippingPlan | None:
        """The plan for the last forward; None if its shapes are not known (a compiled forward does not report them)."""
        return self._planned(self._number, self._batch)

    def take(self, number: int, batch: int) -> ClippingPlan | None:
        """The plan for the forward of this number, whose backward begins; its shapes are dropped. None if not known."""
        plan = self._planned(number, batch)
        self._uses.pop(number, None)
        self._products.pop(number, None)
        return plan

    def choose(self, share: Share, saved_bytes: int | None) -> ClippingRow:
        """Choose how a parameter without a plan is clipped, when its gradient is there.

        `saved_bytes` is what the backward has stored so far; None: the backward only computes norms, and stores nothing.

        Raises:
            GramianError: if nothing fits into what is left of the budget.
        """
        storage = "bookkeeping" if saved_bytes is None else self._storage
        open_ways = ways(share, self._machine([share]), self._algorithm, storage)
        if saved_bytes is None:
            return open_ways[0]
        if self._budget is None:  # compiled: what the step saves is not known, so keep only where that saves no more
            return next((way for way in open_ways if way.way != "keep" or way.held <= share.held), open_ways[0])
        fitting = [way for way in open_ways if saved_bytes + way.held <= self._budget]
        if not fitting:
            raise GramianError(
                f"memory_budget: {share.parameter} needs {min(way.held for way in open_ways)} bytes, more than are left "
                f"of {self._budget}; expected a larger one, a smaller max_physical_batch, or eager mode with "
                "engine.backward(loss)"
            )
        return fitting[0]

    def _planned(self, number: int, batch: int) -> ClippingPlan | None:
        uses, products = self._uses.get(number, []), self._products.get(number, {})
        if not uses and not products:
            return None
        key = (batch, *((tap.name, inputs, made) for tap, inputs, made in uses), str(products))
        if key not in self._plans:
            shares = self._shares(uses, batch)
            for own in products.values():
                _join(shares, own)
            self._plans[key] = self._make_plan([*shares.values()])
        return self._plans[key]

    def _shares(self, uses: Sequence[Any], batch: int) -> dict[str, Share]:
        shares: dict[str, Share] = {}
        for tap, shapes, made in uses:
            module = tap.owner()
            names = {local: name for local, name in tap.parameters.items() if name in self._trained}
            if made is None or not tap.site.compiles:  # the generic fallback forms explicit per-sample gradients
                found = {name: self._explicit(name, batch) for name in names.values()}
            else:
                inputs = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in shapes]
                output = torch.empty(made[0], dtype=made[1], device="meta")
                try:
                    gradients = tap.site.gradients(module, inputs, [output], batch, None)
                except RuntimeError:  # it reads numbers of the module, not shapes alone: planned when they are there
                    continue
                found = {
                    names[local]: share_of(names[local], gradient)
                    for local, gradient in gradients.items()
                    if local in names
                }
            for share in found.values():
                _join(shares, share)
        return shares

    def _explicit(self, name: str, batch: int) -> Share:
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
    """The form, shapes and bytes of a per-sample gradient, as the `Share` from which a plan is made."""
    tensors = gradient.tensors()
    itemsize = gradient.dtype.itemsize
    held = sum(t.nbytes for t in tensors)
    if isinstance(gradient, GroupedOuter):
        scaled = min(t.nbytes for t in tensors)
        return Share(name, "grouped", gradient.batch, gradient.tokens, gradient.shape, itemsize, held, scaled)
    if isinstance(gradient, Outer):
        narrow = min(tensors, key=lambda t: t.shape[2])
        return Share(name, "outer", gradient.batch, gradient.tokens, gradient.shape, itemsize, held, narrow.nbytes)
    if isinstance(gradient, Summed | GroupedSum):
        return Share(name, "sum", gradient.batch, gradient.tokens, gradient.shape, itemsize, held)
    form = (
        "rows"
        if isinstance(gradient, Indexed | GroupedIndexed)
        else "parts"
        if isinstance(gradient, Joined)
        else "other"
    )
    if isinstance(gradient, Convolved):
        form = "parts"
    return Share(name, form, gradient.batch, gradient.tokens, gradient.shape, itemsize, held)


def _join(shares: dict[str, Share], share: Share) -> None:
    """Add the share of one use of a parameter in a forward to that of its other uses."""
    earlier = shares.get(share.parameter)
    shares[share.parameter] = share if earlier is None else _joined(earlier, share)


def _joined(one: Share, other: Share) -> Share:
    """The share of a parameter with two uses in one forward, from the shares of both."""
    same = one.form == other.form
    if same and one.form in ("outer", "grouped"):
        return replace(
            one, tokens=one.tokens + other.tokens, held=one.held + other.held, scaled=one.scaled + other.scaled
        )
    if same and one.form in ("sum", "rows"):
        return replace(one, tokens=one.tokens + other.tokens, held=one.held + other.held)
    return replace(one, form="parts", tokens=max(one.tokens, other.tokens), held=one.held + other.held)
