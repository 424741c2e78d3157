"""K-FAC's work and data shared out among processes: factorisations, gradients that stay sharded, files that each writes."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

import gramian
from gramian.curvature.refresh.shared_factorisation import assign
from gramian.linalg import LowRank
from gramian.linalg.factors import dense, low_rank
from tests.curvature.small import MADE
from tests.curvature.splits import CASES, Case, assert_equal, refresh, vector
from tests.dist.kfac_bodies import make, wrapped
from tests.kit.matrix import sample
from tests.kit.processes import distributed, run_on_ranks
from tests.kit.refusals import refusal

pytestmark = [pytest.mark.oracle, pytest.mark.xdist_group("processes")]

REDUCTIONS = ("gram", "gather", "dense")
WAYS: dict[str, dict[str, Any]] = {
    "Cholesky": {"damping_mode": "factored", "use_eigenvalue_correction": False},
    "eigenpairs": {"damping_mode": "factored", "max_condition_number": 2.0},
    "joint": {"damping_mode": "joint"},
}
EIGH, CHOLESKY, FULL_TENSOR = torch.linalg.eigh, torch.linalg.cholesky_ex, DTensor.full_tensor


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
        owners = assign(costs, size)
        loads = [sum(c for c, maker in zip(costs, owners, strict=True) if maker == rank) for rank in range(size)]
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
@distributed(world_size=2)
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
    with refusal("^process 1: .*: [AG]: eigh: the matrix holds NaN") as caught:
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
def test_what_one_process_looked_at_before_decides_nothing(rank: int) -> None:
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


# ---- gradients that stay sharded -------------------------------------------------------------------------------------


def transposed() -> nn.Module:
    """Weights stored as [in, out], with biases: a bias is one more row, and a shard of its own."""
    from transformers.pytorch_utils import Conv1D

    return nn.Sequential(Conv1D(8, 7), nn.Tanh(), Conv1D(5, 8))


MORE = {
    **CASES,
    "transposed": Case(transposed, lambda n: torch.randn(n, 2, 7, generator=torch.Generator().manual_seed(n)), 5, 2),
}


def stays_sharded(
    rank: int, world_size: int, case: str, reduce: str, options: dict[str, Any], gathered: set[str]
) -> None:
    """Natural gradients and products of one process, with no gradient put together but those that are expected to be."""
    samples = 4
    plain = MORE[case].model()
    model = wrapped("fsdp2", MORE[case].model())
    one = make(**{**options, "kfac_distributed_reduce": "none"})
    refresh(one, plain, MORE[case].data(samples), range(samples), reduction="sum")
    kfac = make(**options, kfac_distributed_reduce=reduce)
    refresh(kfac, model, MORE[case].data(samples), range(rank, samples, world_size), reduction="sum")
    whole, places = vector(plain), dict(model.named_parameters())
    sharded = {n: distribute_tensor(t, places[n].device_mesh, places[n].placements) for n, t in whole.items()}
    calls: list[tuple[int, ...]] = []

    def full_tensor(t: DTensor) -> Any:
        calls.append(tuple(t.shape))
        return FULL_TENSOR(t)

    exchange = kfac.state.exchange
    assert exchange is not None
    below = [b.spec.parameters[1] for b in kfac.kfac_factors.values() if b.spec.layout == "in_out"]
    biases = sum((world_size - 1) * places[name].to_local().nbytes for name in below)  # put together in every use
    for power in (-1.0, -0.5, None):
        for _ in range(2):  # the second time everything is factorised
            before = exchange.sent["all_gather"]
            with mock.patch.object(DTensor, "full_tensor", full_tensor):
                if power is None:
                    found = kfac.compute_fisher_vector_product(sharded)
                else:
                    found = kfac.compute_natural_gradient(model, power=power, gradients=sharded)
        assert exchange.sent["all_gather"] == before + biases or gathered
        expected = (
            one.compute_fisher_vector_product(whole)
            if power is None
            else one.compute_natural_gradient(plain, power=power, gradients=whole)
        )
        told = {name for name, layer in kfac.record()["layers"].items() if layer["gathered"]}
        assert told - set(MADE) == (gathered if power is not None or "joint" not in options.values() else set())
        for name, t in found.items():
            assert t.placements == places[name].placements and t.to_local().shape == places[name].to_local().shape
        assert_equal({n: FULL_TENSOR(t) for n, t in found.items()}, expected, 1e-10)
    kept = {tuple(whole[p].shape) for n, b in kfac.kfac_factors.items() if n not in told for p in b.spec.parameters}
    assert not kept & set(calls) or gathered


STAY = [
    *((case, reduce, {}) for case in ("words", "many words", "pictures") for reduce in REDUCTIONS),
    ("words", "gram", WAYS["Cholesky"]),
    ("many words", "gather", WAYS["eigenpairs"]),
    ("words", "gram", {"kfac_true_fisher_head": True, "use_eigenvalue_correction": False}),
]


@pytest.mark.parametrize("case, reduce, options", sample(STAY, 5, case=lambda item: item[1]))
@distributed(world_size=2)
def test_gradients_stay_sharded(rank: int, world_size: int, case: str, reduce: str, options: dict[str, Any]) -> None:
    stays_sharded(rank, world_size, case, reduce, options, set())


@pytest.mark.full
@pytest.mark.parametrize("case, reduce", list(itertools.product(["many words", "pictures"], ["gather", "dense"])))
@distributed(world_size=3)
def test_gradients_of_uneven_shards_stay_sharded(rank: int, world_size: int, case: str, reduce: str) -> None:
    stays_sharded(rank, world_size, case, reduce, {"kfac_use_woodbury": False}, set())


@pytest.mark.full
@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("case", ["words", "transposed"])
@distributed(world_size=3)
def test_factors_and_gradients_that_are_cut_differently(rank: int, world_size: int, case: str, reduce: str) -> None:
    """`Shard` gives 3 processes 3, 3 and 2 of 8 rows, 3, 3 and 1 of 7; factors have 3, 3, 2 and 3, 2, 2 of them."""
    stays_sharded(rank, world_size, case, reduce, {}, set())


@pytest.mark.full
@pytest.mark.parametrize("reduce", REDUCTIONS)
@distributed(world_size=2)
def test_gradients_with_inputs_first_stay_sharded(rank: int, world_size: int, reduce: str) -> None:
    stays_sharded(rank, world_size, "transposed", reduce, {}, set())


@distributed(world_size=2)
def test_joint_damping_stays_sharded_where_inputs_are_whole(rank: int, world_size: int) -> None:
    """8 tokens: of the head alone G (11) is low rank and A (8) is not."""
    stays_sharded(rank, world_size, "words", "gram", {"damping_mode": "joint"}, {"table", "q", "k", "v", "fc"})


# ---- files -----------------------------------------------------------------------------------------------------------


def saved_and_loaded(rank: int, world_size: int, folder: str, case: str, options: dict[str, Any], writers: int) -> None:
    """What some processes wrote, any number of them reads: bit for bit, each its rows only where rows are spread."""
    groups = [dist.new_group(list(range(size))) for size in range(1, world_size + 1)]
    model, samples = CASES[case].model(), 4
    states: list[Any] = [None]
    if rank < writers:
        kfac = make(**options, process_group=groups[writers - 1])
        refresh(kfac, model, CASES[case].data(samples), range(rank, samples, writers), reduction="sum")
        kfac.save_sharded(folder)
        states = [kfac.state_dict()]
    dist.barrier()
    dist.broadcast_object_list(states, 0)
    assert sorted(path.name for path in Path(folder).iterdir()) == [
        *(f"kfac-{number:05d}.safetensors" for number in range(writers)),
        "kfac.json",
    ]
    for readers, group in enumerate(groups, 1):
        if rank < readers:
            found = make(**options, process_group=group)
            found.load_sharded(folder, model)
            assert_same_state(found.state_dict(), states[0])
            for block in found.kfac_factors.values():
                for factor in block.factors.values():
                    spread = isinstance(factor, LowRank) and options["kfac_distributed_reduce"] == "gram"
                    if spread and readers > 1:
                        rows = factor.columns.others.features(factor.dim)[rank]
                        assert len(factor.stored.body) == rows.stop - rows.start
            natural = found.compute_natural_gradient(model, gradients=vector(model))
            one, plain = make(**{**options, "kfac_distributed_reduce": "none"}), CASES[case].model()
            refresh(one, plain, CASES[case].data(samples), range(samples), reduction="sum")
            tolerance = 1e-10 if "woodbury_dtype" not in options else 1e-2
            assert_equal(natural, one.compute_natural_gradient(plain, gradients=vector(plain)), tolerance)
    dist.barrier()
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def assert_same_state(actual: Any, expected: Any) -> None:
    """Bit for bit, but for what is each process's own."""
    if isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype and torch.equal(actual, expected)
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            if key not in ("local_tokens", "sent", "seconds"):
                assert_same_state(actual[key], value)
    else:
        assert actual == expected or list(actual) == list(expected)


