"""The audit: a check in every backward that parameter gradients computed from the taps are equal to autograd's.

The sum Σ_i g_i of the taps' per-sample gradients is compared with the gradient that autograd computes for the parameter in this
backward, before any reduction over processes. They differ if a weight is used outside its layer, has the wrong orientation, has
uses that are forgotten or counted twice, or is in a penalty term of the loss.

The first time a parameter gets a gradient, the entire gradients are compared. Cost: one more weight gradient, once. After that
one parameter in sixteen is compared in each backward, in turn: a penalty on all weights is found at once, one on a single
weight within sixteen backwards. Both gradients are then projected on random directions, and the projections of their difference
Δ have mean 0 and variance ‖Δ‖². Cost: one pass over the gradient and over the tensors that the taps read, and one wait for the
device at the end of the backward. Collectives run only for a tensor-parallel model, whose backward runs some anyway; of such a
model only the first, entire gradients are compared.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from gramian.core.dtypes import wide_dtype
from gramian.core.errors import GramianError
from gramian.linalg.wide import TENSOR_FLOAT_32, convolutions_round, exact_products, wide
from gramian.parallel.tensor_parallel import TensorParallel, full_tensor
from gramian.taps.gradients import PerSampleGradient
from gramian.taps.gradients.directions import Directions
from gramian.taps.records import ParameterRecord
from gramian.taps.roles import ParameterInfo

AGREES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
"""Largest relative difference between the taps' gradient of a parameter and autograd's, by the narrowest dtype in either."""
PROJECTED = 8
"""Largest allowed root-mean-square difference of projected gradients, as a multiple of the expected rounding error."""
AMPLIFIED = 1e-11
"""Rounding error of one parameter's gradient, relative to the norm of all gradients, that is always allowed. In float64 it is
more than 64 ε, because layers amplify rounding (the backward of a layer norm divides it by the deviation of its input)."""
TURNS = 16
"""Once its entire gradient was compared, a parameter is compared in one of this many backwards, by projections."""
TINY = torch.finfo(torch.float32).tiny


def amplified(eps: float) -> float:
    """The rounding error, relative to the norm of all gradients, that is allowed where products round by ε.

    `AMPLIFIED`, or ε² where that is more (half precision, TF32): a gradient that is zero but for rounding, as of a bias that is
    added to all inputs of a softmax, is another one whenever it is computed.
    """
    return max(AMPLIFIED, eps**2)


@dataclass
class Projections:
    """Projections of one backward's gradients, the taps' and autograd's, on K random directions for each parameter."""

    directions: dict[tuple[tuple[int, ...], torch.device], Directions]
    """Random directions by parameter shape and device; the model's hub stores them, so that they are drawn once."""
    product_rounding: float
    """Relative rounding of the operands that the user allows in float32 products; inside a backward, taps allow none."""
    explained: dict[str, list[Tensor]] = field(default_factory=dict)
    """{parameter: terms [n, K] for each of its records}; their sum is the taps' gradient, projected on K directions."""
    arrived: dict[str, list[Tensor]] = field(default_factory=dict)
    """{parameter: [M, K], the products G v_k of each gradient G [M, N] that autograd computed with K random vectors v_k}."""
    _rounding: dict[str, float] = field(default_factory=dict)
    """{parameter: relative rounding error ε of the products that made its gradient}."""
    _sequential: set[str] = field(default_factory=set)
    """Parameters whose gradient autograd may sum over tokens one after the other in the tokens' own dtype."""
    _left: dict[str, Tensor] = field(default_factory=dict)

    def explain(self, record: ParameterRecord, device: torch.device) -> None:
        """Project a parameter's gradient, as the taps computed it for one record, and store the terms in `explained`."""
        name, gradient = record.parameter, record.gradient
        terms = gradient.projected(self._directions(gradient.shape, device))
        self.explained.setdefault(name, []).append(terms)
        self._round(name, gradient.dtype, device, len(gradient.shape))
        if not gradient.summed_wide and device.type == "cpu":
            self._sequential.add(name)

    def arrive(self, name: str, gradient: Tensor) -> None:
        """Project a gradient that autograd computed for the parameter `name`, and store it in `arrived`."""
        directions = self._directions(tuple(gradient.shape), gradient.device)
        self.arrived.setdefault(name, []).append(directions.along_rows(gradient))
        self._left[name] = directions.sides(wide_dtype(gradient))[0]
        self._round(name, gradient.dtype, gradient.device, gradient.dim())

    def disagreement(self) -> str | None:
        """Name of the first parameter whose projected gradients, the taps' and autograd's, differ; None: none does.

        The root mean square of the difference over directions may be PROJECTED times the expected rounding error. A product
        that is rounded, or has rounded operands, has an error of ε times its norm. A sum of n terms of one sign, added one
        after the other, has an error of ε·n times their norm, with the ε of the accumulator. This is float32 for products of
        matrices and on a GPU; on a CPU, gradients of embedding tables, biases and norms are added in their own dtype. Waits for
        the device once.
        """
        if not self.arrived:
            return None
        names = list(self.arrived)
        empty = torch.zeros_like(next(iter(self.arrived.values()))[0][:1])
        signs = [self._left[name] for name in names for _ in self.arrived[name]]
        arrived_PK, norms_P = _sums_and_norms([self.arrived[name] for name in names], signs)
        explained = [self.explained.get(name, [empty]) for name in names]
        explained_PK, sizes_P = _sums_and_norms(explained)
        counts = [sum(map(len, parts)) for parts in explained]
        eps = [self._rounding[name] for name in names]
        accumulator = torch.finfo(empty.dtype).eps
        off = [
            one + (one if name in self._sequential else accumulator) * max(1, count)
            for name, one, count in zip(names, eps, counts, strict=True)
        ]
        floors = [amplified(one) for one in eps]
        rates = torch.tensor([eps, off, floors], dtype=torch.float64).to(norms_P.device, non_blocking=True)
        allowed_P = PROJECTED * (rates[0] * norms_P + rates[1] * sizes_P)
        allowed_P = allowed_P + rates[2] * norms_P.nan_to_num(0.0, posinf=0.0).norm()
        excess_P = (arrived_PK - explained_PK).square().mean(1).sqrt() - allowed_P
        for name, excess in zip(names, excess_P.tolist(), strict=True):
            if excess > TINY:  # False where something is not finite, which cannot be compared
                return name
        return None

    def _directions(self, shape: tuple[int, ...], device: torch.device) -> Directions:
        if (shape, device) not in self.directions:
            self.directions[shape, device] = Directions(shape, device)
        return self.directions[shape, device]

    def rounding_on(self, device: torch.device) -> float:
        """`product_rounding` on a device: CPUs have products of bfloat16, and none of TF32."""
        return self.product_rounding if device.type == "cuda" or self.product_rounding > TENSOR_FLOAT_32 else 0.0

    def _round(self, name: str, dtype: torch.dtype, device: torch.device, axes: int) -> None:
        """Record the coarsest rounding ε of the products that made a gradient of this dtype with this number of axes.

        Convolutions (`axes` > 2) have a TF32 switch of their own.
        """
        eps = torch.finfo(dtype).eps
        if dtype == torch.float32:
            convolves = device.type == "cuda" and axes > 2 and convolutions_round()
            eps = max(eps, self.rounding_on(device), TENSOR_FLOAT_32 if convolves else 0.0)
        self._rounding[name] = max(eps, self._rounding.get(name, 0.0))


