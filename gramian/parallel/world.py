"""This process among the others: the group that torchrun asks for, and what all must agree on."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class World:
    """This process among the others."""

    rank: int
    size: int
    device: torch.device
    kind: str
    """"one", "ddp" or "fsdp2"."""
    store: Any = None

    def first_failure(self, mine: str) -> str:
        """What went wrong first, on any process; each tells the others before it leaves."""
        if self.store is None:
            return mine
        told = mine if self.size == 1 else f"process {self.rank}: {mine}"
        try:
            return bytes(self.store.compare_set("failure", "", told)).decode()
        except RuntimeError:  # the process that keeps the store is gone
            return told

    def wait(self) -> None:
        """For all others; raises if one of them is gone."""
        if self.store is not None:
            dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)

    def sum_(self, values: Tensor) -> Tensor:
        """Σ over processes, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def most(self, value: float) -> float:
        """The largest of all processes' values."""
        if self.size == 1:
            return value
        values = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return float(values)


@contextmanager
def world(cpu: bool, fsdp: bool) -> Iterator[World]:
    """The process group that torchrun asks for, a group of one for FSDP2 alone, or none; destroyed whatever happens."""
    cuda = torch.cuda.is_available() and not cpu
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if not started_by_torchrun() and not fsdp:
        yield World(0, 1, device, "one")
        return
    store: Any
    if started_by_torchrun():
        store, rank, size = next(iter(rendezvous("env://", timeout=TIMEOUT)))
    else:
        store, rank, size = HashStore(), 0, 1
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # which outlives the processes
        store = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=PrefixStore("group", store),
        rank=rank,
        world_size=size,
        timeout=TIMEOUT,
        device_id=device if cuda else None,
    )
    try:
        yield World(rank, size, device, "fsdp2" if fsdp else "ddp", PrefixStore("gramian", store))
    finally:
        dist.destroy_process_group()


def started_by_torchrun() -> bool:
    """True if the environment names this process's rank and the size of the world."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ
