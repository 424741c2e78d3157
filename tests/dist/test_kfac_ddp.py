"""K-FAC on gloo processes, under DistributedDataParallel and without it: the factors are those of one process."""

import itertools
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gramian
from tests.curvature.splits import CASES
from tests.dist import kfac_bodies as bodies
from tests.kit.matrix import FULL, sample
from tests.kit.processes import distributed
from tests.kit.waiting import PATIENCE

pytestmark = [pytest.mark.oracle, pytest.mark.xdist_group("processes")]

REDUCTIONS = ("gram", "gather", "dense")
POLICIES = ("all", "auto", "hybrid", "small_only")
DAMPING = ("pi", "factored", "joint")
TWO = {"dealt out": [[0, 2, 4], [1, 3]], "uneven": [[3], [0, 4, 1, 2]], "empty": [[], [2, 0, 1]]}
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "keyed subset": {"max_tokens": 4},
    "exact head": {"kfac_true_fisher_head": True},
    "one token for a sample": {"weight_sharing": "reduce"},
    "exact head on a subset": {"kfac_true_fisher_head": True, "max_tokens": 3},
}
MATRIX = list(itertools.product(REDUCTIONS, CASES, TWO, VARIANTS, POLICIES, DAMPING))


@pytest.mark.parametrize("reduce, case, split, variant, policy, damping", sample(MATRIX[:: 7 if FULL else 1], 6))
@distributed(world_size=2)
def test_two_processes_have_the_factors_of_one(
    rank: int, world_size: int, reduce: str, case: str, split: str, variant: str, policy: str, damping: str
) -> None:
    options = {
        "kfac_distributed_reduce": reduce,
        "kfac_policy": policy,
        "damping_mode": damping,
        "kfac_big_threshold": 9,
        **VARIANTS[variant],
    }
    record = bodies.same_as_one(rank, "ddp", case, TWO[split], options, reduction="sum")
    assert (record["world_size"], record["reduce"]) == (2, reduce)


@pytest.mark.full
@pytest.mark.parametrize("reduce, case", sample(list(itertools.product(REDUCTIONS, CASES)), 3))
@distributed(world_size=3)
def test_three_processes_have_the_factors_of_one(rank: int, world_size: int, reduce: str, case: str) -> None:
    options = {"kfac_distributed_reduce": reduce, "max_tokens": 5}
    bodies.same_as_one(rank, "ddp", case, [[3, 1], [], [0, 4, 2]], options, reduction="sum")


@pytest.mark.full
@pytest.mark.parametrize("reduce, case", list(itertools.product(REDUCTIONS, CASES)))
@distributed(world_size=4)
def test_four_processes_have_the_factors_of_one(rank: int, world_size: int, reduce: str, case: str) -> None:
    options = {"kfac_distributed_reduce": reduce, "max_tokens": 5}
    bodies.same_as_one(rank, "ddp", case, [[3, 1], [], [0, 4, 2], [5]], options, reduction="sum")


@pytest.mark.full
@pytest.mark.parametrize("reduce", REDUCTIONS)
@distributed(world_size=2)
def test_a_process_without_any_pass(rank: int, world_size: int, reduce: str) -> None:
    """Without DDP, which would wait for it; each rank's loss is its own mean."""
    options = {"kfac_distributed_reduce": reduce}
    bodies.same_as_one(rank, "plain", "words", TWO["empty"], options, empty_pass=False)


@pytest.mark.full
@pytest.mark.parametrize("reduce", REDUCTIONS)
@distributed(world_size=2)
def test_float32(rank: int, world_size: int, reduce: str) -> None:
    options = {"kfac_distributed_reduce": reduce, "woodbury_dtype": "fp32", "damping": 0.3}
    bodies.same_as_one(rank, "ddp", "words", TWO["uneven"], options, torch.float32, 1e-5)


@distributed(world_size=2)
def test_a_collection_reduces_no_gradients(rank: int, world_size: int) -> None:
    bodies.gradients_and_collection(rank, "ddp")


@distributed(world_size=2)
def test_a_collection_between_forward_and_backward(rank: int, world_size: int) -> None:
    bodies.collection_between_forward_and_backward(rank, "ddp")


@distributed(world_size=2)
def test_a_collection_while_gradients_are_accumulated(rank: int, world_size: int) -> None:
    bodies.accumulated_gradients_survive(rank, "ddp")


@pytest.mark.parametrize("reduce", ["gram", "gather"])
@distributed(world_size=2)
def test_preconditioned_training_is_that_of_one_process(rank: int, world_size: int, reduce: str) -> None:
    bodies.trained(rank, world_size, "ddp", reduce)


# ---- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how, failing", [("forward", 0), ("arguments", 1), ("collection", 1)])
@distributed(world_size=2)
def test_an_error_on_one_process_is_raised_on_all(rank: int, world_size: int, how: str, failing: int) -> None:
    bodies.one_rank_fails(rank, failing, how)


@pytest.mark.parametrize("reduce", REDUCTIONS)
@distributed(world_size=2)
def test_nan_on_one_process_drops_the_refresh_on_all(rank: int, world_size: int, reduce: str) -> None:
    bodies.nan_on_one_rank(rank, reduce)


@distributed(world_size=2)
def test_processes_that_differ_raise_together(rank: int, world_size: int) -> None:
    case = CASES["words"]
    kfac = bodies.make(damping=0.1 + 0.1 * rank)
    with pytest.raises(gramian.GramianError, match="damping: is 0.1 on process 0 and 0.2 on process 1"):
        bodies.refresh(kfac, case.model(), case.data(4), range(rank, 4, 2))


@pytest.mark.full
@distributed(world_size=3)
def test_a_group_of_some_processes(rank: int, world_size: int) -> None:
    """`process_group=` leaves the others out: they take no part, and none is waited for."""
    group = dist.new_group([0, 2])
    case = CASES["words"]
    if rank != 1:
        kfac, model = bodies.make(process_group=group), case.model()
        bodies.refresh(kfac, model, case.data(4), range(rank // 2, 4, 2))
        assert kfac.record()["world_size"] == 2
        bodies.assert_equal(bodies.results(kfac, model), bodies.alone(case, 4, torch.float64, {}), 1e-10)
    dist.barrier()
    bodies.same_as_one(rank, "plain", "words", [[0], [1, 2], []], {})  # and afterwards all of them meet again


@distributed(world_size=2)
def test_by_itself_is_by_itself_and_warns_once(rank: int, world_size: int) -> None:
    case = CASES["words"]
    kfac, model = bodies.make(kfac_distributed_reduce="none"), case.model()
    if rank == 0:  # nobody is waited for
        bodies.refresh(kfac, model, case.data(4), range(4))
        assert kfac.record()["world_size"] == 2 and kfac.record()["reduce"] == "none"


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.mark.full
def test_an_object_made_before_the_process_group_joins_all_the_same() -> None:
    """Research 2A-8: the environment is looked at when sums are joined, never when the object is made."""
    context = torch.multiprocessing.get_context("spawn")
    port = _free_port()
    ranks = [context.Process(target=bodies.built_before_the_group, args=(rank, 2, port)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(PATIENCE)
    assert [process.exitcode for process in ranks] == [0, 0]
