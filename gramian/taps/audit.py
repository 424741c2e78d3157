"""The first-batch audit: what the taps explain must be what autograd computed, for every trainable parameter.

Σ_i g_i from the records is compared with the gradient that reaches the parameter in this backward, before any reduction
over processes. It catches a weight used outside its layer, a wrong orientation, double counts and forgotten uses in one
comparison. Cost: one more weight gradient, once per model; the comparison needs no collective, except in a tensor-parallel
model, whose backward is one anyway.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from gramian.errors import GramianError
from gramian.linalg.wide import wide
from gramian.parallel.tensor_parallel import TensorParallel, whole
from gramian.taps.record import ParameterRecord
from gramian.taps.statistic import ParameterInfo

AGREES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
"""Largest relative difference, by the narrowest dtype that took part."""


class Audit:
    """Collects both sides of the comparison during one backward."""

    def __init__(
        self,
        parameters: Mapping[str, ParameterInfo],
        spread: TensorParallel | None = None,
        listens: Callable[[], bool] = lambda: True,
    ) -> None:
        """Watch nothing yet.

        Args:
            parameters: to be compared.
            listens: False while a proof runs the model untapped.
            spread: the processes that took a share of the samples each; what they explain is added up.
        """
        self._spread, self._listens = spread, listens
        self._rounding: dict[str, tuple[Tensor, torch.dtype]] = {}
        """{parameter: how large the terms of its sum are, and their narrowest dtype}, of its last record."""
        self._totals: dict[str, Tensor] = {}
        self._arrived: dict[str, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        self._watched: dict[int, Tensor] = {}
        self._watched_names: set[str] = set()
        self._names = dict.fromkeys(parameters)

    def watch(self, name: str, tensor: Tensor) -> None:
        """See the local gradient that reaches this tensor (under FSDP2 the unsharded one that the forward reads)."""
        known = name not in self._names or id(tensor) in self._watched
        if not known and tensor.requires_grad and tensor.is_leaf and self._is_read(tensor):
            self._watched[id(tensor)] = tensor
            self._watched_names.add(name)
            handle = tensor.register_hook(lambda gradient: self._gradient(name, gradient))
            hooks = tensor._backward_hooks or {}
            for key in [key for key in hooks if key != handle.id]:  # ours first: the user's may change the gradient
                hooks[key] = hooks.pop(key)
            self._handles.append(handle)

    def _is_read(self, tensor: Tensor) -> bool:
        """True for what a forward reads: a plain tensor, or one that is spread by features alone; False for FSDP2's shards."""
        if not isinstance(tensor, DTensor):
            return True
        return self._spread is not None and tensor.device_mesh == self._spread.mesh

    def record(self, record: ParameterRecord) -> None:
        """What the taps explain."""
        if record.parameter not in self._watched_names:
            return
        total = record.gradient.total()
        previous = self._totals.get(record.parameter)
        self._totals[record.parameter] = total if previous is None else previous + total
        self._rounding[record.parameter] = (record.gradient.magnitude(), record.gradient.dtype)

    def _gradient(self, name: str, gradient: Tensor) -> None:
        if not self._listens():
            return
        gradient = gradient.detach()
        self._arrived[name] = self._arrived[name] + gradient if name in self._arrived else gradient.clone()

    def verdict(self) -> frozenset[str]:
        """Compare, once the backward is over.

        A parameter that this backward did not differentiate (`torch.autograd.grad` with respect to inputs), or whose
        gradient is not finite, is left for another one.

        Returns:
            The parameters that were compared.

        Raises:
            GramianError: naming the first parameter whose gradient the taps do not explain.
        """
        self.release()
        compared: set[str] = set()
        for name in self._names:
            arrived, total = self._arrived.get(name), self._totals.get(name)
            if arrived is None:
                continue
            arrived = whole(arrived)
            if self._spread is not None and total is not None:
                total = self._spread.sum(total)
            if not bool(arrived.isfinite().all()):
                continue
            compared.add(name)
            if total is None:
                if bool((arrived != 0).any()):
                    raise GramianError(f"{name}: got a gradient, but none through its layer; {_ADVICE}")
                continue
            (magnitude, dtype), got = self._rounding[name], wide(arrived).to(total.dtype)
            magnitude = magnitude if self._spread is None else self._spread.sum(magnitude)
            told = torch.finfo(dtype)
            below_normal = told.smallest_normal * got.numel() ** 0.5  # where numbers lie evenly, eps of it apart
            rounding = told.eps * (magnitude + below_normal)
            allowed = AGREES[dtype] * got.norm() + 8 * rounding
            error = (got - total).norm()
            if not bool(error <= allowed):
                raise GramianError(
                    f"{name}: the taps explain a gradient of norm {float(total.norm()):.4g}, autograd computed "
                    f"{float(got.norm()):.4g} (difference {float(error):.4g}); {_ADVICE}"
                )
        return frozenset(compared)

    def release(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


_ADVICE = (
    "expected the weight to be used through its own module only (not F.linear(x, layer.weight)), or a registered site"
)
