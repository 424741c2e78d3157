"""K-FAC on gloo processes, under DistributedDataParallel and without it: the factors are those of one process."""

import itertools
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.curvature.splits import CASES, assert_equal, refresh, results
from tests.dist import kfac_bodies as bodies
from tests.kit.matrix import FULL, sample
from tests.kit.processes import distributed
from tests.kit.refusals import refusal
from tests.kit.waiting import PATIENCE

pytestmark = [pytest.mark.oracle, pytest.mark.xdist_group("processes")]
ways = pytest.mark.parametrize("way", ["ddp", "fsdp2"])

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
    rank: int, reduce: str, case: str, split: str, variant: str, policy: str, damping: str
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
def test_three_processes_have_the_factors_of_one(rank: int, reduce: str, case: str) -> None:
    options = {"kfac_distributed_reduce": reduce, "max_tokens": 5}
    bodies.same_as_one(rank, "ddp", case, [[3, 1], [], [0, 4, 2]], options, reduction="sum")


@pytest.mark.full
@pytest.mark.parametrize("reduce, case", list(itertools.product(REDUCTIONS, CASES)))
@distributed(world_size=4)
def test_four_processes_have_the_factors_of_one(rank: int, reduce: str, case: str) -> None:
    options = {"kfac_distributed_reduce": reduce, "max_tokens": 5}
    bodies.same_as_one(rank, "ddp", case, [[3, 1], [], [0, 4, 2], [5]], options, reduction="sum")


@pytest.mark.full
@pytest.mark.parametrize("reduce", REDUCTIONS)
@distributed(world_size=2)
def test_a_process_without_any_pass(rank: int, reduce: str) -> None:
    """Without DDP, which would wait for it; each rank's loss is its own mean."""
    options = {"kfac_distributed_reduce": reduce}
    bodies.same_as_one(rank, "plain", "words", TWO["empty"], options, empty_pass=False)


@pytest.mark.full
@pytest.mark.parametrize("reduce", REDUCTIONS)
@distributed(world_size=2)
def test_float32(rank: int, reduce: str) -> None:
    options = {"kfac_distributed_reduce": reduce, "woodbury_dtype": "fp32", "damping": 0.3}
    bodies.same_as_one(rank, "ddp", "words", TWO["uneven"], options, torch.float32, 1e-5)


@ways
@distributed(world_size=2)
def test_a_collection_reduces_no_gradients(rank: int, way: str) -> None:
    """A collection reduces nothing, leaves the user's gradients alone and has the factors of one process."""
    case = CASES["words"]
    inputs, targets = case.data(5)
    rows = torch.tensor([[4, 1], [0, 2, 3]][rank])
    one = bodies.make(kfac_distributed_reduce="none")
    reference = case.model()
    for kind in ("empirical", "mc", "true"):
        one.collect_kfac_factors(reference, (inputs, targets), kind, sample_ids=torch.arange(5))
        kfac, model = bodies.make(), bodies.wrapped(way, case.model())
        kfac.state.generator.set_state(one.state.generator_before_step)
        F.cross_entropy(model(inputs[rows]).flatten(0, 1), targets[rows].flatten()).backward()
        before = {n: p.grad for n, p in model.named_parameters()}
        copies = {n: g.clone() for n, g in before.items() if g is not None}
        kfac.collect_kfac_factors(model, (inputs[rows], targets[rows]), kind, sample_ids=rows)
        for n, p in model.named_parameters():
            assert p.grad is before[n]
            assert torch.equal(bodies._local(p.grad), bodies._local(copies[n]))
        found = {f"{n} {s}": f.to_dense() for n, b in kfac.kfac_factors.items() for s, f in b.factors.items()}
        expected = {f"{n} {s}": f.to_dense() for n, b in one.kfac_factors.items() for s, f in b.factors.items()}
        assert_equal(found, expected, 1e-10)
        assert not any(name.startswith("module.") for name in kfac.kfac_factors)


