"""K-FAC's work and data shared out among processes: factorisations, gradients that stay sharded, files that each writes."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import gramian
from gramian.curvature.spread import deal
from gramian.linalg import dense, low_rank
from tests.curvature.splits import CASES, assert_equal, refresh, vector
from tests.dist.kfac_bodies import make
from tests.kit.matrix import sample
from tests.kit.processes import distributed

pytestmark = [pytest.mark.oracle, pytest.mark.xdist_group("processes")]

REDUCTIONS = ("gram", "gather", "dense")
WAYS: dict[str, dict[str, Any]] = {
    "Cholesky": {"damping_mode": "factored", "use_eigenvalue_correction": False},
    "eigenpairs": {"damping_mode": "factored", "max_condition_number": 2.0},
    "joint": {"damping_mode": "joint"},
}
EIGH, CHOLESKY = torch.linalg.eigh, torch.linalg.cholesky_ex


@contextmanager
def counted() -> Iterator[list[tuple[str, int]]]:
    """Every factorisation that this process makes: what and of which side."""
    found: list[tuple[str, int]] = []

    def eigh(matrix: Any) -> Any:
        found.append(("eigen", len(matrix)))
        return EIGH(matrix)

    def cholesky(matrix: Any) -> Any:
        found.append(("solve", len(matrix)))
        return CHOLESKY(matrix)

    with mock.patch.object(torch.linalg, "eigh", eigh), mock.patch.object(torch.linalg, "cholesky_ex", cholesky):
        yield found


# ---- factorisations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_nobody_is_dealt_more_than_a_fair_share_and_the_largest(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    for count in (0, 1, 5, 40):
        costs = (torch.rand(count, generator=generator) ** 3).tolist()
        makers = deal(costs, size)
        loads = [sum(c for c, maker in zip(costs, makers, strict=True) if maker == rank) for rank in range(size)]
        assert max(loads) <= sum(costs) / size + max(costs, default=0.0) + 1e-12


def each_makes_its_share(rank: int, world_size: int, case: str, reduce: str, way: str, power: float) -> None:
    """The factorisations of one process, each made once by somebody, with its results, and none of them a second time."""
    samples = 4

    def run(options: dict[str, Any], rows: range) -> tuple[Any, list[tuple[str, int]], Any]:
        kfac, model = make(**WAYS[way], **options), CASES[case].model()
        refresh(kfac, model, CASES[case].data(samples), rows, reduction="sum")
        gradient = vector(model)
        with counted() as made:
            found = kfac.compute_natural_gradient(model, power=power, gradients=gradient)
        with counted() as again:
            kfac.compute_natural_gradient(model, power=power, gradients=gradient)
        assert again == []
        return found, made, kfac.record()["factorised"]

    low = {"kfac_use_woodbury": reduce != "dense"}
    expected, whole, _ = run({**low, "kfac_distributed_reduce": "none"}, range(samples))
    found, mine, told = run({**low, "kfac_distributed_reduce": reduce}, range(rank, samples, world_size))
    assert_equal(found, expected, 1e-10)
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, mine)
    assert sorted(itertools.chain(*gathered)) == sorted(whole)
    assert told == {"here": len(mine), "all": len(whole)}

    def cost(made: list[tuple[str, int]]) -> float:
        return sum(n**3 * (9 if what == "eigen" else 1 / 3) for what, n in made)

    assert len(whole) > world_size
    assert cost(mine) <= cost(whole) / world_size + max(cost([one]) for one in whole)
    assert all(gathered)


SHARES = list(itertools.product(["many words", "words"], REDUCTIONS, WAYS, (-1.0, -0.5)))


@pytest.mark.parametrize("case, reduce, way, power", sample(SHARES, 6, case=lambda item: item[1:3]))
@distributed(world_size=2)
def test_two_processes_share_the_factorisations(
    rank: int, world_size: int, case: str, reduce: str, way: str, power: float
) -> None:
    each_makes_its_share(rank, world_size, case, reduce, way, power)


@pytest.mark.full
@pytest.mark.parametrize("case, reduce, way, power", SHARES[::3])
@distributed(world_size=4)
def test_four_processes_share_the_factorisations(
    rank: int, world_size: int, case: str, reduce: str, way: str, power: float
) -> None:
    each_makes_its_share(rank, world_size, case, reduce, way, power)


@pytest.mark.parametrize("reduce", ["gram", "dense"])
@distributed(world_size=2, timeout=60)
def test_a_factorisation_that_fails_on_one_process_is_the_same_error_on_all(
    rank: int, world_size: int, reduce: str
) -> None:
    case = CASES["many words"]
    kfac, model = make(kfac_distributed_reduce=reduce, **WAYS["eigenpairs"]), case.model()
    refresh(kfac, model, case.data(4), range(rank, 4, 2))

    def fails(matrix: Any) -> Any:
        raise gramian.GramianError("eigh: the matrix holds NaN or infinity; expected finite numbers")

    broken = [mock.patch.object(module, "eigendecompose", fails) for module in (dense, low_rank)] if rank else []
    for patch in broken:
        patch.start()
    with pytest.raises(gramian.GramianError, match="^process 1: .*: [AG]: eigh: the matrix holds NaN") as caught:
        kfac.compute_natural_gradient(model, gradients=vector(model))
    for patch in broken:
        patch.stop()
    said: list[Any] = [None] * world_size
    dist.all_gather_object(said, str(caught.value))
    assert len({*said}) == 1
    found = kfac.compute_natural_gradient(model, gradients=vector(model))  # nobody is left behind
    one, model = make(kfac_distributed_reduce="none", **WAYS["eigenpairs"]), case.model()
    refresh(one, model, case.data(4), range(4))
    assert_equal(found, one.compute_natural_gradient(model, gradients=vector(model)), 1e-10)


@distributed(world_size=2)
def test_what_one_process_looked_at_before_decides_nothing(rank: int, world_size: int) -> None:
    """Eigenvalues that a user asked for on one process alone make its bounds exact: the others still come along."""
    case = CASES["many words"]
    options = {"kfac_use_woodbury": False, "kfac_distributed_reduce": "dense", "max_condition_number": 20.0}
    kfac, model = make(**options), case.model()
    refresh(kfac, model, case.data(4), range(rank, 4, 2))
    if rank == 1:
        for block in kfac.kfac_factors.values():
            block.G.eigenvalues()
    found = kfac.compute_natural_gradient(model, gradients=vector(model))
    one, model = make(**{**options, "kfac_distributed_reduce": "none"}), case.model()
    refresh(one, model, case.data(4), range(4))
    assert_equal(found, one.compute_natural_gradient(model, gradients=vector(model)), 1e-10)
