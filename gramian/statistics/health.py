"""Is every layer alive: dead activations, vanishing or exploding gradients, numbers that are not finite."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gramian.linalg.wide import wide
from gramian.taps.record import LayerRecord
from gramian.taps.statistic import AdditiveStatistic, ParameterInfo, Sums


@dataclass(frozen=True)
class LayerHealth:
    """What passed through one layer."""

    activation_norm: float
    """Root mean square of the layer's input; nan for indices."""
    zero_fraction: float
    """Share of exact zeros in the input: dead units behind it; nan for indices."""
    gradient_norm: float
    """Root mean square of the output gradient, of one sample's loss."""
    nonfinite: int
    """Number of nan and inf in inputs and output gradients; they are left out of the norms."""


class Health(AdditiveStatistic):
    """{layer: LayerHealth} from sums of squares and counts. Cost: one read of input and output gradient."""

    needs: Literal["layer"] = "layer"
    per_sample = False

    def start(self, parameters: Mapping[str, ParameterInfo]) -> Sums:
        """Six zeros per layer."""
        layers = {info.layer: info.device for info in parameters.values()}
        return {layer: torch.zeros(6, dtype=torch.float64, device=device) for layer, device in layers.items()}

    def update(self, sums: Sums, record: LayerRecord) -> None:
        """Add one use of a layer."""
        inputs = [x for x in record.inputs[:1] if x.is_floating_point()]
        activation, zeros, values, bad_inputs = _measure(inputs)
        gradient, _, elements, bad_gradients = _measure(record.output_gradients)
        parts = (activation, zeros, values, gradient * record.info.scale**2, elements, bad_inputs + bad_gradients)
        entry = sums[record.layer]
        entry += torch.stack([torch.as_tensor(part, dtype=torch.float64, device=entry.device) for part in parts])

    def finish(self, sums: Sums) -> dict[str, LayerHealth]:
        """Root mean squares and shares."""
        health = {}
        for layer, entry in sums.items():
            activation, zeros, values, gradient, elements, bad = entry.tolist()
            health[layer] = LayerHealth(
                activation_norm=(activation / values) ** 0.5 if values else float("nan"),
                zero_fraction=zeros / values if values else float("nan"),
                gradient_norm=(gradient / elements) ** 0.5 if elements else float("nan"),
                nonfinite=int(bad),
            )
        return health


def _measure(tensors: list[Tensor]) -> tuple[Tensor | float, Tensor | float, float, Tensor | float]:
    """Sum of squares of the finite values, zeros, number of values, number that are not finite."""
    square: Tensor | float = 0.0
    zeros: Tensor | float = 0.0
    values, bad = 0.0, torch.zeros(())
    for t in tensors:
        finite = t.isfinite()
        square = square + wide(t).where(finite, 0).square().sum(dtype=torch.float64)
        zeros = zeros + (t == 0).sum()
        values += t.numel()
        bad = bad.to(t.device) + (~finite).sum()
    return square, zeros, values, bad
