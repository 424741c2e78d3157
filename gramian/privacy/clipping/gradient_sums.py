"""Clipped sums on their way into the optimizer: into `p.grad`, over pieces and processes, then noised and divided.

A sum in half precision would be rounded by about 2⁻⁹ of its length, and one sample of five hundred changes it by no more: the
noise would not cover what rounding adds. So behind the `p.grad` of a half-precision parameter stands the sum in float32, and
that one is noised.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from gramian.core.errors import GramianError
from gramian.linalg.wide import wide, wide_dtype
from gramian.parallel.data_parallel import DataParallel, landed, local, local_rows, placed, reduce_to_shard
from gramian.privacy.audit.integrity import Watch
from gramian.privacy.clipping.clipping_rule import read_later
from gramian.privacy.clipping.step_timing import Stopwatch
from gramian.privacy.noise.element_noise import NoisePlan

IN_FLIGHT = 8
"""Reductions that may be under way at once."""
CHANGED_GRADIENT = (
    "{}: its .grad was changed between backward and step, where it is not private yet; the step was refused and its sums "
    "dropped; expected .grad as the backward left it, or zero_grad() (a hook before the optimizer's step may write)"
)
CHANGED_WEIGHTS = (
    "{}: was changed between backward and step, where its .grad is not private yet (by hand, or by another optimizer?); "
    "nothing was released, but the weights may hold a gradient without noise; expected weights from before, and changes "
    "after step()"
)


@dataclass(frozen=True)
class Scaling:
    """What the gradients of a step are multiplied by."""

    inside: Any = None
    """A scale that the optimizer undoes inside its step: gradients stay multiplied by it. None: none."""
    left: float = 1.0
    """A scale that nobody else undoes."""
    undone: float = 1.0
    """A scale that a GradScaler has divided `p.grad` by already."""


class GradientSums:
    """Where clipped sums go. In `p.grad` they are in the parameter's dtype; what is released comes from wide ones."""

    def __init__(
        self,
        trained: Mapping[str, nn.Parameter],
        parallel: DataParallel,
        overlap: bool,
        stopwatch: Stopwatch,
        loss_scale: "float | torch.amp.GradScaler" = 1.0,
    ) -> None:
        """Hold nothing yet."""
        self.trained, self._parallel, self._overlap, self._stopwatch = dict(trained), parallel, overlap, stopwatch
        self.moved: dict[str, Tensor] = {}
        """Sums of earlier pieces of this draw, this process's part, wide and without the loss scale."""
        self._behind: dict[str, Tensor] = {}
        """{parameter: the wide sum of which `p.grad` is the rounded copy, this process's part}."""
        self._versions = WeakTensorKeyDictionary()
        """{p.grad, of a parameter with such a sum, as the last backward left it: its version}."""
        self.watch = Watch(trained)
        """Whether gradients and weights stay as that backward left them."""
        self._changed: Callable[[], list[Any]] = lambda: []
        """Reads which weights had other values at the beginning of a backward than at the end of the last one."""
        self._loss_scale = loss_scale
        self._arriving: deque[tuple[str, DTensor]] = deque()

    # ---- backward --------------------------------------------------------------------------------------------------

    def receive(self, name: str, total: Tensor | None) -> None:
        """Add a parameter's sum to its gradient; under FSDP2 all processes come here for every parameter, in order."""
        p = self.trained[name]
        if not isinstance(p, DTensor):
            if total is not None:
                self._add(name, total)
            return
        if total is None:
            total = torch.zeros(p.shape, dtype=wide_dtype(p), device=p.device)
        with self._stopwatch.time("communication", name, "reduce-scatter", nbytes=float(total.nbytes), cuda=p.is_cuda):
            self._arriving.append((name, reduce_to_shard(total, p)))
        while len(self._arriving) > (IN_FLIGHT if self._overlap else 0):
            self._land()

    def settle(self) -> None:
        """Wait for what is still on its way.

        Raises:
            GramianError: if weights had other values when this backward began than after the last one.
        """
        while self._arriving:
            self._land()
        changed, self._changed = self._changed(), lambda: []
        if any(changed):
            self.forget()
            raise GramianError(CHANGED_WEIGHTS.format(list(self.trained)[changed.index(True)]))
        if all(p.grad is None for p in self.trained.values()):  # an empty batch; a GradScaler wants to see a gradient
            first = next(iter(self.trained.values()))
            first.grad = torch.zeros_like(first)
        self.watch.take(self._inverse_scale())
        for name in self._behind:
            gradient = self.trained[name].grad
            if gradient is not None:
                self._versions[gradient] = local(gradient)._version

    def _inverse_scale(self) -> Tensor | None:
        """What a GradScaler's `unscale_` multiplies gradients with; None: there is no scaler, or it has scaled nothing."""
        scaler = self._loss_scale
        scale = scaler._scale if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled() else None
        return None if scale is None else scale.double().reciprocal().float()

    def begin(self) -> None:
        """Another backward begins before the step. Values of weights are compared, too; the result is read at its end.

        Raises:
            GramianError: if weights were written to since the last one.
        """
        if not self.watch.on:
            return
        written = self.watch.written_weights()
        if written:
            raise GramianError(CHANGED_WEIGHTS.format(written[0]))
        self._changed = read_later(self.watch.changed_weights())
        self._follow_zeroed()
        self.watch.carry(self._behind)

    def _follow_zeroed(self) -> None:
        """Where the user dropped a gradient, or wrote zeros into it, drop the wide sum behind it. Waits only after a write."""
        for name in list(self._behind):
            gradient = self.trained[name].grad
            written = gradient is not None and self._versions.get(gradient) != local(gradient)._version
            if gradient is None or (written and not bool(local(gradient).any())):
                del self._behind[name]

    @torch.no_grad()
    def compare(self, scaling: Scaling) -> Callable[[], None]:
        """Begin to compare gradients and weights with what the backward left, before the step writes into them.

        All processes come here and refuse together: what each found is added up. The result is read when the step's own
        work is queued, so that the device does not wait for the host.

        Returns:
            To be called before anybody else sees the gradients. It raises a `GramianError`, and drops all sums, if one of
            them was changed on any process.
        """
        self._follow_zeroed()
        count, watched = len(self.trained), self.watch.on
        device = local(next(iter(self.trained.values())).detach()).device
        found = torch.zeros(2 * count, dtype=torch.int32, device=device)
        if watched:
            changed = self.watch.changed_gradients(self._behind, scaling.undone != 1.0)
            found = torch.cat([changed, self.watch.changed_weights()]).int()
        reduction = self._parallel.start_sum(found)
        if reduction is not None:
            reduction.wait()
        read = read_later(found) if watched or reduction is not None else lambda: []

        def verdict() -> None:
            for i, number in enumerate(read()):
                if number:
                    self.forget()
                    reason = CHANGED_GRADIENT if i < count else CHANGED_WEIGHTS
                    raise GramianError(reason.format(list(self.trained)[i % count]))

        return verdict

    def _land(self) -> None:
        name, shard = self._arriving.popleft()
        with self._stopwatch.time("communication", name, "wait", cuda=shard.is_cuda):
            whole = landed(shard)
        self._add(name, whole)

    def _add(self, name: str, total: Tensor) -> None:
        p = self.trained[name]
        if p.dtype not in (torch.float16, torch.bfloat16):
            if p.grad is None:
                p.grad = total if isinstance(total, DTensor) or total.stride() == p.stride() else _laid_out(total, p)
            else:
                p.grad += total
            return
        part = local(total)
        if p.grad is not None:
            part = self._wide(name, Scaling()).add_(part)
        part = _laid_out(wide(part), local(p.detach()))
        p.grad = placed(part.to(p.dtype), p)  # at once: the device still sums the next ones while the host does this
        self._behind[name] = part

    def _wide(self, name: str, scaling: Scaling) -> Tensor:
        """This process's part of what is in `p.grad`, wide and without the scale that nobody else undoes; may be written to."""
        p = self.trained[name]
        assert p.grad is not None
        part, behind = local(p.grad), self._behind.pop(name, None)
        if behind is not None:
            part = behind if scaling.undone == 1.0 else behind.div_(scaling.undone)
        else:
            part = wide(part) if part.dtype != wide_dtype(part) else part.clone()
        return part if scaling.left == 1.0 else part.div_(scaling.left)

    # ---- step ------------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Drop sums that no step has released."""
        self._changed = lambda: []
        self.watch.clear()
        self.moved.clear()
        self._behind.clear()
        for p in self.trained.values():
            p.grad = None

    def move(self, scaling: Scaling) -> None:
        """Take the gradients of a piece out of `p.grad`, so that the optimizer sees none and zero_grad() loses none."""
        self.watch.clear()
        for name, p in self.trained.items():
            if p.grad is not None:
                part = self._wide(name, scaling)
                part = part / scaling.inside if scaling.inside is not None else part
                if name not in self.moved:
                    self.moved[name] = part
                else:
                    self.moved[name] += part
                p.grad = None

    def release(self, noise: NoisePlan, number: int, std: float, expected_batch: float, scaling: Scaling) -> None:
        """p.grad = (Σ over pieces and processes + std · noise) / expected batch, for every parameter.

        Args:
            noise: where each parameter's noise lies.
            number: of the release.
            std: of the noise.
            expected_batch: what is divided by.
            scaling: what `p.grad` is multiplied by.
        """
        noise_std: float | Tensor = std if scaling.inside is None else std * scaling.inside
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
            whole = self._whole(name, scaling)
            reduces = self._parallel.kind == "ddp"
            waiting.append((name, whole, self._parallel.start_sum(whole) if reduces else None))
            if len(waiting) > (IN_FLIGHT if self._overlap else 0):
                finish()
        while waiting:
            finish()
        self.moved.clear()
        self.watch.clear()  # what is in `p.grad` now has its noise: anybody may write

    def _whole(self, name: str, scaling: Scaling) -> Tensor:
        """This process's sum over the pieces of the draw: wide where anything is still to be added or rounded."""
        p = self.trained[name]
        moved = self.moved.pop(name, None)
        if moved is not None and scaling.inside is not None:
            moved = moved * scaling.inside
        part = local(p.detach())
        if p.grad is None:
            whole = torch.zeros_like(part) if moved is None else moved
        elif moved is None and name not in self._behind:  # nothing is added any more: noised where it lies
            whole = local(p.grad) if scaling.left == 1.0 else local(p.grad).div_(scaling.left)
        else:
            whole = self._wide(name, scaling)
            whole = whole if moved is None else moved.add_(whole)
        # one dtype and one layout on all processes, whoever has a gradient
        return _laid_out(wide(whole), part) if self._parallel.kind == "ddp" else whole


def _laid_out(t: Tensor, like: Tensor) -> Tensor:
    """In memory as another is: fused optimizers read memory, not strides."""
    return t if t.stride() == like.stride() else torch.empty_like(like, dtype=t.dtype).copy_(t)
