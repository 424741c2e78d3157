"""K-FAC of FSDP2 models on gloo processes: factors of one process, gradients that stay sharded."""

import itertools

import pytest

from tests.curvature.splits import CASES
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
    rank: int, world_size: int, reduce: str, case: str, way: str, split: str, damping: str
) -> None:
    options = {"kfac_distributed_reduce": reduce, "damping_mode": damping}
    bodies.same_as_one(rank, way, case, SPLITS[split], options, reduction="sum")


@pytest.mark.full
@pytest.mark.parametrize("reduce", sample(REDUCTIONS, 1, case=lambda _: None))
@distributed(world_size=3)
def test_three_processes_with_uneven_shards(rank: int, world_size: int, reduce: str) -> None:
    options = {"kfac_distributed_reduce": reduce, "max_tokens": 5}
    bodies.same_as_one(rank, "fsdp2", "tied", [[3, 1], [], [0, 4, 2]], options, reduction="sum")


@distributed(world_size=2)
def test_a_collection_reduces_no_gradients(rank: int, world_size: int) -> None:
    bodies.gradients_and_collection(rank, "fsdp2")


@distributed(world_size=2)
def test_a_collection_while_gradients_are_accumulated(rank: int, world_size: int) -> None:
    bodies.accumulated_gradients_survive(rank, "fsdp2")


@pytest.mark.parametrize("reduce", ["gram", "dense"])
@distributed(world_size=2)
def test_preconditioned_training_is_that_of_one_process(rank: int, world_size: int, reduce: str) -> None:
    bodies.trained(rank, world_size, "fsdp2", reduce)


@pytest.mark.full
@pytest.mark.parametrize("trains", [False, True])
@distributed(world_size=2)
def test_layers_that_read_a_parameter(rank: int, world_size: int, trains: bool) -> None:
    bodies.inputs_that_are_parameters(rank, trains)