@distributed(world_size=2)
def test_a_collection_between_forward_and_backward(rank: int) -> None:
    """The user's own step, interrupted by a collection, has the gradients that it has without."""
    case = CASES["words"]
    inputs, targets = case.data(4)
    rows = list(range(rank, 4, 2))

    def step(interrupt: bool) -> list[Tensor]:
        model = bodies.wrapped("ddp", case.model())
        loss = F.cross_entropy(model(inputs[rows]).flatten(0, 1), targets[rows].flatten())
        if interrupt:
            bodies.make().collect_kfac_factors(model, (inputs[rows], targets[rows]))
        loss.backward()
        return [bodies._local(p.grad) for p in model.parameters()]

    for got, want in zip(step(True), step(False), strict=True):
        assert torch.equal(got, want)


@ways
@distributed(world_size=2)
def test_a_collection_while_gradients_are_accumulated(rank: int, way: str) -> None:
    """Micro-batches whose reduction is held back: a collection between them changes nothing of the reduced sum."""
    case = CASES["words"]
    inputs, targets = case.data(4)

    def step(interrupt: bool) -> list[Tensor]:
        model = bodies.wrapped(way, case.model())

        def backward(row: int) -> None:
            F.cross_entropy(model(inputs[[row]]).flatten(0, 1), targets[[row]].flatten()).backward()

        if isinstance(model, DistributedDataParallel):
            with model.no_sync():
                backward(rank)
        else:
            model.set_requires_gradient_sync(False)
            backward(rank)
            model.set_requires_gradient_sync(True)
        if interrupt:
            rows = [rank, rank + 2]
            bodies.make().collect_kfac_factors(model, (inputs[rows], targets[rows]))
        backward(rank + 2)
        return [bodies._local(p.grad) for p in model.parameters()]

    for got, want in zip(step(True), step(False), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("way, reduce", [("ddp", "gram"), ("ddp", "gather"), ("fsdp2", "gram"), ("fsdp2", "dense")])
@distributed(world_size=2)
def test_preconditioned_training_is_that_of_one_process(rank: int, way: str, reduce: str) -> None:
    case = CASES["words"]
    expected = bodies.preconditioned(case, case.model(), [0, 1, 2, 3], "none")
    found = bodies.preconditioned(case, bodies.wrapped(way, case.model()), [rank, rank + 2], reduce)
    assert_equal(found, expected, 1e-9)


# ---- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how, failing", [("forward", 0), ("arguments", 1), ("collection", 1)])
@distributed(world_size=2)
def test_an_error_on_one_process_is_raised_on_all(rank: int, how: str, failing: int) -> None:
    bodies.one_rank_fails(rank, failing, how)


@pytest.mark.parametrize("reduce", REDUCTIONS)
@distributed(world_size=2)
def test_nan_on_one_process_drops_the_refresh_on_all(rank: int, reduce: str) -> None:
    """The refresh is dropped on all ranks, and the factors are those from before."""
    case = CASES["words"]
    data, rows = case.data(4), list(range(rank, 4, 2))
    kfac, model = bodies.make(kfac_distributed_reduce=reduce), case.model()
    refresh(kfac, model, data, rows)
    before = results(kfac, model)
    with kfac.capture(model, num_terms=4):
        (model(data[0][rows]).sum() * (float("nan") if rank else 1.0)).backward()
    assert (kfac.refreshes, len(kfac.dropped)) == (1, 1) and "not finite" in kfac.dropped[0]["reason"]
    assert_equal(results(kfac, model), before, 0.0)


@distributed(world_size=2)
def test_processes_that_differ_raise_together(rank: int) -> None:
    case = CASES["words"]
    kfac = bodies.make(damping=0.1 + 0.1 * rank)
    with refusal("damping: is 0.1 on process 0 and 0.2 on process 1"):
        bodies.refresh(kfac, case.model(), case.data(4), range(rank, 4, 2))


@pytest.mark.full
@distributed(world_size=3)
def test_a_group_of_some_processes(rank: int) -> None:
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
def test_by_itself_is_by_itself_and_warns_once(rank: int) -> None:
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
