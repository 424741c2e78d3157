"""Batches of one sample: the ordinary gradient is that sample's, whatever the architecture; it is clipped as a whole."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gramian.errors import GramianError
from gramian.linalg.wide import wide_dtype
from gramian.privacy.clipping import SLACK, Clipped
from gramian.taps.passes import in_backward
from gramian.taps.sites.site import first_tensor


class WholeGradient:
    """Clips what autograd forms for one sample: no tap, any layer, weights used anywhere."""

    def __init__(
        self,
        root: nn.Module,
        trained: Mapping[str, nn.Parameter],
        *,
        max_grad_norm: float,
        loss_scale: "float | torch.amp.GradScaler" = 1.0,
    ) -> None:
        """Put hooks on the parameters; `remove` takes them off."""
        self._trained, self._limit, self._loss_scale = dict(trained), max_grad_norm, loss_scale
        self._before: dict[str, Tensor | None] | None = None
        self._batch = 1
        self.last: Clipped | None = None
        self.passes = 0
        self.paused = False
        self.on_done: Callable[[], None] = lambda: None
        self._handles: list[RemovableHandle] = [root.register_forward_pre_hook(self._count_rows, with_kwargs=True)]
        self._handles += [p.register_hook(self._begin) for p in self._trained.values()]

    def recover(self) -> None:
        """After a backward that broke off: `p.grad` as it was before it."""
        if self._before is not None and not in_backward():
            for name, p in self._trained.items():
                p.grad = self._before[name]
            self._before = None

    def remove(self) -> None:
        """Take the hooks off."""
        self.recover()
        for handle in self._handles:
            handle.remove()

    def _count_rows(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.recover()
        self._batch = first_tensor(args, kwargs).shape[0]
        if self._batch > 1 and torch.is_grad_enabled():
            raise GramianError(
                f"batch: has {self._batch} samples, but max_physical_batch=1 clips whole gradients; expected one sample"
            )

    def _begin(self, gradient: Tensor) -> None:
        """The backward reached a first parameter: put earlier sums aside, so that `p.grad` becomes this sample's own."""
        if self._before is None:
            self._before = {name: p.grad for name, p in self._trained.items()}
            for p in self._trained.values():
                p.grad = None
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    @torch.no_grad()
    def _end(self) -> None:
        before, self._before = self._before, None
        assert before is not None
        own = {name: p.grad for name, p in self._trained.items() if p.grad is not None}
        gradients = [g for g in own.values() if g is not None]
        wide = wide_dtype(*gradients)
        parts = torch._foreach_norm(gradients, 2, dtype=wide)
        norm = torch.stack([part.to(parts[0].device) for part in parts]).square().sum().sqrt() / self._scale()
        slack = max(SLACK[g.dtype] for g in gradients)
        factor = (self._limit / (1 + slack) / norm).clamp(max=1.0)
        finite = bool(norm.isfinite())
        self.last = Clipped(
            norm.reshape(1)[: self._batch],
            (factor if finite else factor * 0).reshape(1)[: self._batch],
            int(not finite),
        )
        counts = finite and self._batch == 1 and not self.paused
        for name, p in self._trained.items():
            earlier, gradient = before[name], own.get(name)
            if gradient is not None and counts:
                gradient.mul_(factor.to(gradient.device))
                p.grad = gradient if earlier is None else earlier.add_(gradient)
            else:
                p.grad = earlier
        self.passes += 1
        self.on_done()

    def _scale(self) -> Any:
        if not isinstance(self._loss_scale, torch.amp.GradScaler):
            return self._loss_scale
        scale = getattr(self._loss_scale, "_scale", None)
        return scale if scale is not None else self._loss_scale.get_scale()
