"""Health of every layer: dead activations, vanishing or exploding gradients, numbers that are not finite."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gramian.taps.records import LayerRecord
from gramian.taps.roles import SAMPLES, AdditiveStatistic, Needs, ParameterInfo, Sums


@dataclass(frozen=True)
class LayerHealth:
    """Root mean squares, zeros and non-finite values of the tensors that passed through one layer."""

    activation_norm: float
    """Root mean square of the layer's input; nan if the input is indices."""
    zero_fraction: float
    """Share of exact zeros among the finite values of the layer's input, a sign of dead neurons before it; nan for indices."""
    gradient_norm: float
    """Root mean square of the gradient of a sample's own loss with respect to the layer's output."""
    nonfinite: int
    """Number of nan and inf in inputs and output gradients; they are left out of the norms."""


class Health(AdditiveStatistic):
    """The statistic {layer: LayerHealth}, from sums of squares and counts. Cost: one read of input and output gradient.

    ```python
    health = gramian.Health()
    with gramian.observe(model, health) as seen:
        F.cross_entropy(model(x), y).backward()
    seen[health]["fc"].zero_fraction
    ```

    Tokens whose `token_weights` is zero are left out of layers that see [B, T, …].
    """

    needs: Needs = "layer"
    per_sample = False

    def start(self, parameters: Mapping[str, ParameterInfo]) -> Sums:
        """{layer: six zeros}: sums of squares and counts of its input and output gradient; and a sample count of 0."""
        layers = {layer: info.device for info in parameters.values() for layer in info.layers}
        sums = {layer: torch.zeros(6, dtype=torch.float64, device=device) for layer, device in layers.items()}
        device = next(iter(layers.values()))
        return {**sums, SAMPLES: torch.zeros((), dtype=torch.float64, device=device)}

    def update(self, sums: Sums, record: LayerRecord) -> None:
        """Add the squares and counts of one call of a layer."""
        weights = record.info.token_weights
        inputs = [_counted(x, weights) for x in record.inputs[:1] if x.is_floating_point()]
        gradients = [_counted(g, weights) for g in record.output_gradients]
        batch = record.info.batch
        shared = bool(inputs) and inputs[0].shape[:1] == (1,) and batch != 1  # one row that stands for every sample
        activation, zeros, values, bad_inputs = (part * (batch if shared else 1) for part in _measure(inputs))
        gradient, _, elements, bad_gradients = _measure(gradients)
        parts = (activation, zeros, values, gradient * record.info.scale**2, elements, bad_inputs + bad_gradients)
        entry = sums[record.layer]
        entry += torch.stack([torch.as_tensor(part, dtype=torch.float64, device=entry.device) for part in parts])

    def finish(self, sums: Sums) -> dict[str, LayerHealth]:
        """{layer: `LayerHealth`}: root mean squares and shares from the sums."""
        health = {}
        for layer, entry in sums.items():
            if layer == SAMPLES:
                continue
            activation, zeros, values, gradient, elements, bad = entry.tolist()
            health[layer] = LayerHealth(
                activation_norm=(activation / values) ** 0.5 if values else float("nan"),
                zero_fraction=zeros / values if values else float("nan"),
                gradient_norm=(gradient / elements) ** 0.5 if elements else float("nan"),
                nonfinite=int(bad),
            )
        return health


def _counted(t: Tensor, weights_BT: Tensor | None) -> Tensor:
    """The tokens of `t` [B, T, …] whose weight in `weights_BT` is not zero; all of `t` for other shapes or without weights."""
    if weights_BT is None or t.shape[:2] != weights_BT.shape:
        return t
    return t[weights_BT.to(t.device) != 0]


def _measure(tensors: list[Tensor]) -> tuple[Tensor | float, Tensor | float, Tensor | float, Tensor | float]:
    """Over all tensors: sum of squares of finite values, and numbers of zeros, of finite and of non-finite values."""
    square: Tensor | float = 0.0
    zeros, values, bad = square, square, square
    for t in tensors:
        finite = t.isfinite()
        square = square + torch.linalg.vector_norm(t.where(finite, 0), dtype=torch.float64).square()
        zeros = zeros + (t == 0).sum()
        values = values + finite.sum()
        bad = bad + (~finite).sum()
    return square, zeros, values, bad
