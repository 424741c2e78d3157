"""Clipped sums on their way into the optimizer: into `p.grad`, over pieces and processes, then noised and divided."""

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gramian.linalg.wide import wide
from gramian.parallel.gradients import DataParallel, landed, local, local_rows, placed, reduce_to_shard
from gramian.privacy.noise import NoisePlan
from gramian.privacy.timing import Stopwatch

IN_FLIGHT = 8
"""Reductions that may be under way at once."""


class GradientSums:
    """Where clipped sums go. In `p.grad` they are in the parameter's dtype; what is moved out of it is kept wide."""

    def __init__(
        self, trained: Mapping[str, nn.Parameter], parallel: DataParallel, overlap: bool, stopwatch: Stopwatch
    ) -> None:
        """Hold nothing yet."""
        self.trained, self._parallel, self._overlap, self._stopwatch = dict(trained), parallel, overlap, stopwatch
        self.moved: dict[str, Tensor] = {}
        """Sums of earlier pieces of this draw, this process's part, wide and without the loss scale."""
        self._arriving: deque[tuple[str, DTensor]] = deque()

    # ---- backward --------------------------------------------------------------------------------------------------

    def receive(self, name: str, total: Tensor | None) -> None:
        """Add a parameter's sum to its gradient; under FSDP2 all processes come here for every parameter, in order."""
        p = self.trained[name]
        if not isinstance(p, DTensor):
            if total is not None:
                self._add(p, total)
            return
        if total is None:
            total = torch.zeros(p.shape, dtype=p.dtype, device=p.device)
        with self._stopwatch.time("communication", name, "reduce-scatter", nbytes=float(total.nbytes), cuda=p.is_cuda):
            self._arriving.append((name, reduce_to_shard(total, p)))
        while len(self._arriving) > (IN_FLIGHT if self._overlap else 0):
            self._land()

    def settle(self) -> None:
        """Wait for what is still on its way."""
        while self._arriving:
            self._land()
        if all(p.grad is None for p in self.trained.values()):  # an empty batch; a GradScaler wants to see a gradient
            first = next(iter(self.trained.values()))
            first.grad = torch.zeros_like(first)

    def _land(self) -> None:
        name, shard = self._arriving.popleft()
        with self._stopwatch.time("communication", name, "wait", cuda=shard.is_cuda):
            whole = landed(shard)
        self._add(self.trained[name], whole)

    def _add(self, p: nn.Parameter, total: Tensor) -> None:
        if p.grad is None:
            p.grad = total if isinstance(total, DTensor) or total.stride() == p.stride() else _laid_out(total, p)
        else:
            p.grad += total

    # ---- step ------------------------------------------------------------------------------------------------------

    def move(self, loss_scale: Any) -> None:
        """Take the gradients of a piece out of `p.grad`, so that the optimizer sees none and zero_grad() loses none."""
        for name, p in self.trained.items():
            if p.grad is not None:
                part = wide(local(p.grad))
                part = part / loss_scale if loss_scale is not None else part
                if name not in self.moved:
                    self.moved[name] = part.clone() if part.data_ptr() == local(p.grad).data_ptr() else part
                else:
                    self.moved[name] += part
                p.grad = None

    def release(self, noise: NoisePlan, number: int, std: float, expected_batch: float, loss_scale: Any) -> None:
        """p.grad = (Σ over pieces and processes + std · noise) / expected batch, for every parameter.

        Args:
            noise: where each parameter's noise lies.
            number: of the release.
            std: of the noise.
            expected_batch: what is divided by.
            loss_scale: what `p.grad` is, and is to stay, multiplied by; None: nothing.
        """
        noise_std: float | Tensor = std if loss_scale is None else std * loss_scale
        first = local(next(iter(self.trained.values())).detach())
        if first.is_cuda and not isinstance(noise_std, Tensor):
            noise_std = torch.full((), noise_std, device=first.device)
        waiting: deque[tuple[str, Tensor, Any]] = deque()

        def finish() -> None:
            name, whole, reduction = waiting.popleft()
            p = self.trained[name]
            if reduction is not None:
                nbytes = float(whole.nbytes)
                with self._stopwatch.time("communication", name, "all-reduce", nbytes=nbytes, cuda=p.is_cuda):
                    reduction.wait()
            with self._stopwatch.time("noise", name, nbytes=float(whole.nbytes), cuda=p.is_cuda):
                if std > 0:
                    noise.add_noise_(whole, name, noise_std, number, local_rows(p), 1 / expected_batch)
                else:
                    whole.div_(expected_batch)
                p.grad = placed(_laid_out(whole.to(p.dtype), local(p.detach())), p)

        for name in self.trained:
            whole = self._whole(name, loss_scale)
            reduces = self._parallel.kind == "ddp"
            waiting.append((name, whole, self._parallel.start_sum(whole) if reduces else None))
            if len(waiting) > (IN_FLIGHT if self._overlap else 0):
                finish()
        while waiting:
            finish()
        self.moved.clear()

    def _whole(self, name: str, loss_scale: Any) -> Tensor:
        """This process's sum over the pieces of the draw: wide where anything is still to be added, else `p.grad` itself."""
        p = self.trained[name]
        moved = self.moved.pop(name, None)
        if moved is not None and loss_scale is not None:
            moved = moved * loss_scale
        part = local(p.detach())
        if p.grad is None:
            whole = torch.zeros_like(part) if moved is None else moved
        else:
            whole = local(p.grad) if moved is None else moved.add_(local(p.grad))
        # one dtype and one layout on all processes, whoever has a gradient
        return _laid_out(wide(whole), part) if self._parallel.kind == "ddp" else whole


def _laid_out(t: Tensor, like: Tensor) -> Tensor:
    """In memory as another is: fused optimizers read memory, not strides."""
    return t if t.stride() == like.stride() else torch.empty_like(like, dtype=t.dtype).copy_(t)
