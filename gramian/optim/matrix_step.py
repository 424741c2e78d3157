"""The step of weight matrices of one shape: averaged gradients in one stack, their directions, and the weights' update.

Small matrices of several shapes step together: where a product takes less time than its launch, one stack of all of them takes
the time of one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from gramian.curvature.memory.operator_footprint import TOGETHER
from gramian.kernels.matrix_steps import Addresses, nesterov_averages, on_its_way, scaled_steps
from gramian.optim.whitened_steps import MatrixGroup, WhitenedGradients, directions
from gramian.taps.products.parts import owner, view

MATRIX_RATE = 4.0
"""Learning rate of weight matrices over `lr`, that of everything else."""
RMS = 0.2
"""Root mean square of a matrix's step over its learning rate, as AdamW's is in the long run."""


@dataclass(frozen=True)
class MatrixStep:
    """The step of some weights of one shape and one parameter group: M, N, U and W of `KFAC`'s formula."""

    options: Mapping[str, Any]
    """The parameter group."""
    matrices: MatrixGroup
    places: Sequence[int]
    """Places of the weights in `matrices`."""
    weights: Sequence[nn.Parameter]
    momenta: Sequence[Tensor]
    """M of each weight, sharded as it is."""

    @property
    def sharded(self) -> bool:
        """Whether the weights are: M stays sharded, N is gathered."""
        return isinstance(self.weights[0], DTensor)

    @property
    def gradients(self) -> list[Tensor]:
        """This process's part of every weight's gradient."""
        return [gradient_part(p) for p in self.weights]

    @property
    def rates(self) -> Tensor:
        """(rate, keep) of W ← keep·W + rate·U, float64 on the host."""
        rate = MATRIX_RATE * float(self.options["lr"])
        keep = 1 - rate * self.options["weight_decay"]
        return torch.tensor([-RMS * rate, keep], dtype=torch.float64, device="cpu")

    def whitened(self, tables: "StepTables | None" = None) -> WhitenedGradients:
        """Update M, and return N in the coordinates in which the curvature is even. Collective where weights are sharded."""
        momenta, at = [local_part(m) for m in self.momenta], None if tables is None else tables.at
        n = nesterov_averages(momenta, self.gradients, self.options["momentum"], self.matrices.gradient_dtype, at)
        if self.sharded:
            n = torch.stack([_gathered(one, p) for one, p in zip(n, self.weights, strict=True)])
        return self.matrices.whitened(n.flatten(2).mT if self.matrices.in_out else n.flatten(2), self.places)

    def update(self, z_BOM: Tensor, d_BOM: Tensor, tables: "StepTables | None" = None) -> None:
        """Step the weights along U = d·Z."""
        z, d = (z_BOM.mT, d_BOM.mT) if self.matrices.in_out else (z_BOM, d_BOM)
        z = z.reshape(len(z), *self.weights[0].shape)
        if self.sharded:
            whole = (z.flatten(2) * d).view_as(z)
            z, d = (
                torch.stack([_shard(one, p) for one, p in zip(whole, self.weights, strict=True)]),
                torch.ones_like(d[:1, :1, :1]),
            )
        weights = [local_part(p) for p in self.weights]
        at, rates = tables or (None, on_its_way(self.rates, z.device))
        scaled_steps(weights, z, d, rates, at)


class StepTables(NamedTuple):
    """What changes from step to step, on the device."""

    at: Addresses
    rates: Tensor
    """`MatrixStep.rates`."""


def together(steps: Sequence[MatrixStep]) -> Iterator[list[MatrixStep]]:
    """Steps in lists whose narrower sides have one width, dtype and device, of at most `TOGETHER` entries, or one step."""
    lists: dict[tuple[object, ...], list[MatrixStep]] = {}
    entries: dict[tuple[object, ...], int] = {}
    for step in steps:
        P = step.matrices.P
        key = (P.shape[1], P.dtype, P.device)
        own = len(step.weights) * P.shape[1] ** 2
        if key in lists and entries[key] + own > TOGETHER:
            yield lists.pop(key)
        entries[key] = own + (entries[key] if key in lists else 0)
        lists.setdefault(key, []).append(step)
    yield from lists.values()


def step_together(steps: Sequence[MatrixStep], tables: Sequence[StepTables] | None = None) -> None:
    """Step weights of several shapes, whose narrower sides have one width; `tables`, if they are on the device, of each."""
    given: Sequence[StepTables | None] = tables or [None] * len(steps)
    found = directions([step.whitened(own) for step, own in zip(steps, given, strict=True)])
    for step, own, (z_BOM, d_BOM) in zip(steps, given, found, strict=True):
        step.update(z_BOM, d_BOM, own)


# ---- parts of tensors ------------------------------------------------------------------------------------------------


def local_part(t: Tensor) -> Tensor:
    """The part of a tensor that this process has."""
    return t.to_local() if isinstance(t, DTensor) else t


def gradient_part(p: nn.Parameter) -> Tensor:
    """This process's part of a parameter's gradient, sharded as the parameter is."""
    gradient = p.grad
    assert gradient is not None
    if isinstance(gradient, DTensor) and isinstance(p, DTensor) and gradient.placements != p.placements:
        gradient = gradient.redistribute(placements=p.placements)
    return local_part(gradient)


def weight_part(p: nn.Parameter, name: str) -> nn.Parameter:
    """The parameter, or a view of the part of this name with the view of its gradient: steps of one are those of the other."""
    if owner(name) == name:
        return p
    part = nn.Parameter(view(p.detach(), name), requires_grad=False)
    part.grad = None if p.grad is None else view(p.grad, name)
    return part


def _gathered(local: Tensor, p: nn.Parameter) -> Tensor:
    """The full tensor whose part `local` is sharded as the parameter is."""
    if not isinstance(p, DTensor):
        return local
    mesh, places = p.device_mesh, p.placements
    whole = DTensor.from_local(local, mesh, places, run_check=False, shape=p.shape, stride=p.stride())
    return whole.full_tensor()


def _shard(whole: Tensor, p: nn.Parameter) -> Tensor:
    """This process's part of a tensor that every process has in full, sharded as the parameter is."""
    if not isinstance(p, DTensor):
        return whole
    replicated = [Replicate()] * p.device_mesh.ndim
    own = whole.contiguous()
    found = DTensor.from_local(own, p.device_mesh, replicated, run_check=False, shape=own.shape, stride=own.stride())
    return found.redistribute(placements=p.placements).to_local()
