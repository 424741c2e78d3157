"""Sums of a refresh for parameters outside K-FAC: exact blocks Σ_i g_i g_iᵀ or diagonals Σ_i g_i², over samples i."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gramian.curvature.blocks.block_specs import Spec
from gramian.curvature.estimate.refresh_pass import SumsOfOneCapture
from gramian.taps.records import ParameterRecord
from gramian.taps.roles import Needs, ParameterInfo


@dataclass
class RemainderSums(SumsOfOneCapture):
    """The statistic Σ_i g_i g_iᵀ, or its diagonal, over gradients g_i of samples i, for every parameter outside K-FAC."""

    specs: Mapping[str, Spec]
    needs: Needs = "parameter"
    per_sample: bool = False

    def start(self, parameters: Mapping[str, ParameterInfo]) -> dict[str, Tensor]:
        """An empty dict of sums at the start of a capture; a parameter that stays missing was not used."""
        return {}

    def update(self, sums: dict[str, Tensor], record: ParameterRecord) -> None:
        """Add Σ_i g_i g_iᵀ or Σ_i g_i² of one parameter to its entry in `sums`; g_i sums all uses by sample i.

        If token weights are not all 0 or 1, g_i is divided by √w, w the largest of sample i: weight 2 counts as two samples.
        """
        spec = self.specs.get(record.parameter)
        if spec is None or spec.kind == "kronecker":
            return
        scale = record.info.scale
        weights_B = record.info.token_weights
        gradient = record.gradient
        fractional = weights_B is not None and not bool(((weights_B == 0) | (weights_B == 1)).all())
        if spec.kind == "block" or fractional:
            g_BN = gradient.per_sample().reshape(gradient.batch, spec.outputs) * scale
            if fractional:
                assert weights_B is not None
                top_B = weights_B.to(g_BN).amax(1)
                g_BN = g_BN * torch.where(top_B > 0, top_B, 1.0).rsqrt()[:, None]
            g_RBW = g_BN.unflatten(1, (spec.rows, -1)).transpose(0, 1)
            added = g_RBW.mT @ g_RBW if spec.kind == "block" else g_BN.square().sum(0)
        else:
            added = gradient.sum_of_squares().reshape(-1) * scale**2
        name = spec.name
        sums[name] = added if name not in sums else sums[name] + added

    def count(self, sums: dict[str, Tensor], samples: int) -> None:
        """Do nothing at the end of a pass: the capture itself counts loss terms."""
