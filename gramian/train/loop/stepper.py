"""One optimizer step: its micro-batches forward and back, clipped, stepped.

The loss of a step is the mean over the tokens of all micro-batches and all processes: every token has the coefficient 1/N, N
known before the first backward. DDP and FSDP2 average over processes, so it is multiplied by their number.
"""

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.optimizer import Optimizer

from gramian.curvature import KFACNaturalGradient
from gramian.data import StepBatch
from gramian.distill.teaching import Teaching
from gramian.parallel.world import World
from gramian.parallel.wrap import reducing
from gramian.train.loop.objective import IGNORED
from gramian.train.loop.precision import Numbers


@dataclass(frozen=True)
class Taken:
    """What a step did, on the device: nothing waits for it."""

    values: Tensor
    """[Σ −log p over all processes, flags raised, tokens behind the loss, gradient norm], float64; then, of a student,
    `gramian.distill.teaching.EXTRA`."""
    stepped: bool
    """False if the loss scaler skipped the step."""


class Stepper:
    """Model, optimizer and scaler, and how they take a step."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        numbers: Numbers,
        world: World,
        *,
        max_norm: float,
        seed: int,
        kfac: KFACNaturalGradient | None = None,
        teaching: Teaching | None = None,
    ) -> None:
        """Hold them.

        Args:
            module: objective, spread over processes.
            optimizer: over its parameters.
            numbers: the precision.
            world: this process among the others.
            max_norm: longer gradients are scaled down to it; 0: none are.
            seed: of dropout.
            kfac: sees the backward of every step, where the optimizer is preconditioned by it.
            teaching: the teacher, where the objective is a student's; whoever takes steps tells it which.
        """
        self.module, self.optimizer, self.numbers, self.world = module, optimizer, numbers, world
        self.max_norm, self.kfac, self.teaching = max_norm, kfac, teaching
        self.scaler = numbers.scaler()
        self.captured = module
        """Whose passes K-FAC sees."""
        self._seed = seed

    def take(self, batch: StepBatch, rate: float, flag: bool = False) -> Taken:
        """One optimizer step.

        Args:
            batch: its micro-batches.
            rate: learning rate.
            flag: this process wants the others to know something; they do when they read the values.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        coefficient = 1.0 / max(1, batch.tokens)
        sums, scale = self._backward(batch, coefficient), 1.0
        if self.scaler is not None:
            scale = self.scaler.get_scale()
            self.scaler.unscale_(self.optimizer)
        norm = self._clip()
        stepped = self._step()
        learned = sums.new_empty(0) if self.teaching is None else self.teaching.finish(scale, stepped)
        sums = self.world.sum_(torch.cat([sums[:1], torch.full_like(sums[:1], flag), sums[1:]]))
        own = torch.stack([torch.full_like(norm, batch.tokens), norm])
        return Taken(torch.cat([sums[:2], own, sums[2:], learned]), stepped)

    def watch(self, batch: StepBatch) -> None:
        """Forward and backward of a batch alone: `p.grad` is the step's gradient, times the loss scale, not clipped."""
        self.optimizer.zero_grad(set_to_none=True)
        self._backward(batch, 1.0 / max(1, batch.tokens))

    def _backward(self, batch: StepBatch, coefficient: float) -> Tensor:
        """What the objective tells, summed over micro-batches."""
        total = torch.zeros(1, dtype=torch.float64, device=self.world.device)
        coefficient = coefficient * self.world.size
        with self._observed(batch, coefficient) as capture:
            for i, micro in enumerate(batch.micro):
                seed_all(self._seed, batch.position, i, self.world.rank)
                if capture is not None and i:
                    capture.next(**terms_and_ids(batch, i))
                more = {} if self.teaching is None else self.teaching.arguments(micro)
                with reducing(self.module, last=i == len(batch.micro) - 1):
                    with self.numbers.autocast():
                        loss, told = self.module(
                            micro["tokens"],
                            micro["targets"],
                            coefficient,
                            micro.get("documents"),
                            **more,
                        )
                    if self.teaching is not None and i + 1 < len(batch.micro):
                        self.teaching.source.upcoming(batch.micro[i + 1])
                    (loss if self.scaler is None else self.scaler.scale(loss)).backward()
                total = total + told.reshape(-1)
        return total

    def _observed(self, batch: StepBatch, coefficient: float) -> AbstractContextManager[Any]:
        """A capture by K-FAC. It sees gradients before they are averaged: each process's own, with the coefficient there."""
        if self.kfac is None:
            return nullcontext()
        return self.kfac.capture(
            self.module,
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

    def _step(self) -> bool:
        if self.scaler is None:
            self.optimizer.step()
            return True
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale() >= before


def seed_all(seed: int, *place: int) -> None:
    """Generators as a function of the place in the run, so that nothing of them must be saved."""
    key = hashlib.blake2b(repr((seed, *place)).encode(), digest_size=8, person=b"dropout").digest()
    torch.manual_seed(int.from_bytes(key, "little") >> 1)


def terms_and_ids(batch: StepBatch, i: int) -> dict[str, Any]:
    """What K-FAC must know of a micro-batch: its loss terms, and its rows' places in the step, whoever computes them."""
    sizes, targets_BT = [len(micro["targets"]) for micro in batch.micro], batch.micro[i]["targets"]
    first = batch.first + sum(sizes[:i])
    return {
        "num_terms": int((targets_BT != IGNORED).sum()),
        "sample_ids": torch.arange(first, first + sizes[i]),
    }


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode and no graph, for a while."""
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(training)
