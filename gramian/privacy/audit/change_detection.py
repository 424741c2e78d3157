"""Detect changes of gradients and weights between a backward and the step that adds the noise.

A write to `p.data` or `p.grad.data` does not increase the version counter, and a write of equal values does. So gradients are
compared by value: a checksum of every element is taken when the backward returns, and again in the step. Weights are compared
by version, which every write except through `.data` increases, and by the checksum of the first SAMPLED elements of each
parameter: an update by hand or by an optimizer changes all of a parameter, and a second checksum of all would double the cost.

Cost: two reads of the gradients between backward and step, 8 bytes per float32 parameter and 4 per half-precision one, in a
fixed number of launches; no wait for the device before the comparison is read.
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from gramian.kernels.checksums import checksums
from gramian.parallel.data_parallel import local

SAMPLED = 2**15
"""Number of elements at the beginning of each parameter whose values are compared between backward and step."""


class ChangeDetector:
    """Checksums of gradients and weights at the end of a backward, to detect later changes.

    Checksums and masks are vectors [N], with one entry for each trained parameter, in their order.
    """

    def __init__(self, trained: Mapping[str, nn.Parameter]) -> None:
        """Store the parameters; no checksum is taken before the first backward."""
        self._trained = dict(trained)
        self._gradients: Tensor | None = None
        """Checksums of `p.grad` as the last backward left it; None: there was no backward since `clear`."""
        self._unscaled: Tensor | None = None
        """Checksums of the gradients as a GradScaler's `unscale_` would leave them."""
        self._changed: Tensor | None = None
        """Mask [N] of gradients that were changed before the last backward added to them."""
        self._weights: Tensor | None = None
        self._versions: list[int] = []
        self._may_be_zero: dict[frozenset[str], Tensor] = {}
        """{names of the parameters for which zeros are a change: mask [N] of all others, on the device}; the last one."""

    @property
    def on(self) -> bool:
        """True between a backward and `clear`, while gradients and weights must not change."""
        return self._gradients is not None

    def clear(self) -> None:
        """Drop the checksums: the gradients were noised or dropped, and may be written to."""
        self._gradients = self._unscaled = self._changed = self._weights = None

    @torch.no_grad()
    def take(self, inverse_scale: Tensor | None = None) -> None:
        """Take checksums of the gradients that a backward left and, in the first call since `clear`, of the weights.

        `inverse_scale` is the factor by which a GradScaler's `unscale_` will multiply the gradients: checksums of unscaled
        copies are taken as well. None: there is no scaler.
        """
        gradients = self._ordered_gradients()
        self._gradients = self._marked(checksums(gradients))
        if inverse_scale is not None:
            self._unscaled = self._marked(checksums(_unscaled(gradients, inverse_scale)))
        if self._weights is None:
            self._weights, self._versions = self._weights_now(), self._versions_now()

    def _marked(self, now: Tensor) -> Tensor:
        """The checksums `now`, changed for gradients that `carry` found changed, so that a later comparison finds them too."""
        return now if self._changed is None else now + self._changed

    def carry(self, never_zero: Collection[str]) -> None:
        """Store which gradients were changed before another backward adds to them; does not wait for the device.

        `never_zero`: names of the parameters for which zeros are a change, too.
        """
        self._changed = self.changed_gradients(never_zero)

    @torch.no_grad()
    def changed_gradients(self, never_zero: Collection[str], unscaled: bool = False) -> Tensor:
        """Mask, bool [N], of gradients that are neither what the last backward left, nor zeros or None.

        `never_zero`: names of the parameters for which zeros are a change, too. `unscaled`: a GradScaler has divided the
        gradients since, so they are compared with the unscaled copies.
        """
        before = self._unscaled if unscaled and self._unscaled is not None else self._gradients
        assert before is not None
        now = checksums(self._ordered_gradients())
        names = frozenset(never_zero)
        if names not in self._may_be_zero:
            self._may_be_zero = {names: torch.tensor([n not in names for n in self._trained]).to(now.device)}
        return (now != before) & ~((now == 0) & self._may_be_zero[names])

    def written_weights(self) -> list[str]:
        """Names of the parameters whose version counter moved since the backward; reads nothing from the device."""
        if self._weights is None:
            return []
        now = self._versions_now()
        return [name for name, old, new in zip(self._trained, self._versions, now, strict=True) if old != new]

    @torch.no_grad()
    def changed_weights(self) -> Tensor:
        """Mask, bool [N], of weights that were written to or changed their values since the backward."""
        assert self._weights is not None
        changed, written = self._weights_now() != self._weights, self.written_weights()
        return changed | torch.tensor([n in written for n in self._trained]).to(changed.device) if written else changed

    def _ordered_gradients(self) -> list[Tensor]:
        """This process's part of every gradient, in the memory order of the parameter; empty where `p.grad` is None."""
        found = []
        for p in self._trained.values():
            part, gradient = local(p), p.grad
            found.append(part.new_empty(0) if gradient is None else _in_order(local(gradient), part))
        return found

    def _weights_now(self) -> Tensor:
        return checksums([_in_order(part, part) for part in map(local, self._trained.values())], SAMPLED)

    @torch.no_grad()
    def _versions_now(self) -> list[int]:
        return [local(p)._version for p in self._trained.values()]


def _in_order(t: Tensor, like: Tensor) -> Tensor:
    """A tensor made contiguous in the memory order of another; no copy if both are contiguous."""
    if t.is_contiguous() and like.is_contiguous():
        return t
    strides = like.stride()
    return t.permute(sorted(range(t.dim()), key=lambda dim: -strides[dim])).contiguous()


def _unscaled(gradients: list[Tensor], inverse_scale: Tensor) -> list[Tensor]:
    """Copies of the gradients, unscaled by a GradScaler's own operation, so that they equal its result bit for bit."""
    copies = [gradient.clone() for gradient in gradients]
    for device, dtype in {(copy.device, copy.dtype) for copy in copies}:
        group = [copy for copy in copies if copy.device == device and copy.dtype == dtype]
        if dtype == torch.bfloat16 and device.type == "cuda":  # torch refuses to unscale: only fused optimizers do
            torch._foreach_mul_(group, inverse_scale.to(device))
            continue
        found = torch.zeros(1, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(group, found, inverse_scale.to(device))
    return copies
