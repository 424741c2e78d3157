"""The audit: what the taps explain must be what autograd computed, for every trainable parameter, in every backward.

Σ_i g_i from the records is compared with the gradient that reaches the parameter in this backward, before any reduction
over processes. It catches a weight used outside its layer, a wrong orientation, double counts, forgotten uses and a penalty
on the weights that enters the loss, in one comparison.

The first time a parameter gets a gradient, the whole gradients are compared. Cost: one more weight gradient, once. After that
both are projected on random directions: the difference Δ shows as numbers of mean 0 and variance ‖Δ‖². Cost: one pass over each
gradient and over the tensors that the taps read, and one wait for the device at the end of the backward. No collective runs,
except in a tensor-parallel model, whose backward is one anyway and of which the first batch alone is compared.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from gramian.errors import GramianError
from gramian.linalg.wide import exact_float32, wide, wide_dtype
from gramian.parallel.tensor_parallel import TensorParallel, whole
from gramian.taps.gradients.directions import Directions
from gramian.taps.record import ParameterRecord
from gramian.taps.statistic import ParameterInfo

AGREES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
"""Largest relative difference of whole gradients, by the narrowest dtype that took part."""
PROJECTED = 8
"""How many times its rounding a projected difference may reach, in the mean square over directions."""
TENSOR_FLOAT_32 = 2.0**-10
TINY = torch.finfo(torch.float32).tiny


@dataclass
class Projections:
    """What was projected in one backward, on K directions for each parameter."""

    directions: dict[tuple[tuple[int, ...], torch.device], Directions]
    """By shape and device; the model's hub keeps them, so that they are drawn once."""
    explained: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """{parameter: projections of what the taps explain [K], and how far rounding may put them off}."""
    arrived: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """{parameter: projections of autograd's gradient [K], and its rounding}."""

    def explain(self, record: ParameterRecord, device: torch.device) -> None:
        """What the taps explain, of one use or of several.

        Rounding: sums in the accumulation dtype are off by ε_wide times the sum of absolute terms, which is at most √n times
        their norm; products that are rounded, or taken of rounded operands, by ε times the norm of the terms.
        """
        gradient = record.gradient
        terms = gradient.projected(self._directions(gradient.shape, device))
        size = torch.linalg.vector_norm(terms) / terms.shape[1] ** 0.5
        eps = _eps(gradient.dtype, device)
        summation = torch.finfo(terms.dtype).eps if gradient.summed_wide else eps
        off = size * (eps + summation * max(1, len(terms)) ** 0.5)
        self._add(self.explained, record.parameter, terms.sum(0), off)

    def arrive(self, name: str, gradient: Tensor) -> None:
        """What autograd computed; a second gradient of one parameter is added."""
        projections_K = self._directions(tuple(gradient.shape), gradient.device).project(gradient)
        norm = torch.linalg.vector_norm(gradient, dtype=wide_dtype(gradient))
        self._add(self.arrived, name, projections_K, norm * _eps(gradient.dtype, gradient.device))

    def disagreement(self) -> str | None:
        """The first parameter whose gradient the taps do not explain. Waits for the device once."""
        if not self.arrived:
            return None
        nothing = tuple(torch.zeros_like(t) for t in next(iter(self.arrived.values())))
        arrived = list(self.arrived.values())
        explained = [self.explained.get(name, nothing) for name in self.arrived]
        apart_PK = _stacked([k for k, _ in arrived]) - _stacked([k for k, _ in explained])
        rounding_P = _stacked([r for _, r in arrived]) + _stacked([r for _, r in explained])
        excess_P = apart_PK.square().mean(1).sqrt() - PROJECTED * rounding_P
        for name, excess in zip(self.arrived, excess_P.tolist(), strict=True):
            if excess > TINY:  # not so where something is not finite, of which nothing can be said
                return name
        return None

    def _directions(self, shape: tuple[int, ...], device: torch.device) -> Directions:
        if (shape, device) not in self.directions:
            self.directions[shape, device] = Directions(shape, device)
        return self.directions[shape, device]

    @staticmethod
    def _add(sums: dict[str, tuple[Tensor, Tensor]], name: str, projections_K: Tensor, rounding: Tensor) -> None:
        before = sums.get(name)
        sums[name] = (projections_K, rounding) if before is None else (before[0] + projections_K, before[1] + rounding)


def _stacked(tensors: list[Tensor]) -> Tensor:
    return torch.stack([t.to(tensors[0].device) for t in tensors]).double()


def _eps(dtype: torch.dtype, device: torch.device) -> float:
    """Relative rounding of a product; float32 on a GPU may be rounded to TF32 by the user's leave."""
    eps = torch.finfo(dtype).eps
    if device.type == "cuda" and dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return TENSOR_FLOAT_32
    return eps


class Audit:
    """Collects both sides of the comparison during one backward."""

    def __init__(
        self,
        parameters: Mapping[str, ParameterInfo],
        projections: Projections,
        known: Collection[str] = (),
        spread: TensorParallel | None = None,
        listens: Callable[[], bool] = lambda: True,
    ) -> None:
        """Watch nothing yet.

        Args:
            parameters: to be compared.
            projections: of this backward.
            known: those that were compared whole before, and are compared by projections now.
            spread: the processes that took a share of the samples each; what they explain is added up.
            listens: False while a proof runs the model untapped.
        """
        self._spread, self._listens, self._known, self._projections = spread, listens, known, projections
        self._rounding: dict[str, tuple[Tensor, torch.dtype]] = {}
        """{parameter: how large the terms of its sum are, and their narrowest dtype}, of its last record."""
        self._totals: dict[str, Tensor] = {}
        self._arrived: dict[str, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        self._watched: dict[int, Tensor] = {}
        self._watched_names: dict[str, torch.device] = {}
        self._names = dict.fromkeys(parameters)

    def watch(self, name: str, tensor: Tensor) -> None:
        """See the local gradient that reaches this tensor (under FSDP2 the unsharded one that the forward reads)."""
        known = name not in self._names or id(tensor) in self._watched
        if not known and tensor.requires_grad and tensor.is_leaf and self._is_read(tensor):
            self._watched[id(tensor)] = tensor
            self._watched_names[name] = tensor.device
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
        if record.parameter in self._known:
            self._projections.explain(record, self._watched_names[record.parameter])
            return
        total = record.gradient.total()
        previous = self._totals.get(record.parameter)
        self._totals[record.parameter] = total if previous is None else previous + total
        self._rounding[record.parameter] = (record.gradient.magnitude(), record.gradient.dtype)

    def _gradient(self, name: str, gradient: Tensor) -> None:
        if not self._listens():
            return
        gradient = gradient.detach()
        if name in self._known:
            if not gradient.is_sparse:
                with torch.autocast(gradient.device.type, enabled=False), exact_float32():
                    self._projections.arrive(name, gradient)
            return
        self._arrived[name] = self._arrived[name] + gradient if name in self._arrived else gradient.clone()

    def verdict(self) -> frozenset[str]:
        """Compare, once the backward is over.

        A parameter that this backward did not differentiate (`torch.autograd.grad` with respect to inputs), or whose
        gradient is not finite, is left for another one.

        Returns:
            The parameters whose whole gradients were compared.

        Raises:
            GramianError: naming the first parameter whose gradient the taps do not explain.
        """
        self.release()
        name = self._projections.disagreement()
        if name is not None:
            raise GramianError(f"{name}: got a gradient in this backward that the taps do not explain; {_ADVICE}")
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
    "expected the weight to be used through its own module only (not F.linear(x, layer.weight), not a penalty in the loss: use "
    "the optimizer's weight_decay), or a registered site"
)
