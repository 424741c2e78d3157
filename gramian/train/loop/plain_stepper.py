"""An optimizer step on a batch: its micro-batches forward and backward, gradients clipped, parameters updated.

The loss of a step is the mean over the tokens of all micro-batches and all processes: every token has the coefficient 1/N,
with N known before the first backward. DDP and FSDP2 average over processes, so the coefficient is multiplied by their number.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.optimizer import Optimizer

from gramian.curvature import KFACNaturalGradient
from gramian.data import StepBatch
from gramian.optim.kfac_optimizer import KFAC
from gramian.parallel.process_grid import ProcessGrid
from gramian.parallel.wrap_data_parallel import gradient_sync
from gramian.privacy.clipping.step_timing import Stopwatch
from gramian.train.loop.precision import Precision
from gramian.train.loop.stepper import TRUST_REGION, Stepper, TakenStep, seed_all, terms_and_ids


class PlainStepper(Stepper):
    """Takes the optimizer steps of cross-entropy training, also along natural gradients.

    Args:
        module, optimizer, numbers, grid: model and loss, optimizer, precision and process grid of the run, as in `Stepper`.
        max_norm: longer gradients are scaled down to this norm; 0 scales none.
        seed: seed of dropout.
        kfac: curvature of the optimizer, its preconditioner or inside it, from the backward of a step; None: plain gradients.

    Example:
        >>> stepper = PlainStepper(module, optimizer, numbers, grid, max_norm=1.0, seed=0)  # doctest: +SKIP
        >>> stepper.take(batch, rate=1e-3).stepped  # doctest: +SKIP
        True
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        numbers: Precision,
        grid: ProcessGrid,
        *,
        max_norm: float,
        seed: int,
        kfac: KFACNaturalGradient | None = None,
    ) -> None:
        self.module, self.optimizer, self.numbers, self.grid = module, optimizer, numbers, grid
        self.max_norm, self.kfac, self.captured = max_norm, kfac, module
        self.scaler, self.stopwatch = numbers.scaler(), Stopwatch()
        if kfac is not None and not isinstance(optimizer, KFAC):
            self.extra = (*self.extra, *TRUST_REGION)
        self._seed = seed

    def take(self, batch: StepBatch, rate: float, flag: bool = False) -> TakenStep:
        """Take one optimizer step on the micro-batches of `batch` at learning rate `rate`; its metrics stay on the device.

        A `flag` raised on one process is reported to all.
        """
        self.set_rate(rate)
        self.optimizer.zero_grad(set_to_none=True)
        sums, scale = self._backward(batch, 1.0 / max(1, batch.tokens)), 1.0
        if self.scaler is not None:
            scale = self.scaler.get_scale()
            self.scaler.unscale_(self.optimizer)
        with self._timed("clip"):
            norm = self._clip()
        with self._timed("optimizer"):
            stepped = self._step()
        learned = self._learn(sums, scale, stepped)
        sums = self.grid.sum_(torch.cat([sums[:1], torch.full_like(sums[:1], flag), sums[1:]]))
        own = torch.stack([torch.full_like(norm, batch.tokens), norm])
        return TakenStep(torch.cat([sums[:2], own, sums[2:], learned, self._trust_region(sums)]), stepped)

    def watch(self, batch: StepBatch) -> None:
        """Run forward and backward of a batch without a step; `p.grad` is then the gradient times the loss scale."""
        self.optimizer.zero_grad(set_to_none=True)
        self._backward(batch, 1.0 / max(1, batch.tokens))

    def _backward(self, batch: StepBatch, coefficient: float) -> Tensor:
        """Forward and backward of all micro-batches; returns the values that the objective reports, summed over them."""
        total = torch.zeros(1, dtype=torch.float64, device=self.grid.device)
        coefficient = coefficient * self.grid.size
        with self._observed(batch, coefficient) as capture:
            for i, micro in enumerate(batch.micro):
                seed_all(self._seed, batch.position, i, self.grid.rank)
                if capture is not None and i:
                    capture.next(**terms_and_ids(batch, i))
                more = self._arguments(micro)
                with gradient_sync(self.module, last=i == len(batch.micro) - 1):
                    with self.numbers.autocast(), self._timed("forward"):
                        loss, values = self.module(
                            micro["tokens"], micro["targets"], coefficient, micro.get("documents"), **more
                        )
                    if i + 1 < len(batch.micro):
                        self._announce(batch.micro[i + 1])
                    with self._timed("backward"):
                        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
                total = total + values.reshape(-1)
        return total

    def _timed(self, phase: str) -> AbstractContextManager[Any]:
        return self.stopwatch.time(phase, cuda=self.grid.device.type == "cuda")

    def _observed(self, batch: StepBatch, coefficient: float) -> AbstractContextManager[Any]:
        """Context manager that captures this process's gradients for K-FAC before they are averaged; empty without K-FAC."""
        if self.kfac is None:
            return nullcontext()
        capture = (
            self.optimizer.capture if isinstance(self.optimizer, KFAC) else partial(self.kfac.capture, self.module)
        )
        return capture(
            loss_reduction=coefficient,
            loss_scale=1.0 if self.scaler is None else self.scaler,
            **terms_and_ids(batch, 0),
        )

    def _clip(self) -> Tensor:
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        norm = get_total_norm(gradients)
        if self.max_norm:
            clip_grads_with_norm_([p for p in self.module.parameters() if p.grad is not None], self.max_norm, norm)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        return norm.detach().to(torch.float64)

    # ---- what distillation adds --------------------------------------------------------------------------------------

    def _arguments(self, micro: dict[str, Tensor]) -> dict[str, Any]:
        """Further keyword arguments of the objective for a micro-batch; none without a teacher."""
        return {}

    def _announce(self, micro: dict[str, Tensor]) -> None:
        """Called with the next micro-batch of the step before the backward of this one; does nothing without a teacher."""

    def _learn(self, sums: Tensor, scale: float, stepped: bool) -> Tensor:
        """Called after the step to update what the optimizer does not (a temperature); returns further values to report."""
        return sums.new_empty(0)
