"""Clipped sums between backward and optimizer: added to `p.grad` over micro-batches and processes, then noised and divided.

A sum in half precision would be rounded by about 2⁻⁹ of its length, and one sample of five hundred changes it by no more: the
noise would not cover what rounding adds. So `p.grad` of a half-precision parameter is the rounded copy of a sum in float32 (the
wide sum), and the noise is added to the wide sum.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from gramian.core.deferred_read import read_later
from gramian.core.dtypes import wide_dtype
from gramian.core.errors import GramianError
from gramian.linalg.wide import wide
from gramian.parallel.data_parallel import as_sharded, local, reduce_to_shard, wait_for_shard
from gramian.parallel.process_grid import ProcessGrid
from gramian.parallel.tensor_parallel import TensorParallel
from gramian.privacy.audit.change_detection import ChangeDetector
from gramian.privacy.clipping.loss_scaling import Scaling
from gramian.privacy.clipping.step_timing import Stopwatch
from gramian.privacy.metric.public_metric import PublicMetric
from gramian.privacy.noise.correlated_noise import CorrelatedNoise
from gramian.privacy.noise.element_noise import NoisePlan
from gramian.privacy.noise.noised_release import NoisedRelease, StoredPart

IN_FLIGHT = 8
"""Largest number of reductions to a shard that run while the next sums are computed."""
AT_ONCE = 2**26
"""Number of elements whose noise is drawn together, and whose sums over processes run at once."""
CHANGED_GRADIENT = (
    "{}: its .grad was changed between backward and step, where it is not private yet; the step was refused and its sums "
    "dropped; expected .grad as the backward left it, or zero_grad() (a hook before the optimizer's step may write)"
)
CHANGED_WEIGHTS = (
    "{}: was changed between backward and step, where its .grad is not private yet (by hand, or by another optimizer?); "
    "nothing was released, but the weights may hold a gradient without noise; expected weights from before, and changes "
    "after step()"
)


class GradientSums:
    """Collects the clipped sums of a step in `p.grad`, and releases them: adds noise and divides by the expected batch."""

    def __init__(
        self,
        trained: Mapping[str, nn.Parameter],
        parallel: ProcessGrid,
        stopwatch: Stopwatch,
        loss_scale: "float | torch.amp.GradScaler" = 1.0,
        tensor_parallel: TensorParallel | None = None,
    ) -> None:
        """Begin without sums of the parameters in `trained`.

        `loss_scale`: factor of the loss, or its `GradScaler`. `tensor_parallel`: the processes that each sum a share of the
        samples they all see; None: there are none.
        """
        self.trained, self._parallel, self._stopwatch = dict(trained), parallel, stopwatch
        self.moved: dict[str, Tensor] = {}
        """Sums of earlier micro-batches of this draw: this process's part, in float32 or float64, without the loss scale."""
        self._wide_sums: dict[str, Tensor] = {}
        """{half-precision parameter: float32 sum of which `p.grad` is the rounded copy; this process's part}."""
        self._unrounded: dict[str, Tensor] = {}
        """Sums of this backward that will be in `_wide_sums`, when `p.grad` is their rounded copy."""
        self._versions = WeakTensorKeyDictionary()
        """{`p.grad` of a parameter in `_wide_sums`: its version counter after the last backward}."""
        self.watch = ChangeDetector(trained)
        """Detects changes of gradients and weights between the last backward and the step."""
        self._changed: Callable[[], list[Any]] = lambda: []
        """Function that reads which weights changed between the end of the last backward and the beginning of this one."""
        self._loss_scale = loss_scale
        self._arriving: deque[tuple[str, DTensor]] = deque()
        self._stored: dict[str, StoredPart] = {}
        """{parameter: what this process stores of it}, of those that had a release."""
        self._tensor_parallel = tensor_parallel

    # ---- backward --------------------------------------------------------------------------------------------------

    def receive(self, name: str, total: Tensor | None) -> None:
        """Add a parameter's clipped sum to `p.grad`; None: it got no gradient.

        Under FSDP2 and with tensor parallelism this is a collective, which every process calls for every parameter in the same
        order.
        """
        p, shares = self.trained[name], self._tensor_parallel
        if total is None and (shares is not None or isinstance(p, DTensor)):
            total = torch.zeros(p.shape, dtype=wide_dtype(p), device=p.device)
        if shares is not None and total is not None and not shares.spreads(p):
            total = shares.sum(total)
        if not isinstance(p, DTensor):
            if total is not None:
                self._add(name, total)
            return
        assert total is not None
        with self._stopwatch.time("communication", name, "reduce-scatter", nbytes=float(total.nbytes), cuda=p.is_cuda):
            self._arriving.append((name, reduce_to_shard(total, p)))
        while len(self._arriving) > IN_FLIGHT:
            self._land()

    def settle(self) -> None:
        """End a backward: wait for the reductions under way and take checksums of the gradients.

        Raises:
            GramianError: if weights had other values when this backward began than after the last one.
        """
        while self._arriving:
            self._land()
        self._round()
        changed, self._changed = self._changed(), lambda: []
        if any(changed):
            self.forget()
            raise GramianError(CHANGED_WEIGHTS.format(list(self.trained)[changed.index(True)]))
        if all(p.grad is None for p in self.trained.values()):  # an empty batch; a GradScaler wants to see a gradient
            first = next(iter(self.trained.values()))
            first.grad = torch.zeros_like(first)
        self.watch.take(self._inverse_scale())
        for name in self._wide_sums:
            gradient = self.trained[name].grad
            if gradient is not None:
                self._versions[gradient] = local(gradient)._version

    def _inverse_scale(self) -> Tensor | None:
        """Factor by which a GradScaler's `unscale_` multiplies; None: there is no scaler, or it has scaled nothing."""
        scaler = self._loss_scale
        scale = scaler._scale if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled() else None
        return None if scale is None else scale.double().reciprocal().float()

    def begin(self) -> None:
        """Begin a backward: check that weights and gradients did not change since an earlier backward of the same step.

        Values of weights are compared on the device, and the result is read at the end of the backward. A changed gradient is
        remembered, and refused in the step.

        Raises:
            GramianError: if weights were written to since that backward.
        """
        if not self.watch.on:
            return
        written = self.watch.written_weights()
        if written:
            raise GramianError(CHANGED_WEIGHTS.format(written[0]))
        self._changed = read_later(self.watch.changed_weights())
        self._drop_zeroed()
        self.watch.carry(self._wide_sums)

    def _drop_zeroed(self) -> None:
        """Drop the float32 sum of a gradient that the user set to None or zeros; waits for the device only after a write."""
        for name in list(self._wide_sums):
            gradient = self.trained[name].grad
            written = gradient is not None and self._versions.get(gradient) != local(gradient)._version
            if gradient is None or (written and not bool(local(gradient).any())):
                del self._wide_sums[name]

    @torch.no_grad()
    def compare(self, scaling: Scaling) -> Callable[[], None]:
        """Start to compare gradients and weights with what the last backward left, before the step changes them. Collective.

        The findings of all processes are added up, so that all refuse together. The result is read when the step's own work is
        queued, so that the device does not wait for the host.

        Returns:
            A function to call before the optimizer reads the gradients. It drops all sums and raises a `GramianError` if a
            gradient or weight was changed on any process.
        """
        self._drop_zeroed()
        count, watched = len(self.trained), self.watch.on
        device = local(next(iter(self.trained.values())).detach()).device
        found = torch.zeros(2 * count, dtype=torch.int32, device=device)
        if watched:
            changed = self.watch.changed_gradients(self._wide_sums, scaling.undone != 1.0)
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
            total = wait_for_shard(shard)
        self._add(name, total)

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
        p.grad, self._unrounded[name] = None, _laid_out(wide(part), local(p))

    def _round(self) -> None:
        """Set `p.grad` of half-precision parameters to the rounded copies of their sums, in few launches."""
        sums, self._unrounded = self._unrounded, {}
        copies = [torch.empty_like(part, dtype=self.trained[name].dtype) for name, part in sums.items()]
        if copies:
            torch._foreach_copy_(copies, list(sums.values()))
        for name, copy in zip(sums, copies, strict=True):
            self.trained[name].grad = as_sharded(copy, self.trained[name])
        self._wide_sums |= sums

    def _wide(self, name: str, scaling: Scaling) -> Tensor:
        """This process's part of `p.grad` as a new float32 or float64 tensor, without the loss scale the engine removes."""
        p = self.trained[name]
        assert p.grad is not None
        part, wide_sum = local(p.grad), self._wide_sums.pop(name, None)
        if wide_sum is not None:
            part = wide_sum if scaling.undone == 1.0 else wide_sum.div_(scaling.undone)
        else:
            part = wide(part) if part.dtype != wide_dtype(part) else part.clone()
        return part if scaling.left == 1.0 else part.div_(scaling.left)

    # ---- step ------------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Drop all sums that no step has released: `p.grad` becomes None."""
        self._changed = lambda: []
        self.watch.clear()
        self.moved.clear()
        self._wide_sums.clear()
        self._unrounded.clear()
        for p in self.trained.values():
            p.grad = None

    def move(self, scaling: Scaling) -> None:
        """Add the gradients of a micro-batch to `moved` and set `p.grad` to None, so that the optimizer sees none.

        `scaling` tells which factors of a loss scale are still in the gradients; they are divided out.
        """
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

    def release(
        self,
        noise: NoisePlan | CorrelatedNoise,
        number: int,
        std: float,
        expected_batch: float,
        scaling: Scaling,
        metric: PublicMetric | None = None,
    ) -> None:
        """Set p.grad = (sum over micro-batches and processes + std · noise of release `number`) / expected_batch. Collective.

        `scaling` tells which factors of a loss scale are still in the gradients. With a `metric` W the noise is W⁻¹ times it,
        layer by layer, formed as a whole on every process. The noise of up to 2²⁶ elements is one launch;
        under DDP it begins when their sums over processes have arrived, and those of the next parameters are on their way.
        """
        release = NoisedRelease(self.trained, self._stored, noise, number, std, scaling.inside, expected_batch, metric)
        waiting: list[tuple[str, Tensor, Any]] = []
        elements = 0
        for name in self.trained:
            total = self._sum_of_pieces(name, scaling)
            waiting.append((name, total, self._parallel.start_sum(total) if self._parallel.uses_ddp else None))
            elements += total.numel()
            if elements >= AT_ONCE:
                self._finish(release, waiting)
                waiting, elements = [], 0
        if waiting:
            self._finish(release, waiting)
        self.moved.clear()
        self.watch.clear()  # `p.grad` has its noise now, and may be written to

    def _finish(self, release: NoisedRelease, waiting: list[tuple[str, Tensor, Any]]) -> None:
        """Wait for the sums of some parameters over processes, and set their `p.grad`."""
        sums = {}
        for name, total, reduction in waiting:
            if reduction is not None:
                nbytes, cuda = float(total.nbytes), total.is_cuda
                with self._stopwatch.time("communication", name, "all-reduce", nbytes=nbytes, cuda=cuda):
                    reduction.wait()
            sums[name] = total.contiguous()
        nbytes, cuda = float(sum(total.nbytes for total in sums.values())), waiting[0][1].is_cuda
        of = waiting[0][0] if len(waiting) == 1 else f"{len(waiting)} parameters"
        with self._stopwatch.time("noise", of, nbytes=nbytes, cuda=cuda):
            noised = release.noised(sums)
        for name, gradient in noised.items():
            p = self.trained[name]
            if isinstance(p, DTensor) or gradient.stride() != p.stride():
                gradient = as_sharded(_laid_out(gradient, local(p.detach())), p)
            if p.grad is not gradient:
                p.grad = gradient

    def _sum_of_pieces(self, name: str, scaling: Scaling) -> Tensor:
        """This process's sum over the micro-batches of the Poisson draw; in float32 or float64 if more is added to it."""
        p = self.trained[name]
        moved = self.moved.pop(name, None)
        if moved is not None and scaling.inside is not None:
            moved = moved * scaling.inside
        part = local(p.detach())
        if p.grad is None:
            total = torch.zeros_like(part) if moved is None else moved
        elif moved is None and name not in self._wide_sums:  # nothing is added any more: noised where it lies
            total = local(p.grad) if scaling.left == 1.0 else local(p.grad).div_(scaling.left)
        else:
            total = self._wide(name, scaling)
            total = total if moved is None else moved.add_(total)
        # one dtype and one layout on all processes, with or without a gradient
        return _laid_out(wide(total), part) if self._parallel.uses_ddp else total


def _laid_out(t: Tensor, like: Tensor) -> Tensor:
    """`t` in the memory layout of `like`, copied if needed: fused optimizers read memory, not strides."""
    return t if t.stride() == like.stride() else torch.empty_like(like, dtype=t.dtype).copy_(t)
