"""Private training on meshes (HSDP, tensor parallel, FSDP2 × tensor parallel), on gloo processes: that of one process."""

import itertools
from typing import Any

import pytest
import torch

from gramian.parallel.process_grid import DataParallelKind, ProcessGrid
from gramian.verify import clipping_matrix
from gramian.verify.checks import run_checks
from gramian.verify.model_layouts import with_tensor_parallel
from tests.dist import mesh_bodies as bodies
from tests.kit.matrix import sample
from tests.kit.mutations import Edit
from tests.kit.processes import distributed, run_on_ranks

pytestmark = [pytest.mark.oracle, pytest.mark.few_proofs, pytest.mark.xdist_group("processes")]

MODELS = (("mlp", "usual"), ("gpt", "tables"), ("flat", "usual"), ("long gpt", "sequence"))
OPTIONS = tuple(
    itertools.product(
        (5, 2, 1), ("flat", "automatic", "per_layer"), ("auto", "bookkeeping", "keep", "two_pass"), (0.0, 0.7)
    )
)
TWO = [*itertools.product(("tp",), MODELS, OPTIONS)]
FOUR = [*itertools.product(("hsdp", "fsdp2 x tp"), MODELS, OPTIONS)]


@pytest.mark.parametrize("layout, model, options", sample(TWO, 5))
@distributed(world_size=2)
def test_a_step_of_two_processes(
    rank: int, layout: str, model: tuple[str, str], options: tuple[int, str, str, float]
) -> None:
    bodies.private_step(rank, layout, *model, *options)


@pytest.mark.parametrize("layout, model, options", sample(FOUR, 4))
@distributed(world_size=4)
def test_a_step_of_four_processes(
    rank: int, layout: str, model: tuple[str, str], options: tuple[int, str, str, float]
) -> None:
    bodies.private_step(rank, layout, *model, *options)


@pytest.mark.full
@pytest.mark.parametrize("layout, model, options", sample(TWO, 3))
@distributed(world_size=3)
def test_a_step_of_three_processes(
    rank: int, layout: str, model: tuple[str, str], options: tuple[int, str, str, float]
) -> None:
    bodies.private_step(rank, layout, *model, *options)


@pytest.mark.few_proofs(every=1)
@pytest.mark.parametrize("layout", ["hsdp", "fsdp2 x tp"])
@distributed(world_size=4)
def test_poisson_draws_noise_and_epsilon_are_those_of_one_process(rank: int, layout: str) -> None:
    bodies.trained(layout, "mlp" if layout == "hsdp" else "gpt", "tables")


@distributed(world_size=2)
def test_draws_of_a_tensor_parallel_group_are_those_of_one_process(rank: int) -> None:
    bodies.trained("tp", "gpt", "tables", sigma=0.15, clip_function="adaptive", max_physical_batch=2)


@distributed(world_size=2)
def test_a_replayed_run_ends_where_it_ended(rank: int) -> None:
    bodies.resumed("tp", "gpt", "tables")
    bodies.resumed("tp", "mlp", "usual", **BANDED)


BANDED: dict[str, Any] = {"noise": "bandmf", "bands": 2, "releases": 6}
ROOTS: dict[str, Any] = {"noise": "bisr", "bands": 3}


@pytest.mark.parametrize("model, style, options", [("mlp", "usual", BANDED), ("gpt", "tables", ROOTS)])
@distributed(world_size=2)
def test_correlated_noise_of_shards_is_that_of_one_process(
    rank: int, model: str, style: str, options: dict[str, Any]
) -> None:
    bodies.trained("tp", model, style, **options)


@distributed(world_size=4)
def test_correlated_noise_of_shards_cut_both_ways(rank: int) -> None:
    bodies.trained("fsdp2 x tp", "mlp", "usual", **BANDED)


@pytest.mark.parametrize("model, style", [("gpt", "tables"), pytest.param("flat", "usual", marks=pytest.mark.full)])
@distributed(world_size=2)
def test_a_metric_of_public_factors_is_that_of_one_process(rank: int, model: str, style: str) -> None:
    bodies.trained("tp", model, style, metric=bodies.public_factors(model))


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.full)])
def test_units_of_a_tensor_parallel_group_are_those_of_one_process(size: int) -> None:
    for unit_of in ([0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 0, 2, 2, 3, 1, 3]):
        run_on_ranks(size, bodies.trained_units, unit_of)


