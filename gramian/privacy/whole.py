"""Batches of one sample: the ordinary gradient is that sample's, whatever the architecture; it is clipped as a whole."""

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gramian.errors import GramianError
from gramian.linalg.wide import wide_dtype
from gramian.privacy.clipping import SLACK, Clipped
from gramian.taps.passes import accumulates, in_backward
from gramian.taps.sites.site import first_tensor


class RowCount:
    """A forward hook that tells a `WholeGradient` of every batch; what copies and pickles of a module carry does nothing."""

    def __init__(self, owner: "WholeGradient | None") -> None:
        """Remember whom to tell, weakly."""
        self._owner: Any = (lambda: None) if owner is None else weakref.ref(owner)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Tell."""
        owner = self._owner()
        if owner is not None:
            owner.count_rows(module, args, kwargs)

    def __deepcopy__(self, memo: Any) -> "RowCount":
        """One that does nothing."""
        return RowCount(None)

    def __reduce__(self) -> Any:
        """One that does nothing."""
        return (RowCount, (None,))


class WholeGradient:
    """Clips what autograd forms for one sample: no tap, any layer, weights used anywhere."""

    def __init__(
        self,
        root: nn.Module,
        trained: Mapping[str, nn.Parameter],
        *,
        max_grad_norm: float,
        loss_reduction: str | float = "mean",
        loss_scale: "float | torch.amp.GradScaler" = 1.0,
    ) -> None:
        """Put hooks on the parameters; `remove` takes them off."""
        self._trained, self._limit, self._loss_scale = dict(trained), max_grad_norm, loss_scale
        self._factor = 1.0 if isinstance(loss_reduction, str) else 1.0 / loss_reduction
        self._root, self._entered = weakref.ref(root), False
        self._before: dict[str, Tensor | None] | None = None
        self._batch = 1
        self.last: Clipped | None = None
        self.passes = 0
        self.paused = False
        self.on_begin: Callable[[int], None] = lambda rows: None
        """Called before anything is summed; may refuse."""
        self.on_done: Callable[[], None] = lambda: None
        self._handles: list[RemovableHandle] = [root.register_forward_pre_hook(RowCount(self), with_kwargs=True)]
        for p in self._trained.values():
            leaf = torch.autograd.graph.get_gradient_edge(p).node
            self._handles.append(p.register_hook(partial(self._begin, leaf)))

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

    def count_rows(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A forward begins: how many samples it is of."""
        if module is not self._root() or in_backward() or not torch.is_grad_enabled():
            return
        self.recover()
        self._batch, self._entered = first_tensor(args, kwargs).shape[0], True
        if self._batch > 1:
            raise GramianError(
                f"batch: has {self._batch} samples, but max_physical_batch=1 clips whole gradients; expected one sample"
            )

    def _begin(self, leaf: Any, gradient: Tensor) -> None:
        """The backward reached a first parameter: put earlier sums aside, so that `p.grad` becomes this sample's own.

        Raises:
            GramianError: if nobody knows how many samples it is of.
        """
        if not accumulates(leaf):
            return  # torch.autograd.grad: `p.grad` gets nothing
        if self._before is None:
            if not self._entered:
                raise GramianError(
                    "backward: did not come from a forward of the model itself; expected a call of it, or a larger "
                    "max_physical_batch"
                )
            if not self.paused:
                self.on_begin(self._batch)
            self._before = {name: p.grad for name, p in self._trained.items()}
            for p in self._trained.values():
                p.grad = None
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    @torch.no_grad()
    def _end(self) -> None:
        before, self._before, self._entered = self._before, None, False
        assert before is not None
        own = {name: p.grad for name, p in self._trained.items() if p.grad is not None}
        gradients = [g for g in own.values() if g is not None]
        wide = wide_dtype(*gradients)
        parts = torch._foreach_norm(gradients, 2, dtype=wide)
        norm = torch.stack([part.to(parts[0].device) for part in parts]).square().sum().sqrt()
        norm = norm * self._factor / self._scale()
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
                gradient.mul_((factor * self._factor).to(gradient.device))
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
