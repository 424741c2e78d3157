"""K-FAC of FSDP2 models on gloo processes: factors of one process, gradients that stay sharded."""

import itertools

import pytest
import torch
from torch import nn

from tests.curvature.splits import CASES, Case, assert_equal, refresh
from tests.dist import kfac_bodies as bodies
from tests.kit.matrix import sample
from tests.kit.processes import distributed

pytestmark = [pytest.mark.oracle, pytest.mark.xdist_group("processes")]

REDUCTIONS = ("gram", "gather", "dense")
WAYS = ("fsdp2", "fsdp2 root")
SPLITS = {"dealt out": [[0, 2, 4], [1, 3]], "empty": [[], [2, 0, 1]]}
MATRIX = list(itertools.product(REDUCTIONS, CASES, WAYS, SPLITS, ("pi", "joint")))


@pytest.mark.parametrize("reduce, case, way, split, damping", sample(MATRIX, 5))
@distributed(world_size=2)
def test_sharded_models_have_the_factors_of_one_process(
    rank: int, reduce: str, case: str, way: str, split: str, damping: str
) -> None:
    options = {"kfac_distributed_reduce": reduce, "damping_mode": damping}
    bodies.same_as_one(rank, way, case, SPLITS[split], options, reduction="sum")


@pytest.mark.full
@pytest.mark.parametrize("reduce", sample(REDUCTIONS, 1, case=lambda _: None))
@distributed(world_size=3)
def test_three_processes_with_uneven_shards(rank: int, reduce: str) -> None:
    options = {"kfac_distributed_reduce": reduce, "max_tokens": 5}
    bodies.same_as_one(rank, "fsdp2", "tied", [[3, 1], [], [0, 4, 2]], options, reduction="sum")


@pytest.mark.full
@pytest.mark.parametrize("trains", [False, True])
@distributed(world_size=2)
def test_layers_that_read_a_parameter(rank: int, trains: bool) -> None:
    """FSDP2 frees the memory of a unit's parameters before the backward is over: rows of it are copied in time."""
    case = Case(
        lambda: nn.Sequential(nn.Linear(7, 7), bodies.reads(trains), nn.Linear(7, 5)),
        lambda n: torch.randn(n, 4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(n)),
        5,
        4,
    )
    options = {"max_tokens": 1000}  # rows are kept as rows
    expected = bodies.alone(case, 2, torch.float64, options)
    kfac, plain = bodies.make(**options), case.model()
    model = bodies.wrapped("fsdp2", case.model())
    refresh(kfac, model, case.data(2), [rank])
    assert_equal(bodies.sharded_results(kfac, model, plain), expected, 1e-10)
