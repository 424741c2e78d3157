"""Start and destroy the process group of a run, from the environment that torchrun sets."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from gramian.parallel.process_grid import DataParallelKind, ProcessGrid

TIMEOUT = timedelta(minutes=5)


@contextmanager
def world(cpu: bool, fsdp: bool) -> Iterator[ProcessGrid]:
    """Context manager that starts the process group of torchrun's environment, yields the grid, and destroys the group.

    The backend is NCCL on GPUs and gloo on CPUs. Without torchrun and without `fsdp`, no group is started.

    Args:
        cpu: use the CPU even if there is a GPU.
        fsdp: parameters will be sharded by FSDP2, which needs a group: without torchrun one of a single process.
    """
    cuda = torch.cuda.is_available() and not cpu
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if not started_by_torchrun() and not fsdp:
        yield ProcessGrid(0, 1, device)
        return
    store: Any
    if started_by_torchrun():
        store, rank, size = next(iter(rendezvous("env://", timeout=TIMEOUT)))
    else:
        store, rank, size = HashStore(), 0, 1
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # the agent's store outlives the processes
        store = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=PrefixStore("group", store),
        rank=rank,
        world_size=size,
        timeout=TIMEOUT,
        device_id=device if cuda else None,
    )
    kind = DataParallelKind.FSDP2 if fsdp else DataParallelKind.DDP
    try:
        yield ProcessGrid(rank, size, device, kind, PrefixStore("gramian", store))
    finally:
        dist.destroy_process_group()


def started_by_torchrun() -> bool:
    """True if the environment sets RANK and WORLD_SIZE, as torchrun does."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ
