"""Passes of our own that leave no trace in the user's model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


@contextmanager
def untouched(root: nn.Module) -> Iterator[None]:
    """Gradients, buffers (running statistics) and random states are afterwards what they were, also after an error.

    Inside, no parameter has a gradient, and FSDP2 reduces none, not even those that the user is still accumulating; modes are
    left as they are, so dropout drops as the user set it.
    """
    sharded = [module for module in root.modules() if isinstance(module, FSDPModule)]
    groups = [group for module in sharded for group in _groups(module)]
    syncs = [(group, group.reduce_grads, group.all_reduce_grads) for group in groups]
    gradients = [(p, p.grad) for p in root.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in root.buffers()]
    devices = sorted({p.device.index or 0 for p in root.parameters() if p.device.type == "cuda"})
    for p, _ in gradients:
        p.grad = None
    for group, _, _ in syncs:
        group.reduce_grads = group.all_reduce_grads = False
    try:
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            yield
    finally:
        for group, reduces, all_reduces in syncs:
            group.reduce_grads, group.all_reduce_grads = reduces, all_reduces
        for p, gradient in gradients:
            p.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                if not torch.equal(buffer, value):  # writing would spoil a backward of the user's that is still to come
                    buffer.copy_(value)


def _groups(unit: FSDPModule) -> list[Any]:
    """What FSDP2 gathers and reduces at once: several of a unit, in older releases of torch one or none."""
    state: Any = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
