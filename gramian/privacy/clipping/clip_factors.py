"""The clip factors c_i of samples with gradients g_i, with a margin for rounding, and what one sample then changes at most.

All clipping uses `ClipFunction`, so that one sample contributes a gradient of norm at most `sensitivity` to the sum.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor

from gramian.core.errors import GramianError

FunctionName = Literal["flat", "per_layer", "automatic", "adaptive"]

SLACK = {torch.float64: 2.0**-36, torch.float32: 2.0**-17, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-8}
"""Relative error that rounding may add to a norm or to a clipped gradient, by the narrowest dtype of the computation. Clip
factors below 1 are reduced by this much, so that the clipped gradient stays within the clip norm."""

GAMMA = 0.01
"""γ of "automatic", C/(‖g_i‖ + γ): below it, gradients keep their order of size (Bu et al. 2022, arXiv 2206.07136)."""


@dataclass(frozen=True)
class ClippedBatch:
    """Gradient norms and clip factors of the samples of one backward. ε does not cover their publication."""

    norms_B: Tensor
    """Norm of each sample's gradient over all trained parameters: [B]."""
    factors_B: Tensor
    """Clip factor of each sample: [B], or [B, layers] with "per_layer"; 0 for one whose gradient is not finite."""
    nonfinite: int
    """Number of samples that were left out because their gradient is not finite."""


class ClipFunction:
    """How gradients are scaled: one norm for all parameters, or one for each layer.

    | name | c_i | sensitivity |
    |---|---|---|
    | flat | min(1, C/‖g_i‖) | C |
    | per_layer | min(1, C_l/‖g_il‖) for the part of each layer | √Σ C_l², C for C_l = C/√L |
    | automatic | C/(‖g_i‖ + γ) | C: ‖c_i g_i‖ = C·‖g_i‖/(‖g_i‖ + γ) |
    | adaptive | as flat, with C = C_t | C_t, which `PrivateQuantile` changes from release to release |
    """

    def __init__(self, name: FunctionName, max_grad_norm: float | Sequence[float], parameters: Sequence[str]) -> None:
        """Clip the trained `parameters` to C, or with "per_layer" to a list of C_l in the order of their layers.

        A layer is the module that a parameter belongs to.

        Raises:
            GramianError: if a list has another length than there are layers.
        """
        self.name = name
        layers = dict.fromkeys(parameter.rpartition(".")[0] for parameter in parameters)
        of_layer = {layer: i for i, layer in enumerate(layers)} if name == "per_layer" else dict.fromkeys(layers, 0)
        self.groups: Mapping[str, int] = {p: of_layer[p.rpartition(".")[0]] for p in parameters}
        """{parameter: number of the norm that it is a part of}."""
        count = len(layers) if name == "per_layer" else 1
        if isinstance(max_grad_norm, Sequence):
            self.limits = list(max_grad_norm)
        else:
            self.limits = [max_grad_norm / math.sqrt(count)] * count
        if len(self.limits) != count:
            raise GramianError(
                f"max_grad_norm: has {len(self.limits)} clip norms for {count} layers with trained parameters; expected one "
                f"for each of {', '.join(layers)}, or one number for all"
            )

    @property
    def sensitivity(self) -> float:
        """Largest norm of what one sample adds to the sum; the noise is relative to it."""
        return math.hypot(*self.limits)

    def columns(self, factors: Mapping[int, Tensor]) -> Tensor:
        """The factors [B] of one norm as they are; of several as [B, norms], 1 where a layer got no gradient."""
        first = next(iter(factors.values()))
        if len(self.limits) == 1:
            return first
        return torch.stack([factors.get(group, torch.ones_like(first)) for group in range(len(self.limits))], 1)

    def factors(self, norms: Tensor, slack: float, group: int = 0) -> Tensor:
        """The clip factor for every norm of the parameters of a group; 0 where the norm is not finite.

        `slack` is the relative rounding error to allow for, an entry of `SLACK`: what is aimed at is C/(1 + slack).
        """
        limit = self.limits[group] / (1 + slack)
        factors = limit / (norms + GAMMA) if self.name == "automatic" else (limit / norms).clamp(max=1.0)
        return torch.where(norms.isfinite(), factors, 0.0)


def layer_limits(rules: Sequence[str], total: float, parameters: Sequence[str]) -> list[float]:
    """C_l of every layer by the first of the rules "pattern=number" that its name matches, scaled to √Σ C_l² = `total`.

    Raises:
        GramianError: for a rule of another form, or one that no layer takes, or a layer without a rule.
    """
    layers, found, used = dict.fromkeys(name.rpartition(".")[0] for name in parameters), [], set()
    for layer in layers:
        rule = next((rule for rule in rules if fnmatchcase(layer, rule.rpartition("=")[0].strip())), None)
        if rule is None:
            raise GramianError(f'privacy.layer_norms: has no rule for {layer}; expected one, such as "*=1" as the last')
        found.append(float(rule.rpartition("=")[2]))
        if not 0 < found[-1] < math.inf:
            raise GramianError(f"privacy.layer_norms: {rule!r} is no clip norm; expected a number above 0")
        used.add(rule)
    for rule in rules:
        if rule not in used:
            raise GramianError(
                f"privacy.layer_norms: no layer takes {rule!r}; expected patterns of {', '.join(layers)}"
            )
    return [total * limit / math.hypot(*found) for limit in found]
