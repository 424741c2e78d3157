"""What the tests of several processes share: how a case is wrapped, who holds which samples, and whole tensors of shards.

Every rank builds the same problem and takes its own rows of it, so that the loop's answers need no communication.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import gramian
from tests.statistics.problems import Problem, splits

CASE_NAMES = ("mlp", "gpt", "tied_gpt", "reused", "padded_embedding", "hf_llama")
WAYS = ("ddp", "fsdp2", "fsdp2 kept")


def blocks(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """(parent, child's name) of what a user would shard, compile or checkpoint by itself."""
    for path in ("blocks", "model.layers"):
        try:
            parent = model.get_submodule(path)
        except AttributeError:
            continue
        return [(parent, name) for name, _ in parent.named_children()]
    return [(model, name) for name, child in model.named_children() if isinstance(child, nn.Linear)]


def each_block(model: nn.Module, change: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Replace every block by what `change` makes of it."""
    for parent, name in blocks(model):
        setattr(parent, name, change(getattr(parent, name)))
    return model


def checkpointed(model: nn.Module) -> nn.Module:
    """Activation checkpointing of every block."""
    return each_block(model, checkpoint_wrapper)


def wrap(way: str, model: nn.Module, **options: Any) -> nn.Module:
    """Data parallel: "ddp"; "fsdp2", blocks first and then the root; "fsdp2 kept", with weights kept after the forward."""
    if way == "ddp":
        return DistributedDataParallel(model, **options)
    for parent, name in blocks(model):
        fully_shard(getattr(parent, name), reshard_after_forward=way == "fsdp2", **options)
    return fully_shard(model, reshard_after_forward=way == "fsdp2", **options)


@contextmanager
def without_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate without reducing."""
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
        return
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def mine(rank: int, sizes: Sequence[int]) -> slice:
    """The rows of this rank when ranks hold consecutive parts of these sizes."""
    return splits(sizes)[rank]


def gradients(model: nn.Module) -> list[Tensor]:
    """This rank's part of every gradient."""
    return [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]


def captured(model: nn.Module, p: Problem, batch: Any) -> gramian.statistics.norms.NormCapture:
    """The norms of one backward over a batch of the problem."""
    with gramian.per_sample_norms(model) as norms:
        p.backward(model, batch)
    return norms


def plain_gradients(p: Problem, way: str, step: Callable[[nn.Module], object]) -> list[Tensor]:
    """Gradients of the same step without gramian."""
    model = wrap(way, p.model())
    step(model)
    return gradients(model)


def assert_same_bits(actual: list[Tensor], expected: list[Tensor]) -> None:
    """Bit for bit."""
    assert len(actual) == len(expected)
    for i, (got, want) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(got, want), f"gradient {i} differs"


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Shards put together (collective)."""
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}


def ranks_agree(value: float) -> bool:
    """True if every rank holds the same number, bit for bit."""
    held = [torch.zeros(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(held, torch.tensor([value], dtype=torch.float64))
    return all(torch.equal(held[0], other) for other in held)
