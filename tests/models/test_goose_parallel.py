"""Goose spread over two processes has the gradient of one."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from gramian.models import Goose, GooseConfig, generate_text_tokens
from gramian.parallel.wrap_data_parallel import blocks_of
from tests.kit.processes import distributed

pytestmark = pytest.mark.xdist_group("processes")


@distributed(world_size=2)
@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_gradients_of_two_processes_are_those_of_one(rank: int, world_size: int, way: str) -> None:
    config = GooseConfig(vocabulary=17, context=12, layers=2, width=15)  # an odd width: uneven shards
    tokens = torch.randint(17, (4, 21), generator=torch.Generator().manual_seed(0))

    def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    whole = Goose(config).double()
    loss(whole, tokens).backward()
    model: nn.Module = Goose(config).double()
    model.checkpoint_blocks = 1
    if way == "ddp":
        spread: nn.Module = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (world_size,))
        assert blocks_of(model) == list(model.blocks)
        for block in blocks_of(model):
            fully_shard(block, mesh=mesh)
        spread = fully_shard(model, mesh=mesh)
    loss(spread, tokens[2 * rank : 2 * rank + 2]).backward()
    for (name, found), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
        gradient = found.grad.full_tensor() if way == "fsdp2" else found.grad
        torch.testing.assert_close(
            gradient, expected.grad, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )
    if way == "ddp":
        text = generate_text_tokens(model, tokens[0, :5], 10)
        assert torch.equal(text, generate_text_tokens(whole, tokens[0, :5], 10))
    dist.barrier()