def _sums_and_norms(groups: list[list[Tensor]], signs: list[Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """For groups of tensors [rows, K]: the sum of each group's rows [groups, K], and the norm of its rows [groups]; float64.

    The norm is the square root of Σ rows² / K. In the sums (not in the norms) each tensor is multiplied by its entry of
    `signs`, a tensor of the same shape; None: by 1.
    """
    device = groups[0][0].device
    flat = torch.cat([part.to(device) for parts in groups for part in parts]).double()
    signed = flat if signs is None else flat * torch.cat([part.to(device) for part in signs])
    lengths = torch.tensor([sum(map(len, parts)) for parts in groups]).to(device, non_blocking=True)
    both = torch.cat([signed, flat.square()], 1)
    sums = torch.segment_reduce(both, "sum", lengths=lengths, axis=0, unsafe=True)
    count = flat.shape[1]
    return sums[:, :count], sums[:, count:].mean(1).sqrt()


class Audit:
    """Compares, for one backward, each parameter's gradient as computed from the taps on its layers with autograd's."""

    def __init__(
        self,
        parameters: Mapping[str, ParameterInfo],
        projections: Projections,
        known: Collection[str] = (),
        tensor_parallel: TensorParallel | None = None,
        listens: Callable[[], bool] = lambda: True,
    ) -> None:
        """Store the arguments; no parameter is watched yet.

        Args:
            parameters: the parameters to compare.
            projections: receives the projections of this backward.
            known: parameters whose entire gradient was compared before, so that only projections are compared now.
            tensor_parallel: processes that each computed the taps' gradients of a share of the samples, which are summed over
                them; None: this process has all of its samples.
            listens: returns False while a proof runs the model without taps; gradients of such a run are ignored.
        """
        self._tensor_parallel, self._listens = tensor_parallel, listens
        self._known, self._projections = known, projections
        self._rounding: dict[str, tuple[Tensor, torch.dtype, int]] = {}
        """{parameter: (upper bound of the norm of its gradient, its narrowest dtype, number of terms added in that dtype)}."""
        self._totals: dict[str, Tensor] = {}
        self._arrived: dict[str, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        self._watched: dict[int, Tensor] = {}
        self._watched_names: dict[str, torch.device] = {}
        self._names = dict.fromkeys(parameters)

    def watch(self, name: str, tensor: Tensor) -> None:
        """Hook `tensor`, which the forward uses as parameter `name`, to read autograd's gradient of it on this process.

        Under FSDP2 it is the gathered weight. Ignored: tensors hooked already, not to be compared, or without gradient.
        """
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
        """True for a tensor that a forward computes with: plain, or tensor parallel; False for FSDP2's shards."""
        if not isinstance(tensor, DTensor):
            return True
        return self._tensor_parallel is not None and tensor.device_mesh == self._tensor_parallel.mesh

    def record(self, record: ParameterRecord) -> None:
        """Add a parameter's gradient, as the taps computed it for one record, to the taps' side of the comparison."""
        if record.parameter not in self._watched_names:
            return
        if record.parameter in self._known:
            self._projections.explain(record, self._watched_names[record.parameter])
            return
        total = record.gradient.total()
        previous = self._totals.get(record.parameter)
        self._totals[record.parameter] = total if previous is None else previous + total
        self._rounding[record.parameter] = (
            record.gradient.magnitude(),
            record.gradient.dtype,
            self._terms(record.gradient),
        )

    @staticmethod
    def _terms(gradient: PerSampleGradient) -> int:
        """Number of terms of a gradient that autograd may add one after the other in their own dtype (on a CPU); else 0."""
        last = gradient.tensors()[-1]
        return 0 if gradient.summed_wide or last.device.type != "cpu" else last.shape[:2].numel()

    def _gradient(self, name: str, gradient: Tensor) -> None:
        if not self._listens():
            return
        gradient = gradient.detach()
        if name in self._known:
            if not gradient.is_sparse:
                with exact_products(gradient.device.type):
                    self._projections.arrive(name, gradient)
            return
        self._arrived[name] = self._arrived[name] + gradient if name in self._arrived else gradient.clone()

    def verdict(self) -> frozenset[str]:
        """Compare the taps' gradients with autograd's after the backward, and remove the hooks.

        A parameter that this backward did not differentiate (`torch.autograd.grad` with respect to inputs), or whose
        gradient is not finite, is compared in a later backward.

        Returns:
            The parameters whose entire gradients were compared.

        Raises:
            GramianError: naming the first parameter whose two gradients differ.
        """
        self.release()
        name = self._projections.disagreement()
        if name is not None:
            raise GramianError(f"{name}: got a gradient in this backward that the taps do not explain; {_ADVICE}")
        compared: set[str] = set()
        norms = [float(wide(full_tensor(arrived)).norm()) for arrived in self._arrived.values()]
        whole = math.hypot(*filter(math.isfinite, norms))
        for name in self._names:
            arrived, total = self._arrived.get(name), self._totals.get(name)
            if arrived is None:
                continue
            arrived = full_tensor(arrived)
            if self._tensor_parallel is not None and total is not None:
                total = self._tensor_parallel.sum(total)
            if not bool(arrived.isfinite().all()):
                continue
            compared.add(name)
            if total is None:
                if bool((arrived != 0).any()):
                    raise GramianError(f"{name}: got a gradient, but none through its layer; {_ADVICE}")
                continue
            (magnitude, dtype, terms), got = self._rounding[name], wide(arrived).to(total.dtype)
            magnitude = magnitude if self._tensor_parallel is None else self._tensor_parallel.sum(magnitude)
            # a product in float32 may be rounded for its weight
            dtype = max(dtype, arrived.dtype, key=lambda one: torch.finfo(one).eps)
            info = torch.finfo(dtype)
            below_normal = info.smallest_normal * got.numel() ** 0.5  # where numbers lie evenly, eps of it apart
            rounding = info.eps * (magnitude + below_normal)
            agrees = (
                AGREES[dtype]
                if dtype != torch.float32
                else max(AGREES[dtype], 4 * self._projections.rounding_on(got.device))
            )
            allowed = agrees * got.norm() + 8 * rounding + amplified(info.eps) * whole
            if terms:
                allowed = allowed + min(1.0, info.eps * terms) * magnitude
            error = (got - total).norm()
            if not bool(error <= allowed):
                raise GramianError(
                    f"{name}: the taps explain a gradient of norm {float(total.norm()):.4g}, autograd computed "
                    f"{float(got.norm()):.4g} (difference {float(error):.4g}); {_ADVICE}"
                )
        return frozenset(compared)

    def release(self) -> None:
        """Remove the gradient hooks from all watched tensors."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


_ADVICE = (
    "expected the weight to be used through its own module only (not F.linear(x, layer.weight), not a penalty in the loss: use "
    "the optimizer's weight_decay), or a registered site"
)
