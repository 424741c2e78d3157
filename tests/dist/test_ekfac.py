"""EK-FAC on gloo processes: the eigenvalues, and what is done with them, are those of one process."""

import itertools
from typing import Any

import pytest
import torch

from tests.curvature.splits import CASES
from tests.dist import kfac_bodies as bodies
from tests.dist import tp_bodies
from tests.kit.matrix import sample
from tests.kit.processes import distributed

pytestmark = [pytest.mark.oracle, pytest.mark.xdist_group("processes")]

TWO = {"dealt out": [[0, 2, 4], [1, 3]], "uneven": [[3], [0, 4, 1, 2]], "empty": [[], [2, 0, 1]]}
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "keyed subset": {"max_tokens": 4},
    "exact head": {"kfac_true_fisher_head": True},
    "one token for a sample": {"weight_sharing": "reduce"},
}
MATRIX = [
    case
    for case in itertools.product(("gram", "gather", "dense"), CASES, TWO, VARIANTS, ("ddp", "fsdp2"))
    if case[1] != "tied"
    or case[3] != "keyed subset"  # equal token counts: eigenvalues repeat, and no basis is the right one
]
EKFAC = {"ekfac": True, "damping_mode": "joint", "damping": 0.05}


@pytest.mark.parametrize("reduce, case, split, variant, way", sample(MATRIX, 5))
@distributed(world_size=2)
def test_two_processes_have_the_eigenvalues_of_one(
    rank: int, reduce: str, case: str, split: str, variant: str, way: str
) -> None:
    options = {"kfac_distributed_reduce": reduce, **EKFAC, **VARIANTS[variant]}
    record = bodies.same_as_one(rank, way, case, TWO[split], options, tolerance=1e-8, reduction="sum")
    assert all(layer["ekfac"]["corrected"] for layer in record["layers"].values() if layer["ekfac"])


PASSES = list(itertools.product(("gram", "gather", "dense"), CASES, TWO, ("empirical", "mc", "true"), ("ddp", "fsdp2")))


@pytest.mark.parametrize("reduce, case, split, fisher_type, way", sample(PASSES, 3))
@distributed(world_size=2)
def test_two_passes_on_two_processes_are_those_of_one(
    rank: int, reduce: str, case: str, split: str, fisher_type: str, way: str
) -> None:
    options = {"kfac_distributed_reduce": reduce, **EKFAC}
    record = bodies.fitted_as_one(rank, way, case, TWO[split], options, fisher_type)
    terms = {(layer["ekfac"]["N"], layer["N"]) for layer in record["layers"].values() if layer["ekfac"]}
    assert len(terms) == 1 and all(layer["ekfac"]["corrected"] for layer in record["layers"].values() if layer["ekfac"])


@pytest.mark.parametrize(
    "reduce, way", sample(list(itertools.product(("gram", "gather", "dense"), ("ddp", "fsdp2"))), 1)
)
@distributed(world_size=3)
def test_two_passes_on_three_processes_are_those_of_one(rank: int, reduce: str, way: str) -> None:
    options = {"kfac_distributed_reduce": reduce, **EKFAC}
    bodies.fitted_as_one(rank, way, "words", [[3, 1, 5], [], [0, 4, 2]], options, "mc")


@pytest.mark.full
@pytest.mark.parametrize("reduce", ("gram", "dense"))
@pytest.mark.parametrize("reading", (1, 2))
@distributed(world_size=2)
def test_batches_that_break_off_on_one_process_end_the_fit_of_all(rank: int, reading: int, reduce: str) -> None:
    bodies.one_rank_breaks_off(rank, reading, {"kfac_distributed_reduce": reduce, **EKFAC})


@pytest.mark.full
@distributed(world_size=2)
def test_a_process_without_any_batch_is_named_under_fsdp2(rank: int) -> None:
    bodies.no_batch_under_fsdp2(rank)


@pytest.mark.full
@pytest.mark.parametrize("reduce, case", list(itertools.product(("gram", "gather", "dense"), CASES)))
@distributed(world_size=3)
def test_three_processes_have_the_eigenvalues_of_one(rank: int, reduce: str, case: str) -> None:
    options = {"kfac_distributed_reduce": reduce, **EKFAC}
    bodies.same_as_one(rank, "ddp", case, [[3, 1], [], [0, 4, 2]], options, tolerance=1e-8, reduction="sum")


@pytest.mark.full
@pytest.mark.parametrize("reduce", ("gram", "gather", "dense"))
@distributed(world_size=2)
def test_float32(rank: int, reduce: str) -> None:
    options = {"kfac_distributed_reduce": reduce, "woodbury_dtype": "fp32", **EKFAC, "damping": 0.3}
    bodies.same_as_one(rank, "ddp", "words", TWO["uneven"], options, torch.float32, 1e-4)


@pytest.mark.full
@pytest.mark.parametrize("reduce", ("gram", "gather", "dense"))
@pytest.mark.parametrize("model", [("mlp", "usual"), ("gpt", "tables"), ("flat", "usual")])
@distributed(world_size=2)
def test_tensor_parallel(rank: int, model: tuple[str, str], reduce: str) -> None:
    tp_bodies.same_as_one(
        rank, *model, 2, [list(range(5))], {**EKFAC, "kfac_distributed_reduce": reduce}, tolerance=1e-8
    )


@pytest.mark.full
@pytest.mark.parametrize("reduce", ("gram", "gather", "dense"))
@distributed(world_size=4)
def test_tensor_parallel_times_fsdp2(rank: int, reduce: str) -> None:
    options = {**EKFAC, "kfac_distributed_reduce": reduce}
    tp_bodies.same_as_one(rank, "gpt", "tables", 2, [[0, 2, 4], [1, 3]], options, tolerance=1e-8, reduction="sum")


@pytest.mark.full
@pytest.mark.parametrize("step", ["add", "_add_samples"])
@pytest.mark.parametrize("reduce", ("gram", "dense"))
@distributed(world_size=2)
def test_one_process_that_cannot_measure_ends_the_refresh_of_all(rank: int, reduce: str, step: str) -> None:
    bodies.one_rank_cannot(
        rank,
        f"gramian.curvature.estimate.eigenbasis_sums.EigenbasisSums.{step}",
        {"kfac_distributed_reduce": reduce, **EKFAC},
    )