@pytest.mark.few_proofs(every=1)
@distributed(world_size=2)
def test_packed_units_of_a_tensor_parallel_group(rank: int) -> None:
    bodies.packed_units(rank)


@pytest.mark.full
@distributed(world_size=4)
def test_a_metric_of_public_factors_over_both(rank: int) -> None:
    bodies.trained("fsdp2 x tp", "mlp", "usual", metric=bodies.public_factors("mlp"))
    bodies.trained("hsdp", "mlp", "usual", metric=bodies.public_factors("mlp"))


@pytest.mark.full
@distributed(world_size=4)
def test_units_over_both(rank: int) -> None:
    bodies.trained("fsdp2 x tp", "gpt", "tables", steps=2, unit_of=[0, 1, 0, 2, 2, 3, 1, 3])


@pytest.mark.parametrize(
    "options",
    [
        {"unit_of": [0, 0, 1, 1, 2, 2, 3, 3], "steps": 2},
        {"max_physical_batch": 1},
        pytest.param({"clip_function": "adaptive", "sigma": 0.15}, marks=pytest.mark.full),
        pytest.param(BANDED, marks=pytest.mark.full),
        pytest.param(ROOTS, marks=pytest.mark.full),
    ],
    ids=["units", "one by one", "adaptive", "bandmf", "bisr"],
)
@distributed(world_size=4)
def test_every_option_under_hybrid_sharding(rank: int, options: dict[str, Any]) -> None:
    bodies.trained("hsdp", "mlp", "usual", **options)


@pytest.mark.few_proofs(every=1)
@distributed(world_size=2)
def test_rows_are_proven_and_coupled_samples_refused(rank: int) -> None:
    bodies.proofs(rank)


@distributed(world_size=2)
def test_other_batches_labels_and_features_of_a_group_are_refused(rank: int) -> None:
    bodies.refusals(rank)


@distributed(world_size=2)
def test_sharded_logits_pieces_single_samples_and_nan(rank: int) -> None:
    bodies.special(rank)


@distributed(world_size=2)
def test_what_is_not_done_is_refused_by_name(rank: int) -> None:
    bodies.refused_layouts(rank)


@pytest.mark.few_proofs(every=1)
@distributed(world_size=4)
def test_meshes_that_nobody_reduces_over_are_refused_by_name(rank: int) -> None:
    bodies.refused_on_four(rank)


BUGS = {
    "sums of a share that nobody adds up": Edit(
        "GradientSums.receive", "shares is not None and total is not None and not shares.spreads(p)", "False"
    ),
    "whole sides that all processes cut alike": Edit(
        "TensorParallel.take",
        "full_tensor(t)[mine.start * each : mine.stop * each]",
        "full_tensor(t)[: (mine.stop - mine.start) * each]",
    ),
    "a mean over the share alone": Edit(
        "Clipping.pass_info", '"mean": float(batch)', '"mean": float(batch / self._hub.tensor_parallel.size)'
    ),
    "columns with the noise of rows": Edit("ColumnPlaces.of", "slice(*bounds) for bounds", "slice(b - a) for a, b"),
}


def verified(rank: int, size: int, fsdp: bool) -> None:
    """The checks of `gramian verify clipping --tp`, on a sample of its cases, pass on all processes."""
    grid = with_tensor_parallel(ProcessGrid(rank, size, torch.device("cpu"), DataParallelKind.FSDP2), fsdp)
    assert grid.label == ("FSDP2 over 2 × tensor parallel over 2" if fsdp else "tensor parallel over 2")
    found = run_checks(clipping_matrix.plan(grid, ("mlp",), clipping_matrix.CASES[:1]), stop_at_crash=True)
    assert len(found) == 7 - fsdp
    for outcome in found:
        assert not outcome.crash
        assert max(one.error for one in outcome.comparisons) <= outcome.check.tolerance, outcome.check.title


@distributed(world_size=2)
def test_verify_clipping_of_tensor_parallel_linears(rank: int) -> None:
    verified(rank, 2, fsdp=False)


@pytest.mark.full
@distributed(world_size=4)
def test_verify_clipping_of_both(rank: int) -> None:
    verified(rank, 4, fsdp=True)


@distributed(world_size=2)
def test_dropped_reductions_turn_it_red(rank: int) -> None:
    bodies.dropped_reductions(rank, BUGS)
