"""The first-batch audit: what the taps explain must be what autograd computed, for every trainable parameter.

Σ_i g_i from the records is compared with the gradient that reaches the parameter in this backward, before any reduction
over processes. It catches a weight used outside its layer, a wrong orientation, double counts and forgotten uses in one
comparison. Cost: one more weight gradient, once per model; the comparison needs no collective.
"""

import weakref
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gramian.errors import GramianError
from gramian.linalg.wide import wide
from gramian.taps.record import ParameterRecord
from gramian.taps.statistic import ParameterInfo

AGREES = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
"""Largest relative difference, by the narrowest dtype that took part."""


class Audit:
    """Collects both sides of the comparison during one backward."""

    def __init__(self, parameters: Mapping[str, ParameterInfo]) -> None:
        """Watch nothing yet."""
        self._expected: dict[str, ParameterRecord] = {}
        self._totals: dict[str, Tensor] = {}
        self._arrived: dict[str, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        self._watched: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self._names = list(parameters)

    def watch(self, name: str, tensor: Tensor) -> None:
        """See the local gradient that reaches this tensor (under FSDP2 the unsharded one that the forward reads)."""
        if tensor.requires_grad and tensor.is_leaf and not any(tensor is t for t in self._watched):
            self._watched.add(tensor)
            self._handles.append(tensor.register_hook(lambda gradient: self._gradient(name, gradient)))

    def record(self, record: ParameterRecord) -> None:
        """What the taps explain."""
        total = record.gradient.total()
        previous = self._totals.get(record.parameter)
        self._totals[record.parameter] = total if previous is None else previous + total
        self._expected[record.parameter] = record

    def _gradient(self, name: str, gradient: Tensor) -> None:
        gradient = gradient.detach()
        self._arrived[name] = self._arrived[name] + gradient if name in self._arrived else gradient.clone()

    def verdict(self) -> bool:
        """Compare, once the backward is over.

        Returns:
            False if a gradient was not finite, so that the comparison must be made again on another batch.

        Raises:
            GramianError: naming the first parameter whose gradient the taps do not explain.
        """
        self.release()
        finite = True
        for name in self._names:
            arrived, total = self._arrived.get(name), self._totals.get(name)
            if arrived is None and total is None:
                continue
            if arrived is not None and total is None:
                if bool((arrived != 0).any()):
                    raise GramianError(f"{name}: got a gradient, but none through its layer; {_ADVICE}")
                continue
            record, total = self._expected[name], total if total is not None else torch.zeros(())
            got = wide(arrived).to(total.dtype) if arrived is not None else torch.zeros_like(total)
            if not bool(got.isfinite().all()):
                finite = False
                continue
            rounding = torch.finfo(record.gradient.dtype).eps * record.gradient.magnitude()
            allowed = AGREES[record.gradient.dtype] * got.norm() + 8 * rounding
            error = (got - total).norm()
            if not bool(error <= allowed):
                raise GramianError(
                    f"{name}: the taps explain a gradient of norm {float(total.norm()):.4g}, autograd computed "
                    f"{float(got.norm()):.4g} (difference {float(error):.4g}); {_ADVICE}"
                )
        return finite

    def release(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


_ADVICE = (
    "expected the weight to be used through its own module only (not F.linear(x, layer.weight)), or a registered site"
)
