"""A metric from public data: samples are clipped, and noise is drawn, where the model's Fisher is about the identity.

With W = (F + damping)^(-1/2), F the K-FAC approximation from PUBLIC data and W the identity on parameters outside K-FAC,

    c_i = min(1, C/‖W g_i‖)    and    released: Σ_i c_i g_i + σ C W⁻¹ z,    z standard normal.

W times what is released is Σ_i c_i W g_i + σ C z: a sum to which a sample adds a vector of norm ≤ C, with the noise of ordinary
DP-SGD. So ε is the same. W must not depend on private data, and is the same for the samples and the noise of one draw.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.curvature import KFACNaturalGradient
from gramian.curvature.blocks.block import Block
from gramian.linalg.wide import exact_products
from gramian.parallel.process_grid import ProcessGrid
from gramian.privacy.metric.metric_block import MetricBlock

MOST_ROUNDING = 0.05
"""Largest share of the clip norm that rounding in ill-conditioned factors may take."""


class PublicMetric:
    """The metric W of one private model, as its public K-FAC factors are at the beginning of each draw."""

    def __init__(
        self, kfac: KFACNaturalGradient, root: nn.Module, trained: Mapping[str, nn.Parameter], parallel: ProcessGrid
    ) -> None:
        """Check what the metric rests on, and take the present factors of the model `root`, if there are any.

        Raises:
            GramianError: if the factors are not called public, belong to another model, are damped jointly, observed a model
                in private training, or are too ill-conditioned.
        """
        if not isinstance(kfac, KFACNaturalGradient):
            raise GramianError(f"metric: expected a gramian.KFACNaturalGradient, got {type(kfac).__name__}")
        if not kfac.public:
            raise GramianError(
                "metric: factors of private data are outside the accountant; expected factors that were captured on public "
                "data alone, and kfac.public = True to say so"
            )
        if kfac.options.damps_product:
            raise GramianError(
                f'metric: damping_mode="{kfac.options.damping_mode}" adds λ to a product, which has no root by sides; '
                'expected "pi" or "factored", without ekfac'
            )
        self._kfac, self._root, self._trained, self._parallel = kfac, root, dict(trained), parallel
        self._taken: dict[str, Block] = {}
        self._digest = 0
        self._draws = False
        self.blocks: dict[str, MetricBlock] = {}
        """{parameter: the metric of its layer}; those that are missing have the identity."""
        self.rounding = 0.0
        """Bound of the relative error of ‖W g‖ from rounding: by it, clip factors are reduced."""
        if kfac.kfac_factors:
            self._take()

    def begin_draw(self) -> None:
        """Take the present factors, unless a draw is under way, whose samples and noise must have one metric.

        Raises:
            GramianError: if there are none, or they are of no use as a metric (see `__init__`).
        """
        if not self._draws:
            self._take()
            if not self.blocks:
                raise GramianError(
                    "metric: has no factors of trained layers; expected a capture on public data before the first draw"
                )
            self._draws = True

    def end_draw(self) -> None:
        """Let the next draw take newer factors."""
        self._draws = False

    def _take(self) -> None:
        if self._kfac.state.private:
            raise GramianError(
                "metric: a capture observed a model in private training, so that its factors depend on private data; expected "
                "an object that sees public batches alone, on a copy of the model"
            )
        now = {
            name: block
            for name, block in self._kfac.kfac_factors.items()
            if block.A is not None and set(block.spec.parameters) <= self._trained.keys()
        }
        same = now.keys() == self._taken.keys() and all(self._taken[name] is block for name, block in now.items())
        if same:
            return
        self._kfac.state.checked_specs(self._root)
        with torch.no_grad(), exact_products(self._device.type):
            found = {name: MetricBlock.of(block) for name, block in now.items()}
            self.rounding = max((_rounding(name, block) for name, block in found.items()), default=0.0)
        self.blocks = {parameter: block for block in found.values() for parameter in block.spec.parameters}
        self._taken, self._digest = now, _digest(now)

    def whitened(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """W g for the gradients {parameter: tensor} of one sample."""
        found = dict(gradients)
        for block in {id(b): b for name in gradients if (b := self.blocks.get(name)) is not None}.values():
            own = {name: gradients[name] for name in block.spec.parameters if name in gradients}
            found |= block.whitened(own)
        return found

    def agree(self) -> None:
        """Compare the metric of this draw with those of the other processes. Collective.

        Raises:
            GramianError: if they differ.
        """
        if self._parallel.differing({"metric": self._digest}, self._device) is not None:
            raise GramianError(
                "metric: its factors differ between processes; expected captures on all of them together"
            )

    def digest(self) -> int:
        """31-bit hash of the present factors and their damping, of which the next draw's noise will be made."""
        if not self._draws:
            self._take()
        return self._digest

    @property
    def _device(self) -> torch.device:
        return next(iter(self._trained.values())).device

    def record(self) -> dict[str, Any]:
        """What the metric is and what it rests on, as JSON values."""
        elements = sum(p.numel() for name, p in self._trained.items() if name in self.blocks)
        return {
            "factors": "public, as the user says",
            "damping_mode": self._kfac.options.damping_mode,
            "refreshes": self._kfac.refreshes,
            "share of trained elements": elements / sum(p.numel() for p in self._trained.values()),
            "rounding": self.rounding,
        }


def _digest(blocks: Mapping[str, Block]) -> int:
    """31-bit hash of the damping of blocks and of their factors' products with fixed random vectors."""
    found, generator = hashlib.blake2b(digest_size=8), torch.Generator().manual_seed(0)
    for name, block in blocks.items():
        found.update(repr((name, block.damping, block.spec.parameters)).encode())
        for factor in block.factors.values():
            probe = torch.randn(factor.dim, 1, generator=generator).to(factor.device, factor.dtype)
            with torch.no_grad(), exact_products(factor.device.type):
                found.update(factor.matvec(probe).cpu().numpy().tobytes())
    return int.from_bytes(found.digest(), "big") >> 33


def _rounding(name: str, block: MetricBlock) -> float:
    """Relative error of ‖W g‖ from rounding g and W: ε √(κ_A κ_G), with condition numbers κ, and the error measured on W⁻¹ W.

    Raises:
        GramianError: if it exceeds `MOST_ROUNDING`.
    """
    eps = torch.finfo(torch.promote_types(block.G.factor.dtype, block.A.factor.dtype)).eps
    found: float = eps * (block.A.condition * block.G.condition) ** 0.5 + block.A.error + block.G.error
    if not found <= MOST_ROUNDING:
        raise GramianError(
            f"metric: {name}: rounding may change norms by {found:.2g} of themselves; expected more damping (condition numbers "
            f"{block.A.condition:.2g} and {block.G.condition:.2g})"
        )
    return found