FILES = [
    ("words", {"kfac_distributed_reduce": "gram"}, 3),
    ("many words", {"kfac_distributed_reduce": "dense"}, 2),
    ("tied", {"kfac_distributed_reduce": "gram", "woodbury_dtype": "fp16"}, 2),
    ("words", {"kfac_distributed_reduce": "gather"}, 1),
    ("words", {"kfac_distributed_reduce": "gram", "kfac_true_fisher_head": True}, 2),
]


@pytest.mark.dist
@pytest.mark.parametrize("case, options, writers", sample(FILES, 2, case=lambda item: 0))
def test_a_state_of_some_processes_is_read_by_any_number(
    tmp_path: Path, case: str, options: dict[str, Any], writers: int
) -> None:
    run_on_ranks(3, saved_and_loaded, str(tmp_path / "kfac"), case, options, writers)


def bad_folders(rank: int, world_size: int, folder: str) -> None:
    """All processes raise the same line, and nothing changes."""
    case = CASES["words"]
    kfac, model = make(), case.model()
    refresh(kfac, model, case.data(4), range(rank, 4, world_size))
    kfac.save_sharded(folder)
    before = kfac.kfac_factors
    file = Path(folder) / "kfac-00001.safetensors"

    def refused(what: str, do: Any) -> None:
        with refusal(what) as caught:
            do()
        said: list[Any] = [None] * world_size
        dist.all_gather_object(said, str(caught.value))
        assert len({*said}) == 1 and "\n" not in said[0] and "expected" in said[0]
        assert kfac.kfac_factors is before

    refused("is not empty", lambda: kfac.save_sharded(folder))
    refused("No such file", lambda: kfac.load_sharded(folder + " elsewhere", model))
    if rank == 0:
        damaged = bytearray(file.read_bytes())
        damaged[-1] ^= 1
        file.write_bytes(damaged)
    dist.barrier()
    refused("kfac-00001.safetensors' is damaged", lambda: kfac.load_sharded(folder, model))
    dist.barrier()
    if rank == 0:
        file.unlink()
    dist.barrier()
    refused("kfac-00001.safetensors' cannot be read", lambda: kfac.load_sharded(folder, model))
    if rank == 0:
        (Path(folder) / "kfac.json").write_text("{}")
    dist.barrier()
    refused("kfac.json' is damaged", lambda: kfac.load_sharded(folder, model))


@pytest.mark.dist
def test_folders_without_a_state_are_refused_on_all_processes(tmp_path: Path) -> None:
    run_on_ranks(2, bad_folders, str(tmp_path / "kfac"))
