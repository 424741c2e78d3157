"""The operator of K-FAC whose factors are spread over processes, on models that are whole or sharded."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import gramian
from gramian.curvature import GGNOperator, KFACOperator
from tests.curvature.operator_problems import close, probe
from tests.curvature.small import net, words
from tests.kit.processes import distributed
from tests.kit.refusals import refusal


@pytest.mark.full
@distributed(world_size=2)
@pytest.mark.parametrize("sharded", [False, True])
def test_spread_factors_have_the_products_of_one_process(rank, world_size, sharded):
    x, y = words((4, 6))
    alone = gramian.KFACNaturalGradient(process_group=dist.new_group([rank], use_local_synchronization=True))
    model = net(dtype=torch.float64)
    with alone.capture(model, num_terms=y.numel()):
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    together, other = gramian.KFACNaturalGradient(), net(dtype=torch.float64)
    if sharded:
        fully_shard(other)
    mine = slice(rank, rank + 1) if rank == 0 else slice(1, 4)  # uneven
    with together.capture(other, loss_reduction="sum", num_terms=y[mine].numel()):
        F.cross_entropy(other(x[mine]).flatten(0, 1), y[mine].flatten(), reduction="sum").backward()
    for damped in (False, True):
        expected, found = KFACOperator(alone, damped), KFACOperator(together, damped)
        assert [*found.space.shapes] == [*expected.space.shapes]
        close(found.matmat(probe(expected)), expected.matmat(probe(expected)), 1e-9)
    if sharded:
        with refusal("model: is sharded"):
            GGNOperator(other, [(x, y)])
