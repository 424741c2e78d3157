"""K-FAC of tensor-parallel models, alone and together with FSDP2, on gloo processes: factors of one process."""

import itertools

import pytest

from tests.dist import tp_bodies as bodies
from tests.kit.matrix import sample
from tests.kit.mutations import Edit
from tests.kit.processes import distributed

pytestmark = [pytest.mark.oracle, pytest.mark.xdist_group("processes")]

REDUCTIONS = ("gram", "gather", "dense")
MODELS = (("mlp", "usual"), ("gpt", "tables"), ("flat", "usual"), ("long gpt", "sequence"))
OPTIONS = (
    {},
    {"damping_mode": "joint"},
    {"damping_mode": "factored", "kfac_policy": "auto"},
    {"max_tokens": 4},
    {"weight_sharing": "reduce", "kfac_policy": "hybrid"},
    {"kfac_use_woodbury": False},
    {"kfac_true_fisher_head": True},
    {"min_layer_size": 9, "kfac_policy": "small_only"},
)
TWO = list(itertools.product(MODELS, REDUCTIONS, OPTIONS, (5, 1)))


@pytest.mark.parametrize("model, reduce, options, samples", sample(TWO, 4))
@distributed(world_size=2)
def test_two_processes(
    rank: int, model: tuple[str, str], reduce: str, options: dict[str, object], samples: int
) -> None:
    bodies.same_as_one(rank, *model, 2, [list(range(samples))], {**options, "kfac_distributed_reduce": reduce})


@pytest.mark.full
@pytest.mark.parametrize("model, reduce", sample(list(itertools.product(MODELS, REDUCTIONS)), 1, case=lambda _: None))
@distributed(world_size=3)
def test_three_processes_with_uneven_classes(rank: int, model: tuple[str, str], reduce: str) -> None:
    for samples, options in ((4, {}), (2, {"kfac_true_fisher_head": True})):
        bodies.same_as_one(rank, *model, 3, [list(range(samples))], {**options, "kfac_distributed_reduce": reduce})


SPLITS = ([[0, 2, 4], [1, 3]], [[2], [0, 1]])
FOUR = list(itertools.product(MODELS, REDUCTIONS, SPLITS, OPTIONS))


@pytest.mark.parametrize("model, reduce, split, options", sample(FOUR, 1, case=lambda _: None))
@distributed(world_size=4)
def test_tensor_parallel_times_fsdp2(
    rank: int, model: tuple[str, str], reduce: str, split: list[list[int]], options: dict[str, object]
) -> None:
    options = {**options, "kfac_distributed_reduce": reduce}
    bodies.same_as_one(rank, *model, 2, split, options, reduction="sum")


@pytest.mark.full
@distributed(world_size=4)
def test_collections_and_training_on_a_mesh_of_two_dimensions(rank: int) -> None:
    bodies.collections(rank, "gpt", "tables", 2, [[0, 2, 4], [1, 3, 5]], default_ids=True)
    for reduce in ("gram", "dense"):
        bodies.trained(rank, 2, 2, reduce)


@pytest.mark.parametrize("model", sample(MODELS[1:], 1, case=lambda _: None))
@distributed(world_size=2)
def test_collections_draw_labels_once(rank: int, model: tuple[str, str]) -> None:
    bodies.collections(rank, *model, 2, [[0, 1, 2]], default_ids=True)


@pytest.mark.full
@distributed(world_size=2)
def test_padding_weights_and_micro_batches(rank: int) -> None:
    bodies.padded(rank)


@distributed(world_size=2)
def test_preconditioned_training_is_that_of_one_process(rank: int) -> None:
    bodies.trained(rank, 2, 1, "gram")


@distributed(world_size=2)
def test_an_error_is_reported_on_all_processes(rank: int) -> None:
    bodies.one_rank_fails(rank)
    bodies.wrong_terms(rank)
    bodies.audited(rank)


@distributed(world_size=2)
def test_what_cannot_be_done_is_refused_by_name(rank: int) -> None:
    bodies.refusals(rank)


TRAPS = {
    "terms counted once for each process that sees them": Edit(
        "KFACCapture.end_of_pass", "info.tensor_parallel is None or info.tensor_parallel.first", "True"
    ),
    "keys of other samples": Edit("KFACCapture.pass_info", "samples_B[mine]", "samples_B[: mine.stop - mine.start]"),
    "ids of samples that nobody has": Edit("TensorParallel.assignment", "group.size // self.size)", "group.size)"),
    "features in another order": Edit(
        "Exchange.to_samples", "torch.cat(pieces, dim=dim)", "torch.cat(pieces[::-1], dim=dim)"
    ),
    "whole sides that all processes cut alike": Edit(
        "TensorParallel.take",
        "full_tensor(t)[mine.start * each : mine.stop * each]",
        "full_tensor(t)[: (mine.stop - mine.start) * each]",
    ),
}


@pytest.mark.full
@distributed(world_size=2)
def test_traps_turn_it_red(rank: int) -> None:
    bodies.traps(rank, TRAPS)
