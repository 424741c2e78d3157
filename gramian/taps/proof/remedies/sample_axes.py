"""On which axis of each layer's tensors the samples lie, as runs with replaced samples show.

A layer may have them on axis 1 (`batch_first=False`, models that compute in [T, B, D]) or next to each other in other ways. For
every axis with k·B rows, and both orders of them, a tensor is split into B parts. If the samples lie so, the part of
a sample that stays does not change when others are replaced. Nothing that is found here is trusted: with these layouts the
batch is proven from the beginning (`Prover`), as with any others.

Cost: 2⌈log₂ B⌉ + 1 forwards and backwards without taps, once for a structure of inputs that cannot be proven with samples on
axis 0. Memory: 40 bytes for each sample, tensor and candidate.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gramian.taps.proof.row_fingerprint import Fingerprint, relative_rounding
from gramian.taps.sites.batch_layout import FIRST, CallLayouts, Layout, split
from gramian.taps.tap import Tap
from gramian.taps.tapped_model import Layouts

Place = tuple[str, int, int, int]
"""A tensor of a call: (layer, number of its earlier calls, 0 for an input and 1 for an output, number of the tensor)."""
Prints = dict[Layout, Fingerprint]
"""{layout: fingerprint of a tensor's parts, one for each sample, as the layout splits it}."""


@dataclass
class SampleAxes:
    """A `Watcher` that finds the layouts of all calls of tapped layers, from the run of a batch and runs with replacements."""

    batch: int
    seed: int
    _now: dict[Place, Prints] = field(default_factory=dict)
    """The tensors of the run under way."""
    _base: dict[Place, Prints] = field(default_factory=dict)
    """Those of the batch, without the layouts that a run has refuted."""
    _varied: set[Place] = field(default_factory=set)
    """Tensors that have changed in some run, so that they depend on samples."""
    _count: dict[str, int] = field(default_factory=dict)
    """{layer: number of its calls in the run under way}."""

    def run(self, tap: Tap, module: nn.Module, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a layer and look at its inputs, if these may lie otherwise than its output, and at its output."""
        site = tap.site
        assert site is not None
        inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        number = self._count[tap.name] = self._count.get(tap.name, -1) + 1
        for i, x in enumerate(inputs if site.inline or not site.compiles else ()):
            self._look((tap.name, number, 0, i), x, x.dim() - x.is_floating_point())
        output = plain(*args, **kwargs)
        for i, y in enumerate(pytree.tree_leaves(output)):
            self._look((tap.name, number, 1, i), y, site.batch_axes(module, y) if isinstance(y, Tensor) else 0)
        return output

    def begin(self) -> None:
        """The run that has ended is that of the batch, with which others are compared."""
        self._base, self._now, self._count = self._now, {}, {}

    def compare(self, stayed: Collection[int]) -> None:
        """The run that has ended had other samples in place of all but those that `stayed`: drop layouts that do not fit."""
        places = sorted(stayed)
        for place, prints in self._base.items():
            now = self._now.get(place, {})
            for layout, one in list(prints.items()):
                other = now.get(layout)
                if other is None or one.shape != other.shape:
                    del prints[layout]
                    continue
                changed = (one.hashes_R != other.hashes_R) & (
                    one.moved(other) > relative_rounding(one.eps) * one.largest
                )
                self._varied |= {place} if bool(changed.any()) else set()
                if bool(changed[places].any()):
                    del prints[layout]
        self._now, self._count = {}, {}

    @property
    def settled(self) -> bool:
        """True if no tensor can have its samples elsewhere than on axis 0, as far as the runs so far have shown."""
        if not self._varied:
            return all(prints.keys() <= {FIRST} for prints in self._base.values())
        return all(next(iter(self._base[place]), FIRST) == FIRST for place in self._varied)

    def found(self) -> Layouts:
        """The layouts of the calls of all layers that have samples elsewhere than on axis 0 in one of them."""
        found: dict[str, list[tuple[list[Layout | None], list[Layout | None]]]] = {}
        for place, prints in self._base.items():
            layer, number, side, _ = place
            calls = found.setdefault(layer, [])
            calls += [([], []) for _ in range(len(calls), number + 1)]
            calls[number][side].append(next(iter(prints), None) if place in self._varied else None)
        layouts = {
            name: tuple(CallLayouts(tuple(ins), tuple(outs)) for ins, outs in calls) for name, calls in found.items()
        }
        return {layer: calls for layer, calls in layouts.items() if any(call.moved for call in calls)}

    def _look(self, place: Place, t: Any, axes: int) -> None:
        """Store fingerprints of a tensor under all layouts that fit its shape, on the first of its axes; axis 0 comes first.

        Layouts that earlier runs have refuted are left out.
        """
        found: Prints = {}
        self._now[place] = found
        left = self._base.get(place)
        if not isinstance(t, Tensor) or t.layout != torch.strided:
            return
        for layout in (
            Layout(axis, between) for between in (False, True) for axis in range(min(max(axes, 1), t.dim()))
        ):
            rows = t.shape[layout.axis or 0]
            fits = rows and rows % self.batch == 0 and (rows > self.batch or not layout.interleaved)
            if fits and (left is None or layout in left):
                found[layout] = Fingerprint.of(split(t.detach(), layout, self.batch), self.seed)
