"""The metric of one layer: W = (F + damping)^(-1/2) = P_G ⊗ P_A, with W vec(Y) = vec(P_G Y P_A).

Y [o, m] is the layer's weight gradient with the bias as last column, P_G = (G + λ_G I)^(-1/2) and P_A = (A + λ_A I)^(-1/2) come
from the layer's K-FAC factors. A sample's gradient is a sum over tokens of g_t a_tᵀ, so that

    ‖W vec(Σ_t g_t a_tᵀ)‖² = ‖Σ_t (P_G g_t)(P_A a_t)ᵀ‖²,

an ordinary per-sample norm of other vectors: 2·B·T·(o² + m²) FLOPs more than without a metric.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from gramian.core.dtypes import wide_dtype
from gramian.curvature.blocks.block import Block
from gramian.curvature.blocks.block_specs import Spec
from gramian.linalg import Diagonal, Factor
from gramian.linalg.wide import exact_products
from gramian.plan.norm_algorithm import samples_per_chunk
from gramian.taps.gradients import Indexed, Outer, PerSampleGradient, Summed
from gramian.taps.gradients.outer import same_tensor

WIDEST_WRITTEN_OUT = 4096
"""Widest side whose P is formed as a matrix; wider ones are multiplied through their factor."""
PROBES = 4
"""Number of random vectors on which P^(-1) P = I is measured."""


@dataclass(frozen=True)
class MetricSide:
    """P = (M + λI)^(-1/2) of one factor M [n, n] of a layer, with the clip of its condition number if there is one."""

    factor: Factor
    damping: float
    max_condition: float | None

    def whitened(self, x: Tensor) -> Tensor:
        """P applied to the vectors on the last axis of `x`."""
        if self._matrix is None:
            return self._power(x, -0.5)
        dtype = torch.promote_types(wide_dtype(x), self._matrix.dtype)
        with exact_products(self.factor.device.type):
            found: Tensor = x.to(dtype) @ self._matrix.to(dtype)
        return found

    def coloured(self, x: Tensor) -> Tensor:
        """P⁻¹ applied to the vectors on the last axis of `x`."""
        return self._power(x, 0.5)

    @property
    def condition(self) -> float:
        """Condition number of M + λI, or an upper bound of it."""
        return self.factor.condition(self.damping, self.max_condition)[0]

    @property
    def error(self) -> float:
        """‖P⁻¹ P x - x‖/‖x‖ over `PROBES` random vectors x: how far whitening and colouring are from inverse to each other."""
        generator = torch.Generator().manual_seed(self.factor.dim)
        probe = torch.randn(PROBES, self.factor.dim, generator=generator).to(self.factor.device, self.factor.dtype)
        back = self.coloured(self.whitened(probe))
        return float((back - probe).norm() / probe.norm())

    @cached_property
    def _matrix(self) -> Tensor | None:
        if self.factor.dim > WIDEST_WRITTEN_OUT:
            return None
        return self._power(torch.eye(self.factor.dim, dtype=self.factor.dtype, device=self.factor.device), -0.5)

    def _power(self, x: Tensor, p: float) -> Tensor:
        flat_NK = x.reshape(-1, x.shape[-1]).mT.to(torch.promote_types(wide_dtype(x), self.factor.dtype))
        with exact_products(self.factor.device.type):
            return self.factor.power(flat_NK, p, self.damping, self.max_condition).mT.reshape(x.shape)


@dataclass(frozen=True)
class MetricBlock:
    """The metric of the parameters of one layer."""

    spec: Spec
    G: MetricSide
    A: MetricSide

    @classmethod
    def of(cls, block: Block) -> "MetricBlock":
        """The metric of a Kronecker block with factored damping."""
        damping, A = block.damping, block.A
        assert damping is not None and A is not None
        limit = damping.max_condition
        return cls(block.spec, MetricSide(block.G, damping.lambda_G, limit), MetricSide(A, damping.lambda_A, limit))

    def whitened(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """W Y for the block's parameters {name: tensor}, a missing one being zero, as {name: tensor} of all of them."""
        return self.spec.tensors(self._whitened(self.spec.matrix(dict(tensors))))

    def coloured(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """W⁻¹ Y, likewise: the noise of the block in the coordinates of its parameters."""
        y_OM = self.A.coloured(self.spec.matrix(dict(tensors)))
        return self.spec.tensors(self.G.coloured(y_OM.mT).mT)

    def squares(self, gradients: Mapping[str, PerSampleGradient]) -> Tensor:
        """‖W g_i‖² of every sample from its formed gradients {parameter: gradients}: [B]."""
        batch = next(iter(gradients.values())).batch
        step, found = samples_per_chunk(sum(prod(g.shape) for g in gradients.values())), []
        for start in range(0, max(batch, 1), step):
            formed = {name: g.select(start, min(start + step, batch)).per_sample() for name, g in gradients.items()}
            y_BOM: Tensor = (
                torch.func.vmap(self.spec.matrix)(formed) if batch else next(iter(formed.values())).flatten(1)
            )
            found.append((self._whitened(y_BOM) if batch else y_BOM).flatten(1).square().sum(1))
        return torch.cat(found)

    def whitened_tokens(self, gradients: Mapping[str, PerSampleGradient]) -> Outer | Indexed | None:
        """The whitened gradients as sums over tokens (P_G g_t)(P_A [a_t, 1])ᵀ; None unless they are stored by token.

        A bias is the last coordinate of the inputs where its gradient is the sum of the same output gradients g_t. A lookup of
        row v in a table, whose A is a diagonal d, is P_G g_t·(d_v + λ_A)^(-1/2) in row v: no table is formed for a sample.
        """
        weight = gradients.get(self.spec.parameters[0])
        if isinstance(weight, Indexed) and self.spec.layout == "table" and isinstance(self.A.factor, Diagonal):
            d_V = self.A.whitened(torch.ones(self.A.factor.dim, dtype=self.A.factor.dtype, device=self.A.factor.device))
            rows_BTD = self.G.whitened(weight.rows_BTD) * d_V[weight.index_BT, None]
            return Indexed(weight.index_BT, rows_BTD, weight.shape[0])
        if type(weight) is not Outer or self.spec.layout == "kernel":
            return None
        swapped = self.spec.layout in ("in_out", "table")
        given, inputs = (weight.right_BTN, weight.left_BTM) if swapped else (weight.left_BTM, weight.right_BTN)
        if self.spec.has_bias:
            bias = gradients.get(self.spec.parameters[1])
            if bias is not None and not (isinstance(bias, Summed) and same_tensor(bias.tokens_BTN, given)):
                return None
            last = inputs.new_full((*inputs.shape[:2], 1), 0.0 if bias is None else 1.0)
            inputs = torch.cat([inputs, last], 2)
        return Outer(self.G.whitened(given), self.A.whitened(inputs), input_left=False)

    def _whitened(self, y_OM: Tensor) -> Tensor:
        return self.G.whitened(self.A.whitened(y_OM).mT).mT
